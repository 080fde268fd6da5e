//! Being connected to.

use std::net::ToSocketAddrs;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use super::address::first_of;
use super::attempt::{Cause, ConnectError, Step};
use super::connection::Connection;
use super::devices::{Devices, require};
use super::side::Side;
use super::{Address, CmError, EventChannel, EventKind, Id, Member, Parameters, PeerParameters, PortSpace};
use crate::{Endpoint, EndpointBuilder, EndpointSet, Errno, Error, ProtectionDomain, Result};

/// Listens at an address for connections.
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
///         request.reject(b"version 1 is spoken here")?;
///         continue;
///     }
///     // Receives come before the peer can send.
///     let pd = request.pd()?;
///     let mut prepared = request.prepare(Endpoint::builder(&pd))?;
///     prepared.receive(pd.allocate(4096)?)?;
///     let mut connection = prepared.accept(b"")?;
///     let done = connection.wait(Duration::from_secs(5))?.ok()?;
///     println!("{:?}: {:?}", connection.peer_address(), done.buffer.as_deref());
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Listener {
    listening: Listening,
    ack_timeout: Option<u8>,
}

impl Listener {
    /// Listens at the first of these addresses that can be had, with room for 128 requests that were not taken yet. An unspecified
    /// IP address is every one of this host, on any device; port 0 is a free one.
    ///
    /// # Errors
    /// [`CmError::Call`], with `EADDRINUSE` when another has the address and port, `EADDRNOTAVAIL` when another has the port and it
    /// or this one is to be at every address, and `EADDRNOTAVAIL` or `ENODEV` when no device has the address;
    /// [`CmError::NoAddress`].
    pub fn bind(addresses: impl ToSocketAddrs) -> Result<Self> {
        first_of(addresses, |address| Listener::bind_with(address, 128))
    }

    /// As [`Listener::bind`], of one address, with room for `backlog` requests. What comes beyond is dropped, and asked for again
    /// by the peer.
    ///
    /// # Errors
    /// As there.
    pub fn bind_with(address: impl Into<Address>, backlog: u32) -> Result<Self> {
        let listening = Listening::new(PortSpace::TCP, address.into(), backlog)?;
        Ok(Listener { listening, ack_timeout: None })
    }

    /// Makes connections on the device of `pd` in this domain, instead of one that is opened for it.
    #[must_use]
    pub fn pd(self, pd: &ProtectionDomain) -> Self {
        self.listening.devices.set(pd);
        self
    }

    /// How long an acknowledgement of the peers is waited for: [`Connector::ack_timeout`](super::Connector::ack_timeout).
    #[must_use]
    pub fn ack_timeout(mut self, exponent: u8) -> Self {
        self.ack_timeout = Some(exponent);
        self
    }

    /// The address that it listens at, with the port that it got.
    #[must_use]
    pub fn local_address(&self) -> Address {
        self.listening.local
    }

    /// The channel whose descriptor becomes readable when there is a request: for `epoll(7)` and async runtimes. Then call
    /// [`Listener::next`] with no time to wait.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        self.listening.channel()
    }

    /// Waits for the next request, at most for `timeout`; `None` when it passed.
    ///
    /// # Errors
    /// [`CmError::Call`]; [`CmError::Connect`] with [`Cause::DeviceRemoved`] when the device of a request went away, or that of the
    /// listener's address, of which it then says so each time. One that listens at every address goes on.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Request>> {
        let Some((mut id, Parameters::Connected(asked))) = self.listening.next(timeout)? else { return Ok(None) };
        let moved = EventChannel::new().and_then(|channel| {
            id.migrate(&channel)?;
            self.ack_timeout.map_or(Ok(()), |exponent| id.set_ack_timeout(exponent))
        });
        let side = Side::new(id, None);
        match moved {
            Ok(()) => Ok(Some(Request { side, asked, devices: self.listening.devices.clone() })),
            Err(error) => Err(side.not_taken(error)),
        }
    }

    /// Accepts the next request, with an endpoint as [`Endpoint::builder`] has it, at most within `timeout`; `None` when it passed.
    ///
    /// # Errors
    /// Those of [`Listener::next`], and those of [`Request::prepare`] and [`PreparedRequest::accept`], which concern this peer
    /// only: listen on. A peer that has asked and then says nothing keeps this waiting for 10 s more.
    pub fn accept(&mut self, timeout: Duration) -> Result<Option<Connection>> {
        let Some(request) = self.next(timeout)? else { return Ok(None) };
        let pd = request.pd()?;
        request.prepare(Endpoint::builder(&pd))?.accept(&[]).map(Some)
    }
}

impl Side {
    /// Of a request that could not be given a channel of its own, as when its device has gone meanwhile.
    pub(super) fn not_taken(&self, error: Error) -> Error {
        match error {
            Error::Cm(CmError::Call { errno: Errno(libc::ENXIO), .. }) => {
                self.error(Step::Accept, Cause::DeviceRemoved)
            }
            other => other,
        }
    }
}

