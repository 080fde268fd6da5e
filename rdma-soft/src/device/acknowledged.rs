//! Waiting until events are acknowledged.

use std::sync::{Condvar, Mutex, PoisonError};

/// How often events were acknowledged.
#[derive(Default)]
pub(super) struct Acknowledged {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Default)]
struct Counts {
    events: u64,
    /// Threads that wait.
    waiters: u32,
}

impl Acknowledged {
    /// One more. Wakes the threads that wait.
    pub(super) fn add(&self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.events += 1;
        // To wake nobody takes a system call, too.
        if counts.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Waits for one. It counts from when `unlock` is called, which gives up the lock under which events are acknowledged.
    pub(super) fn wait(&self, unlock: impl FnOnce()) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let before = counts.events;
        counts.waiters += 1;
        unlock();
        counts =
            self.changed.wait_while(counts, |counts| counts.events == before).unwrap_or_else(PoisonError::into_inner);
        counts.waiters -= 1;
    }
}
