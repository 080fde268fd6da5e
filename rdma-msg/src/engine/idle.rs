//! What an idle connection gives back: buffers for packets, and credit for receives that the peer shares with others.

use std::time::Duration;

use super::Engine;
use super::timer::Timer;
use crate::wire::{Class, HEADER, WAIVER};

/// A connection that has sent nothing for this time is idle.
const IDLE_AFTER: Duration = Duration::from_millis(100);

/// Checks whether the connection has become idle, as long as it has something to give back.
pub(super) struct Idle {
    timer: Timer,
    /// Packets of the window that were sent when the timer was armed.
    sent_before: u32,
}

impl Idle {
    pub(super) fn new(timer: Timer) -> Self {
        Idle { timer, sent_before: 0 }
    }
}

impl Engine {
    /// Arms the timer if the connection has something to give back.
    pub(super) fn arm_idle_timer(&mut self) {
        let has_something = self.outgoing.may_have_surplus() || self.flow.waivable().is_some();
        if has_something && !self.idle.timer.is_armed() {
            self.idle.sent_before = self.flow.sent();
            self.idle.timer.arm(IDLE_AFTER);
        }
    }

    /// Gives back what an idle connection does not need.
    pub(super) fn check_idle(&mut self) {
        let has_fired = self.idle.timer.take_fired();
        if !has_fired || self.idle.sent_before != self.flow.sent() || self.outgoing.has_frames() {
            return;
        }
        self.waive();
        self.freed.buffers.extend(self.outgoing.take_surplus());
    }

    /// Waives the credit that this end does not need.
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

    /// Grows the window if receives are free. The peer has used up its credit.
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
