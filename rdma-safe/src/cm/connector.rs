//! Connecting to an address.

use std::net::ToSocketAddrs;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::address::first_of;
use super::attempt::{Cause, Step};
use super::connection::Connection;
use super::devices::{Devices, require};
use super::side::Side;
use super::{Address, EventChannel, EventKind, Id, Member, PortSpace};
use crate::{Endpoint, EndpointBuilder, EndpointSet, ProtectionDomain, Result};

/// Connects to addresses: makes reliable connections to who listens there, finds services for datagrams, and joins multicast
/// groups.
///
/// Keep one: it keeps a protection domain for each device that an address has led to, so that all connections of it share memory.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use rdma_safe::cm::Connector;
///
/// let connector = Connector::new();
/// let mut connection = connector.connect("10.0.0.2:7471")?;
/// let mut outbox = connection.pd().allocate(64)?;
/// outbox.fill_from(b"hello")?;
/// connection.send(outbox)?;
/// connection.wait(Duration::from_secs(5))?.ok()?;
/// connection.disconnect()?;
/// # Ok(())
/// # }
/// ```
///
/// Where the peer speaks first, its message must find a receive: see [`Route::prepare`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Connector {
    devices: Devices,
    source: Option<Address>,
    resolve_timeout: Duration,
    resolve_retries: u32,
    timeout: Duration,
    tos: Option<u8>,
    ack_timeout: Option<u8>,
}

impl Default for Connector {
    fn default() -> Self {
        Connector::new()
    }
}

impl Connector {
    /// With the defaults.
    pub fn new() -> Self {
        Connector {
            devices: Devices::default(),
            source: None,
            resolve_timeout: Duration::from_secs(2),
            resolve_retries: 2,
            timeout: Duration::from_secs(10),
            tos: None,
            ack_timeout: None,
        }
    }

    /// The address to connect from, with port 0 for any; the one that the network chooses unless set.
    pub fn source(mut self, address: impl Into<Address>) -> Self {
        self.source = Some(address.into());
        self
    }

    /// How long the device and then the way to a peer is looked for each time, and how often again; 2 s and twice unless set.
    pub fn resolve_timeout(mut self, timeout: Duration, retries: u32) -> Self {
        (self.resolve_timeout, self.resolve_retries) = (timeout, retries);
        self
    }

    /// How long the peer has to answer; 10 s unless set.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Type of service: [`Id::set_type_of_service`].
    pub fn type_of_service(mut self, tos: u8) -> Self {
        self.tos = Some(tos);
        self
    }

    /// How long an acknowledgement is waited for: [`Id::set_ack_timeout`]. A packet that is lost holds work up as long as that when
    /// none comes after it. What the kernel makes of the network unless set; on Ethernet that is 19, 2.1 s, and since Linux 6.12 at
    /// the latest 17, 0.54 s, whereas [`ConnectOptions`](crate::ConnectOptions) has 14, 67 ms.
    pub fn ack_timeout(mut self, exponent: u8) -> Self {
        self.ack_timeout = Some(exponent);
        self
    }

    /// Makes connections on the device of `pd` in this domain, instead of one that is opened for it.
    pub fn pd(self, pd: &ProtectionDomain) -> Self {
        self.devices.set(pd);
        self
    }

    /// Connects to the first of these addresses that accepts, each tried in turn, with an endpoint as [`Endpoint::builder`] has it.
    ///
    /// # Errors
    /// [`CmError::Connect`](super::CmError::Connect) says which step failed with the last of them, and why;
    /// [`CmError::NoAddress`](super::CmError::NoAddress) when a name is not known.
    pub fn connect(&self, addresses: impl ToSocketAddrs) -> Result<Connection> {
        first_of(addresses, |address| {
            let route = self.resolve(address)?;
            let pd = route.pd().clone();
            route.prepare(Endpoint::builder(&pd))?.connect(&[])
        })
    }

    /// As [`Connector::resolve`], of the first of these addresses that a device leads to.
    ///
    /// # Errors
    /// As there, of the last of them; [`CmError::NoAddress`](super::CmError::NoAddress) when a name is not known.
    pub fn resolve_first(&self, addresses: impl ToSocketAddrs) -> Result<Route> {
        first_of(addresses, |address| self.resolve(address))
    }

    /// Finds the device that leads to `peer`, and a way there.
    ///
    /// # Errors
    /// [`CmError::Connect`](super::CmError::Connect); [`CmError::Call`](super::CmError::Call).
    pub fn resolve(&self, peer: impl Into<Address>) -> Result<Route> {
        let (side, pd) = self.way(PortSpace::TCP, peer.into())?;
        Ok(Route { side, pd, timeout: self.timeout })
    }

    /// A way to `peer`, and the domain of the device that leads there.
    pub(super) fn way(&self, space: PortSpace, peer: Address) -> Result<(Side, ProtectionDomain)> {
        let mut side = self.side(space, peer)?;
        self.again(&mut side, Step::ResolveAddress, |id| id.resolve_address(self.source, peer, self.resolve_timeout))?;
        self.again(&mut side, Step::ResolveRoute, |id| id.resolve_route(self.resolve_timeout))?;
        let pd = self.devices.of(&side.id)?;
        Ok((side, pd))
    }

