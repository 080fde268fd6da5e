//! One end of a handshake.

use std::time::Duration;

use super::attempt::{Cause, ConnectError, Step};
use super::{Address, CmError, ConnectParameters, EventKind, Id, Parameters, PeerParameters, PrivateData};
use crate::{
    Endpoint, EndpointBuilder, EndpointMut, Error, QueuePair, QueuePairAddress, QueuePairAttributes, QueuePairState,
    Result,
};

/// How long a peer waits before it sends again what has found no receive here: code 12 of ibv_modify_qp(3), 0.64 ms. The kernel
/// would have 655 ms.
const MIN_RNR_TIMER: u8 = 12;

/// How long the peer has to confirm that it knows it was accepted.
const CONFIRMATION: Duration = Duration::from_secs(10);

/// How long the peer has to answer that the connection has ended.
const FAREWELL: Duration = Duration::from_secs(5);

/// One end of a handshake, and of the connection that comes of it: an id with a channel of its own.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) id: Id,
    /// As asked for.
    peer: Option<Address>,
    ended: bool,
}

impl Side {
    pub(super) fn new(id: Id, peer: Option<Address>) -> Self {
        Side { id, peer, ended: false }
    }

    /// What comes next.
    pub(super) fn event(&mut self, step: Step, timeout: Duration) -> Result<EventKind> {
        match self.id.channel().wait(timeout)? {
            Some(event) => Ok(event.kind),
            None => Err(self.error(step, Cause::Timeout(timeout))),
        }
    }

    pub(super) fn error(&self, step: Step, cause: Cause) -> Error {
        // Of an id that was only bound, it is zero.
        let is_set = |address: &Address| address.ip().is_none_or(|address| !address.ip().is_unspecified());
        let peer = self.id.peer_address().filter(is_set).or(self.peer);
        let local = self.id.local_address();
        CmError::Connect(Box::new(ConnectError { step, cause, local, peer })).into()
    }

    /// Of a call that the step begins or goes on with, by an id with a channel of its own. What has become of the peer meanwhile
    /// says more than its `errno`.
    pub(super) fn call_failed(&self, step: Step, error: Error) -> Error {
        let Error::Cm(CmError::Call { errno, .. }) = error else { return error };
        match self.id.channel().try_event() {
            Ok(Some(event)) if ends(&event.kind) => self.error(step, Cause::of(&event.kind)),
            _ => self.error(step, Cause::of_errno(errno)),
        }
    }

    /// What brings a queue pair to `state`, which is a part of the step: of a peer that is gone there is nothing to be had.
    pub(super) fn attributes(&self, step: Step, state: QueuePairState) -> Result<QueuePairAttributes> {
        self.id.attributes(state).map_err(|error| self.call_failed(step, error))
    }

    /// The port that was found.
    pub(super) fn port(&self) -> u8 {
        self.id.port().unwrap_or(1)
    }

    /// The endpoint, in INIT on the port that was found.
    pub(super) fn endpoint(&self, step: Step, builder: EndpointBuilder<'_>) -> Result<Endpoint> {
        let (builder, _) = self.placed(step, builder)?;
        builder.build()
    }

