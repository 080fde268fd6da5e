//! Connections by address.

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::attempt::{Cause, Step};
use super::error::failed;
use super::handshake::{Arrival, Handshake, Outcome, Progress};
use super::side::{ConnectionEnd, Side};
use super::{Address, Id, PrivateData};
use crate::endpoint::Armed;
use crate::error::Verb;
use crate::{Buffer, Completion, Endpoint, Errno, Error, Result, readiness};

/// Interval at which `wait` checks the peer if the endpoint has no events.
const PEER_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A connection by address: an [`Endpoint`], to which it dereferences, with its id.
///
/// Made by [`Connector`](super::Connector) and [`Listener`](super::Listener). Dropping it disconnects, which notifies
/// the peer and flushes the work in flight.
#[derive(Debug)]
pub struct Connection {
    // Dropped first, so that nothing arrives after the id is destroyed.
    endpoint: Endpoint,
    side: Side,
    private_data: PrivateData,
    /// Time for the peer to confirm that the connection has ended.
    timeout: Duration,
}

impl Connection {
    /// The private data of the peer's request or reply, padded with zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The address of this end.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// The address of the peer; `None` only if it is of a family that [`Address`] does not have.
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        self.side.id.peer_address()
    }

    /// The id of the connection.
    ///
    /// Its channel belongs to the connection. Read its events only with [`Connection::is_connected`], also when the
    /// descriptor of the channel becomes readable.
    #[must_use]
    pub fn id(&self) -> &Id {
        &self.side.id
    }

    /// Whether the connection exists: neither end has ended it.
    ///
    /// If the peer has ended it, this confirms the disconnect and flushes the work in flight. The kernel disconnects
    /// for a process that exits. If the peer's host fails, failing work or the
    /// [keepalive](crate::EndpointBuilder::keepalive) reports it.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    pub fn is_connected(&mut self) -> Result<bool> {
        self.side.is_connected(|ended_by| self.endpoint.flush(ended_by))
    }

    /// Waits until a piece of work has completed, for `timeout` at most, and watches for a disconnect.
    ///
    /// If the peer disconnects, work in flight is returned as flushed ([`Completion::is_disconnected`]). When none is left, the
    /// error is [`Cause::Disconnected`]. It sleeps or spins like [`Endpoint::wait`], which does not notice a disconnect.
    ///
    /// # Errors
    /// [`CmError::Connect`](super::CmError::Connect) with [`Cause::Disconnected`] when the connection has ended and no
    /// work is left; the errors of [`Endpoint::wait`]; [`CmError::Call`](super::CmError::Call).
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion> {
        let start = Instant::now();
        loop {
            if let Some(done) = self.endpoint.poll()? {
                return Ok(done);
            }
            // Work that completed before the disconnect is in the queue by the time the disconnect is noticed.
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
                match self.endpoint.wait(left.min(PEER_CHECK_INTERVAL)) {
                    Err(Error::Timeout { .. }) => {}
                    done => return done,
                }
            } else if self.endpoint.arm()? == Armed::Wait {
                let due = self.endpoint.keepalive_due();
                self.sleep(due.map_or(left, |due| left.min(due.saturating_duration_since(Instant::now()))))?;
            }
        }
    }

    /// Sleeps until there is a completion or an event of the id, unless the disconnect is known.
    fn sleep(&self, timeout: Duration) -> Result<()> {
        let Some(work) = self.endpoint.channel() else { return Ok(()) };
        let ready = match self.side.has_ended() {
            true => readiness::poll([work.as_fd()], timeout).map(|[work]| work),
            false => {
                readiness::poll([work.as_fd(), self.side.id.channel().as_fd()], timeout).map(|[work, id]| work | id)
            }
        };
        // An error without data means that the device or a descriptor is gone. Waiting again would be pointless.
        match ready.map_err(|errno| failed(Verb::PollFd, errno))? {
            0 => Ok(()),
            ready if ready & libc::POLLIN != 0 => Ok(()),
            _ => Err(failed(Verb::PollFd, Errno(libc::EIO))),
        }
    }

    /// Ends the connection, and returns the buffers of all work that was not handed out, like [`Endpoint::close`].
    ///
    /// Poll the completions of earlier sends first: sends in flight are flushed, and may not have reached the peer. Without
    /// sends in flight, the peer is answered until it has confirmed the disconnect, or until the timeout. Its messages arrive
    /// in posted receives, whose buffers are returned unread, and it can use exposed memory. To cut a peer off at once, drop
    /// the connection.
    ///
    /// # Errors
    /// [`DisconnectError`] with [`CmError::Connect`](super::CmError::Connect) when the peer does not confirm within the
    /// timeout of the connector or listener that made the connection ([`Connector::timeout`](super::Connector::timeout),
    /// [`Listener::timeout`](super::Listener::timeout)), or with [`CmError::Call`](super::CmError::Call): the connection has
    /// ended nevertheless, and the buffers are returned. The errors of [`Endpoint::close`], which keep the buffers.
    pub fn disconnect(self) -> Result<Vec<Buffer>, DisconnectError> {
        Ok(self.start_disconnect()?.wait()?.buffers)
    }

    /// Like [`Connection::disconnect`], without blocking.
    ///
    /// # Errors
    /// [`DisconnectError`], as with [`Connection::disconnect`].
    pub fn start_disconnect(mut self) -> Result<Handshake<Disconnected>, DisconnectError> {
        let has_sends = self.endpoint.sends_in_flight() != 0;
        let started = self.side.disconnect(has_sends, |ended_by| self.endpoint.flush(ended_by));
        let Connection { endpoint, side, timeout, .. } = self;
        match started {
            Ok(true) => Ok(Handshake::waiting(endpoint, side, Step::Disconnect, timeout)),
            Ok(false) => Ok(Handshake::ready(endpoint, side, Step::Disconnect)),
            Err(error) => Err(DisconnectError::of(error, endpoint.close())),
        }
    }

    /// Splits the connection into the endpoint and the id. Dropping the id ends the connection.
    #[must_use]
    pub fn into_parts(self) -> (Endpoint, Id) {
        (self.endpoint, self.side.id)
    }
}

