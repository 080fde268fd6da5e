//! How often a program waits for events.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::transport::Time;

/// Events that follow each other within this time are frequent.
pub(super) const FREQUENT_INTERVAL: Duration = Duration::from_millis(1);

/// Longest time between the events of a program that was woken and waits for a processor.
pub(super) const DELAYED_INTERVAL: Duration = Duration::from_millis(16);

/// Frequent events in a row after which a channel becomes direct.
const FREQUENT: u32 = 4;

/// Stands for no channel.
pub(super) const NO_CHANNEL: u32 = u32::MAX;

/// How often a program waits for events, and which channel is direct. Readable without the device locked.
#[derive(Debug)]
pub(in crate::device) struct Frequency {
    pub(super) direct: AtomicU32,
    /// Channel of the last event, and the time when the event was taken.
    channel: AtomicU32,
    pub(super) taken_at: AtomicU64,
    /// Frequent events in a row.
    count: AtomicU32,
    /// Calls that asked for an event, approximately. A program that waits increases it.
    pub(super) calls: AtomicU32,
}

impl Frequency {
    pub(in crate::device) const fn new() -> Frequency {
        Frequency {
            direct: AtomicU32::new(NO_CHANNEL),
            channel: AtomicU32::new(NO_CHANNEL),
            taken_at: AtomicU64::new(0),
            count: AtomicU32::new(0),
            calls: AtomicU32::new(0),
        }
    }

    /// Records an event. Returns whether its channel may become direct.
    pub(super) fn record(&self, channel: u32, now: Time) -> bool {
        let is_same = self.channel.swap(channel, Ordering::Relaxed) == channel;
        let last = Time(self.taken_at.swap(now.0, Ordering::Relaxed));
        let count = if is_same && now < last + FREQUENT_INTERVAL {
            self.count.load(Ordering::Relaxed).saturating_add(1)
        } else {
            0
        };
        self.count.store(count, Ordering::Relaxed);
        count >= FREQUENT
    }

    /// Whether the last event was of `channel`, and less than `interval` ago.
    pub(super) fn was_taken_within(&self, channel: u32, interval: Duration, now: Time) -> bool {
        self.channel.load(Ordering::Relaxed) == channel && now < Time(self.taken_at.load(Ordering::Relaxed)) + interval
    }
}
