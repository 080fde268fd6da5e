//! What posting and polling look at, each one field.

use super::Poster;
use crate::interface::Interface;
use crate::post::SendOps;
use crate::{Buffer, ProtectionDomain};

/// Each way in is open for buffers of one domain, or for none: then the call goes the long way, which finds out why and does
/// what has to be done.
#[derive(Clone, Copy)]
pub(super) struct Gates {
    /// For a send or a write with a completion of its own: [`ProtectionDomain::id`], or [`NOBODY`].
    pub(super) send: usize,
    /// For a read, likewise.
    pub(super) read: usize,
    /// For a receive.
    receive: usize,
    /// Nothing is left to hand out, nothing is staged, and completions have the fields that all endpoints ask for and no more.
    pub(super) poll: bool,
}

/// What is sent and written at once.
const AT_ONCE: SendOps = SendOps::SEND.union(SendOps::RDMA_WRITE);

/// What no domain has, and no buffer.
const NOBODY: usize = 1;

impl Gates {
    pub(super) const SHUT: Gates = Gates { send: NOBODY, read: NOBODY, receive: NOBODY, poll: false };

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

impl<I: Interface> Poster<I> {
    /// Ends a forgotten batch, posts the pending sends that there is room for, and opens the gates that may be open.
    ///
    /// While sends are pending, later sends and polls take the slow path, which keeps the order of sends and calls this.
    pub(super) fn open_gates(&mut self) {
        self.gates = Gates::SHUT;
        if !self.poisoned {
            self.abandon();
            if self.live.sends.pending() != 0 {
                self.post_pending();
            }
        }
        if self.poisoned {
            self.flush_pending();
            return;
        }
        let pending = self.live.sends.pending() != 0;
        // What is to be noted of datagrams takes the long way.
        let datagrams = self.live.datagrams.is_some();
        self.gates.poll = !datagrams && !pending && !self.has_completed() && !self.settings.timestamps;
        if (self.settings.max_message as usize) < Buffer::SHORT {
            return;
        }
        if !datagrams && self.live.qp.recv_state().is_ready() {
            self.gates.receive = self.pd.id();
        }
        let queue = self.live.qp.send_state();
        if queue.is_ready() && !pending {
            let open = |ops| if queue.operations().contains(ops) { self.pd.id() } else { NOBODY };
            (self.gates.send, self.gates.read) = (open(AT_ONCE), open(SendOps::RDMA_READ));
        }
    }
}