    /// A builder for the port that was found, and the queue key of those who are found there, which datagrams have.
    pub(super) fn placed<'a>(
        &self,
        step: Step,
        builder: EndpointBuilder<'a>,
    ) -> Result<(EndpointBuilder<'a>, Option<u32>)> {
        let found = self.attributes(step, QueuePairState::INIT)?;
        let port = found.port().unwrap_or_else(|| self.port());
        Ok((builder.port(port).pkey_index(found.pkey_index().unwrap_or(0)), found.qkey()))
    }

    /// What is said of the endpoint, with as many reads and atomics each way as its device has, and not more than `most`.
    pub(super) fn parameters(
        &self,
        endpoint: &impl End,
        most: Option<&PeerParameters>,
        private_data: &[u8],
    ) -> Result<ConnectParameters> {
        let own = endpoint.address().rd_atomic;
        let (served, asked) = most.map_or((own, own), |most| (most.responder_resources, most.initiator_depth));
        ConnectParameters::new(endpoint.queue_pair().number())
            .responder_resources(served.min(own))
            .initiator_depth(asked.min(own))
            .srq(endpoint.queue_pair().shared_receive_queue().is_some())
            .private_data(private_data)
    }

    /// Brings the endpoint to RTR or RTS, with no more reads and atomics at a time than its device has.
    fn bring(&self, step: Step, endpoint: &mut impl End, state: QueuePairState) -> Result<()> {
        let most = endpoint.address().rd_atomic;
        let mut attributes = self.attributes(step, state)?;
        if let Some(served) = attributes.max_dest_rd_atomic() {
            attributes = attributes.set_max_dest_rd_atomic(served.min(most)).set_min_rnr_timer(MIN_RNR_TIMER);
        }
        if let Some(asked) = attributes.max_rd_atomic() {
            attributes = attributes.set_max_rd_atomic(asked.min(most));
        }
        endpoint.advance(&attributes)
    }

    /// Asks for the connection; what the peer has to say with its answer.
    pub(super) fn connect(
        &mut self,
        endpoint: &mut impl End,
        timeout: Duration,
        private_data: &[u8],
    ) -> Result<PrivateData> {
        let parameters = self.parameters(endpoint, None, private_data)?;
        self.id.connect(&parameters).map_err(|error| self.call_failed(Step::Connect, error))?;
        let answer = match self.event(Step::Connect, timeout)? {
            EventKind::ConnectResponse(Parameters::Connected(answer)) => answer,
            other => return Err(self.error(Step::Connect, Cause::of(&other))),
        };
        for state in [QueuePairState::RTR, QueuePairState::RTS] {
            self.bring(Step::Connect, endpoint, state)?;
        }
        self.id.establish().map_err(|error| self.call_failed(Step::Connect, error))?;
        Ok(answer.private_data)
    }

    /// Accepts the connection, and waits until the peer knows; what it has said when it asked.
    pub(super) fn accept(
        &mut self,
        endpoint: &mut impl End,
        asked: &PeerParameters,
        private_data: &[u8],
    ) -> Result<PrivateData> {
        for state in [QueuePairState::RTR, QueuePairState::RTS] {
            self.bring(Step::Accept, endpoint, state)?;
        }
        let parameters = self.parameters(endpoint, Some(asked), private_data)?;
        self.id.accept(&parameters).map_err(|error| self.call_failed(Step::Accept, error))?;
        match self.event(Step::Accept, CONFIRMATION)? {
            EventKind::Established(_) => Ok(asked.private_data),
            other => Err(self.error(Step::Accept, Cause::of(&other))),
        }
    }

    /// Whether it is known that the connection has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether neither end has ended the connection. If the peer has, `flush` is called, and the peer answered.
    pub(super) fn is_connected(&mut self, mut flush: impl FnMut() -> Result<()>) -> Result<bool> {
        while let Some(event) = self.id.channel().try_event()? {
            if ends(&event.kind) && !std::mem::replace(&mut self.ended, true) {
                let flushed = flush();
                // There is nobody to tell it to, if it fails.
                let _ = self.id.disconnect();
                flushed?;
            }
        }
        Ok(!self.ended)
    }

    /// Ends the connection, unless it has ended: calls `flush`, tells the peer, and waits until it knows.
    pub(super) fn part(&mut self, mut flush: impl FnMut() -> Result<()>) -> Result<()> {
        if !self.is_connected(&mut flush)? {
            return Ok(());
        }
        flush()?;
        self.id.disconnect().map_err(|error| self.call_failed(Step::Disconnect, error))?;
        let end = self.event(Step::Disconnect, FAREWELL)?;
        match ends(&end) && !matches!(end, EventKind::DeviceRemoval) {
            true => Ok(()),
            false => Err(self.error(Step::Disconnect, Cause::of(&end))),
        }
    }
}

/// An endpoint that is brought to connection, by itself or in a set.
pub(super) trait End {
    fn address(&self) -> QueuePairAddress;
    fn queue_pair(&self) -> &QueuePair;
    fn advance(&mut self, attributes: &QueuePairAttributes) -> Result<()>;

    /// Its work comes back.
    fn flush(&mut self) -> Result<()> {
        self.advance(&QueuePairAttributes::new().set_state(QueuePairState::ERR))
    }
}

macro_rules! end {
    ($($name:ty),+) => {
        $(impl End for $name {
            fn address(&self) -> QueuePairAddress {
                self.address()
            }

            fn queue_pair(&self) -> &QueuePair {
                self.queue_pair()
            }

            fn advance(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
                self.advance(attributes)
            }
        })+
    };
}

end!(Endpoint, EndpointMut<'_>);

/// Whether there is no connection any more. A peer that dies before it was told that this end knows of its answer takes that back.
fn ends(event: &EventKind) -> bool {
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
