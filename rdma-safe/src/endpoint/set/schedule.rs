//! When the peers of a set are checked.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use super::EndpointKey;
use crate::endpoint::keepalive::{Countdown, Pace, slack};

/// Endpoints with a keepalive, by the time of their next check.
///
/// Times are rounded down to ticks, so that a program that sleeps wakes once for all endpoints of a tick. Checking
/// allocates nothing: an endpoint leaves the heap and returns to it.
pub(super) struct Schedule {
    checks: BinaryHeap<Due>,
    /// Entries in `checks` of endpoints that were removed.
    stale: usize,
    /// Ticks count from here.
    start: Instant,
    /// Polls until the clock is read.
    countdown: Countdown,
    /// `None` if the clock need not be read.
    pace: Option<Pace>,
    /// Shortest time limit of an endpoint in the set.
    shortest: Duration,
}

/// An endpoint and the time of its next check.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Due {
    at: Instant,
    pub(super) key: EndpointKey,
    within: Duration,
    interval: Duration,
}

impl Ord for Due {
    /// The earliest check is the greatest, and thus the first in the heap.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.cmp(&self.at)
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Schedule {
    pub(super) fn new() -> Self {
        Schedule {
            checks: BinaryHeap::new(),
            stale: 0,
            start: Instant::now(),
            countdown: Countdown::OFF,
            pace: None,
            shortest: Duration::MAX,
        }
    }

    /// Counts a poll. Returns whether to read the clock, and then to call [`Schedule::read`].
    #[inline(always)]
    pub(super) fn count(&mut self) -> bool {
        self.countdown.count()
    }

    /// Records a reading of the clock.
    pub(super) fn read(&mut self, now: Instant) {
        self.countdown = self.pace.as_mut().map_or(Countdown::OFF, |pace| pace.read(now));
    }

    /// Adds an endpoint with this time limit and this time between two checks.
    pub(super) fn add(&mut self, key: EndpointKey, within: Duration, interval: Duration) {
        let now = Instant::now();
        if within < self.shortest {
            self.shortest = within;
            (self.pace, self.countdown) = (Some(Pace::new(now, slack(within))), Countdown::NOW);
        }
        self.repeat(Due { at: now, key, within, interval }, now);
    }

    /// Schedules the next check.
    pub(super) fn repeat(&mut self, due: Due, now: Instant) {
        let tick = (slack(due.within) / 2).as_nanos().max(1);
        let exact = now.checked_add(due.interval).unwrap_or(now);
        let offset = exact.saturating_duration_since(self.start).as_nanos() % tick;
        // The offset is less than a tick, whose nanoseconds fit in 64 bits.
        let at = exact.checked_sub(Duration::from_nanos(offset as u64));
        self.checks.push(Due { at: at.unwrap_or(exact), ..due });
    }

    /// Takes an endpoint out whose check is due.
    pub(super) fn take(&mut self, now: Instant) -> Option<Due> {
        if self.checks.peek()?.at > now {
            return None;
        }
        self.checks.pop()
    }

    /// Continues with the next poll: more checks are due.
    pub(super) fn hurry(&mut self) {
        self.countdown = Countdown::NOW;
    }

    /// Time of the next check.
    pub(super) fn next(&self) -> Option<Instant> {
        self.checks.peek().map(|due| due.at)
    }

    /// Notes that an endpoint was removed. Forgets removed endpoints once they are half of all; `exists` tells them apart.
    pub(super) fn removed(&mut self, exists: impl Fn(EndpointKey) -> bool) {
        self.stale += 1;
        if 2 * self.stale > self.checks.len() {
            self.checks.retain(|due| exists(due.key));
            self.stale = 0;
        }
        if self.checks.is_empty() {
            self.shortest = Duration::MAX;
            (self.pace, self.countdown) = (None, Countdown::OFF);
        }
    }

    /// Notes that [`Schedule::take`] has returned an endpoint that was removed.
    pub(super) fn forgotten(&mut self) {
        self.stale = self.stale.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qp::QpId;

    const WITHIN: Duration = Duration::from_secs(16);
    const INTERVAL: Duration = Duration::from_secs(3);

    fn keys(count: u32) -> Vec<EndpointKey> {
        (0..count).map(|index| EndpointKey { index, id: QpId::next() }).collect()
    }

    #[test]
    fn checks_are_in_time_and_share_ticks() {
        let mut schedule = Schedule::new();
        let start = schedule.start;
        for (key, millis) in keys(10).into_iter().zip((0..).step_by(10)) {
            let due = Due { at: start, key, within: WITHIN, interval: INTERVAL };
            schedule.repeat(due, start + Duration::from_millis(millis));
        }
        let at = schedule.next().unwrap();
        assert_eq!(at, start + INTERVAL, "rounded down to a half of the slack");
        assert!(schedule.take(at - Duration::from_nanos(1)).is_none());
        let taken: Vec<u32> = std::iter::from_fn(|| schedule.take(at)).map(|due| due.key.index).collect();
        assert_eq!(taken.len(), 10);
        assert_eq!(schedule.next(), None);
    }

    #[test]
    fn endpoints_with_different_limits_are_ordered_by_time() {
        let mut schedule = Schedule::new();
        let keys = keys(2);
        schedule.add(keys[0], WITHIN, INTERVAL);
        schedule.add(keys[1], WITHIN / 8, INTERVAL / 8);
        assert_eq!(schedule.shortest, WITHIN / 8);
        let late = schedule.start + WITHIN;
        let order: Vec<u32> = std::iter::from_fn(|| schedule.take(late)).map(|due| due.key.index).collect();
        assert_eq!(order, [1, 0]);
    }

    #[test]
    fn removed_endpoints_do_not_accumulate() {
        let mut schedule = Schedule::new();
        let all = keys(100);
        for key in &all {
            schedule.add(*key, WITHIN, INTERVAL);
        }
        for removed in 1..=all.len() {
            schedule.removed(|key| all[removed..].contains(&key));
            assert!(schedule.checks.len() <= 2 * (all.len() - removed), "{removed}: {}", schedule.checks.len());
        }
        assert!(!schedule.count(), "no clock is read for an empty set");
    }
}
