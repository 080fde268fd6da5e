//! One side of a handshake.

use super::attempt::{Cause, ConnectError, Step};
use super::{Address, CmError, ConnectParameters, EventKind, Id, Parameters, PeerParameters, PrivateData};
use crate::endpoint::EndpointMut;
use crate::qp::QueuePairAttributes;
use crate::{Endpoint, EndpointBuilder, Error, QueuePair, QueuePairAddress, QueuePairState, Result};

/// RNR NAK timer of connections: code 12 of ibv_modify_qp(3), 0.64 ms. The kernel's default is 655 ms.
const MIN_RNR_TIMER: u8 = 12;

/// One side of a handshake and of the resulting connection: an id with a separate channel.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) id: Id,
    /// The requested address.
    peer: Option<Address>,
    ended: bool,
}

impl Side {
    pub(super) fn new(id: Id, peer: Option<Address>) -> Self {
        Side { id, peer, ended: false }
    }

    /// The address of the peer: the one that the id has, or else the requested one.
    pub(super) fn peer_address(&self) -> Option<Address> {
        // The peer address of an id that is only bound is zero.
        let is_set = |address: &Address| address.ip().is_none_or(|address| !address.ip().is_unspecified());
        self.id.peer_address().filter(is_set).or(self.peer)
    }

    pub(super) fn error(&self, step: Step, cause: Cause) -> Error {
        let (local, peer) = (self.id.local_address(), self.peer_address());
        CmError::Connect(Box::new(ConnectError { step, cause, local, peer })).into()
    }

    /// Converts the error of a call in this step. The id must have a separate channel.
    ///
    /// If the peer has ended the handshake in the meantime, its event explains more than the `errno`.
    pub(super) fn call_failed(&self, step: Step, error: Error) -> Error {
        let Error::Cm(CmError::Call { errno, .. }) = error else { return error };
        match self.id.channel().try_event() {
            Ok(Some(event)) if is_disconnect(&event.kind) => self.error(step, Cause::of(&event.kind)),
            _ => self.error(step, Cause::from_errno(errno)),
        }
    }

    /// Attributes that bring a queue pair to `state`. This fails if the peer is gone.
    pub(super) fn attributes(&self, step: Step, state: QueuePairState) -> Result<QueuePairAttributes> {
        self.id.attributes(state).map_err(|error| self.call_failed(step, error))
    }

    /// The port of the device that was found.
    pub(super) fn port(&self) -> u8 {
        self.id.port().unwrap_or(1)
    }

    /// Builds the endpoint in INIT on the port that was found.
    pub(super) fn endpoint(&self, step: Step, builder: EndpointBuilder<'_>) -> Result<Endpoint> {
        let (builder, _) = self.configure(step, builder)?;
        builder.build()
    }

