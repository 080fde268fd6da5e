//! Accepting connections.

use std::net::ToSocketAddrs;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::address::try_each;
use super::attempt::{Cause, ConnectError, Step};
use super::connection::{Connection, Establish};
use super::devices::{Devices, require_device};
use super::handshake::Handshake;
use super::side::Side;
use super::{Address, CmError, EventChannel, EventKind, Id, Parameters, PeerParameters, PortSpace, SetConnection};
use crate::endpoint::EndpointMut;
use crate::{Endpoint, EndpointBuilder, EndpointSet, Errno, Error, ProtectionDomain, Result};

/// Listens at an address for connections.
///
/// A server that waits for one client at a time:
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use rdma_safe::Endpoint;
/// use rdma_safe::cm::Listener;
///
/// let mut listener = Listener::bind("0.0.0.0:7471")?;
/// println!("listening at {}", listener.local_address());
/// loop {
///     let Some(request) = listener.next(Duration::from_secs(60))? else { continue };
///     if !request.private_data().starts_with(b"version 1") {
///         request.reject(b"version 1 is required")?;
///         continue;
///     }
///     // Post receives before the peer can send.
///     let pd = request.pd()?;
///     let mut prepared = request.prepare(Endpoint::builder(&pd))?;
///     prepared.receive(pd.allocate(4096)?)?;
///     let mut connection = prepared.accept(b"")?;
///     let done = connection.wait(Duration::from_secs(5))?.ok()?;
///     println!("{:?}: {:?}", connection.peer_address(), done.buffer.as_deref());
/// }
/// # }
/// ```
///
/// [`PreparedRequest::accept`] waits until the peer confirms. A server that must not wait for one client uses
/// [`PreparedRequest::start_accept`]. [`Handshake`] has an example, which polls the descriptors of the listener ([`AsFd`])
/// and of the handshakes. So does the example program `hello_service`, for many clients in an [`EndpointSet`].
#[derive(Debug)]
pub struct Listener {
    listening: ListeningId,
    timeout: Duration,
    ack_timeout: Option<u8>,
}

/// Default time for the peer to confirm an accept or a disconnect.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);

impl Listener {
    /// Listens at the first of these addresses that is available, with a backlog of 128 requests.
    ///
    /// An unspecified IP address stands for all addresses of this host, on any device. Port 0 selects a free port.
    ///
    /// # Errors
    /// [`CmError::Call`], with `EADDRINUSE` when the address and port are in use, `EADDRNOTAVAIL` when the port is in
    /// use and this listener or the other user of the port is bound to all addresses, and `EADDRNOTAVAIL` or `ENODEV` when
    /// no device has the address; [`CmError::NoAddress`].
    pub fn bind(addresses: impl ToSocketAddrs) -> Result<Self> {
        try_each(addresses, |address| Listener::bind_with(address, 128))
    }

    /// Like [`Listener::bind`], for one address, with a backlog of `backlog` requests.
    ///
    /// Further requests are dropped, and retried by the peer.
    ///
    /// # Errors
    /// Like [`Listener::bind`].
    pub fn bind_with(address: impl Into<Address>, backlog: u32) -> Result<Self> {
        let listening = ListeningId::new(PortSpace::TCP, address.into(), backlog)?;
        Ok(Listener { listening, timeout: ACCEPT_TIMEOUT, ack_timeout: None })
    }

    /// Uses this domain for connections on its device, instead of opening the device.
    #[must_use]
    pub fn pd(mut self, pd: &ProtectionDomain) -> Self {
        self.listening.devices = self.listening.devices.with(pd);
        self
    }

    /// Shares the domains of devices with others that use the same `devices`. Call it before [`Listener::pd`].
    #[must_use]
    pub fn devices(mut self, devices: &Devices) -> Self {
        self.listening.devices = devices.clone();
        self
    }

    /// Time for the peer to confirm that it was accepted, and to confirm a disconnect; 10 s by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// ACK timeout of accepted connections: [`Connector::ack_timeout`](super::Connector::ack_timeout).
    #[must_use]
    pub fn ack_timeout(mut self, exponent: u8) -> Self {
        self.ack_timeout = Some(exponent);
        self
    }

    /// The address that it listens at, including the actual port.
    #[must_use]
    pub fn local_address(&self) -> Address {
        self.listening.local
    }

