//! Datagram services that are found by address.

use std::net::ToSocketAddrs;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rdma_sys::RDMA_UDP_QKEY;

use super::address::try_each;
use super::attempt::{Cause, Step};
use super::devices::{Devices, require_device};
use super::handshake::{Arrival, Handshake, Outcome, Progress};
use super::listener::ListeningId;
use super::resolve::{Resolve, Resolved};
use super::side::Side;
use super::{
    Address, CmError, ConnectParameters, Connector, EventChannel, EventKind, Parameters, PortSpace, PrivateData,
};
use crate::endpoint::DatagramIdentity;
use crate::{DatagramEndpoint, Endpoint, EndpointBuilder, Error, Peer, ProtectionDomain, QueuePairState, Result};

/// The queue key of services that are found by address: `RDMA_UDP_QKEY`.
pub const DATAGRAM_QKEY: u32 = RDMA_UDP_QKEY;

impl Connector {
    /// Finds the device that leads to a service for datagrams, and the route.
    ///
    /// # Errors
    /// [`CmError::Connect`]; [`CmError::Call`].
    pub fn resolve_datagrams(&self, service: impl Into<Address>) -> Result<DatagramRoute> {
        self.start_resolve_datagrams(service)?.wait()
    }

    /// Like [`Connector::resolve_datagrams`], without blocking.
    ///
    /// # Errors
    /// Errors of the first step of [`Connector::resolve_datagrams`].
    pub fn start_resolve_datagrams(&self, service: impl Into<Address>) -> Result<Handshake<DatagramRoute>> {
        Resolve::start(self, PortSpace::UDP, service.into())
    }

    /// Builds a default endpoint, and looks up the service at the first of these addresses that replies.
    ///
    /// # Errors
    /// [`CmError::Connect`] with the step that failed for the last address, and its cause; [`CmError::NoAddress`] when
    /// a name is unknown.
    pub fn find_datagrams(&self, addresses: impl ToSocketAddrs) -> Result<(DatagramEndpoint, DatagramService)> {
        try_each(addresses, |address| {
            let route = self.resolve_datagrams(address)?;
            let endpoint = route.endpoint(Endpoint::builder(route.pd()))?;
            let service = route.find(&endpoint, &[])?;
            Ok((endpoint, service))
        })
    }
}

/// The route to a service for datagrams. Made by [`Connector::resolve_datagrams`].
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// use rdma_safe::Endpoint;
/// use rdma_safe::cm::Connector;
///
/// let route = Connector::new().resolve_datagrams(([10, 0, 0, 2], 7174))?;
/// let mut endpoint = route.endpoint(Endpoint::builder(route.pd()).inline_data(64))?;
/// endpoint.receive(route.pd().allocate(1024)?)?;
/// let service = route.find(&endpoint, b"version 1")?;
/// endpoint.send_inline(b"hello", &service.peer)?;
/// loop {
///     let done = endpoint.wait(Duration::from_secs(5))?.ok()?;
///     if done.sender.is_some() {
///         println!("{:?}", done.work.buffer.as_deref());
///         break;
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DatagramRoute {
    side: Side,
    pd: ProtectionDomain,
    timeout: Duration,
}

impl Resolved for DatagramRoute {
    const HAS_ROUTE: bool = true;

    fn new(side: Side, pd: ProtectionDomain, connector: &Connector, _: Address) -> Self {
        DatagramRoute { side, pd, timeout: connector.timeout }
    }
}

impl DatagramRoute {
    /// The connector's domain of the device.
    ///
    /// Build the endpoint and its buffers in this domain, or in another domain of the device.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The local address.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// Builds a matching endpoint: on the port of the route, with the queue key [`DATAGRAM_QKEY`].
    ///
    /// # Errors
    /// [`CmError::OtherDevice`] for a builder of another device; the errors of [`EndpointBuilder::build_datagrams`].
    pub fn endpoint(&self, builder: EndpointBuilder<'_>) -> Result<DatagramEndpoint> {
        self.side.datagrams(Step::FindService, builder)
    }

    /// Looks up the queue pair of the service, with at most 180 bytes of private data.
    ///
    /// This is the service ID resolution of InfiniBand. An endpoint can be used for several lookups. The service does
    /// not learn the endpoint's address until it receives a datagram.
    ///
    /// # Errors
    /// [`CmError::Connect`], with [`Cause::Refused`] when no service listens or the request was rejected;
    /// [`CmError::OtherDevice`] and [`CmError::OtherQueueKey`] for an endpoint that does not match the route;
    /// [`CmError::PrivateData`].
    pub fn find(self, endpoint: impl Into<DatagramIdentity>, private_data: &[u8]) -> Result<DatagramService> {
        self.start_find(endpoint, private_data)?.wait()
    }

