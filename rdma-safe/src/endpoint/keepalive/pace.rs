//! When a poll reads the clock.

use std::time::{Duration, Instant};

/// Most polls between two readings of the clock, which takes about twenty times as long as counting a poll.
const MAX_STRIDE: u32 = 64;

/// Polls until the clock is read.
#[derive(Clone, Copy)]
pub(in crate::endpoint) struct Countdown(u32);

impl Countdown {
    /// The clock need not be read. The countdown ends after four billion polls, and starts again.
    pub(in crate::endpoint) const OFF: Countdown = Countdown(0);

    /// The next poll reads the clock.
    pub(in crate::endpoint) const NOW: Countdown = Countdown(1);

    /// Counts a poll. Returns whether to read the clock, and to set another countdown.
    #[inline(always)]
    pub(in crate::endpoint) fn count(&mut self) -> bool {
        self.0 = self.0.wrapping_sub(1);
        self.0 == 0
    }
}

/// Decides how many polls pass between two readings of the clock.
///
/// The number adapts to the program: it is large while the program spins, and small if the program polls seldom.
pub(in crate::endpoint) struct Pace {
    /// Polls between two readings.
    stride: u32,
    /// Longest time between two readings.
    target: Duration,
    /// Time between two readings below which there may be more polls.
    short: Duration,
    last: Instant,
}

impl Pace {
    /// Reads the clock once within `target`, if the program polls that often.
    pub(in crate::endpoint) fn new(now: Instant, target: Duration) -> Self {
        Pace { stride: 1, target, short: target / 4, last: now }
    }

    /// Records a reading of the clock. Returns the polls until the next one.
    pub(in crate::endpoint) fn read(&mut self, now: Instant) -> Countdown {
        let elapsed = now.saturating_duration_since(self.last);
        self.last = now;
        if elapsed > self.target {
            self.stride = 1;
        } else if elapsed < self.short {
            self.stride = self.stride.saturating_mul(2).min(MAX_STRIDE);
        }
        Countdown(self.stride)
    }
}