    /// The channel that becomes readable when there is a request, for `epoll(7)` and async runtimes.
    ///
    /// Then call [`Listener::next`] with a timeout of zero until it returns `None`.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        self.listening.channel()
    }

    /// Waits for the next request, for `timeout` at most. Returns `None` after the timeout.
    ///
    /// A timeout of zero does not block. Each request has a separate channel, so requests do not delay each other.
    ///
    /// A rejected request can come again: Linux forgets it, and reports a retransmission that arrives later as another request.
    ///
    /// # Errors
    /// [`CmError::Call`] and [`CmError::Connect`] when a request cannot be used, for example because its device was
    /// removed, or because the process has too many open files. That request is rejected, and the next call returns the
    /// next one. When the device of the listener's address was removed, every call fails with [`Cause::DeviceRemoved`]. A
    /// listener for all addresses keeps working.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Request>> {
        let Some((mut id, Parameters::Connected(asked))) = self.listening.next(timeout)? else { return Ok(None) };
        let moved = EventChannel::new().and_then(|channel| {
            id.migrate(&channel)?;
            self.ack_timeout.map_or(Ok(()), |exponent| id.set_ack_timeout(exponent))
        });
        let side = Side::new(id, None);
        match moved {
            Ok(()) => Ok(Some(Request { side, asked, devices: self.listening.devices.clone(), timeout: self.timeout })),
            Err(error) => Err(side.migrate_failed(error)),
        }
    }

    /// Accepts the next request, with a default [`Endpoint::builder`]. Returns `None` after `timeout`.
    ///
    /// # Errors
    /// The errors of [`Listener::next`]; those of [`Request::prepare`] and [`PreparedRequest::accept`], which affect
    /// only this peer, so keep listening. A peer that sends a request and then stays silent blocks this call for
    /// another [`Listener::timeout`].
    pub fn accept(&mut self, timeout: Duration) -> Result<Option<Connection>> {
        let Some(request) = self.next(timeout)? else { return Ok(None) };
        let pd = request.pd()?;
        request.prepare(Endpoint::builder(&pd))?.accept(&[]).map(Some)
    }
}

/// The descriptor of [`Listener::channel`].
impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel().as_fd()
    }
}

impl Side {
    /// The error of a request that could not get a channel, for example because its device was removed.
    pub(super) fn migrate_failed(&self, error: Error) -> Error {
        match error {
            Error::Cm(CmError::Call { errno: Errno(libc::ENXIO), .. }) => {
                self.error(Step::Accept, Cause::DeviceRemoved)
            }
            other => other,
        }
    }
}

/// The common part of both kinds of listeners.
#[derive(Debug)]
pub(super) struct ListeningId {
    id: Id,
    pub(super) local: Address,
    pub(super) devices: Devices,
    /// The device was removed, and no more requests arrive.
    removed: bool,
}

impl ListeningId {
    pub(super) fn new(space: PortSpace, address: Address, backlog: u32) -> Result<Self> {
        let mut id = Id::new(&EventChannel::new()?, space)?;
        id.bind(address)?;
        id.listen(backlog)?;
        let local = id.local_address().unwrap_or(address);
        Ok(ListeningId { id, local, devices: Devices::default(), removed: false })
    }

    pub(super) fn id(&self) -> &Id {
        &self.id
    }

    pub(super) fn is_removed(&self) -> bool {
        self.removed
    }

    pub(super) fn channel(&self) -> &EventChannel {
        self.id.channel()
    }

    /// The id of the next request, which still reports to this channel.
    pub(super) fn next(&mut self, timeout: Duration) -> Result<Option<(Id, Parameters)>> {
        let start = Instant::now();
        while !self.removed {
            let Some(event) = self.channel().wait(timeout.saturating_sub(start.elapsed()))? else { return Ok(None) };
            match event.kind {
                EventKind::ConnectRequest(id, asked) => return Ok(Some((id, asked))),
                EventKind::DeviceRemoval if event.id == self.id.id() => self.removed = true,
                // An event of a request's id from before its move to another channel.
                _ => {}
            }
        }
        let (step, cause, local) = (Step::Accept, Cause::DeviceRemoved, Some(self.local));
        Err(CmError::Connect(Box::new(ConnectError { step, cause, local, peer: None })).into())
    }
}

/// A connection request. Dropping it rejects.
#[derive(Debug)]
pub struct Request {
    side: Side,
    asked: PeerParameters,
    devices: Devices,
    timeout: Duration,
}

