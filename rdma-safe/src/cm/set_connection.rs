//! Connections by address with endpoints in a set.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::attempt::Step;
use super::connection::DisconnectError;
use super::devices::require_device;
use super::handshake::{Arrival, Handshake, Outcome, Progress};
use super::side::{ConnectionEnd, EndedBy, Side};
use super::{Address, Id, PrivateData};
use crate::endpoint::{EndpointMut, Provisional};
use crate::{Buffer, EndpointBuilder, EndpointKey, EndpointSet, Error, Result};

/// A connection by address whose endpoint belongs to an [`EndpointSet`].
///
/// Made by [`Request::accept_in`](super::Request::accept_in), [`Route::connect_in`](super::Route::connect_in), and the
/// handshakes of the same names with `start_`. The set owns the endpoint, lends it and polls it. This object holds the
/// connection's id. Dropping it disconnects, but leaves the endpoint in the set until [`EndpointSet::remove`]. Until then,
/// messages from a peer that ignores the disconnect can still arrive.
///
/// Its descriptor ([`AsFd`]) becomes readable when the peer has ended the connection. The example program `hello_service` is a
/// server for many clients. Its thread sleeps in `poll(2)` until there are completions, requests, handshakes that advance, or
/// clients that disconnect.
///
/// This server answers one client:
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use rdma_safe::cm::Listener;
/// use rdma_safe::{Device, Endpoint, EndpointSet, Error, ReceivePool};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// let mut pool = ReceivePool::new(&pd, 64)?;
/// for buffer in pd.allocate(64 * 256)?.into_chunks(256)? {
///     pool.receive(buffer)?;
/// }
/// // Entries for the receives of the pool, and for 16 answers to each of 100 clients.
/// let mut set = EndpointSet::builder(pd.context(), 64 + 100 * 16).events(true).build()?;
/// let mut listener = Listener::bind("0.0.0.0:7471")?.pd(&pd);
/// let Some(request) = listener.next(Duration::from_secs(60))? else { return Ok(()) };
/// let builder = Endpoint::builder(&pd).send_depth(16).receive_pool(&pool).receive_share(16);
/// let mut client = request.accept_in(builder, &mut set, b"")?;
/// let mut unused = Vec::new();
/// while client.is_connected(&mut set)? {
///     let (key, done) = match set.wait(Duration::from_millis(100)) {
///         Err(Error::Timeout { .. }) => continue,
///         taken => taken?,
///     };
///     let Some(mut endpoint) = set.endpoint(key) else { continue };
///     match done.ok() {
///         Ok(done) if done.id.is_receive() => {
///             endpoint.send(done.buffer.unwrap())?; // answer from the same buffer
///         }
///         Ok(done) => {
///             pool.receive(done.buffer.unwrap())?; // the answer was sent
///         }
///         Err(failed) => {
///             eprintln!("{:?}: {}", client.peer_address(), endpoint.explain(&failed));
///             unused.extend(failed.0.buffer);
///             break;
///         }
///     }
/// }
/// unused.extend(client.disconnect(&mut set).unwrap_or_else(|error| error.buffers));
/// for buffer in unused {
///     pool.receive(buffer)?; // for the next client
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SetConnection {
    side: Side,
    key: EndpointKey,
    private_data: PrivateData,
    /// Time for the peer to confirm that the connection has ended.
    timeout: Duration,
}

impl SetConnection {
    /// Builds the endpoint, and starts the handshake with `start`, which returns the private data of the request if this side
    /// accepts one.
    pub(super) fn start(
        mut side: Side,
        step: Step,
        timeout: Duration,
        builder: EndpointBuilder<'_>,
        set: &mut EndpointSet,
        start: impl FnOnce(&mut Side, &mut EndpointMut<'_>) -> Result<PrivateData>,
    ) -> Result<Handshake<SetConnection>> {
        require_device(&side.id, builder.pd())?;
        let (builder, _) = side.configure(step, builder)?;
        let key = builder.build_in(set)?;
        let mut endpoint = set.endpoint(key).ok_or(Error::NoSuchEndpoint)?;
        match start(&mut side, &mut endpoint) {
            Ok(asked) => {
                Ok(Handshake::waiting(EstablishIn { member: set.provisional(key), asked }, side, step, timeout))
            }
            Err(error) => {
                let _ = set.remove(key);
                Err(error)
            }
        }
    }

    /// The key of the endpoint in the set.
    #[must_use]
    pub fn key(&self) -> EndpointKey {
        self.key
    }

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

    /// The id of the connection, see [`Connection::id`](super::Connection::id). [`SetConnection::is_connected`] reads its
    /// channel.
    #[must_use]
    pub fn id(&self) -> &Id {
        &self.side.id
    }

    /// Whether the connection exists: neither end has ended it. See [`Connection::is_connected`](super::Connection::is_connected).
    ///
    /// If the peer has ended it, `set` returns the work in flight as flushed. `set` must be the set of the endpoint.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    pub fn is_connected(&mut self, set: &mut EndpointSet) -> Result<bool> {
        self.side.is_connected(|ended_by| flush(set, self.key, ended_by))
    }

