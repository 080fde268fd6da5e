//! Forking is prepared for before a device is opened. A program of its own: it is done once in a process.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rdma_safe::sys::{IBV_FORK_DISABLED, IBV_FORK_ENABLED, Verbs, ibv_fork_status, install_verbs};
use rdma_safe::{Errno, Error, ForkStatus, fork_init, fork_status};

static STATUS: AtomicU32 = AtomicU32::new(IBV_FORK_DISABLED.0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn is_fork_initialized() -> ibv_fork_status {
    ibv_fork_status(STATUS.load(Ordering::SeqCst))
}

/// Fails the first time.
unsafe extern "C" fn init() -> c_int {
    if CALLS.fetch_add(1, Ordering::SeqCst) == 0 {
        return libc::ENOSYS;
    }
    STATUS.store(IBV_FORK_ENABLED.0, Ordering::SeqCst);
    0
}

extern "C" fn unsupported() -> c_int {
    libc::EOPNOTSUPP
}

#[test]
fn forking_is_prepared_for_once() {
    // SAFETY: nobody here calls what is not replaced below.
    let mut table = unsafe { Verbs::from_lookup("the test", |_: &CStr| unsupported as *mut c_void) }.unwrap();
    table.ibv_is_fork_initialized = is_fork_initialized;
    table.ibv_fork_init = init;
    // SAFETY: the functions that are called have the signatures of their fields.
    unsafe { install_verbs(table) }.unwrap();

    assert_eq!(fork_status().unwrap(), ForkStatus::DISABLED);
    let error = fork_init().unwrap_err();
    assert!(matches!(error, Error::Fork { errno: Errno(libc::ENOSYS) }), "{error:?}");
    assert_eq!(fork_status().unwrap(), ForkStatus::DISABLED);
    fork_init().unwrap();
    assert_eq!(fork_status().unwrap(), ForkStatus::ENABLED);
    fork_init().unwrap();
    assert_eq!(CALLS.load(Ordering::SeqCst), 2, "what is done is not done again");
    assert_eq!(ForkStatus(9).to_string(), "fork status 9");
}
