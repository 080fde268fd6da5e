//! Locks that are held from one call of a program to another.

use std::sync::atomic::{AtomicBool, Ordering};

/// Takes a lock that is held for a few calls of the same thread. As long as that takes: the functions that do it have no deadline,
/// and no errors.
pub(crate) fn acquire(lock: &AtomicBool) {
    let mut tries = 0_u32;
    while lock.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        tries += 1;
        if tries % 64 == 0 {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}
