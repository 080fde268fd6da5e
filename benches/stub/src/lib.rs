//! A stub verbs provider for measuring the cost of its callers. It does a provider's work on memory and nothing else.
//!
//! Posting writes an entry of a ring, including inline data, and signaled work completes immediately. Polling takes
//! completions from a ring. There is no peer, and no data moves. The stub omits the checks of real providers. It has no
//! locks, so only one thread at a time may use a queue pair and its completion queues.
//!
//! The shared object exports the functions of libibverbs and can replace that library for any program. `RDMA_SYS_LIBIBVERBS`
//! selects it for rdma-sys. A C program links to it or loads it as `libibverbs.so.1`. A program that links this crate calls
//! [`install`].
//!
//! Two functions generate completions, for loops that measure only receives or only polling:
//! [`rdma_stub_receive_at_once`] and [`rdma_stub_endless`]. [`rdma_stub_latest_cq`] finds the queue for the latter.

// Like a C library, every function takes raw pointers and trusts its caller to meet the requirements of the verb's manual
// page. The safety comment of each block would be the same.
#![allow(clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc)]

mod cq;
mod device;
mod memory;
mod qp;
mod srq;

use std::ffi::{CStr, c_int, c_void};

use rdma_sys::{AlreadyLoaded, LoadError, Verbs};

pub use cq::{rdma_stub_endless, rdma_stub_latest_cq};
pub use qp::rdma_stub_receive_at_once;

/// Makes the stub the libibverbs of this process: `rdma_sys::install_verbs`.
///
/// # Errors
/// [`AlreadyLoaded`] if another libibverbs is in use.
pub fn install() -> Result<(), AlreadyLoaded> {
    let table = table().unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: the functions have the signatures of libibverbs, and the verbs that benchmarks use behave as documented.
    unsafe { rdma_sys::install_verbs(table) }
}

fn table() -> Result<Verbs, LoadError> {
    let find = |name: &CStr| FUNCTIONS.iter().find(|(n, _)| n.as_bytes() == name.to_bytes()).map(|(_, f)| f.0);
    // SAFETY: `FUNCTIONS` pairs each name with the function of that name. The functions of `unsupported!` ignore their
    // arguments.
    unsafe { Verbs::from_lookup("rdma-stub", |name| find(name).unwrap_or(std::ptr::null_mut())) }
}

/// The address of a function.
struct Function(*mut c_void);

// SAFETY: code may be called from any thread.
unsafe impl Sync for Function {}

/// Functions that the shared object exports.
static FUNCTIONS: &[(&str, Function)] = {
    macro_rules! functions {
        ($($module:ident { $($name:ident)* })*) => {
            &[$($((stringify!($name), Function($module::$name as *mut c_void)),)*)*]
        };
    }
    functions! {
        device {
            ibv_get_device_list ibv_free_device_list ibv_get_device_name ibv_get_device_guid ibv_get_device_index
            ibv_open_device ibv_close_device ibv_query_device ibv_query_port _ibv_query_gid_ex _ibv_query_gid_table
            ibv_query_gid ibv_query_pkey
        }
        memory { ibv_alloc_pd ibv_dealloc_pd ibv_create_ah ibv_destroy_ah ibv_reg_mr ibv_reg_mr_iova ibv_reg_mr_iova2 ibv_dereg_mr }
        cq {
            ibv_create_cq ibv_destroy_cq ibv_ack_cq_events ibv_create_comp_channel ibv_destroy_comp_channel ibv_get_cq_event
        }
        qp { ibv_create_qp ibv_destroy_qp ibv_modify_qp ibv_query_qp ibv_qp_to_qp_ex }
        srq { ibv_create_srq ibv_destroy_srq }
        missing {
            ibv_ack_async_event ibv_attach_mcast ibv_detach_mcast
            ibv_dofork_range ibv_dontfork_range ibv_fork_init ibv_get_async_event ibv_get_pkey_index
            ibv_init_ah_from_wc ibv_is_fork_initialized ibv_modify_srq ibv_query_ece ibv_query_qp_data_in_order
            ibv_query_srq ibv_rate_to_mbps ibv_rate_to_mult ibv_rereg_mr ibv_resize_cq ibv_resolve_eth_l2_from_gid
            ibv_set_ece ibv_unimport_dm ibv_unimport_mr ibv_unimport_pd mbps_to_ibv_rate mult_to_ibv_rate
            ibv_create_ah_from_wc ibv_event_type_str
            ibv_import_device ibv_import_dm ibv_import_mr ibv_import_pd ibv_node_type_str ibv_port_state_str
            ibv_reg_dmabuf_mr ibv_wc_status_str
        }
    }
};

/// Unsupported functions. They fail with any arguments, which the C calling convention allows.
mod missing {
    use super::{c_int, c_void, null};

    macro_rules! unsupported {
        ($($name:ident)* -> $ty:ty = $value:expr) => {
            $(#[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name() -> $ty {
                $value
            })*
        };
    }

    unsupported! {
        ibv_ack_async_event ibv_attach_mcast ibv_detach_mcast
        ibv_dofork_range ibv_dontfork_range ibv_fork_init ibv_get_async_event ibv_get_pkey_index
        ibv_init_ah_from_wc ibv_is_fork_initialized ibv_modify_srq ibv_query_ece ibv_query_qp_data_in_order
        ibv_query_srq ibv_rate_to_mbps ibv_rate_to_mult ibv_rereg_mr ibv_resize_cq ibv_resolve_eth_l2_from_gid
        ibv_set_ece ibv_unimport_dm ibv_unimport_mr ibv_unimport_pd mbps_to_ibv_rate mult_to_ibv_rate
        -> c_int = libc::EOPNOTSUPP
    }
    unsupported! {
        ibv_create_ah_from_wc ibv_event_type_str
        ibv_import_device ibv_import_dm ibv_import_mr ibv_import_pd ibv_node_type_str ibv_port_state_str
        ibv_reg_dmabuf_mr ibv_wc_status_str
        -> *mut c_void = null(libc::EOPNOTSUPP)
    }
}

/// Sets `errno` and returns NULL, for functions that return an object.
fn null<T>(errno: c_int) -> *mut T {
    unsafe { *libc::__errno_location() = errno };
    std::ptr::null_mut()
}

fn new<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

unsafe fn free<T>(object: *mut T) -> c_int {
    drop(unsafe { Box::from_raw(object) });
    0
}
