//! What is noted while messages go.

use super::touched;
use crate::clock::Clock;
use crate::stats::Latencies;
use crate::stats::perftest::Moments;

/// Notes posts and completions of a bandwidth test. What it does not need, it does not take the time of.
pub(super) trait Recorder {
    /// There is no other thread, as in perftest, that could want the run to end or look how far it is.
    const ALONE: bool = false;

    /// Messages from `index` on are about to be posted with one doorbell; what it returns comes back with the completions
    /// of the signaled ones, if there are any among them.
    fn posting(&mut self, index: u64, has_signaled: bool) -> u64;

    /// The signaled message posted at `stamp` has completed, and with it all of the first `total`.
    fn completed(&mut self, stamp: u64, total: u64);

    /// A look at the queue begins.
    fn look(&mut self) {}
}

/// Notes nothing.
pub(super) struct Nothing;

impl Recorder for Nothing {
    #[inline]
    fn posting(&mut self, _index: u64, _has_signaled: bool) -> u64 {
        0
    }

    #[inline]
    fn completed(&mut self, _stamp: u64, _total: u64) {}
}

/// A histogram of the time that signaled messages take, and the fastest stretch.
pub(super) struct Native {
    clock: Clock,
    pub(super) latencies: Latencies,
    /// Ticks of the shortest stretch whose rate counts as the peak.
    stretch: u64,
    /// When this stretch began, and how many messages had completed.
    began: Option<(u64, u64)>,
    /// When the last look that found something was, and how many messages had completed after it.
    latest: (u64, u64),
    /// Messages a tick, at most.
    peak: f64,
    /// The time of this look, once it was needed.
    now: Option<u64>,
}

impl Native {
    pub(super) fn new(clock: Clock) -> Self {
        let stretch = clock.ticks(std::time::Duration::from_millis(1)).max(1);
        Native { clock, latencies: Latencies::new(), stretch, began: None, latest: (0, 0), peak: 0.0, now: None }
    }

    /// Messages a tick in the fastest stretch; `None` when the run was not as long as one.
    pub(super) fn peak(mut self) -> Option<f64> {
        self.end_stretch();
        (self.peak > 0.0).then_some(self.peak)
    }

    /// Counts whole looks: how many completions one finds says when it came, not when they did.
    fn end_stretch(&mut self) {
        let ((now, total), Some((began, before))) = (self.latest, self.began) else { return };
        if now.saturating_sub(began) >= self.stretch {
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
    fn look(&mut self) {
        if self.now.take().is_some() {
            match self.began {
                None => self.began = Some(self.latest),
                Some(_) => self.end_stretch(),
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

/// Every moment, as perftest keeps them.
pub(super) struct Compat {
    clock: Clock,
    pub(super) moments: Moments,
    list: u32,
}

impl Compat {
    /// For `messages` in all, posted `list` at a time.
    pub(super) fn new(clock: Clock, messages: u64, list: u32) -> Self {
        let none = || {
            let mut moments = touched(messages);
            moments.fill(0);
            moments
        };
        Compat { clock, moments: Moments { posted: none(), completed: none() }, list }
    }

    /// How long the signaled messages took, counted from their doorbell.
    pub(super) fn latencies(&self) -> Latencies {
        let mut latencies = Latencies::new();
        let Moments { posted, completed } = &self.moments;
        for (index, completed) in completed.iter().enumerate().filter(|(_, moment)| **moment > 0) {
            let posted = posted[index - index % self.list as usize];
            latencies.record(self.clock.nanos(completed.saturating_sub(posted)) as u64);
        }
        latencies
    }
}

impl Recorder for Compat {
    const ALONE: bool = true;

    #[inline]
    fn posting(&mut self, index: u64, _has_signaled: bool) -> u64 {
        if let Some(moment) = self.moments.posted.get_mut(index as usize) {
            *moment = self.clock.now();
        }
        0
    }

    #[inline]
    fn completed(&mut self, _stamp: u64, total: u64) {
        if let Some(moment) = self.moments.completed.get_mut(total as usize - 1) {
            *moment = self.clock.now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_of_whole_looks() {
        let mut native = Native::new(Clock::nanoseconds());
        // At 0 ms, 2 ms, 4 ms, 5 ms: four messages each, then eight.
        for (millis, totals) in [(0_u64, 1..=4_u64), (2, 5..=8), (4, 9..=12), (5, 13..=20)] {
            native.look();
            native.now = Some(1_000_000 * millis);
            totals.for_each(|total| native.completed(0, total));
        }
        assert_eq!(native.peak(), Some(8.0 / 1e6));
        let mut short = Native::new(Clock::nanoseconds());
        short.completed(0, 1);
        assert_eq!(short.peak(), None);
    }
}
