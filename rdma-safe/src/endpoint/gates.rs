//! What posting and polling look at, each one field.

use super::Endpoint;
use crate::interface::Interface;
use crate::post::SendOps;
use crate::{Buffer, ProtectionDomain};

/// Each way in is open for buffers of one domain, or for none: then the call goes the long way, which finds out why and does
/// what has to be done.
#[derive(Clone, Copy)]
pub(super) struct Gates {
    /// For a send, a write or a read with a completion of its own: [`ProtectionDomain::id`], or [`NOBODY`].
    send: usize,
    /// For a receive.
    receive: usize,
    /// Nothing is left to hand out, nothing is staged, and completions have the fields that all endpoints ask for and no more.
    pub(super) poll: bool,
}

/// What no domain has, and no buffer.
const NOBODY: usize = 1;

impl Gates {
    pub(super) const SHUT: Gates = Gates { send: NOBODY, receive: NOBODY, poll: false };

    /// Whether `buffer` can be sent at once. Its length has 32 bits then.
    #[inline(always)]
    pub(super) fn send(&self, buffer: &Buffer) -> bool {
        buffer.gate() == self.send
    }

    /// Whether `buffer` can be received into at once. Its capacity has 32 bits then.
    #[inline(always)]
    pub(super) fn receive(&self, buffer: &Buffer) -> bool {
        buffer.gate() == self.receive
    }
}

impl Buffer {
    /// Bytes of capacity at most, where posting looks at nothing but a gate and whether there is room.
    pub(crate) const SHORT: usize = 1 << 20;

    /// What it says to gates: the domain it is of, [`ProtectionDomain::id`]; 0 if it is longer than [`Buffer::SHORT`].
    pub(crate) fn gate_of(pd: &ProtectionDomain, capacity: usize) -> usize {
        if capacity <= Self::SHORT { pd.id() } else { 0 }
    }
}

impl<I: Interface> Endpoint<I> {
    /// Opens what may be open, after it has taken back what a batch that was forgotten has left.
    pub(super) fn open_gates(&mut self) {
        self.gates = Gates::SHUT;
        if self.poisoned {
            return;
        }
        self.abandon();
        let pending = self.live.sends.has_completed() || self.live.receives.has_completed();
        self.gates.poll = !pending && !self.settings.timestamps && self.cq.is_idle();
        if (self.settings.max_message as usize) < Buffer::SHORT {
            return;
        }
        if self.live.qp.recv_state().is_ready() {
            self.gates.receive = self.pd.id();
        }
        let queue = self.live.qp.send_state();
        if queue.is_ready() && queue.operations().contains(SendOps::BASIC) {
            self.gates.send = self.pd.id();
        }
    }
}
