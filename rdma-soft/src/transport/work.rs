//! Work, and its packets.

use super::{Outgoing, Payload, packets};
use crate::wire::{Atomic, Operation, Psn, RemoteRange, Trailer};

/// A piece of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Work {
    /// By which the host knows it and its data.
    pub id: u64,
    /// What to do.
    pub request: Request,
    /// Bytes of data.
    pub len: u32,
    /// Not before the reads and atomic operations that come before it are done.
    pub is_fenced: bool,
    /// Wakes who waits for solicited events.
    pub is_solicited: bool,
}

/// What to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Send the data.
    Send(Trailer),
    /// Write the data to the peer's memory.
    Write {
        /// Where.
        address: u64,
        /// The key.
        rkey: u32,
        /// For a receive of the peer.
        imm: Option<u32>,
    },
    /// Read as much of the peer's memory as there is room for.
    Read {
        /// Where.
        address: u64,
        /// The key.
        rkey: u32,
    },
    /// Replace a word of the peer's memory where it is equal to another.
    CompareSwap(Atomic),
    /// Add to a word of the peer's memory.
    FetchAdd(Atomic),
}

impl Work {
    /// How many packets it takes.
    pub(super) fn packets(&self, mtu: u32) -> u32 {
        match self.request {
            Request::CompareSwap(_) | Request::FetchAdd(_) => 1,
            _ => packets(self.len, mtu),
        }
    }

    /// The packet of that index of so many.
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
                // What has come back is not asked for again.
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