/// The descriptor of the [`EventChannel`](super::EventChannel) of [`Connection::id`].
///
/// It becomes readable when the peer has ended the connection: then call [`Connection::is_connected`], which reads the
/// channel. It does not become readable when work completes: see [`Endpoint::arm`] and [`Endpoint::channel`].
impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.side.id.channel().as_fd()
    }
}

/// The state of a handshake that establishes a connection.
#[derive(Debug)]
pub struct Establish {
    pub(super) endpoint: Endpoint,
    /// Private data of the request, if this side accepts one.
    pub(super) asked: PrivateData,
}

impl Outcome for Connection {
    type Error = Error;
    type Context = ();
    type State = Establish;

    fn handle(mut handshake: Handshake<Self>, arrival: Arrival, (): &mut ()) -> Result<Progress<Self>> {
        let Handshake { state: Establish { endpoint, asked }, side, step, .. } = &mut handshake;
        let event = arrival.event(side, *step)?;
        let private_data = side.establish(endpoint, *step, asked, &event)?;
        let Handshake { state: Establish { endpoint, .. }, side, timeout, .. } = handshake;
        Ok(Progress::Ready(Connection { endpoint, side, private_data, timeout }))
    }
}

/// A connection that was ended, by [`Connection::start_disconnect`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Disconnected {
    /// Buffers of all work that was not handed out.
    pub buffers: Vec<Buffer>,
}

impl Outcome for Disconnected {
    type Error = DisconnectError;
    type Context = ();
    type State = Endpoint;

    fn handle(handshake: Handshake<Self>, arrival: Arrival, (): &mut ()) -> Result<Progress<Self>, DisconnectError> {
        let Handshake { state: endpoint, side, .. } = handshake;
        let buffers = DisconnectError::combine(arrival.disconnect(&side), endpoint.close())?;
        Ok(Progress::Ready(Disconnected { buffers }))
    }
}

/// A connection that ended without confirmation by the peer: [`Connection::disconnect`],
/// [`SetConnection::disconnect`](super::SetConnection::disconnect).
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct DisconnectError {
    /// Reason of the failure.
    pub error: Error,
    /// Buffers of all work that was not handed out.
    ///
    /// Empty if the queue pair could not be destroyed, because the device may then still use them.
    pub buffers: Vec<Buffer>,
}

impl DisconnectError {
    /// The error of a disconnect, with the result of closing the endpoint.
    pub(super) fn of(error: Error, closed: Result<Vec<Buffer>>) -> Self {
        match closed {
            Ok(buffers) => DisconnectError { error, buffers },
            Err(error) => DisconnectError { error, buffers: Vec::new() },
        }
    }

    /// Combines the results of the disconnect and of closing the endpoint.
    pub(super) fn combine(
        disconnected: Result<()>,
        closed: Result<Vec<Buffer>>,
    ) -> Result<Vec<Buffer>, DisconnectError> {
        match (disconnected, closed) {
            (Ok(()), Ok(buffers)) => Ok(buffers),
            (Ok(()), Err(error)) => Err(DisconnectError { error, buffers: Vec::new() }),
            (Err(error), closed) => Err(DisconnectError::of(error, closed)),
        }
    }
}

impl From<DisconnectError> for Error {
    /// Drops the buffers.
    fn from(unconfirmed: DisconnectError) -> Self {
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
