//! Injection of faults into sent packets.

use std::collections::VecDeque;
use std::time::Duration;

use super::To;
use crate::faults::{Faults, Injector};
use crate::transport::Time;

/// Maximum time that a reordered packet waits for others to overtake it.
const REORDER_TIMEOUT: Duration = Duration::from_millis(1);

/// Packets that wait because they are delayed or reordered. Packets are dropped, duplicated and corrupted before they are pushed.
pub(super) struct FaultQueue {
    injector: Injector,
    /// Packets in the order in which they were pushed.
    held: VecDeque<Held>,
}

struct Held {
    to: To,
    packet: Vec<u8>,
    copies: u8,
    /// Number of later packets that still have to overtake this one.
    overtaken_by: u8,
    /// Send time, if no other packet has to overtake it.
    due: Time,
}

impl Held {
    fn send_at(&self) -> Time {
        if self.overtaken_by == 0 { self.due } else { self.due + REORDER_TIMEOUT }
    }
}

impl FaultQueue {
    /// Returns `None` if `faults` injects nothing.
    pub(super) fn new(faults: Faults) -> Option<FaultQueue> {
        // A seed alone injects nothing.
        let is_good = Faults { seed: 0, ..faults } == Faults::default();
        (!is_good).then(|| FaultQueue { injector: Injector::new(faults), held: VecDeque::new() })
    }

    pub(super) fn push(&mut self, to: To, mut packet: Vec<u8>, now: Time) {
        let fate = self.injector.next(&mut packet);
        if fate.copies > 0 {
            let (copies, overtaken_by) = (fate.copies, fate.overtaken_by);
            self.held.push_back(Held { to, packet, copies, overtaken_by, due: now + fate.delay });
        }
    }

    /// Passes the packets that are due to `send`.
    pub(super) fn release(&mut self, now: Time, mut send: impl FnMut(To, Vec<u8>)) {
        let mut at = 0;
        // All packets have the same delay, so they become due in order.
        while let Some(held) = self.held.get(at).filter(|held| held.due <= now) {
            if held.send_at() > now {
                at += 1;
                continue;
            }
            let Some(Held { to, packet, copies, .. }) = self.held.remove(at) else { break };
            (1..copies).for_each(|_| send(to, packet.clone()));
            send(to, packet);
            for overtaken in self.held.range_mut(..at) {
                overtaken.overtaken_by = overtaken.overtaken_by.saturating_sub(1);
            }
            at = 0;
        }
    }

    /// Returns when the next packet is due.
    pub(super) fn wake_at(&self) -> Option<Time> {
        self.held.iter().map(Held::send_at).min()
    }
}
