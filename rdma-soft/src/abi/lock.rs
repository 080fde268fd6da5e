//! Spin locks that are held across calls of a program.

use std::sync::atomic::{AtomicBool, Ordering};

/// Acquires a lock, without a deadline.
///
/// The holder keeps it for a few calls in one thread. The verbs that acquire it have neither a deadline nor errors.
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
