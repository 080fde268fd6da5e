//! A librdmacm that refuses: connections over the device are made by exchanging addresses and numbers out of band.
//!
//! That of the system must not stand in. It would look for devices of the kernel, and hand out contexts of another libibverbs.

use core::ffi::{c_char, c_int};

use rdma_sys::*;

use super::refuse::{Refused, Refusing};

/// Every function fails with `EOPNOTSUPP`, except for those that cannot fail.
pub(super) fn table() -> RdmaCm {
    macro_rules! table {
        (refused { $($refused:ident)* } absent { $($absent:ident)* } $($own:ident: $function:expr,)*) => {
            RdmaCm {
                $($refused: Refusing::REFUSE,)*
                $($absent: None,)*
                $($own: $function,)*
            }
        };
    }
    table! {
        refused {
            raccept rbind rclose rconnect rdma_accept rdma_ack_cm_event rdma_bind_addr rdma_connect
            rdma_create_ep rdma_create_event_channel rdma_create_id rdma_create_qp rdma_create_qp_ex
            rdma_create_srq rdma_create_srq_ex rdma_destroy_ep rdma_destroy_event_channel rdma_destroy_id
            rdma_destroy_qp rdma_destroy_srq rdma_disconnect rdma_establish rdma_free_devices rdma_freeaddrinfo
            rdma_get_cm_event rdma_get_dst_port rdma_get_remote_ece rdma_get_request rdma_get_src_port
            rdma_getaddrinfo rdma_init_qp_attr rdma_join_multicast rdma_join_multicast_ex rdma_leave_multicast
            rdma_listen rdma_migrate_id rdma_notify rdma_reject rdma_reject_ece rdma_resolve_addr
            rdma_resolve_route rdma_set_local_ece rdma_set_option rgetpeername rgetsockname rgetsockopt riomap
            riounmap riowrite rlisten rpoll rread rreadv rrecv rrecvfrom rrecvmsg rselect rsend rsendmsg
            rsendto rsetsockopt rshutdown rsocket rwrite rwritev
        }
        absent {
            rdma_query_addrinfo rdma_resolve_addrinfo rdma_write_cm_event repoll_create repoll_ctl repoll_wait
        }
        rdma_event_str: rdma_event_str,
        rdma_get_devices: rdma_get_devices,
        // `rsocket` gives out no descriptor, so this is asked of a closed one or of a file. Rust cannot define a function
        // of variable arguments, and only that of the same signature can stand for it.
        rfcntl: libc::fcntl,
    }
}

/// What an event of a connection is called.
unsafe extern "C" fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
    macro_rules! names {
        ($($name:ident)*) => {
            match event {
                $($name => concat!(stringify!($name), "\0"),)*
                _ => "UNKNOWN EVENT\0",
            }
        };
    }
    let name = names! {
        RDMA_CM_EVENT_ADDR_RESOLVED RDMA_CM_EVENT_ADDR_ERROR RDMA_CM_EVENT_ROUTE_RESOLVED RDMA_CM_EVENT_ROUTE_ERROR
        RDMA_CM_EVENT_CONNECT_REQUEST RDMA_CM_EVENT_CONNECT_RESPONSE RDMA_CM_EVENT_CONNECT_ERROR
        RDMA_CM_EVENT_UNREACHABLE RDMA_CM_EVENT_REJECTED RDMA_CM_EVENT_ESTABLISHED RDMA_CM_EVENT_DISCONNECTED
        RDMA_CM_EVENT_DEVICE_REMOVAL RDMA_CM_EVENT_MULTICAST_JOIN RDMA_CM_EVENT_MULTICAST_ERROR
        RDMA_CM_EVENT_ADDR_CHANGE RDMA_CM_EVENT_TIMEWAIT_EXIT
    };
    name.as_ptr().cast()
}

/// No devices for connections by address.
unsafe extern "C" fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context {
    if !num_devices.is_null() {
        // SAFETY: the caller gave the place for the number, as rdma_get_devices(3) asks.
        unsafe { num_devices.write(0) }
    }
    Refused::refused()
}