    /// Sets the builder's port and partition key, and the default keepalive. For datagrams, also returns the queue key.
    pub(super) fn configure<'a>(
        &self,
        step: Step,
        builder: EndpointBuilder<'a>,
    ) -> Result<(EndpointBuilder<'a>, Option<u32>)> {
        let found = self.attributes(step, QueuePairState::INIT)?;
        let port = found.port().unwrap_or_else(|| self.port());
        Ok((builder.port(port).pkey_index(found.pkey_index().unwrap_or(0)).by_address(), found.qkey()))
    }

    /// Connection parameters of the endpoint, with as many reads and atomics as its device and `limits` allow.
    pub(super) fn parameters(
        &self,
        endpoint: &impl ConnectionEnd,
        limits: Option<&PeerParameters>,
        private_data: &[u8],
    ) -> Result<ConnectParameters> {
        let own = endpoint.address().rd_atomic;
        let (served, asked) = limits.map_or((own, own), |limits| (limits.responder_resources, limits.initiator_depth));
        ConnectParameters::new(endpoint.queue_pair().number())
            .responder_resources(served.min(own))
            .initiator_depth(asked.min(own))
            .srq(endpoint.queue_pair().shared_receive_queue().is_some())
            .private_data(private_data)
    }

    /// Brings the endpoint to RTR or RTS, with at most as many reads and atomics as its device supports.
    fn bring_to(&self, step: Step, endpoint: &mut impl ConnectionEnd, state: QueuePairState) -> Result<()> {
        let limits = endpoint.address().rd_atomic;
        let mut attributes = self.attributes(step, state)?;
        if let Some(served) = attributes.max_dest_rd_atomic() {
            attributes = attributes.set_max_dest_rd_atomic(served.min(limits)).set_min_rnr_timer(MIN_RNR_TIMER);
        }
        if let Some(asked) = attributes.max_rd_atomic() {
            attributes = attributes.set_max_rd_atomic(asked.min(limits));
        }
        endpoint.advance(&attributes)
    }

    /// Requests the connection.
    pub(super) fn connect(&mut self, endpoint: &impl ConnectionEnd, private_data: &[u8]) -> Result<()> {
        let parameters = self.parameters(endpoint, None, private_data)?;
        self.id.connect(&parameters).map_err(|error| self.call_failed(Step::Connect, error))
    }

    /// Accepts the connection.
    pub(super) fn accept(
        &mut self,
        endpoint: &mut impl ConnectionEnd,
        asked: &PeerParameters,
        private_data: &[u8],
    ) -> Result<()> {
        for state in [QueuePairState::RTR, QueuePairState::RTS] {
            self.bring_to(Step::Accept, endpoint, state)?;
        }
        // The peer's queue pair does not answer before its program has handled the reply.
        endpoint.pause_keepalive();
        let parameters = self.parameters(endpoint, Some(asked), private_data)?;
        self.id.accept(&parameters).map_err(|error| self.call_failed(Step::Accept, error))
    }

    /// Completes `step`, [`Step::Connect`] or [`Step::Accept`], with the event that follows it. Returns the private data of
    /// the peer, which is `asked` if the peer has connected.
    pub(super) fn establish(
        &mut self,
        endpoint: &mut impl ConnectionEnd,
        step: Step,
        asked: &PrivateData,
        event: &EventKind,
    ) -> Result<PrivateData> {
        match (step, event) {
            (Step::Connect, EventKind::ConnectResponse(Parameters::Connected(answer))) => {
                for state in [QueuePairState::RTR, QueuePairState::RTS] {
                    self.bring_to(step, endpoint, state)?;
                }
                self.id.establish().map_err(|error| self.call_failed(step, error))?;
                Ok(answer.private_data)
            }
            (Step::Accept, EventKind::Established(_)) => {
                endpoint.resume_keepalive();
                Ok(*asked)
            }
            (_, other) => Err(self.error(step, Cause::of(other))),
        }
    }

    /// Whether the end of the connection has been reported.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether the connection exists: neither end has ended it. If the peer has, calls `flush` and confirms the disconnect.
    pub(super) fn is_connected(&mut self, mut flush: impl FnMut(EndedBy) -> Result<()>) -> Result<bool> {
        while let Some(event) = self.id.channel().try_event()? {
            if is_disconnect(&event.kind) && !std::mem::replace(&mut self.ended, true) {
                let ended_by = match event.kind {
                    EventKind::DeviceRemoval => EndedBy::Device,
                    _ => EndedBy::Peer,
                };
                let flushed = flush(ended_by);
                // If this fails, the peer is gone.
                let _ = self.id.disconnect();
                flushed?;
            }
        }
        Ok(!self.ended)
    }

    /// Starts to end the connection. Returns whether the confirmation has to follow.
    ///
    /// Calls `flush` if the peer has ended the connection, or to end sends in flight (`has_sends`). Otherwise, the queue pair
    /// stays in RTS until the peer confirms, and acknowledges packets. In the error state it would not: a peer for which the
    /// network lost the disconnect or an ACK would report a failure.
    pub(super) fn disconnect(&mut self, has_sends: bool, mut flush: impl FnMut(EndedBy) -> Result<()>) -> Result<bool> {
        if !self.is_connected(&mut flush)? {
            return Ok(false);
        }
        if has_sends {
            flush(EndedBy::Program)?;
        }
        self.id.disconnect().map_err(|error| self.call_failed(Step::Disconnect, error))?;
        Ok(true)
    }

    /// Checks that an event confirms the end of the connection.
    pub(super) fn confirm_disconnect(&self, event: &EventKind) -> Result<()> {
        match is_disconnect(event) && !matches!(event, EventKind::DeviceRemoval) {
            true => Ok(()),
            false => Err(self.error(Step::Disconnect, Cause::of(event))),
        }
    }
}

/// The cause of the end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EndedBy {
    Program,
    Peer,
    /// The device was removed.
    Device,
}

/// An endpoint of a connection, on its own or in a set.
pub(super) trait ConnectionEnd {
    fn address(&self) -> QueuePairAddress;
    fn queue_pair(&self) -> &QueuePair;
    fn advance(&mut self, attributes: &QueuePairAttributes) -> Result<()>;

    fn pause_keepalive(&mut self);
    fn resume_keepalive(&mut self);
    fn note_peer_left(&mut self);

    /// Flushes all work.
    fn flush(&mut self, ended_by: EndedBy) -> Result<()> {
        if ended_by == EndedBy::Peer {
            self.note_peer_left();
        }
        self.advance(&QueuePairAttributes::new().set_state(QueuePairState::ERR))
    }
}

macro_rules! impl_connection_end {
    ($($name:ty),+) => {
        $(impl ConnectionEnd for $name {
            fn address(&self) -> QueuePairAddress {
                self.address()
            }

            fn queue_pair(&self) -> &QueuePair {
                self.queue_pair()
            }

            fn advance(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
                self.advance(attributes)
            }

            fn pause_keepalive(&mut self) {
                self.pause_keepalive();
            }

            fn resume_keepalive(&mut self) {
                self.resume_keepalive();
            }

            fn note_peer_left(&mut self) {
                self.note_peer_left();
            }
        })+
    };
}

impl_connection_end!(Endpoint, EndpointMut<'_>);

/// Whether the event means that the connection has ended.
///
/// A peer that dies before it receives the final message of the handshake (RTU) withdraws its reply.
fn is_disconnect(event: &EventKind) -> bool {
    matches!(
        event,
        EventKind::Disconnected
            | EventKind::TimewaitExit
            | EventKind::Rejected(..)
            | EventKind::ConnectError(_)
            | EventKind::Unreachable(_)
            | EventKind::DeviceRemoval
    )
}
