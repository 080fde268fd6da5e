//! A connection.

use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::attempt::{Cause, Step};
use super::error::failed;
use super::side::{End, Side};
use super::{Address, Id, PrivateData};
use crate::{Armed, Buffer, Completion, Endpoint, Errno, Error, Result, readiness};

/// How often an endpoint without events is left to see whether the peer is still there.
const GLANCE: Duration = Duration::from_millis(10);

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
}

impl Connection {
    pub(super) fn new(endpoint: Endpoint, side: Side, private_data: PrivateData) -> Self {
        Connection { endpoint, side, private_data }
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
    /// [`CmError::Call`](super::CmError::Call).
    pub fn is_connected(&mut self) -> Result<bool> {
        self.side.is_connected(|| self.endpoint.flush())
    }

    /// Waits for a piece of work to be done, at most for `timeout`, and for the peer to end the connection meanwhile: then work in
    /// flight comes back flushed, and once there is none, the error says so. Sleeps or spins as [`Endpoint::wait`] does, which
    /// notices nothing of the peer.
    ///
    /// # Errors
    /// [`CmError::Connect`](super::CmError::Connect) with [`Cause::Disconnected`] when the connection has ended and no work is
    /// left; otherwise those of [`Endpoint::wait`], and [`CmError::Call`](super::CmError::Call).
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
            } else if self.endpoint.arm()? == Armed::Wait {
                self.sleep(left)?;
            }
        }
    }

    /// Until there is a completion, or the peer has something to say that is not known yet.
    fn sleep(&self, timeout: Duration) -> Result<()> {
        let Some(work) = self.endpoint.channel() else { return Ok(()) };
        let ready = match self.side.has_ended() {
            true => readiness::poll([work.as_fd()], timeout).map(|[work]| work),
            false => {
                readiness::poll([work.as_fd(), self.side.id.channel().as_fd()], timeout).map(|[work, id]| work | id)
            }
        };
        // With nothing to read, now or ever, the device is gone, or a descriptor is: that is not to be waited for again.
        match ready.map_err(|errno| failed("poll(2)", errno))? {
            0 => Ok(()),
            ready if ready & libc::POLLIN != 0 => Ok(()),
            _ => Err(failed("poll(2)", Errno(libc::EIO))),
        }
    }

    /// Ends the connection, and returns the buffers of all work that was not handed out, as [`Endpoint::close`] does. Take the
    /// completions of what was sent before: what is in flight is flushed, and the peer need not have got it.
    ///
    /// # Errors
    /// [`Unconfirmed`] with [`CmError::Connect`](super::CmError::Connect) when the peer does not confirm it within seconds, and
    /// with [`CmError::Call`](super::CmError::Call): the connection has ended all the same, and the buffers are there. Those of
    /// [`Endpoint::close`], which keep the buffers.
    pub fn disconnect(mut self) -> Result<Vec<Buffer>, Unconfirmed> {
        let told = self.side.part(|| self.endpoint.flush());
        Unconfirmed::unless(told, self.endpoint.close())
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

impl Unconfirmed {
    /// The buffers of an endpoint that was closed, where the peer was told.
    pub(super) fn unless(told: Result<()>, closed: Result<Vec<Buffer>>) -> Result<Vec<Buffer>, Unconfirmed> {
        match (closed, told) {
            (Ok(buffers), Ok(())) => Ok(buffers),
            (Ok(buffers), Err(error)) => Err(Unconfirmed { error, buffers }),
            (Err(error), _) => Err(Unconfirmed { error, buffers: Vec::new() }),
        }
    }
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