    /// Like [`DatagramRoute::find`], without blocking. The endpoint may be used or dropped in the meantime.
    ///
    /// # Errors
    /// [`CmError::OtherDevice`], [`CmError::OtherQueueKey`] and [`CmError::PrivateData`], as with
    /// [`DatagramRoute::find`]; [`CmError::Connect`] if the request cannot be sent.
    pub fn start_find(
        mut self,
        endpoint: impl Into<DatagramIdentity>,
        private_data: &[u8],
    ) -> Result<Handshake<DatagramService>> {
        let endpoint = endpoint.into();
        self.side.require_datagrams(Step::FindService, &endpoint)?;
        let parameters = ConnectParameters::new(endpoint.qp_num()).private_data(private_data)?;
        self.side.id.connect(&parameters).map_err(|error| self.side.call_failed(Step::FindService, error))?;
        Ok(Handshake::waiting(endpoint.pd().clone(), self.side, Step::FindService, self.timeout))
    }
}

impl Outcome for DatagramService {
    type Error = Error;
    type Context = ();
    /// The domain of the endpoint.
    type State = ProtectionDomain;

    fn handle(handshake: Handshake<Self>, arrival: Arrival, (): &mut ()) -> Result<Progress<Self>> {
        let Handshake { state: pd, side, .. } = &handshake;
        match arrival.event(side, Step::FindService)? {
            EventKind::Established(Parameters::Datagrams(found)) => {
                let peer = Peer::new(pd, &found.address, found.qp_num, found.qkey)?;
                Ok(Progress::Ready(DatagramService { peer, private_data: found.private_data }))
            }
            other => Err(side.error(Step::FindService, Cause::of(&other))),
        }
    }
}

/// A datagram service that was looked up. Made by [`DatagramRoute::find`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DatagramService {
    /// The peer to send to, from any endpoint of the same domain.
    pub peer: Peer,
    /// Private data of the reply, padded with zeros.
    pub private_data: PrivateData,
}

/// Listens at an address for lookups of a datagram service.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// use rdma_safe::Endpoint;
/// use rdma_safe::cm::DatagramListener;
///
/// let mut listener = DatagramListener::bind("10.0.0.2:7174")?;
/// let request = loop {
///     if let Some(request) = listener.next(Duration::from_secs(60))? {
///         break request;
///     }
/// };
/// // One endpoint can serve all peers.
/// let pd = request.pd()?;
/// let mut endpoint = request.endpoint(Endpoint::builder(&pd).inline_data(64))?;
/// endpoint.receive(pd.allocate(1024)?)?;
/// request.accept(&endpoint, b"version 1")?;
/// let done = endpoint.wait(Duration::from_secs(5))?.ok()?;
/// if let Some(sender) = done.sender {
///     endpoint.send_inline(b"hello", &endpoint.peer_of(&sender)?)?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DatagramListener(ListeningId);

impl DatagramListener {
    /// Listens at the first of these addresses that is available, with a backlog of 128 requests.
    ///
    /// An unspecified IP address stands for all addresses of this host, on any device. Port 0 selects a free port.
    ///
    /// # Errors
    /// Like [`Listener::bind`](super::Listener::bind).
    pub fn bind(addresses: impl ToSocketAddrs) -> Result<Self> {
        try_each(addresses, |address| DatagramListener::bind_with(address, 128))
    }

    /// Like [`DatagramListener::bind`], for one address, with a backlog of `backlog` requests.
    ///
    /// Further requests are dropped. The peer retries them after seconds.
    ///
    /// # Errors
    /// Like [`DatagramListener::bind`].
    pub fn bind_with(address: impl Into<Address>, backlog: u32) -> Result<Self> {
        Ok(DatagramListener(ListeningId::new(PortSpace::UDP, address.into(), backlog)?))
    }

    /// Uses this domain for endpoints on its device, instead of opening the device.
    #[must_use]
    pub fn pd(mut self, pd: &ProtectionDomain) -> Self {
        self.0.devices = self.0.devices.with(pd);
        self
    }

    /// Shares the domains of devices with others that use the same `devices`. Call it before [`DatagramListener::pd`].
    #[must_use]
    pub fn devices(mut self, devices: &Devices) -> Self {
        self.0.devices = devices.clone();
        self
    }

    /// The address that it listens at, including the actual port.
    #[must_use]
    pub fn local_address(&self) -> Address {
        self.0.local
    }

    /// The listener's domain of the device that has its address, and the port. `None` if it listens at all addresses.
    ///
    /// # Errors
    /// Errors of opening the device, for the first call.
    pub fn device(&self) -> Result<Option<(ProtectionDomain, u8)>> {
        let id = self.0.id();
        if id.device_name().is_none() {
            return Ok(None);
        }
        Ok(Some((self.0.devices.domain_of(id)?, id.port().unwrap_or(1))))
    }

