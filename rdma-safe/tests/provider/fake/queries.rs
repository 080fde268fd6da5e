//! Queries of newer releases, and fork support.

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_sys::*;

use super::state::enter;
use super::verbs::port_of;

pub(super) unsafe extern "C" fn query_port_speed(context: *mut ibv_context, port: u32, speed: *mut u64) -> c_int {
    enter(context, "ibv_query_port_speed", |state, _| {
        if let Some(errno) = state.fault("ibv_query_port_speed") {
            return errno;
        }
        match (port_of(&state.config, port), state.config.port_speed) {
            (_, None) => libc::EOPNOTSUPP,
            (None, _) => libc::EINVAL,
            (Some(_), Some(found)) => {
                unsafe { *speed = found };
                0
            }
        }
    })
}

pub(super) unsafe extern "C" fn query_rt_values(context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    enter(context, "query_rt_values", |state, _| {
        if let Some(errno) = state.fault("query_rt_values") {
            return errno;
        }
        if unsafe { (*values).comp_mask } != IBV_VALUES_MASK_RAW_CLOCK.0 {
            state.violation("query_rt_values with a comp_mask that is not defined");
        }
        match state.config.raw_clock {
            Some(read) => {
                read(unsafe { &mut *values });
                0
            }
            None => libc::EOPNOTSUPP,
        }
    })
}

/// Number of `ibv_fork_init` calls in this process.
static FORK_INITS: AtomicUsize = AtomicUsize::new(0);

pub(crate) fn fork_inits() -> usize {
    FORK_INITS.load(Ordering::SeqCst)
}

pub(super) unsafe extern "C" fn is_fork_initialized() -> ibv_fork_status {
    if fork_inits() == 0 { IBV_FORK_DISABLED } else { IBV_FORK_ENABLED }
}

pub(super) unsafe extern "C" fn fork_init() -> c_int {
    FORK_INITS.fetch_add(1, Ordering::SeqCst);
    0
}
