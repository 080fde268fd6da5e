//! The fields that posting and polling check before they take the fast path.

use super::Poster;
use crate::interface::Interface;
use crate::post::SendOps;
use crate::{Buffer, ProtectionDomain};

/// Preconditions of the fast paths, each checked by comparing one field.
///
/// A posting gate is open for buffers of one domain, or shut. If it is shut, the call takes the slow path, which finds
/// the reason and handles it.
#[derive(Clone, Copy)]
pub(super) struct Gates {
    /// For a signaled send or write: [`ProtectionDomain::id`], or [`NO_DOMAIN`].
    pub(super) send: usize,
    /// For a signaled read: the same values.
    pub(super) read: usize,
    /// For a receive: the same values.
    receive: usize,
    /// Open if nothing is left to hand out, nothing is staged, and completions have exactly the fields that all
    /// endpoints request.
    pub(super) poll: bool,
}

/// Operations that share the `send` gate.
const FAST_OPS: SendOps = SendOps::SEND.union(SendOps::RDMA_WRITE);

/// A value that matches no domain and no buffer.
const NO_DOMAIN: usize = 1;

impl Gates {
    pub(super) const SHUT: Gates = Gates { send: NO_DOMAIN, read: NO_DOMAIN, receive: NO_DOMAIN, poll: false };

    /// Whether the gate for sends is open for some buffer. Then nothing is staged or pending.
    #[inline(always)]
    pub(super) fn allow_sends(&self) -> bool {
        self.send != NO_DOMAIN
    }

    /// Whether `buffer` can be received into on the fast path. Its capacity then fits in 32 bits.
    #[inline(always)]
    pub(super) fn receive(&self, buffer: &Buffer) -> bool {
        buffer.gate() == self.receive
    }
}

impl Buffer {
    /// Maximum capacity of buffers that the fast path accepts.
    pub(crate) const SHORT: usize = 1 << 20;

    /// The value that gates are compared with: [`ProtectionDomain::id`], or 0 if the buffer exceeds [`Buffer::SHORT`].
    pub(crate) fn gate_of(pd: &ProtectionDomain, capacity: usize) -> usize {
        if capacity <= Self::SHORT { pd.id() } else { 0 }
    }
}

impl<I: Interface> Poster<I> {
    /// Ends a forgotten batch, posts pending sends that there is room for, and opens the gates.
    ///
    /// While sends are pending, later sends and polls take the slow path, which keeps the order of sends and calls this
    /// function.
    pub(super) fn open_gates(&mut self) {
        self.gates = Gates::SHUT;
        if !self.poisoned {
            self.abort_batch();
            if self.live.sends.pending() != 0 {
                self.post_pending();
            }
        }
        if self.poisoned {
            self.flush_pending();
            return;
        }
        let pending = self.live.sends.pending() != 0;
        // Datagrams need their headers and senders recorded, which only the slow path does.
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
            let open = |ops| if queue.operations().contains(ops) { self.pd.id() } else { NO_DOMAIN };
            (self.gates.send, self.gates.read) = (open(FAST_OPS), open(SendOps::RDMA_READ));
        }
    }
}