    /// Whether [`DatagramListener::next`] has seen the removal of the device. After it, no request arrives: drop the listener.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        self.0.is_removed()
    }

    /// The channel that becomes readable when there is a request, for `epoll(7)` and async runtimes.
    ///
    /// Then call [`DatagramListener::next`] with a timeout of zero until it returns `None`.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        self.0.channel()
    }

    /// Waits for the next request, for `timeout` at most. Returns `None` after the timeout.
    ///
    /// A timeout of zero does not block.
    ///
    /// An answered request can come again: Linux forgets it, and reports a retransmission that arrives later as another request.
    ///
    /// # Errors
    /// Like [`Listener::next`](super::Listener::next).
    pub fn next(&mut self, timeout: Duration) -> Result<Option<DatagramRequest>> {
        let Some((mut id, Parameters::Datagrams(asked))) = self.0.next(timeout)? else { return Ok(None) };
        let moved = EventChannel::new().and_then(|channel| id.migrate(&channel));
        let side = Side::new(id, None);
        moved.map_err(|error| side.migrate_failed(error))?;
        Ok(Some(DatagramRequest { side, private_data: asked.private_data, devices: self.0.devices.clone() }))
    }
}

/// The descriptor of [`DatagramListener::channel`].
impl AsFd for DatagramListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel().as_fd()
    }
}

/// A lookup of the service by a peer. Dropping it rejects.
#[derive(Debug)]
pub struct DatagramRequest {
    side: Side,
    private_data: PrivateData,
    devices: Devices,
}

impl DatagramRequest {
    /// Private data of the request, padded with zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The address of the peer. Its queue pair is unknown until its first datagram arrives, see
    /// [`DatagramSender`](crate::endpoint::DatagramSender).
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

    /// Builds a matching endpoint: on the port of the request, with the queue key [`DATAGRAM_QKEY`].
    ///
    /// # Errors
    /// Like [`DatagramRoute::endpoint`].
    pub fn endpoint(&self, builder: EndpointBuilder<'_>) -> Result<DatagramEndpoint> {
        self.side.datagrams(Step::Accept, builder)
    }

    /// Replies with the address of this endpoint, and at most 136 bytes of private data.
    ///
    /// An endpoint can answer several requests. Post its receives first. The delivery of the answer is not confirmed; a
    /// peer without an answer retries.
    ///
    /// # Errors
    /// [`CmError::OtherDevice`] and [`CmError::OtherQueueKey`] for an endpoint that does not match the request;
    /// [`CmError::PrivateData`]; [`CmError::Connect`]. The request is then rejected.
    pub fn accept(mut self, endpoint: impl Into<DatagramIdentity>, private_data: &[u8]) -> Result<()> {
        let endpoint = endpoint.into();
        self.side.require_datagrams(Step::Accept, &endpoint)?;
        let parameters = ConnectParameters::new(endpoint.qp_num()).private_data(private_data)?;
        self.side.id.accept(&parameters).map_err(|error| self.side.call_failed(Step::Accept, error))
    }

    /// Rejects the request, with at most 136 bytes of private data.
    ///
    /// # Errors
    /// [`CmError::PrivateData`], [`CmError::Call`]; the request is then rejected without private data.
    pub fn reject(mut self, private_data: &[u8]) -> Result<()> {
        self.side.id.reject(private_data)
    }
}

impl Side {
    /// Builds a datagram endpoint on the port that was found.
    pub(super) fn datagrams(&self, step: Step, builder: EndpointBuilder<'_>) -> Result<DatagramEndpoint> {
        require_device(&self.id, builder.pd())?;
        let (builder, qkey) = self.configure(step, builder)?;
        builder.build_datagrams(qkey.unwrap_or(DATAGRAM_QKEY))
    }

    /// Checks that the endpoint's device, port and queue key match the id.
    pub(super) fn require_datagrams(&self, step: Step, endpoint: &DatagramIdentity) -> Result<()> {
        require_device(&self.id, endpoint.pd())?;
        let found = self.attributes(step, QueuePairState::INIT)?;
        let (port, own) = (self.port(), endpoint.port());
        if port != own {
            let name = |port: u8| format!("port {port} of {}", endpoint.pd().context().device_name());
            return Err(CmError::OtherDevice { device: name(port), endpoint: name(own) }.into());
        }
        let (qkey, own) = (found.qkey().unwrap_or(DATAGRAM_QKEY), endpoint.qkey());
        match qkey == own {
            true => Ok(()),
            false => Err(CmError::OtherQueueKey { qkey, endpoint: own }.into()),
        }
    }
}
