//! A librdmacm whose functions fail with `EOPNOTSUPP`. Programs exchange addresses and queue pair numbers out of band.
//!
//! The librdmacm of the system cannot stand in. It would list the devices of the kernel, and return contexts of another libibverbs.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::null_mut;

use rdma_sys::*;

use super::errors::{Unsupported, UnsupportedFn};

/// A table of functions that fail with `EOPNOTSUPP`, except for those that cannot fail. It has no optional functions.
pub(super) fn table() -> Result<RdmaCm, LoadError> {
    macro_rules! table {
        (unsupported { $($unsupported:ident)* } $($own:ident: $function:expr,)*) => {{
            let find = |name: &CStr| match name.to_bytes() {
                $(name if name == stringify!($unsupported).as_bytes() => rdma_get_devices as *mut c_void,)*
                $(name if name == stringify!($own).as_bytes() => rdma_get_devices as *mut c_void,)*
                _ => null_mut(),
            };
            // SAFETY: the function stands for all others until the lines below replace it. None is called before.
            let mut table = unsafe { RdmaCm::from_lookup("rdma-soft", find) }?;
            // Assigned by field, so that a function of the wrong type does not compile.
            $(table.$unsupported = UnsupportedFn::FAIL;)*
            $(table.$own = $function;)*
            Ok(table)
        }};
    }
    table! {
        unsupported {
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
        rdma_event_str: rdma_event_str,
        rdma_get_devices: rdma_get_devices,
        // The entry needs a variadic function, which Rust cannot define. `fcntl` has the right type. It does no harm: `rsocket`
        // always fails, so programs have no descriptor of an rsocket to pass.
        rfcntl: libc::fcntl,
    }
}

/// Returns the name of a connection event: `rdma_event_str(3)`.
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

/// Returns an empty list of devices.
unsafe extern "C" fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context {
    if !num_devices.is_null() {
        // SAFETY: `num_devices` is valid unless it is null: `rdma_get_devices(3)`.
        unsafe { num_devices.write(0) }
    }
    Unsupported::unsupported()
}
