//! Processes that fork. The device copies memory in user space: nothing is pinned, and no page must be kept from a child.

use core::ffi::{c_int, c_void};

use rdma_sys::{IBV_FORK_UNNEEDED, ibv_fork_status};

/// There is nothing to prepare.
pub unsafe extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// `IBV_FORK_UNNEEDED`.
pub unsafe extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}

/// Leaves the pages as they are.
pub unsafe extern "C" fn ibv_dontfork_range(_: *mut c_void, _: usize) -> c_int {
    0
}

/// Leaves the pages as they are.
pub unsafe extern "C" fn ibv_dofork_range(_: *mut c_void, _: usize) -> c_int {
    0
}
