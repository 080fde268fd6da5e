//! Fork support. This is a separate test program, because a process initializes it once.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rdma_safe::fork::{self, ForkStatus};
use rdma_safe::sys::{IBV_FORK_DISABLED, IBV_FORK_ENABLED, Verbs, ibv_fork_status, install_verbs};
use rdma_safe::{Errno, Error};

static STATUS: AtomicU32 = AtomicU32::new(IBV_FORK_DISABLED.0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn is_fork_initialized() -> ibv_fork_status {
    ibv_fork_status(STATUS.load(Ordering::SeqCst))
}

/// Fails on the first call.
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
    // SAFETY: the test calls only functions that are replaced below.
    let mut table = unsafe { Verbs::from_lookup("the test", |_: &CStr| unsupported as *mut c_void) }.unwrap();
    table.ibv_is_fork_initialized = is_fork_initialized;
    table.ibv_fork_init = init;
    // SAFETY: the functions that the test calls have the signatures of their fields.
    unsafe { install_verbs(table) }.unwrap();

    assert_eq!(fork::status().unwrap(), ForkStatus::DISABLED);
    let error = fork::init().unwrap_err();
    assert!(matches!(error, Error::Fork { errno: Errno(libc::ENOSYS) }), "{error:?}");
    assert_eq!(fork::status().unwrap(), ForkStatus::DISABLED);
    fork::init().unwrap();
    assert_eq!(fork::status().unwrap(), ForkStatus::ENABLED);
    fork::init().unwrap();
    assert_eq!(CALLS.load(Ordering::SeqCst), 2, "fork support is initialized only once");
    assert_eq!(ForkStatus(9).to_string(), "fork status 9");
}
