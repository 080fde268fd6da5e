//! Waiting for events to be acknowledged.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Counts acknowledged events, and lets threads wait for the next one.
#[derive(Default)]
pub(super) struct Acknowledged {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Default)]
struct Counts {
    events: u64,
    /// Waiting threads.
    waiters: u32,
}

impl Acknowledged {
    /// Counts an acknowledgement, and wakes the waiting threads.
    pub(super) fn add(&self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.events += 1;
        // `notify_all` makes a system call even without waiters.
        if counts.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Waits for an acknowledgement, at most for `limit`. Calls `unlock` first, to release the lock under which events are
    /// acknowledged.
    pub(super) fn wait(&self, limit: Duration, unlock: impl FnOnce()) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let before = counts.events;
        counts.waiters += 1;
        unlock();
        let woken = self.changed.wait_timeout_while(counts, limit, |counts| counts.events == before);
        woken.unwrap_or_else(PoisonError::into_inner).0.waiters -= 1;
    }
}
