//! Work of a send queue and its packets.

use super::{Outgoing, Payload, packets};
use crate::wire::{Atomic, Operation, Psn, RemoteRange, Trailer};

/// A work request of the send queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Work {
    /// Identifier that the host has chosen for the work and its data.
    pub id: u64,
    /// Operation.
    pub request: Request,
    /// Length of the data in bytes.
    pub len: u32,
    /// Starts only after all previous reads and atomic operations are done.
    pub is_fenced: bool,
    /// Sets the solicited event bit.
    pub is_solicited: bool,
}

/// Operation of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Sends the data.
    Send(Trailer),
    /// Writes the data to the peer's memory.
    Write {
        /// Remote address.
        address: u64,
        /// Remote key.
        rkey: u32,
        /// Immediate data, which consumes a receive of the peer.
        imm: Option<u32>,
    },
    /// Reads `len` bytes of the peer's memory.
    Read {
        /// Remote address.
        address: u64,
        /// Remote key.
        rkey: u32,
    },
    /// Replaces a word of the peer's memory if it equals the compare value.
    CompareSwap(Atomic),
    /// Adds to a word of the peer's memory.
    FetchAdd(Atomic),
}

impl Work {
    /// Number of request or response packets.
    pub(super) fn packets(&self, mtu: u32) -> u32 {
        match self.request {
            Request::CompareSwap(_) | Request::FetchAdd(_) => 1,
            _ => packets(self.len, mtu),
        }
    }

    /// Builds packet `index` of `packets`.
    pub(super) fn packet(&self, index: u32, packets: u32, psn: Psn, mtu: u32) -> Outgoing {
        let offset = index.saturating_mul(mtu);
        let (is_first, is_last) = (index == 0, index + 1 >= packets);
        let part = Payload::Work { id: self.id, offset, len: (self.len - offset.min(self.len)).min(mtu) };
        let (operation, payload) = match self.request {
            Request::Send(trailer) => {
                let operation = match (is_first, is_last) {
                    (true, true) => Operation::SendOnly(trailer),
                    (true, false) => Operation::SendFirst,
                    (false, false) => Operation::SendMiddle,
                    (false, true) => Operation::SendLast(trailer),
                };
                (operation, part)
            }
            Request::Write { address, rkey, imm } => {
                let range = RemoteRange { address, rkey, len: self.len };
                let operation = match (is_first, is_last) {
                    (true, true) => Operation::WriteOnly(range, imm),
                    (true, false) => Operation::WriteFirst(range),
                    (false, false) => Operation::WriteMiddle,
                    (false, true) => Operation::WriteLast(imm),
                };
                (operation, part)
            }
            Request::Read { address, rkey } => {
                // A retransmitted read asks only for the missing rest.
                let address = address.wrapping_add(u64::from(offset));
                let range = RemoteRange { address, rkey, len: self.len - offset.min(self.len) };
                (Operation::ReadRequest(range), Payload::None)
            }
            Request::CompareSwap(atomic) => (Operation::CompareSwap(atomic), Payload::None),
            Request::FetchAdd(atomic) => (Operation::FetchAdd(atomic), Payload::None),
        };
        let payload = if matches!(payload, Payload::Work { len: 0, .. }) { Payload::None } else { payload };
        Outgoing { operation, psn, ack_request: is_last, solicited: is_last && self.is_solicited, payload }
    }
}
