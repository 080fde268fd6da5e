//! What an idle connection gives back: buffers for packets, and credit for receives that the peer shares with others.

use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use rdma_async::Deadline;

use super::Engine;
use crate::wire::{Class, HEADER, WAIVER};

/// A connection that has sent nothing for this time is idle.
const TIME: Duration = Duration::from_millis(100);

/// Looks now and then whether the connection has become idle, as long as it has something to give back.
pub(super) struct Idle {
    deadline: Deadline,
    waker: Waker,
    /// If a look is due: the number of packets that were sent when that was decided.
    sent_before: Option<u64>,
    /// When to look.
    until: Instant,
}

impl Idle {
    pub(super) fn new(deadline: Deadline, waker: Waker) -> Self {
        Idle { deadline, waker, sent_before: None, until: Instant::now() }
    }
}

impl Engine {
    /// Looks later whether the connection is idle, if it then has something to give back.
    pub(super) fn look_later(&mut self) {
        let has_something = self.outgoing.has_surplus() || self.flow.waivable().is_some();
        if self.idle.sent_before.is_some() || !has_something {
            return;
        }
        let Idle { deadline, waker, .. } = &mut self.idle;
        let until = Instant::now() + TIME;
        if deadline.poll(until, &mut Context::from_waker(waker)).is_pending() {
            self.idle.until = until;
            self.idle.sent_before = Some(self.counts.statistics.packets_sent);
        }
    }

    /// Gives back what an idle connection does not need.
    pub(super) fn look_for_idleness(&mut self) {
        if Instant::now() < self.idle.until {
            return;
        }
        let Some(before) = self.idle.sent_before.take() else { return };
        if before != self.counts.statistics.packets_sent || self.ended.is_some() || self.outgoing.has_frames() {
            return;
        }
        self.waive();
        self.freed.buffers.extend(self.outgoing.take_surplus());
    }

    /// Tells the peer which receives it can use for other connections.
    fn waive(&mut self) {
        let Some(count) = self.flow.waivable() else { return };
        let Some(mut buffer) = self.outgoing.take_unused() else { return };
        if buffer.set_len(HEADER + WAIVER).is_err() {
            return self.outgoing.take_back(Class::Waiver, buffer);
        }
        buffer[HEADER..].copy_from_slice(&count.to_be_bytes());
        let counts = self.flow.waive(count);
        self.post(buffer, HEADER + WAIVER, Class::Waiver, counts, 0);
    }

    /// The peer has used up its credit: gives it more, if there are free receives.
    pub(super) fn grow(&mut self) {
        let mut receives = self.flow.growth();
        while receives != 0 {
            if self.connection.reserve_receives(receives) {
                return self.flow.grow(receives);
            }
            receives /= 2;
        }
    }
}
