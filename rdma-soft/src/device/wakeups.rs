//! Threads to wake after the device is unlocked.

use std::sync::Arc;

use super::signal::Signal;

/// Signals to raise when this is dropped, each with its number of events.
///
/// A thread that is woken by an event locks the device next, and may preempt the thread that woke it. So it is woken after the
/// device is unlocked.
#[derive(Debug, Default)]
pub(super) struct Wakeups {
    /// The first two signals, stored without an allocation. More than two at a time are rare.
    first: [Option<(Arc<Signal>, u32)>; 2],
    more: Vec<(Arc<Signal>, u32)>,
}

impl Wakeups {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.first[0].is_none()
    }

    pub(super) fn add(&mut self, signal: &Arc<Signal>) {
        signal.announce();
        let all = self.first.iter_mut().flatten().chain(&mut self.more);
        for (of, count) in all {
            if Arc::ptr_eq(of, signal) {
                *count += 1;
                return;
            }
        }
        let new = (Arc::clone(signal), 1);
        match self.first.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(new),
            None => self.more.push(new),
        }
    }

    /// Takes back an event whose signal was not raised yet. Returns whether there was one.
    pub(super) fn take(&mut self, signal: &Arc<Signal>) -> bool {
        let mut all = self.first.iter_mut().flatten().chain(&mut self.more);
        let Some((_, count)) = all.find(|(of, count)| Arc::ptr_eq(of, signal) && *count > 0) else { return false };
        *count -= 1;
        signal.withdraw();
        true
    }

    fn raise(&mut self) {
        let first = self.first.iter_mut().filter_map(Option::take);
        for (signal, count) in first.chain(self.more.drain(..)).filter(|(_, count)| *count > 0) {
            signal.raise_announced(count);
        }
    }
}

impl Drop for Wakeups {
    #[inline]
    fn drop(&mut self) {
        if !self.is_empty() {
            self.raise();
        }
    }
}
