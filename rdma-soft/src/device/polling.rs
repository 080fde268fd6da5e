//! Moving the device on in the thread of a program that polls.

use std::sync::atomic::{AtomicU32, Ordering};

use super::ack_delay::ACK_DELAY;
use super::core::{Core, Device, Look};

/// Packets that take a few microseconds, which is less than the time between the polls of a program that polls all the time.
/// Fewer do not count as a poll: programs that wait for memory send one packet and do not poll.
pub(super) const PACKETS: u32 = 4;

/// Polls in vain, about 10 µs of them, after which peers on this host are woken to answer.
const UNANSWERED_POLLS: u32 = 128;

/// After so many polls in vain the processor is offered to others.
const IDLE_POLLS: u32 = 32;

/// What is known of the program's polls.
#[derive(Debug, Default)]
pub(super) struct Polling {
    /// Polls, approximately. The server stays idle while the program polls all the time.
    count: AtomicU32,
    /// Polls in vain since the last packet, approximately.
    idle: AtomicU32,
}

impl Device {
    /// Moves the device on, unless somebody else does or is about to.
    pub(crate) fn poll(&self) {
        self.count_polls(1);
        // Those who poll give way to whoever waits.
        let core = if self.is_wanted.load(Ordering::Relaxed) { None } else { self.try_lock() };
        let has_come = core.is_some_and(|mut core| {
            let (now, before) = (self.now(), core.state.shared.packets);
            if !self.server.is_idle() {
                // An ACK waits only if the server need not be woken for it.
                let may_delay = self.server.wakes_before(now + ACK_DELAY);
                let any = core.receive(now, Look::Glance);
                core.send_now(now, may_delay);
                self.count_packets(&core, before);
                // The program may not poll again for the rest, and the server does not know of a timer that was set just now.
                self.leave(core);
                return any;
            }
            // A program that polls all the time polls or posts again. That sends the ACKs, together with posted work. If the
            // program stops, the server sends them, or the call that ends the queue pair or the program does.
            core.send_now(now, true);
            let any = core.receive(now, Look::Glance);
            self.count_packets(&core, before);
            any
        });
        if has_come {
            self.polling.idle.store(0, Ordering::Relaxed);
            return;
        }
        let idle = self.polling.idle.load(Ordering::Relaxed).wrapping_add(1);
        self.polling.idle.store(idle, Ordering::Relaxed);
        if idle == UNANSWERED_POLLS {
            self.kick();
        }
        // What it waits for may be done by somebody who waits for this processor.
        if idle % IDLE_POLLS == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
    }

    /// A lost count does not matter.
    fn count_polls(&self, polls: u32) {
        let count = &self.polling.count;
        count.store(count.load(Ordering::Relaxed).wrapping_add(polls), Ordering::Relaxed);
    }

    /// Counts a poll for each [`PACKETS`] that a program has sent and received since the count was `before`: it could not
    /// poll meanwhile.
    pub(crate) fn count_packets(&self, core: &Core, before: u32) {
        let polls = core.state.shared.packets.wrapping_sub(before) / PACKETS;
        if polls > 0 {
            self.count_polls(polls);
        }
    }

    /// Wakes the servers of peers on this host that have not answered. A server may be idle although its program has stopped
    /// polling and waits for memory to change.
    fn kick(&self) {
        if let Some(mut core) = self.try_lock() {
            core.links.iter_mut().for_each(|link| link.outbox.kick());
        }
    }

    pub(crate) fn polls(&self) -> u32 {
        self.polling.count.load(Ordering::Relaxed)
    }
}
