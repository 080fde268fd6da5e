//! The transport protocols of connections, without sockets, clocks or memory.
//!
//! A [`Requester`] turns work into request packets, and responses into completions. It keeps the ACK timeout, retries and
//! retransmits. A [`Responder`] executes requests and sends responses, ACKs and NAKs. [`UnreliableRequester`] and
//! [`UnreliableResponder`] do the same without ACKs. The caller passes in packets and the time, and asks for packets to send
//! and for the next timer. The transport accesses memory, receives and completions through a [`Host`]. It follows chapter 9 of
//! the InfiniBand Architecture Specification.

mod host;
mod requester;
mod responder;
mod time;
mod unreliable;
mod work;

pub use host::{Access, Completion, Host, Place, ReceiveId, Status};
pub use requester::{Requester, RequesterSettings};
pub use responder::{Responder, ResponderSettings};
pub use time::Time;
pub use unreliable::{UnreliableRequester, UnreliableResponder};
pub use work::{Request, Work};

use crate::wire::{Operation, Psn};

/// A packet to send, without its payload data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outgoing {
    /// Operation with its extended headers.
    pub operation: Operation,
    /// Packet sequence number.
    pub psn: Psn,
    /// AckReq bit: requests an ACK.
    pub ack_request: bool,
    /// Solicited event bit.
    pub solicited: bool,
    /// Location of the payload data.
    pub payload: Payload,
}

/// Location of a packet's payload data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload {
    /// No payload.
    None,
    /// Data of the send queue's work.
    Work {
        /// Identifier from [`Work`].
        id: u64,
        /// Offset in the work's data, in bytes.
        offset: u32,
        /// Length in bytes.
        len: u32,
    },
    /// Memory that a peer reads.
    Remote {
        /// Start of the data.
        place: Place,
        /// Length in bytes.
        len: u32,
    },
}

/// Number of packets of a message with `len` bytes. At least 1.
#[must_use]
pub const fn packets(len: u32, mtu: u32) -> u32 {
    if len == 0 { 1 } else { len.div_ceil(mtu) }
}
