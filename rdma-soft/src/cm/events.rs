//! What a manager gives to its owner.

use super::{ConnectionId, ListenerId, Peer};
use crate::wire::cm::{IpHeader, MAD_LEN, Rej, RejectReason, Rep, Req, SidrRep, SidrReq};

/// A MAD to send to queue pair 1 of a peer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Transmit {
    /// Destination.
    pub to: Peer,
    /// The message.
    pub mad: Box<[u8; MAD_LEN]>,
}

/// Something that the program learns of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A request for a listener. Answer with [`Manager::accept`](super::Manager::accept) or
    /// [`Manager::reject`](super::Manager::reject).
    Request {
        /// Listener.
        listener: ListenerId,
        /// The new connection.
        id: ConnectionId,
        /// Addresses in the private data.
        header: IpHeader,
        /// The request.
        request: Box<Req>,
        /// Source of the request.
        peer: Peer,
    },
    /// A request that the program has not taken ([`Manager::take_request`](super::Manager::take_request)) need not be answered any
    /// more: it gave its place in the backlog to another one, or it has ended some time ago.
    Withdrawn {
        /// The connection of the request.
        id: ConnectionId,
    },
    /// The reply to a request. Continue with [`Manager::establish`](super::Manager::establish).
    Reply {
        /// Connection.
        id: ConnectionId,
        /// The reply.
        reply: Box<Rep>,
    },
    /// The peer has confirmed that the connection is established, or has sent data.
    Established {
        /// Connection.
        id: ConnectionId,
    },
    /// The connection has failed before it was established here. [`Event::TimewaitExit`] follows if a REP was sent or received.
    Failed {
        /// Connection.
        id: ConnectionId,
        /// Why.
        failure: Failure,
    },
    /// The peer has ended the connection, does not have it any more, or has confirmed its end. [`Event::TimewaitExit`] follows.
    ///
    /// The active side may get this event before it establishes the connection.
    Disconnected {
        /// Connection.
        id: ConnectionId,
        /// Whether a message of the peer has ended the connection. Otherwise the peer has not answered.
        is_confirmed: bool,
    },
    /// The connection has left timewait. Its id and queue pair number may be used again.
    TimewaitExit {
        /// Connection.
        id: ConnectionId,
    },
    /// A lookup of a datagram service.
    Lookup {
        /// Listener.
        listener: ListenerId,
        /// The lookup, for [`Manager::reply_lookup`](super::Manager::reply_lookup).
        id: ConnectionId,
        /// Addresses in the private data.
        header: IpHeader,
        /// The lookup.
        request: Box<SidrReq>,
        /// Source of the lookup.
        peer: Peer,
    },
    /// The reply to a lookup of the program.
    LookupReply {
        /// The lookup.
        id: ConnectionId,
        /// The reply.
        reply: Box<SidrRep>,
    },
    /// Nobody has answered a lookup of the program.
    LookupUnreachable {
        /// The lookup.
        id: ConnectionId,
    },
}

/// Why a connection has failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The peer did not answer.
    Unreachable,
    /// The peer has rejected the request or the reply.
    Rejected {
        /// Reason.
        reason: RejectReason,
        /// Private data of the rejection.
        private_data: Box<[u8; Rej::PRIVATE_DATA]>,
    },
}
