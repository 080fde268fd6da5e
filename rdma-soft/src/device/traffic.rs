//! Counters of packets and bytes.

use std::sync::atomic::{AtomicU64, Ordering};

/// Packets and bytes in one direction.
#[derive(Debug)]
pub(crate) struct Count {
    packets: AtomicU64,
    bytes: AtomicU64,
}

/// Packets sent by the device of this process, including retransmissions.
pub(crate) static SENT: Count = Count::new();

/// Packets received with a valid invariant CRC.
pub(crate) static RECEIVED: Count = Count::new();

impl Count {
    const fn new() -> Count {
        Count { packets: AtomicU64::new(0), bytes: AtomicU64::new(0) }
    }

    /// Counts packets and their bytes in total. The device is locked.
    ///
    /// Bytes are counted from the base transport header to the invariant CRC. The lock keeps other threads from counting, so a load
    /// and a store suffice.
    pub(crate) fn add(&self, packets: usize, bytes: usize) {
        for (count, more) in [(&self.packets, packets as u64), (&self.bytes, bytes as u64)] {
            count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
        }
    }

    /// Packets and bytes so far.
    pub(crate) fn get(&self) -> (u64, u64) {
        (self.packets.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}
