//! The exported functions of the shared object.

mod library;

use std::ffi::{CStr, c_char, c_int, c_void};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// All public functions of libibverbs in rdma-core 44, with which programs may be linked.
const PUBLIC: &[&str] = &[
    "_ibv_query_gid_ex",
    "_ibv_query_gid_table",
    "ibv_ack_async_event",
    "ibv_ack_cq_events",
    "ibv_alloc_pd",
    "ibv_attach_mcast",
    "ibv_close_device",
    "ibv_create_ah",
    "ibv_create_ah_from_wc",
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_create_qp",
    "ibv_create_srq",
    "ibv_dealloc_pd",
    "ibv_dereg_mr",
    "ibv_destroy_ah",
    "ibv_destroy_comp_channel",
    "ibv_destroy_cq",
    "ibv_destroy_qp",
    "ibv_destroy_srq",
    "ibv_detach_mcast",
    "ibv_dofork_range",
    "ibv_dontfork_range",
    "ibv_event_type_str",
    "ibv_fork_init",
    "ibv_free_device_list",
    "ibv_get_async_event",
    "ibv_get_cq_event",
    "ibv_get_device_guid",
    "ibv_get_device_index",
    "ibv_get_device_list",
    "ibv_get_device_name",
    "ibv_get_pkey_index",
    "ibv_import_device",
    "ibv_import_dm",
    "ibv_import_mr",
    "ibv_import_pd",
    "ibv_init_ah_from_wc",
    "ibv_is_fork_initialized",
    "ibv_modify_qp",
    "ibv_modify_srq",
    "ibv_node_type_str",
    "ibv_open_device",
    "ibv_port_state_str",
    "ibv_qp_to_qp_ex",
    "ibv_query_device",
    "ibv_query_ece",
    "ibv_query_gid",
    "ibv_query_pkey",
    "ibv_query_port",
    "ibv_query_qp",
    "ibv_query_qp_data_in_order",
    "ibv_query_srq",
    "ibv_rate_to_mbps",
    "ibv_rate_to_mult",
    "ibv_reg_dmabuf_mr",
    "ibv_reg_mr",
    "ibv_reg_mr_iova",
    "ibv_reg_mr_iova2",
    "ibv_rereg_mr",
    "ibv_resize_cq",
    "ibv_resolve_eth_l2_from_gid",
    "ibv_set_ece",
    "ibv_unimport_dm",
    "ibv_unimport_mr",
    "ibv_unimport_pd",
    "ibv_wc_status_str",
    "mbps_to_ibv_rate",
    "mult_to_ibv_rate",
];

/// All public functions of librdmacm in rdma-core 44.
const CONNECTIONS: &[&str] = &[
    "raccept",
    "rbind",
    "rclose",
    "rconnect",
    "rdma_accept",
    "rdma_ack_cm_event",
    "rdma_bind_addr",
    "rdma_connect",
    "rdma_create_ep",
    "rdma_create_event_channel",
    "rdma_create_id",
    "rdma_create_qp",
    "rdma_create_qp_ex",
    "rdma_create_srq",
    "rdma_create_srq_ex",
    "rdma_destroy_ep",
    "rdma_destroy_event_channel",
    "rdma_destroy_id",
    "rdma_destroy_qp",
    "rdma_destroy_srq",
    "rdma_disconnect",
    "rdma_establish",
    "rdma_event_str",
    "rdma_free_devices",
    "rdma_freeaddrinfo",
    "rdma_get_cm_event",
    "rdma_get_devices",
    "rdma_get_dst_port",
    "rdma_get_remote_ece",
    "rdma_get_request",
    "rdma_get_src_port",
    "rdma_getaddrinfo",
    "rdma_init_qp_attr",
    "rdma_join_multicast",
    "rdma_join_multicast_ex",
    "rdma_leave_multicast",
    "rdma_listen",
    "rdma_migrate_id",
    "rdma_notify",
    "rdma_reject",
    "rdma_reject_ece",
    "rdma_resolve_addr",
    "rdma_resolve_route",
    "rdma_set_local_ece",
    "rdma_set_option",
    "rfcntl",
    "rgetpeername",
    "rgetsockname",
    "rgetsockopt",
    "riomap",
    "riounmap",
    "riowrite",
    "rlisten",
    "rpoll",
    "rread",
    "rreadv",
    "rrecv",
    "rrecvfrom",
    "rrecvmsg",
    "rselect",
    "rsend",
    "rsendmsg",
    "rsendto",
    "rsetsockopt",
    "rshutdown",
    "rsocket",
    "rwrite",
    "rwritev",
];

/// Private functions that `ibv_devinfo` imports.
const PRIVATE: &[&str] = &["ibv_query_gid_type", "ibv_read_sysfs_file"];

fn library() -> Library {
    let file = library::build().unwrap();
    // SAFETY: the library runs only initialisers of Rust's standard library and lookups of functions.
    unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) }.unwrap()
}

#[test]
fn every_public_function_is_exported() {
    let library = library();
    // SAFETY: the symbols are looked up but not used.
    let is_missing = |name: &&&str| unsafe { library.get::<*mut c_void>(name.as_bytes()) }.is_err();
    assert_eq!((PUBLIC.len(), CONNECTIONS.len()), (69, 68));
    assert_eq!(
        PUBLIC.iter().chain(PRIVATE).chain(CONNECTIONS).filter(is_missing).collect::<Vec<_>>(),
        Vec::<&&str>::new()
    );
    // soft0 lacks this function, so programs call the one of libibverbs.
    assert!(is_missing(&&"ibv_get_sysfs_path"));
}

#[test]
fn an_exported_function_can_be_called() {
    // SAFETY: the C header declares this type. The function takes any value, and returns a string that is never freed.
    let text = unsafe {
        let library = library();
        let text = library.get::<unsafe extern "C" fn(c_int) -> *const c_char>(b"ibv_port_state_str").unwrap();
        CStr::from_ptr(text(4)).to_owned()
    };
    assert_eq!(text.as_c_str(), c"active");
}
