//! Packets to send.

use std::net::IpAddr;

use super::batch::{Batch, append, packet_len, path};
use super::frame::Frame;
use super::neighbours::Neighbours;
use super::queue::Queue;
use super::socket::{Link, Way};
use super::trouble::Trouble;
use super::{LONGEST, Part, To};
use crate::faults::Faults;
use crate::transport::Time;
use crate::wire::{IcrcSeed, UDP_PORT};

/// Packets to send, gathered so that one system call takes many.
pub(crate) struct Outbox {
    batch: Batch,
    queue: Queue,
    neighbours: Neighbours,
    frame: Frame,
    trouble: Option<Trouble>,
    is_blocked: bool,
}

impl Outbox {
    /// Empty, and with that trouble on the way.
    pub(crate) fn new(faults: Faults) -> Outbox {
        Outbox {
            batch: Batch::new(),
            queue: Queue::default(),
            neighbours: Neighbours::default(),
            frame: Frame::new(),
            trouble: Trouble::new(faults),
            is_blocked: false,
        }
    }

    /// Finds the way to a peer before there is anything for it.
    pub(crate) fn meet(&mut self, socket: &impl Link, peer: IpAddr, now: Time) {
        self.neighbours.has(socket, peer, now);
    }

    /// A way to a peer has ended, of that number: nothing of it stays.
    pub(crate) fn end(&mut self, number: usize, now: Time) {
        self.neighbours.end(number, now);
    }

    /// Packets meet with that trouble from now on; those that are held back go next.
    pub(crate) fn set_faults(&mut self, socket: &impl Link, faults: Faults, now: Time) {
        self.release(socket, Time(u64::MAX), now);
        self.trouble = Trouble::new(faults);
    }

    /// Queues what was held back until then.
    fn release(&mut self, socket: &impl Link, until: Time, now: Time) {
        let Outbox { trouble: Some(trouble), neighbours, queue, .. } = self else { return };
        trouble.release(until, |to, packet| {
            if neighbours.has(socket, to.address, now) {
                neighbours.keep_packet(to, &packet, now);
            } else {
                let segment = packet.len();
                queue.push(to, packet, segment);
            }
        });
    }

    /// Adds a packet: its headers, at most 52 bytes, payload, padding and its invariant CRC. May send those of before.
    ///
    /// The payload is copied: memory that others write to, as they may when a peer reads it, has to be sent as the CRC has it. It
    /// costs little, as the CRC and the kernel then find it in the cache.
    ///
    /// # Safety
    /// Each part of the payload may be read.
    pub(crate) unsafe fn push(&mut self, socket: &impl Link, to: To, headers: &[u8], payload: &[Part], now: Time) {
        if let Some(trouble) = &mut self.trouble {
            let way = path(socket.address(), UDP_PORT, to.address);
            if let Some(path) = way.filter(|_| packet_len(headers, payload) <= LONGEST) {
                let mut packet = Vec::new();
                // SAFETY: the caller's promise.
                unsafe { append(&mut packet, &IcrcSeed::new(&path), 0, headers, payload) };
                trouble.push(to, packet, now);
            }
            return;
        }
        let (way, segmented) = match self.neighbours.has(socket, to.address, now) {
            true => (Way::Near, true),
            false => (Way::Wire, socket.takes_segments() && !self.queue.lacks_segments),
        };
        // SAFETY: the caller's promise.
        let is_full = unsafe { !self.batch.push(socket, to, headers, payload, way, segmented) };
        if is_full {
            self.flush(socket, now);
            // SAFETY: the caller's promise.
            unsafe { self.batch.push(socket, to, headers, payload, way, segmented) };
        }
    }

    /// Whether [`flush`](Outbox::flush) would do nothing.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.batch.is_empty() && self.queue.is_empty() && self.neighbours.keeps_nothing() && self.trouble.is_none()
    }

    /// Sends all. What the socket does not take is copied, and sent by the next call; errors of a destination lose its packets, as
    /// networks do.
    pub(crate) fn flush(&mut self, socket: &impl Link, now: Time) {
        self.release(socket, now, now);
        self.neighbours.retry(now);
        let was_blocked = !self.queue.send(&mut self.frame, socket);
        if !self.batch.is_empty() {
            let Outbox { batch, queue, neighbours, frame, .. } = self;
            batch.send(frame, socket, queue, neighbours, now);
            // What was refused may be of no use, and what is behind it not.
            if !was_blocked {
                self.queue.send(&mut self.frame, socket);
            }
        }
        self.is_blocked = !self.queue.is_empty();
    }

    /// Wakes the peers on this host to which packets were sent since the last call, even if they have not asked for it.
    pub(crate) fn kick(&mut self) {
        self.neighbours.kick();
    }

    /// Whether packets for there wait, for what is on the way to take more: who makes more for there waits until it does.
    pub(crate) fn is_blocked_for(&self, to: &IpAddr) -> bool {
        self.neighbours.is_stuck(to) || (self.is_blocked && !self.neighbours.is_met(to))
    }

    /// How many peers are near.
    #[cfg(test)]
    pub(super) fn neighbours(&self) -> usize {
        self.neighbours.count()
    }

    /// Whether the UDP socket did not take all packets: it says when it takes more.
    pub(crate) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// When [`flush`](Outbox::flush) is to be called again for packets that are held back, or were not taken.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        let trouble = self.trouble.as_ref().and_then(Trouble::wake_at);
        trouble.into_iter().chain(self.neighbours.wake_at()).min()
    }
}