    /// Ends the connection, and removes the endpoint from its set like [`EndpointSet::remove`].
    ///
    /// # Errors
    /// [`DisconnectError`], as with [`Connection::disconnect`](super::Connection::disconnect); the errors of
    /// [`EndpointSet::remove`].
    pub fn disconnect(self, set: &mut EndpointSet) -> Result<Vec<Buffer>, DisconnectError> {
        Ok(self.start_disconnect(set)?.wait_in(set)?.buffers)
    }

    /// Like [`SetConnection::disconnect`], without blocking. The endpoint is removed when the handshake ends.
    ///
    /// Until then, [`EndpointSet::poll`] can still return messages of the peer, as [`Connection::disconnect`] describes. To cut
    /// a peer off at once, drop this object and call [`EndpointSet::remove`].
    ///
    /// [`Connection::disconnect`]: super::Connection::disconnect
    ///
    /// # Errors
    /// [`DisconnectError`], as with [`SetConnection::disconnect`].
    pub fn start_disconnect(mut self, set: &mut EndpointSet) -> Result<Handshake<SetDisconnected>, DisconnectError> {
        let has_sends = set.endpoint(self.key).is_some_and(|endpoint| endpoint.sends_in_flight() != 0);
        let started = self.side.disconnect(has_sends, |ended_by| flush(set, self.key, ended_by));
        let SetConnection { side, key, timeout, .. } = self;
        match started {
            Ok(is_waiting) => {
                let state = Leave { member: set.provisional(key) };
                Ok(match is_waiting {
                    true => Handshake::waiting(state, side, Step::Disconnect, timeout),
                    false => Handshake::ready(state, side, Step::Disconnect),
                })
            }
            Err(error) => Err(DisconnectError::of(error, set.remove(key))),
        }
    }
}

/// The descriptor of the [`EventChannel`](super::EventChannel) of [`SetConnection::id`].
///
/// It becomes readable when the peer has ended the connection: then call [`SetConnection::is_connected`], which reads the
/// channel. It does not become readable when work completes: see [`EndpointSet::arm`].
impl AsFd for SetConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.side.id.channel().as_fd()
    }
}

/// The state of a handshake that connects an endpoint of a set.
#[derive(Debug)]
pub struct EstablishIn {
    member: Provisional,
    /// Private data of the request, if this side accepts one.
    asked: PrivateData,
}

impl Outcome for SetConnection {
    type Error = Error;
    type Context = EndpointSet;
    type State = EstablishIn;

    fn handle(mut handshake: Handshake<Self>, arrival: Arrival, set: &mut EndpointSet) -> Result<Progress<Self>> {
        let Handshake { state: EstablishIn { member, asked }, side, step, .. } = &mut handshake;
        let event = arrival.event(side, *step)?;
        let mut endpoint = set.endpoint(member.key()).ok_or(Error::NoSuchEndpoint)?;
        let private_data = side.establish(&mut endpoint, *step, asked, &event)?;
        let Handshake { state: EstablishIn { member, .. }, side, timeout, .. } = handshake;
        Ok(Progress::Ready(SetConnection { side, key: member.keep(), private_data, timeout }))
    }
}

impl Handshake<SetConnection> {
    /// The key of the endpoint in its set, which has it from the start of the handshake.
    #[must_use]
    pub fn key(&self) -> EndpointKey {
        self.state.member.key()
    }

    /// Waits until the handshake is complete. If it fails, the endpoint is removed at once.
    pub(super) fn wait_or_remove(self, set: &mut EndpointSet) -> Result<SetConnection> {
        let key = self.key();
        let result = self.wait_in(set);
        if result.is_err() {
            let _ = set.remove(key);
        }
        result
    }
}

/// A connection that was ended, by [`SetConnection::start_disconnect`].
#[derive(Debug)]
#[non_exhaustive]
pub struct SetDisconnected {
    /// Key that the endpoint had in its set.
    pub key: EndpointKey,
    /// Buffers of all work that was not handed out.
    pub buffers: Vec<Buffer>,
}

/// The state of a handshake that ends a connection of a set.
#[derive(Debug)]
pub struct Leave {
    member: Provisional,
}

impl Outcome for SetDisconnected {
    type Error = DisconnectError;
    type Context = EndpointSet;
    type State = Leave;

    fn handle(
        handshake: Handshake<Self>,
        arrival: Arrival,
        set: &mut EndpointSet,
    ) -> Result<Progress<Self>, DisconnectError> {
        let key = handshake.key();
        let buffers = DisconnectError::combine(arrival.disconnect(&handshake.side), set.remove(key))?;
        Ok(Progress::Ready(SetDisconnected { key, buffers }))
    }
}

impl Handshake<SetDisconnected> {
    /// The key of the endpoint in its set.
    #[must_use]
    pub fn key(&self) -> EndpointKey {
        self.state.member.key()
    }
}

/// Flushes all work of an endpoint, if the set still contains it.
fn flush(set: &mut EndpointSet, key: EndpointKey, ended_by: EndedBy) -> Result<()> {
    set.endpoint(key).map_or(Ok(()), |mut endpoint| endpoint.flush(ended_by))
}
