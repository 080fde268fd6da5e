//! Whether a direct channel still pays off, and how often the server scans for its packets.

use std::time::Duration;

use super::frequency::{DELAYED_INTERVAL, FREQUENT_INTERVAL};
use crate::device::ack_delay::ACK_DELAY;

/// Scans of the server between two decisions. The program is too busy if more than half of them found packets that it had left.
pub(super) const REVIEW_SCANS: u32 = 64;

/// Longest time between two scans of the server, and longest delay of an ACK meanwhile. A scan takes the processor from the
/// program, and on a busy host, another thread may get it next.
pub(super) const LONGEST_SCAN_INTERVAL: Duration = ACK_DELAY.saturating_mul(4);

/// What the scans of the server have found since a channel became direct.
#[derive(Debug)]
pub(super) struct Review {
    /// Interval of the server's scans.
    scan_interval: Duration,
    /// Whether the program has left packets and has not run since. It was woken, and waits for a processor or computes.
    has_left_packets: bool,
    /// Scans of the server, and those that found packets although no thread had polled or asked for an event since the previous
    /// scan.
    scans: u32,
    missed: u32,
    /// Calls for an event, and polls, at the last scan.
    calls: u32,
    polls: u32,
}

impl Review {
    pub(super) const fn new() -> Review {
        Review { scan_interval: ACK_DELAY, has_left_packets: false, scans: 0, missed: 0, calls: 0, polls: 0 }
    }

    /// Records a scan. Returns whether the program is too busy to take its packets.
    ///
    /// `calls` is how often the program has asked for an event, and `polls` how often it has polled.
    pub(super) fn record(&mut self, has_found: bool, calls: u32, polls: u32) -> bool {
        let has_run = calls != self.calls || polls != self.polls;
        (self.calls, self.polls) = (calls, polls);
        let has_missed = has_found && !has_run;
        self.has_left_packets = has_missed || self.has_left_packets && !has_run;
        self.scan_interval = if has_missed { ACK_DELAY } else { (2 * self.scan_interval).min(LONGEST_SCAN_INTERVAL) };
        self.scans += 1;
        self.missed += u32::from(has_missed);
        if self.scans < REVIEW_SCANS {
            return false;
        }
        self.scans = 0;
        std::mem::take(&mut self.missed) > REVIEW_SCANS / 2
    }

    /// The longest time since the last event for which the channel stays direct.
    pub(super) fn event_interval(&self) -> Duration {
        if self.has_left_packets { DELAYED_INTERVAL } else { FREQUENT_INTERVAL }
    }

    /// The time until the next scan.
    pub(super) fn scan_interval(&self) -> Duration {
        self.scan_interval
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_scans_more_rarely_until_the_program_leaves_packets() {
        let mut review = Review::new();
        let scans = [(false, 1), (false, 2), (true, 3), (true, 3), (false, 3), (true, 4)];
        let intervals = scans.map(|(has_found, polls)| {
            assert!(!review.record(has_found, 0, polls));
            (review.scan_interval().as_nanos() / ACK_DELAY.as_nanos()) as u32
        });
        assert_eq!(intervals, [2, 4, 4, 1, 2, 4]);
    }

    #[test]
    fn a_program_that_has_left_packets_has_longer_until_it_runs() {
        let mut review = Review::new();
        for (has_found, polls, expected) in [
            (true, 1, FREQUENT_INTERVAL),
            (true, 1, DELAYED_INTERVAL),
            (false, 1, DELAYED_INTERVAL),
            (false, 2, FREQUENT_INTERVAL),
        ] {
            review.record(has_found, 0, polls);
            assert_eq!(review.event_interval(), expected);
        }
    }
}