    /// The device for datagrams to `group`, and its domain.
    pub(super) fn device_for(&self, group: Address) -> Result<(Side, ProtectionDomain)> {
        let mut side = self.side(PortSpace::UDP, group)?;
        match self.source {
            Some(own) => side.id.bind(own).map_err(|error| side.call_failed(Step::ResolveAddress, error))?,
            None => {
                self.again(&mut side, Step::ResolveAddress, |id| id.resolve_address(None, group, self.resolve_timeout))?
            }
        }
        let pd = self.devices.of(&side.id)?;
        Ok((side, pd))
    }

    fn side(&self, space: PortSpace, peer: Address) -> Result<Side> {
        let mut side = Side::new(Id::new(&EventChannel::new()?, space)?, Some(peer));
        if let Some(tos) = self.tos {
            side.id.set_type_of_service(tos)?;
        }
        // Datagrams are not acknowledged.
        if let (Some(exponent), PortSpace::TCP) = (self.ack_timeout, space) {
            side.id.set_ack_timeout(exponent)?;
        }
        Ok(side)
    }

    /// How long a peer has to answer.
    pub(super) fn patience(&self) -> Duration {
        self.timeout
    }

    /// Tries a step until it succeeds, as often as is configured.
    fn again(&self, side: &mut Side, step: Step, begin: impl Fn(&mut Id) -> Result<()>) -> Result<()> {
        // The kernel tells by itself when the time is over.
        let margin = self.resolve_timeout.saturating_add(Duration::from_secs(1));
        let mut retries = self.resolve_retries;
        loop {
            if let Err(error) = begin(&mut side.id) {
                return Err(side.call_failed(step, error));
            }
            match side.event(step, margin)? {
                EventKind::AddressResolved if step == Step::ResolveAddress => return Ok(()),
                EventKind::RouteResolved if step == Step::ResolveRoute => return Ok(()),
                EventKind::AddressError(_) | EventKind::RouteError(_) if retries > 0 => retries -= 1,
                other => return Err(side.error(step, Cause::of(&other))),
            }
        }
    }
}

/// A way to a peer.
#[derive(Debug)]
pub struct Route {
    side: Side,
    pd: ProtectionDomain,
    timeout: Duration,
}

impl Route {
    /// The domain that the connector has for the device: make the endpoint, and what it sends and receives, of this one, or of any
    /// other of the device.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The address that a connection will be from.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// Makes the endpoint, so that receives can be posted before the peer can send.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use rdma_safe::Endpoint;
    /// use rdma_safe::cm::Connector;
    ///
    /// let route = Connector::new().resolve(([10, 0, 0, 2], 7471))?;
    /// let pd = route.pd().clone();
    /// let mut prepared = route.prepare(Endpoint::builder(&pd).send_depth(16))?;
    /// for _ in 0..16 {
    ///     prepared.receive(pd.allocate(4096)?)?;
    /// }
    /// let connection = prepared.connect(b"version 1")?;
    /// println!("{:?}", connection.private_data());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`CmError::OtherDevice`](super::CmError::OtherDevice) for a builder of another device; those of
    /// [`EndpointBuilder::build`](crate::EndpointBuilder::build).
    pub fn prepare(self, builder: EndpointBuilder<'_>) -> Result<PreparedRoute> {
        require(&self.side.id, builder.pd())?;
        let endpoint = self.side.endpoint(Step::Connect, builder)?;
        Ok(PreparedRoute { endpoint, side: self.side, timeout: self.timeout })
    }

    /// Asks the peer for the connection, with an endpoint of `set` and at most 56 bytes for it. Where the peer speaks first, let
    /// the builder take receives from a pool.
    ///
    /// # Errors
    /// As [`Route::prepare`] and [`PreparedRoute::connect`], and those of
    /// [`EndpointBuilder::build_in`](crate::EndpointBuilder::build_in). The set is then as it was.
    pub fn connect_in(
        self,
        builder: EndpointBuilder<'_>,
        set: &mut EndpointSet,
        private_data: &[u8],
    ) -> Result<Member> {
        let Route { side, timeout, .. } = self;
        Member::new(side, Step::Connect, builder, set, |side, endpoint| side.connect(endpoint, timeout, private_data))
    }
}

/// A way to a peer, with an endpoint that receives can be posted to.
#[derive(Debug)]
pub struct PreparedRoute {
    endpoint: Endpoint,
    side: Side,
    timeout: Duration,
}

impl PreparedRoute {
    /// Asks the peer for the connection, with at most 56 bytes for it.
    ///
    /// # Errors
    /// [`CmError::Connect`](super::CmError::Connect), with the peer's own words where it has refused;
    /// [`CmError::PrivateData`](super::CmError::PrivateData); [`CmError::Call`](super::CmError::Call).
    pub fn connect(self, private_data: &[u8]) -> Result<Connection> {
        let PreparedRoute { mut endpoint, mut side, timeout } = self;
        let said = side.connect(&mut endpoint, timeout, private_data)?;
        Ok(Connection::new(endpoint, side, said))
    }
}

impl Deref for PreparedRoute {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}

impl DerefMut for PreparedRoute {
    fn deref_mut(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }
}
