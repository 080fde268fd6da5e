//! Connecting to an address.

use std::net::ToSocketAddrs;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::address::try_each;
use super::attempt::Step;
use super::connection::{Connection, Establish};
use super::devices::{Devices, require_device};
use super::handshake::Handshake;
use super::resolve::{Resolve, Resolved};
use super::side::Side;
use super::{Address, EventChannel, Id, PortSpace, PrivateData, SetConnection};
use crate::{Endpoint, EndpointBuilder, EndpointSet, ProtectionDomain, Result};

/// Connects to addresses, looks up services for datagrams, and joins multicast groups.
///
/// Reuse one connector: it keeps one protection domain for each device, so all its connections on a device can share
/// memory.
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
/// If the peer sends first, post receives before connecting: see [`Route::prepare`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Connector {
    pub(super) devices: Devices,
    pub(super) source: Option<Address>,
    pub(super) resolve_timeout: Duration,
    pub(super) resolve_retries: u32,
    /// Time for the peer to reply, and to confirm a disconnect.
    pub(super) timeout: Duration,
    tos: Option<u8>,
    ack_timeout: Option<u8>,
}

impl Default for Connector {
    fn default() -> Self {
        Connector::new()
    }
}

impl Connector {
    /// A connector with the default settings.
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

    /// Local address, with port 0 for any port; chosen by the network by default.
    pub fn source(mut self, address: impl Into<Address>) -> Self {
        self.source = Some(address.into());
        self
    }

    /// Timeout for resolving the address, and then the route, and the number of retries of each; 2 s and 2 by default.
    pub fn resolve_timeout(mut self, timeout: Duration, retries: u32) -> Self {
        (self.resolve_timeout, self.resolve_retries) = (timeout, retries);
        self
    }

    /// Time for the peer to reply, and to confirm a disconnect; 10 s by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Type of service: [`Id::set_type_of_service`].
    pub fn type_of_service(mut self, tos: u8) -> Self {
        self.tos = Some(tos);
        self
    }

    /// ACK timeout: [`Id::set_ack_timeout`].
    ///
    /// A lost packet delays its connection by this time if no packet follows it. By default, the kernel chooses a value
    /// for the network. On Ethernet that is 19 (2.1 s), and since Linux 6.12 at most 17 (0.54 s). The default of
    /// [`ConnectOptions`](crate::ConnectOptions) is 14 (67 ms).
    pub fn ack_timeout(mut self, exponent: u8) -> Self {
        self.ack_timeout = Some(exponent);
        self
    }

    /// Uses this domain for connections on its device, instead of opening the device.
    pub fn pd(mut self, pd: &ProtectionDomain) -> Self {
        self.devices = self.devices.with(pd);
        self
    }

    /// Shares the domains of devices with others that use the same `devices`. Call it before [`Connector::pd`].
    pub fn devices(mut self, devices: &Devices) -> Self {
        self.devices = devices.clone();
        self
    }

    /// Connects to the first of these addresses that accepts, with a default [`Endpoint::builder`].
    ///
    /// # Errors
    /// [`CmError::Connect`](super::CmError::Connect) with the step that failed for the last address, and its cause;
    /// [`CmError::NoAddress`](super::CmError::NoAddress) when a name is unknown.
    pub fn connect(&self, addresses: impl ToSocketAddrs) -> Result<Connection> {
        try_each(addresses, |address| {
            let route = self.resolve(address)?;
            let pd = route.pd().clone();
            route.prepare(Endpoint::builder(&pd))?.connect(&[])
        })
    }

    /// Like [`Connector::resolve`], for the first of these addresses that a device leads to.
    ///
    /// If the peer then refuses the connection, the next address is not tried, unlike with [`Connector::connect`].
    ///
    /// # Errors
    /// Like [`Connector::resolve`], for the last address; [`CmError::NoAddress`](super::CmError::NoAddress) when a name
    /// is unknown.
    pub fn resolve_first(&self, addresses: impl ToSocketAddrs) -> Result<Route> {
        try_each(addresses, |address| self.resolve(address))
    }

    /// Finds the device that leads to `peer`, and the route.
    ///
    /// # Errors
    /// [`CmError::Connect`](super::CmError::Connect); [`CmError::Call`](super::CmError::Call).
    pub fn resolve(&self, peer: impl Into<Address>) -> Result<Route> {
        self.start_resolve(peer)?.wait()
    }

