//! Recorders of post and completion times.

use crate::clock::Clock;
use crate::stats::Latencies;
use crate::stats::perftest::Timestamps;

/// Records posts and completions of a bandwidth test. It reads the clock only when a result needs the time.
pub(super) trait Recorder {
    /// Whether the run has no supervising thread, as in perftest.
    const UNSUPERVISED: bool = false;

    /// Called before messages from `index` on are posted with one doorbell. The returned stamp is passed to
    /// [`Recorder::completed`] for signaled messages.
    fn posting(&mut self, index: u64, has_signaled: bool) -> u64;

    /// The signaled message with this `stamp` has completed, and with it the first `total` messages.
    fn completed(&mut self, stamp: u64, total: u64);

    /// Called before each poll of the completion queue.
    fn begin_poll(&mut self) {}
}

/// Records nothing.
pub(super) struct NoRecorder;

impl Recorder for NoRecorder {
    #[inline]
    fn posting(&mut self, _index: u64, _has_signaled: bool) -> u64 {
        0
    }

    #[inline]
    fn completed(&mut self, _stamp: u64, _total: u64) {}
}

/// A latency histogram of signaled messages, and the peak rate.
pub(super) struct Native {
    clock: Clock,
    pub(super) latencies: Latencies,
    /// Shortest interval that counts for the peak, in ticks.
    interval: u64,
    /// Start of the current interval, and messages completed by then.
    began: Option<(u64, u64)>,
    /// Time of the last poll that found completions, and messages completed after it.
    latest: (u64, u64),
    /// Peak rate, in messages per tick.
    peak: f64,
    /// Time of the current poll, once it was read.
    now: Option<u64>,
}

impl Native {
    pub(super) fn new(clock: Clock) -> Self {
        let interval = clock.ticks(std::time::Duration::from_millis(1)).max(1);
        Native { clock, latencies: Latencies::new(), interval, began: None, latest: (0, 0), peak: 0.0, now: None }
    }

    /// The peak in messages per tick; `None` if the run was shorter than one interval.
    pub(super) fn peak(mut self) -> Option<f64> {
        self.end_interval();
        (self.peak > 0.0).then_some(self.peak)
    }

    /// Ends the interval between polls, because all completions of one poll share its time.
    fn end_interval(&mut self) {
        let ((now, total), Some((began, before))) = (self.latest, self.began) else { return };
        if now.saturating_sub(began) >= self.interval {
            self.peak = self.peak.max((total - before) as f64 / (now - began) as f64);
            self.began = Some(self.latest);
        }
    }
}

impl Recorder for Native {
    #[inline]
    fn posting(&mut self, _index: u64, has_signaled: bool) -> u64 {
        if has_signaled { self.clock.now() } else { 0 }
    }

    #[inline]
    fn begin_poll(&mut self) {
        if self.now.take().is_some() {
            match self.began {
                None => self.began = Some(self.latest),
                Some(_) => self.end_interval(),
            }
        }
    }

    #[inline]
    fn completed(&mut self, stamp: u64, total: u64) {
        let now = *self.now.get_or_insert_with(|| self.clock.now());
        self.latencies.record(self.clock.nanos(now.saturating_sub(stamp)) as u64);
        self.latest = (now, total);
    }
}

/// All times, as perftest keeps them.
pub(super) struct Compat {
    clock: Clock,
    pub(super) timestamps: Timestamps,
    list: u32,
}

impl Compat {
    /// For `messages` messages in total, posted `list` at a time.
    pub(super) fn new(clock: Clock, messages: u64, list: u32) -> Self {
        let none = || {
            let mut timestamps = touched(messages);
            timestamps.fill(0);
            timestamps
        };
        Compat { clock, timestamps: Timestamps { posted: none(), completed: none() }, list }
    }

    /// Latencies of the signaled messages, from their doorbell.
    pub(super) fn latencies(&self) -> Latencies {
        let mut latencies = Latencies::new();
        let Timestamps { posted, completed } = &self.timestamps;
        for (index, completed) in completed.iter().enumerate().filter(|(_, moment)| **moment > 0) {
            let posted = posted[index - index % self.list as usize];
            latencies.record(self.clock.nanos(completed.saturating_sub(posted)) as u64);
        }
        latencies
    }
}

impl Recorder for Compat {
    const UNSUPERVISED: bool = true;

    #[inline]
    fn posting(&mut self, index: u64, _has_signaled: bool) -> u64 {
        if let Some(moment) = self.timestamps.posted.get_mut(index as usize) {
            *moment = self.clock.now();
        }
        0
    }

    #[inline]
    fn completed(&mut self, _stamp: u64, total: u64) {
        if let Some(moment) = self.timestamps.completed.get_mut(total as usize - 1) {
            *moment = self.clock.now();
        }
    }
}

/// Allocates memory for timestamps and touches it, so that no page fault delays a message.
pub(super) fn touched(count: u64) -> Vec<u64> {
    // Zeroed memory would be allocated without pages.
    vec![1; count as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_covers_whole_polls() {
        let mut native = Native::new(Clock::nanoseconds());
        // Four messages each at 0 ms, 2 ms and 4 ms, then eight at 5 ms.
        for (millis, totals) in [(0_u64, 1..=4_u64), (2, 5..=8), (4, 9..=12), (5, 13..=20)] {
            native.begin_poll();
            native.now = Some(1_000_000 * millis);
            totals.for_each(|total| native.completed(0, total));
        }
        assert_eq!(native.peak(), Some(8.0 / 1e6));
        let mut short = Native::new(Clock::nanoseconds());
        short.completed(0, 1);
        assert_eq!(short.peak(), None);
    }
}