/// What both kinds of listeners are.
#[derive(Debug)]
pub(super) struct Listening {
    id: Id,
    pub(super) local: Address,
    pub(super) devices: Devices,
    /// Its device went away, and nobody comes any more.
    removed: bool,
}

impl Listening {
    pub(super) fn new(space: PortSpace, address: Address, backlog: u32) -> Result<Self> {
        let mut id = Id::new(&EventChannel::new()?, space)?;
        id.bind(address)?;
        id.listen(backlog)?;
        let local = id.local_address().unwrap_or(address);
        Ok(Listening { id, local, devices: Devices::default(), removed: false })
    }

    pub(super) fn channel(&self) -> &EventChannel {
        self.id.channel()
    }

    /// The id of the next request, which still reports here.
    pub(super) fn next(&mut self, timeout: Duration) -> Result<Option<(Id, Parameters)>> {
        let start = Instant::now();
        while !self.removed {
            let Some(event) = self.channel().wait(timeout.saturating_sub(start.elapsed()))? else { return Ok(None) };
            match event.kind {
                EventKind::ConnectRequest(id, asked) => return Ok(Some((id, asked))),
                EventKind::DeviceRemoval if event.id == self.id.id() => self.removed = true,
                // Of the id of a request, before it had a channel of its own.
                _ => {}
            }
        }
        let (step, cause, local) = (Step::Accept, Cause::DeviceRemoved, Some(self.local));
        Err(CmError::Connect(Box::new(ConnectError { step, cause, local, peer: None })).into())
    }
}

/// Somebody wants to connect. Dropping it rejects.
#[derive(Debug)]
pub struct Request {
    side: Side,
    asked: PeerParameters,
    devices: Devices,
}

impl Request {
    /// What the peer has to say; padded with zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.asked.private_data
    }

    /// What it asks for.
    #[must_use]
    pub fn parameters(&self) -> &PeerParameters {
        &self.asked
    }

    /// The address of the peer.
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        self.side.id.peer_address()
    }

    /// The address that it has come to.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// The domain that the listener has for the device that the request came by.
    ///
    /// # Errors
    /// Those of opening the device, for the first request.
    pub fn pd(&self) -> Result<ProtectionDomain> {
        self.devices.of(&self.side.id)
    }

    /// Refuses, with at most 148 bytes for the peer.
    ///
    /// # Errors
    /// [`CmError::PrivateData`], [`CmError::Call`]; the peer is refused without them then.
    pub fn reject(mut self, private_data: &[u8]) -> Result<()> {
        self.side.id.reject(private_data)
    }

    /// Makes the endpoint, so that receives can be posted before the peer can send.
    ///
    /// # Errors
    /// [`CmError::Connect`] when the peer has gone meanwhile; [`CmError::OtherDevice`] for a builder of another device; those of
    /// [`EndpointBuilder::build`](crate::EndpointBuilder::build). The peer is refused then.
    pub fn prepare(self, builder: EndpointBuilder<'_>) -> Result<PreparedRequest> {
        require(&self.side.id, builder.pd())?;
        let endpoint = self.side.endpoint(Step::Accept, builder)?;
        Ok(PreparedRequest { endpoint, side: self.side, asked: self.asked })
    }

    /// Accepts with an endpoint of `set`, and at most 196 bytes for the peer, and waits until the peer knows. Let the builder take
    /// receives from a pool: there is no time to post others before the first message comes.
    ///
    /// # Errors
    /// As [`Request::prepare`] and [`PreparedRequest::accept`], and those of
    /// [`EndpointBuilder::build_in`](crate::EndpointBuilder::build_in). The set is then as it was.
    pub fn accept_in(self, builder: EndpointBuilder<'_>, set: &mut EndpointSet, private_data: &[u8]) -> Result<Member> {
        let Request { side, asked, .. } = self;
        Member::new(side, Step::Accept, builder, set, |side, endpoint| side.accept(endpoint, &asked, private_data))
    }
}

/// A request, with an endpoint that receives can be posted to. Dropping it rejects.
#[derive(Debug)]
pub struct PreparedRequest {
    endpoint: Endpoint,
    side: Side,
    asked: PeerParameters,
}

impl PreparedRequest {
    /// Accepts, with at most 196 bytes for the peer, and waits until the peer knows.
    ///
    /// # Errors
    /// [`CmError::Connect`] when it never confirms, or has gone meanwhile; [`CmError::PrivateData`]; [`CmError::Call`].
    pub fn accept(self, private_data: &[u8]) -> Result<Connection> {
        let PreparedRequest { mut endpoint, mut side, asked } = self;
        let said = side.accept(&mut endpoint, &asked, private_data)?;
        Ok(Connection::new(endpoint, side, said))
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
