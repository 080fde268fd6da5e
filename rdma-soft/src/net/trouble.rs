//! Packets on a bad network.

use std::collections::VecDeque;
use std::time::Duration;

use super::To;
use crate::faults::{Faults, Injector};
use crate::transport::Time;

/// How long a packet waits for others to overtake it.
const PATIENCE: Duration = Duration::from_millis(1);

/// Holds packets back, and loses, doubles and damages them.
pub(super) struct Trouble {
    injector: Injector,
    /// In the order in which they came.
    held: VecDeque<Held>,
}

struct Held {
    to: To,
    packet: Vec<u8>,
    copies: u8,
    /// How many that came later are to go before it.
    overtaken_by: u8,
    /// When it goes, if it is not to be overtaken any more.
    due: Time,
}

impl Held {
    fn leaves_at(&self) -> Time {
        if self.overtaken_by == 0 { self.due } else { self.due + PATIENCE }
    }
}

impl Trouble {
    /// `None` where the network is a good one.
    pub(super) fn new(faults: Faults) -> Option<Trouble> {
        // A seed alone does no harm.
        let is_good = Faults { seed: 0, ..faults } == Faults::default();
        (!is_good).then(|| Trouble { injector: Injector::new(faults), held: VecDeque::new() })
    }

    pub(super) fn push(&mut self, to: To, mut packet: Vec<u8>, now: Time) {
        let fate = self.injector.next(&mut packet);
        if fate.copies > 0 {
            let (copies, overtaken_by) = (fate.copies, fate.overtaken_by);
            self.held.push_back(Held { to, packet, copies, overtaken_by, due: now + fate.delay });
        }
    }

    /// Gives what is to go by now to `send`.
    pub(super) fn release(&mut self, now: Time, mut send: impl FnMut(To, Vec<u8>)) {
        let mut at = 0;
        // All are delayed alike, so that none is due before those that came before.
        while let Some(held) = self.held.get(at).filter(|held| held.due <= now) {
            if held.leaves_at() > now {
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

    /// When the next is to go.
    pub(super) fn wake_at(&self) -> Option<Time> {
        self.held.iter().map(Held::leaves_at).min()
    }
}
