//! Support of `fork(2)`. The device copies memory in user space, so no pages are pinned or hidden from a child.

use core::ffi::{c_int, c_void};

use rdma_sys::{IBV_FORK_UNNEEDED, ibv_fork_status};

/// Does nothing, as no preparation is needed.
pub unsafe extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// Returns `IBV_FORK_UNNEEDED`.
pub unsafe extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}

/// Does nothing.
pub unsafe extern "C" fn ibv_dontfork_range(_: *mut c_void, _: usize) -> c_int {
    0
}

/// Does nothing.
pub unsafe extern "C" fn ibv_dofork_range(_: *mut c_void, _: usize) -> c_int {
    0
}
