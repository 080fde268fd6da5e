//! A connection.

use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::attempt::{Cause, ConnectError, Step};
use super::datagram::port_of;
use super::error::failed;
use super::{Address, CmError, ConnectParameters, EventKind, Id, Parameters, PeerParameters, PrivateData};
use crate::{
    Buffer, Completion, Endpoint, EndpointBuilder, EndpointMut, Error, QueuePair, QueuePairAddress,
    QueuePairAttributes, QueuePairState, Result, readiness,
};

/// How long a peer waits before it sends again what has found no receive here: code 12 of ibv_modify_qp(3), 0.64 ms. The kernel
/// would have 655 ms.
const MIN_RNR_TIMER: u8 = 12;

/// How often an endpoint without events is left to see whether the peer is still there.
const GLANCE: Duration = Duration::from_millis(10);

/// How long the peer has to confirm that it knows it was accepted.
const CONFIRMATION: Duration = Duration::from_secs(10);

/// How long the peer has to answer that the connection has ended.
const FAREWELL: Duration = Duration::from_secs(5);

/// One end of a handshake: an id with a channel of its own.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) id: Id,
    /// As asked for.
    peer: Option<Address>,
}

impl Side {
    pub(super) fn new(id: Id, peer: Option<Address>) -> Self {
        Side { id, peer }
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
        let port = found.port().unwrap_or(port_of(&self.id));
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

    /// Tells the peer that the connection has ended, and waits until it knows.
    pub(super) fn part(&mut self) -> Result<()> {
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
pub(super) fn ends(event: &EventKind) -> bool {
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

/// A connection by address: an [`Endpoint`], to which it dereferences, and what is known of its peer. Made by
/// [`Connector`](super::Connector) and [`Listener`](super::Listener).
///
/// Dropping it ends the connection: the peer is told, and its work in flight is flushed.
#[derive(Debug)]
pub struct Connection {
    // First, so that nothing arrives any more when the id goes.
    endpoint: Endpoint,
    side: Side,
    private_data: PrivateData,
    ended: bool,
}

impl Connection {
    pub(super) fn new(endpoint: Endpoint, side: Side, private_data: PrivateData) -> Self {
        Connection { endpoint, side, private_data, ended: false }
    }

    /// What the peer has said when it asked, or accepted; padded with zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The address of this end.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// The address of the peer.
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        self.side.id.peer_address()
    }

    /// The id behind it. Its channel is the connection's own: take its events by [`Connection::is_connected`], which is also what
    /// to call when the channel's descriptor becomes readable.
    #[must_use]
    pub fn id(&self) -> &Id {
        &self.side.id
    }

    /// Whether neither end has ended the connection. If the peer has, that is answered, and work in flight comes back flushed: a
    /// process that is gone has ended its connections, while a host that is gone is noticed by work that fails.
    ///
    /// # Errors
    /// [`CmError::Call`].
    pub fn is_connected(&mut self) -> Result<bool> {
        while let Some(event) = self.side.id.channel().try_event()? {
            if ends(&event.kind) {
                self.end()?;
            }
        }
        Ok(!self.ended)
    }

    /// Waits for a piece of work to be done, at most for `timeout`, and for the peer to end the connection meanwhile: then work in
    /// flight comes back flushed, and once there is none, the error says so. Sleeps or spins as [`Endpoint::wait`] does, which
    /// notices nothing of the peer.
    ///
    /// # Errors
    /// [`CmError::Connect`] with [`Cause::Disconnected`] when the connection has ended and no work is left; otherwise those of
    /// [`Endpoint::wait`], and [`CmError::Call`].
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion> {
        let start = Instant::now();
        loop {
            if let Some(done) = self.endpoint.poll()? {
                return Ok(done);
            }
            // Whatever had completed before the connection ended is in the queue when that is seen.
            if !self.is_connected()? && self.endpoint.sends_in_flight() + self.endpoint.receives_in_flight() == 0 {
                return match self.endpoint.poll()? {
                    Some(done) => Ok(done),
                    None => Err(self.side.error(Step::Transfer, Cause::Disconnected)),
                };
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(Error::Timeout { waited: timeout });
            }
            if self.endpoint.channel().is_none() {
                match self.endpoint.wait(left.min(GLANCE)) {
                    Err(Error::Timeout { .. }) => {}
                    done => return done,
                }
            } else if self.endpoint.arm()? {
                self.sleep(left)?;
            }
        }
    }

    /// Until there is a completion, or the peer has something to say that is not known yet.
    fn sleep(&self, timeout: Duration) -> Result<()> {
        let Some(work) = self.endpoint.channel() else { return Ok(()) };
        let slept = match self.ended {
            true => readiness::poll([work.as_fd()], timeout).map(drop),
            false => readiness::poll([work.as_fd(), self.side.id.channel().as_fd()], timeout).map(drop),
        };
        slept.map_err(|errno| failed("poll(2)", errno))
    }

    /// Answers that the peer has ended it.
    fn end(&mut self) -> Result<()> {
        if !std::mem::replace(&mut self.ended, true) {
            let flushed = self.endpoint.advance(&QueuePairAttributes::new().set_state(QueuePairState::ERR));
            // There is nobody to tell it to, if it fails.
            let _ = self.side.id.disconnect();
            return flushed;
        }
        Ok(())
    }

    /// Ends the connection, and returns the buffers of all work that was not handed out, as [`Endpoint::close`] does. Take the
    /// completions of what was sent before: what is in flight is flushed, and the peer need not have got it.
    ///
    /// # Errors
    /// [`Unconfirmed`] with [`CmError::Connect`] when the peer does not confirm it within seconds, and with [`CmError::Call`]: the
    /// connection has ended all the same, and the buffers are there. Those of [`Endpoint::close`], which keep the buffers.
    pub fn disconnect(mut self) -> Result<Vec<Buffer>, Unconfirmed> {
        let told = self.part();
        match (self.endpoint.close(), told) {
            (Ok(buffers), Ok(())) => Ok(buffers),
            (Ok(buffers), Err(error)) => Err(Unconfirmed { error, buffers }),
            (Err(error), _) => Err(Unconfirmed { error, buffers: Vec::new() }),
        }
    }

    /// Tells the peer, unless it has, and waits until it knows.
    fn part(&mut self) -> Result<()> {
        if !self.is_connected()? {
            return Ok(());
        }
        self.endpoint.advance(&QueuePairAttributes::new().set_state(QueuePairState::ERR))?;
        self.side.part()
    }

    /// The endpoint and the id, whose drop ends the connection.
    #[must_use]
    pub fn into_parts(self) -> (Endpoint, Id) {
        (self.endpoint, self.side.id)
    }
}

/// A connection that has ended, though not as it should: [`Connection::disconnect`],
/// [`Member::disconnect`](super::Member::disconnect).
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Unconfirmed {
    /// Why.
    pub error: Error,
    /// Those of all work that was not handed out; none where the queue pair could not be destroyed, as the device may still use
    /// them then.
    pub buffers: Vec<Buffer>,
}

impl From<Unconfirmed> for Error {
    /// Drops the buffers.
    fn from(unconfirmed: Unconfirmed) -> Self {
        unconfirmed.error
    }
}

impl Deref for Connection {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }
}