impl Request {
    /// Private data of the request, padded with zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.asked.private_data
    }

    /// The requested parameters.
    #[must_use]
    pub fn parameters(&self) -> &PeerParameters {
        &self.asked
    }

    /// The address of the peer; `None` only if it is of a family that [`Address`] does not have.
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        self.side.id.peer_address()
    }

    /// The local address that the request was sent to.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// The listener's domain of the device that the request arrived on.
    ///
    /// # Errors
    /// Errors of opening the device, for the first request.
    pub fn pd(&self) -> Result<ProtectionDomain> {
        self.devices.domain_of(&self.side.id)
    }

    /// Rejects the request, with at most 148 bytes of private data.
    ///
    /// # Errors
    /// [`CmError::PrivateData`], [`CmError::Call`]; the request is then rejected without private data.
    pub fn reject(mut self, private_data: &[u8]) -> Result<()> {
        self.side.id.reject(private_data)
    }

    /// Builds the endpoint, so that receives can be posted before the peer sends.
    ///
    /// # Errors
    /// [`CmError::Connect`] when the peer is gone; [`CmError::OtherDevice`] for a builder of another device; the errors
    /// of [`EndpointBuilder::build`](crate::EndpointBuilder::build). The request is then rejected.
    pub fn prepare(self, builder: EndpointBuilder<'_>) -> Result<PreparedRequest> {
        require_device(&self.side.id, builder.pd())?;
        let endpoint = self.side.endpoint(Step::Accept, builder)?;
        Ok(PreparedRequest { endpoint, side: self.side, asked: self.asked, timeout: self.timeout })
    }

    /// Accepts with an endpoint in `set` and at most 196 bytes of private data, and waits for the confirmation.
    ///
    /// Build the endpoint with a receive pool, or use [`Request::start_accept_in_with`]: other receives cannot be posted before
    /// the first message arrives.
    ///
    /// # Errors
    /// Like [`Request::prepare`] and [`PreparedRequest::accept`]; the errors of
    /// [`EndpointBuilder::build_in`](crate::EndpointBuilder::build_in). The set is then unchanged.
    pub fn accept_in(
        self,
        builder: EndpointBuilder<'_>,
        set: &mut EndpointSet,
        private_data: &[u8],
    ) -> Result<SetConnection> {
        self.start_accept_in(builder, set, private_data)?.wait_or_remove(set)
    }

    /// Like [`Request::accept_in`], without blocking.
    ///
    /// The endpoint is in the set from now on. The first message may arrive before [`Handshake::advance_in`] returns the
    /// connection, since it can overtake the confirmation: [`Handshake::key`] is its key.
    ///
    /// # Errors
    /// Like [`Request::prepare`] and [`PreparedRequest::start_accept`]; the errors of
    /// [`EndpointBuilder::build_in`](crate::EndpointBuilder::build_in). The set is then unchanged.
    pub fn start_accept_in(
        self,
        builder: EndpointBuilder<'_>,
        set: &mut EndpointSet,
        private_data: &[u8],
    ) -> Result<Handshake<SetConnection>> {
        self.start_accept_in_with(builder, set, private_data, |_| Ok(()))
    }

    /// Like [`Request::start_accept_in`], but calls `prepare` before the peer can send, to post receives.
    ///
    /// # Errors
    /// Like [`Request::start_accept_in`]; the errors of `prepare`.
    pub fn start_accept_in_with(
        self,
        builder: EndpointBuilder<'_>,
        set: &mut EndpointSet,
        private_data: &[u8],
        prepare: impl FnOnce(&mut EndpointMut<'_>) -> Result<()>,
    ) -> Result<Handshake<SetConnection>> {
        let Request { side, asked, timeout, .. } = self;
        SetConnection::start(side, Step::Accept, timeout, builder, set, |side, endpoint| {
            prepare(endpoint)?;
            side.accept(endpoint, &asked, private_data).map(|()| asked.private_data)
        })
    }
}

/// A request with its endpoint. Receives can be posted before the request is accepted. Dropping it rejects the request.
#[derive(Debug)]
pub struct PreparedRequest {
    // Dropped first, so that nothing arrives after the id is destroyed.
    endpoint: Endpoint,
    side: Side,
    asked: PeerParameters,
    timeout: Duration,
}

impl PreparedRequest {
    /// Accepts with at most 196 bytes of private data, and waits for the confirmation.
    ///
    /// # Errors
    /// [`CmError::Connect`] when the peer does not confirm or is gone; [`CmError::PrivateData`]; [`CmError::Call`].
    pub fn accept(self, private_data: &[u8]) -> Result<Connection> {
        self.start_accept(private_data)?.wait()
    }

    /// Like [`PreparedRequest::accept`], without blocking.
    ///
    /// # Errors
    /// [`CmError::Connect`] when the peer is gone; [`CmError::PrivateData`]. The request is then rejected.
    pub fn start_accept(mut self, private_data: &[u8]) -> Result<Handshake<Connection>> {
        self.side.accept(&mut self.endpoint, &self.asked, private_data)?;
        let PreparedRequest { endpoint, side, asked, timeout } = self;
        let state = Establish { endpoint, asked: asked.private_data };
        Ok(Handshake::waiting(state, side, Step::Accept, timeout))
    }
}

impl Deref for PreparedRequest {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}

impl DerefMut for PreparedRequest {
    fn deref_mut(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }
}