    /// Like [`Connector::resolve`], without blocking.
    ///
    /// To look up a name, use [`AddressQuery`](super::AddressQuery) or the resolver of a runtime before.
    ///
    /// # Errors
    /// Errors of the first step of [`Connector::resolve`].
    pub fn start_resolve(&self, peer: impl Into<Address>) -> Result<Handshake<Route>> {
        Resolve::start(self, PortSpace::TCP, peer.into())
    }

    pub(super) fn side(&self, space: PortSpace, peer: Address) -> Result<Side> {
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
}

/// The route to a peer.
#[derive(Debug)]
pub struct Route {
    side: Side,
    pd: ProtectionDomain,
    timeout: Duration,
}

impl Resolved for Route {
    const HAS_ROUTE: bool = true;

    fn new(side: Side, pd: ProtectionDomain, connector: &Connector, _: Address) -> Self {
        Route { side, pd, timeout: connector.timeout }
    }
}

impl Route {
    /// The connector's domain of the device.
    ///
    /// Build the endpoint and its buffers in this domain, or in another domain of the device.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The local address of the connection.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// Builds the endpoint, so that receives can be posted before the peer sends.
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
    /// [`CmError::OtherDevice`](super::CmError::OtherDevice) for a builder of another device; the errors of
    /// [`EndpointBuilder::build`](crate::EndpointBuilder::build).
    pub fn prepare(self, builder: EndpointBuilder<'_>) -> Result<PreparedRoute> {
        require_device(&self.side.id, builder.pd())?;
        let endpoint = self.side.endpoint(Step::Connect, builder)?;
        Ok(PreparedRoute { endpoint, side: self.side, timeout: self.timeout })
    }

    /// Requests the connection, with an endpoint in `set` and at most 56 bytes of private data.
    ///
    /// If the peer sends first, build the endpoint with a receive pool.
    ///
    /// # Errors
    /// Like [`Route::prepare`] and [`PreparedRoute::connect`]; the errors of
    /// [`EndpointBuilder::build_in`](crate::EndpointBuilder::build_in). The set is then unchanged.
    pub fn connect_in(
        self,
        builder: EndpointBuilder<'_>,
        set: &mut EndpointSet,
        private_data: &[u8],
    ) -> Result<SetConnection> {
        self.start_connect_in(builder, set, private_data)?.wait_or_remove(set)
    }

    /// Like [`Route::connect_in`], without blocking.
    ///
    /// The endpoint is in the set from now on, see [`Handshake::key`]. The peer cannot send before
    /// [`Handshake::advance_in`] has handled its reply, so receives that are posted until then are in time.
    ///
    /// # Errors
    /// Like [`Route::prepare`] and [`PreparedRoute::start_connect`]; the errors of
    /// [`EndpointBuilder::build_in`](crate::EndpointBuilder::build_in). The set is then unchanged.
    pub fn start_connect_in(
        self,
        builder: EndpointBuilder<'_>,
        set: &mut EndpointSet,
        private_data: &[u8],
    ) -> Result<Handshake<SetConnection>> {
        let Route { side, timeout, .. } = self;
        SetConnection::start(side, Step::Connect, timeout, builder, set, |side, endpoint| {
            side.connect(endpoint, private_data).map(|()| PrivateData::EMPTY)
        })
    }
}

/// The route to a peer, with an endpoint that receives can be posted to.
#[derive(Debug)]
pub struct PreparedRoute {
    // Dropped first, so that nothing arrives after the id is destroyed.
    endpoint: Endpoint,
    side: Side,
    timeout: Duration,
}

impl PreparedRoute {
    /// Requests the connection, with at most 56 bytes of private data.
    ///
    /// # Errors
    /// [`CmError::Connect`](super::CmError::Connect), with the peer's private data if it has rejected;
    /// [`CmError::PrivateData`](super::CmError::PrivateData); [`CmError::Call`](super::CmError::Call).
    pub fn connect(self, private_data: &[u8]) -> Result<Connection> {
        self.start_connect(private_data)?.wait()
    }

    /// Like [`PreparedRoute::connect`], without blocking.
    ///
    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData); [`CmError::Connect`](super::CmError::Connect) if the
    /// request cannot be sent.
    pub fn start_connect(mut self, private_data: &[u8]) -> Result<Handshake<Connection>> {
        self.side.connect(&self.endpoint, private_data)?;
        let PreparedRoute { endpoint, side, timeout } = self;
        let state = Establish { endpoint, asked: PrivateData::EMPTY };
        Ok(Handshake::waiting(state, side, Step::Connect, timeout))
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
