//! The state of a connection.

use super::{ListenerId, Peer};
use crate::wire::cm::{MAD_LEN, Rep, Req};

/// State of a connection: figure 12-9 of the specification, without the states of MRA.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    /// The active side waits for a REP.
    ReqSent,
    /// The passive side waits for the program to accept or reject.
    ReqReceived,
    /// The passive side waits for an RTU.
    RepSent,
    /// The active side waits for the program to establish the connection.
    RepReceived,
    /// Both sides may use the connection.
    Established,
    /// This side has ended the connection, and waits for a DREP.
    DreqSent,
    /// The peer has ended the connection. The program has not confirmed that yet.
    DreqReceived,
    /// The connection has ended or failed. Duplicates are answered until the timer expires.
    Timewait(Ended),
}

/// How a connection has ended. This decides the answers to late messages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ended {
    /// It was never established here or at the peer. A late REQ or REP gets the REJ that has ended the connection, if there was
    /// one.
    Failed,
    /// It may have been established at the peer. A late REP or RTU gets a DREQ.
    Disconnected,
}

/// The properties of a connection that both sides have agreed on, as this side sees them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Negotiated {
    /// Queue pair number of this side, 0 if not known yet.
    pub local_qpn: u32,
    /// Queue pair number of the peer, 0 if not known yet.
    pub remote_qpn: u32,
    /// First packet sequence number that this side sends, which the peer has chosen.
    pub send_psn: u32,
    /// First packet sequence number that the peer sends, which this side has chosen.
    pub receive_psn: u32,
    /// Reads and atomics of the peer that this side serves at the same time.
    pub responder_resources: u8,
    /// Reads and atomics that this side has outstanding at the same time.
    pub initiator_depth: u8,
    /// Retries of the transport, 0 to 7.
    pub retry_count: u8,
    /// Retries after an RNR NAK, 0 to 7. 7 means unlimited.
    pub rnr_retry_count: u8,
    /// ACK timeout, as in `ibv_modify_qp(3)`.
    pub ack_timeout: u8,
    /// Path MTU, as in `enum ibv_mtu`.
    pub mtu: u8,
    /// Traffic class of the packets.
    pub traffic_class: u8,
}

impl Negotiated {
    /// View of the active side on its own request.
    pub(super) fn of_own_request(request: &Req) -> Self {
        Negotiated {
            local_qpn: request.qpn,
            receive_psn: request.psn,
            responder_resources: request.responder_resources,
            initiator_depth: request.initiator_depth,
            ..Negotiated::of_path(request)
        }
    }

    /// The passive side's view of a peer's request.
    pub(super) fn of_request(request: &Req) -> Self {
        Negotiated {
            remote_qpn: request.qpn,
            send_psn: request.psn,
            responder_resources: request.initiator_depth,
            initiator_depth: request.responder_resources,
            ..Negotiated::of_path(request)
        }
    }

    fn of_path(request: &Req) -> Self {
        Negotiated {
            retry_count: request.retry_count,
            rnr_retry_count: request.rnr_retry_count,
            ack_timeout: request.path.ack_timeout,
            mtu: request.mtu,
            traffic_class: request.path.traffic_class,
            ..Negotiated::default()
        }
    }

    /// Adds what the passive side has replied.
    pub(super) fn add_reply(&mut self, reply: &Rep) {
        self.remote_qpn = reply.qpn;
        self.send_psn = reply.psn;
        self.responder_resources = reply.initiator_depth;
        self.initiator_depth = reply.responder_resources;
        self.rnr_retry_count = reply.rnr_retry_count;
    }

    /// Adds what this side replies to a request.
    pub(super) fn add_own_reply(&mut self, reply: &Rep) {
        self.local_qpn = reply.qpn;
        self.receive_psn = reply.psn;
        self.responder_resources = reply.responder_resources;
        self.initiator_depth = reply.initiator_depth;
    }
}

/// A connection.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Connection {
    pub(super) phase: Phase,
    pub(super) peer: Peer,
    /// Local id of the peer, once it is known.
    pub(super) remote_id: Option<u32>,
    /// GUID of the peer, 0 if not known yet.
    pub(super) guid: u64,
    /// Transaction of the handshake.
    pub(super) transaction: u64,
    pub(super) negotiated: Negotiated,
    /// Whether the program has released the connection and gets no more events of it.
    pub(super) is_released: bool,
    /// Whether the program was told that the connection has failed or ended.
    pub(super) is_end_reported: bool,
    /// Listener whose backlog has the request, until the program has taken it.
    pub(super) backlog_of: Option<ListenerId>,
    /// Retransmissions of `message` so far.
    pub(super) retries: u8,
    /// Further retransmissions that the peer has asked for with an MRA.
    pub(super) extra_retries: u8,
    /// The message that is retransmitted, or that answers duplicates in timewait.
    pub(super) message: Option<Box<[u8; MAD_LEN]>>,
}

impl Connection {
    pub(super) fn new(phase: Phase, peer: Peer, transaction: u64, negotiated: Negotiated) -> Self {
        Connection {
            phase,
            peer,
            remote_id: None,
            guid: 0,
            transaction,
            negotiated,
            is_released: false,
            is_end_reported: false,
            backlog_of: None,
            retries: 0,
            extra_retries: 0,
            message: None,
        }
    }

    /// Moves to a state. `message` is the one to retransmit or to answer duplicates with.
    pub(super) fn enter(&mut self, phase: Phase, message: Option<Box<[u8; MAD_LEN]>>) {
        (self.phase, self.message, self.retries, self.extra_retries) = (phase, message, 0, 0);
    }

    pub(super) fn is_in_timewait(&self) -> bool {
        matches!(self.phase, Phase::Timewait(_))
    }
}
