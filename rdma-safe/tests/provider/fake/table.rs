//! The table of exported functions.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Once;

use rdma_sys::{Verbs, install_verbs};

use super::{ah, buf, comp_cntr, cq, dm, dmah, events, import, memory, multicast, qp, queries, srq, verbs};

extern "C" fn unsupported() -> c_int {
    libc::EOPNOTSUPP
}

/// Makes this provider the one of the process.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| unsafe { install_verbs(table()) }.unwrap());
}

/// Functions that no test calls are stubs.
fn table() -> Verbs {
    let mut table = stubs();
    table.ibv_get_device_list = verbs::get_device_list;
    table.ibv_free_device_list = verbs::free_device_list;
    table.ibv_get_device_name = verbs::get_device_name;
    table.ibv_get_device_guid = verbs::get_device_guid;
    table.ibv_get_device_index = verbs::get_device_index;
    table.ibv_open_device = verbs::open_device;
    table.ibv_close_device = verbs::close_device;
    table.ibv_query_device = verbs::query_device;
    table.ibv_query_port = verbs::query_port_compat;
    table._ibv_query_gid_ex = verbs::query_gid_ex;
    table._ibv_query_gid_table = verbs::query_gid_table;
    table.ibv_query_port_speed = Some(queries::query_port_speed);
    table.ibv_is_fork_initialized = queries::is_fork_initialized;
    table.ibv_fork_init = queries::fork_init;
    table.ibv_query_gid = verbs::query_gid;
    table.ibv_query_pkey = verbs::query_pkey;
    table.ibv_get_pkey_index = verbs::get_pkey_index;
    table.ibv_get_async_event = events::get_async_event;
    table.ibv_ack_async_event = events::ack_async_event;
    table.ibv_alloc_pd = memory::alloc_pd;
    table.ibv_dealloc_pd = memory::dealloc_pd;
    table.ibv_reg_mr = memory::reg_mr;
    table.ibv_reg_mr_iova2 = memory::reg_mr_iova2;
    table.ibv_dereg_mr = memory::dereg_mr;
    table.ibv_rereg_mr = memory::rereg_mr;
    table.ibv_import_device = import::import_device;
    table.ibv_import_pd = import::import_pd;
    table.ibv_unimport_pd = import::unimport_pd;
    table.ibv_import_mr = import::import_mr;
    table.ibv_unimport_mr = import::unimport_mr;
    table.ibv_import_dm = dm::import_dm;
    table.ibv_unimport_dm = dm::unimport_dm;
    table.ibv_dm_export_dmabuf_fd = Some(dm::dm_export_dmabuf_fd);
    table.ibv_reg_dmabuf_mr = memory::reg_dmabuf_mr;
    table.ibv_create_comp_channel = cq::create_comp_channel;
    table.ibv_destroy_comp_channel = cq::destroy_comp_channel;
    table.ibv_get_cq_event = cq::get_cq_event;
    table.ibv_ack_cq_events = cq::ack_cq_events;
    table.ibv_create_cq = cq::create_cq;
    table.ibv_destroy_cq = cq::destroy_cq;
    table.ibv_create_ah = ah::create_ah;
    table.ibv_init_ah_from_wc = ah::init_ah_from_wc;
    table.ibv_destroy_ah = ah::destroy_ah;
    table.ibv_resolve_eth_l2_from_gid = ah::resolve_eth_l2_from_gid;
    table.ibv_attach_mcast = multicast::attach_mcast;
    table.ibv_detach_mcast = multicast::detach_mcast;
    table.ibv_resize_cq = cq::resize_cq;
    table.ibv_create_srq = srq::create_srq;
    table.ibv_modify_srq = srq::modify_srq;
    table.ibv_query_srq = srq::query_srq;
    table.ibv_destroy_srq = srq::destroy_srq;
    table.ibv_create_qp = qp::create_qp;
    table.ibv_qp_to_qp_ex = qp::qp_to_qp_ex;
    table.ibv_modify_qp = qp::modify_qp;
    table.ibv_query_qp = qp::query_qp;
    table.ibv_query_ece = qp::query_ece;
    table.ibv_set_ece = qp::set_ece;
    table.ibv_query_qp_data_in_order = qp::query_qp_data_in_order;
    table.ibv_destroy_qp = qp::destroy_qp;
    table._ibv_query_comp_cntr_caps = Some(comp_cntr::query_comp_cntr_caps);
    table.ibv_create_comp_cntr = Some(comp_cntr::create_comp_cntr);
    table.ibv_destroy_comp_cntr = Some(comp_cntr::destroy_comp_cntr);
    table.ibv_read_comp_cntr = Some(comp_cntr::read_comp_cntr);
    table.ibv_read_err_comp_cntr = Some(comp_cntr::read_err_comp_cntr);
    table.ibv_set_comp_cntr = Some(comp_cntr::set_comp_cntr);
    table.ibv_set_err_comp_cntr = Some(comp_cntr::set_err_comp_cntr);
    table.ibv_inc_comp_cntr = Some(comp_cntr::inc_comp_cntr);
    table.ibv_inc_err_comp_cntr = Some(comp_cntr::inc_err_comp_cntr);
    table.ibv_qp_attach_comp_cntr = Some(comp_cntr::qp_attach_comp_cntr);
    if crate::NEWER_LIBRARY {
        table.ibv_alloc_dmah = Some(dmah::alloc_dmah);
        table.ibv_dealloc_dmah = Some(dmah::dealloc_dmah);
        table.ibv_reg_mr_ex = Some(dmah::reg_mr_ex);
        table.ibv_alloc_buf = Some(buf::alloc_buf);
        table.ibv_free_buf = Some(buf::free_buf);
        table.ibv_reg_buf_mr = Some(dmah::reg_buf_mr);
        table.ibv_export_buf_dmabuf_fd = Some(buf::export_buf_dmabuf_fd);
    }
    table
}

fn stubs() -> Verbs {
    let find = |name: &CStr| match name.to_bytes() {
        // rdma-safe uses these functions to distinguish later releases of rdma-core.
        b"ibv_alloc_dmah" | b"ibv_alloc_buf" if !crate::NEWER_LIBRARY => std::ptr::null_mut(),
        _ => unsupported as *mut c_void,
    };
    unsafe { Verbs::from_lookup("the test provider", find) }.unwrap()
}
