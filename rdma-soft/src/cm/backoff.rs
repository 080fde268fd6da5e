//! Retransmission with exponential backoff.

use std::time::Duration;

/// Intervals between transmissions of a message that is not answered.
///
/// Linux retransmits 15 times at constant intervals: 6.1 s in Linux 6.1, 4.6 s in Linux 6.12. Most peers of soft0 are on the same
/// host or network, so the first interval is short. It doubles up to about Linux's interval, for peers that are slow.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Backoff {
    /// Interval after the first transmission.
    pub first: Duration,
    /// Longest interval.
    pub longest: Duration,
    /// Retransmissions before the peer counts as unreachable.
    pub retries: u8,
}

impl Default for Backoff {
    /// 64 ms, doubling to 4.1 s, ten retries: 24.5 s until the peer counts as unreachable.
    fn default() -> Self {
        Backoff { first: Duration::from_millis(64), longest: Duration::from_millis(4096), retries: 10 }
    }
}

impl Backoff {
    /// For lookups: 1 s, doubling to 4.1 s, six retries: 23.6 s until the peer counts as unreachable.
    ///
    /// Linux forgets a lookup once its program has answered it (`cm_send_sidr_rep_locked`), and reports a later duplicate as
    /// another lookup. A first interval longer than most programs take to answer avoids such duplicates.
    #[must_use]
    pub fn of_lookups() -> Self {
        Backoff { first: Duration::from_millis(1024), longest: Duration::from_millis(4096), retries: 6 }
    }

    /// Interval after the retransmission number `retries`, where 0 is the first transmission.
    pub(super) fn interval(&self, retries: u8) -> Duration {
        let factor = 1_u32.checked_shl(retries.into()).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_double_up_to_the_longest() {
        let backoff = Backoff::default();
        let intervals: Vec<u128> = (0..=10).map(|retries| backoff.interval(retries).as_millis()).collect();
        assert_eq!(intervals, [64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096, 4096, 4096]);
        assert_eq!(intervals.iter().sum::<u128>(), 24_512);
        assert_eq!(backoff.interval(255), backoff.longest);
        let backoff = Backoff::of_lookups();
        let intervals: Vec<u128> = (0..=6).map(|retries| backoff.interval(retries).as_millis()).collect();
        assert_eq!(intervals, [1024, 2048, 4096, 4096, 4096, 4096, 4096]);
    }
}
