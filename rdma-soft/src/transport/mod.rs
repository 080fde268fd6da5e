//! What a queue pair does with packets and time, without sockets, clocks or memory of its own.
//!
//! A [`Requester`] turns work into requests, and what comes back into completions; a [`Responder`] carries requests out and answers
//! them. [`UnreliableRequester`] and [`UnreliableResponder`] are the ends of connections without answers. Both are given packets
//! and the time, are asked for packets to send and for when to look again, and reach memory, receives and completions by the
//! [`Host`] that they are in. The rules are those of chapter 9 of the InfiniBand Architecture Specification.

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

/// A packet to send, but for its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outgoing {
    /// What it does.
    pub operation: Operation,
    /// Its number.
    pub psn: Psn,
    /// Whether an acknowledgement is asked for.
    pub ack_request: bool,
    /// Whether to wake who waits for solicited events.
    pub solicited: bool,
    /// Where its payload is.
    pub payload: Payload,
}

/// Where a payload is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload {
    /// There is none.
    None,
    /// Part of the data of a piece of work.
    Work {
        /// The work, as it was given.
        id: u64,
        /// Where in its data.
        offset: u32,
        /// Bytes.
        len: u32,
    },
    /// Memory that a peer reads.
    Remote {
        /// Where it begins.
        place: Place,
        /// Bytes.
        len: u32,
    },
}

/// How many packets a message of so many bytes takes: one at least.
#[must_use]
pub const fn packets(len: u32, mtu: u32) -> u32 {
    if len == 0 { 1 } else { len.div_ceil(mtu) }
}
