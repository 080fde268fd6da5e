//! Datagrams between those who are found by address.

use std::net::ToSocketAddrs;
use std::time::Duration;

use rdma_sys::RDMA_UDP_QKEY;

use super::address::first_of;
use super::attempt::{Cause, Step};
use super::devices::{Devices, require};
use super::listener::Listening;
use super::side::Side;
use super::{
    Address, CmError, ConnectParameters, Connector, EventChannel, EventKind, Parameters, PortSpace, PrivateData,
};
use crate::{DatagramEndpoint, Endpoint, EndpointBuilder, Peer, ProtectionDomain, QueuePairState, Result};

/// The queue key that all have who are found by address: `RDMA_UDP_QKEY`.
pub const DATAGRAM_QKEY: u32 = RDMA_UDP_QKEY;

impl Connector {
    /// Finds the device that leads to a service for datagrams, and a way there.
    ///
    /// # Errors
    /// [`CmError::Connect`]; [`CmError::Call`].
    pub fn resolve_datagrams(&self, service: impl Into<Address>) -> Result<DatagramRoute> {
        let (side, pd) = self.way(PortSpace::UDP, service.into())?;
        Ok(DatagramRoute { side, pd, timeout: self.patience() })
    }

    /// Makes an endpoint, as [`Endpoint::builder`] has it, and finds the first of these addresses that answers.
    ///
    /// # Errors
    /// [`CmError::Connect`] says which step failed with the last of them, and why; [`CmError::NoAddress`] when a name is not known.
    pub fn find_datagrams(&self, addresses: impl ToSocketAddrs) -> Result<(DatagramEndpoint, DatagramService)> {
        first_of(addresses, |address| {
            let route = self.resolve_datagrams(address)?;
            let endpoint = route.endpoint(Endpoint::builder(route.pd()))?;
            let service = route.find(&endpoint, &[])?;
            Ok((endpoint, service))
        })
    }
}

/// A way to a service for datagrams. Made by [`Connector::resolve_datagrams`].
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
/// endpoint.send_inline(b"who are you?", &service.peer)?;
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

impl DatagramRoute {
    /// The domain that the connector has for the device: make the endpoint, and what it sends and receives, of this one, or of any
    /// other of the device.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The address of this end.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// Makes an endpoint that can be used here: on the port of the route, with the queue key [`DATAGRAM_QKEY`].
    ///
    /// # Errors
    /// [`CmError::OtherDevice`] for a builder of another device; those of [`EndpointBuilder::build_datagrams`].
    pub fn endpoint(&self, builder: EndpointBuilder<'_>) -> Result<DatagramEndpoint> {
        self.side.datagrams(Step::FindService, builder)
    }

    /// Asks the service for its queue pair, with at most 180 bytes for it (InfiniBand: service id resolution). The endpoint may be
    /// one that has found others already. The service is not told of the endpoint: it learns of it by its first datagram.
    ///
    /// # Errors
    /// [`CmError::Connect`], with [`Cause::Refused`] when nobody listens there or the request was refused;
    /// [`CmError::OtherDevice`] and [`CmError::OtherQueueKey`] for an endpoint that cannot be used here; [`CmError::PrivateData`].
    pub fn find(mut self, endpoint: &DatagramEndpoint, private_data: &[u8]) -> Result<DatagramService> {
        self.side.require_datagrams(Step::FindService, endpoint)?;
        let parameters = ConnectParameters::new(endpoint.queue_pair().number()).private_data(private_data)?;
        self.side.id.connect(&parameters).map_err(|error| self.side.call_failed(Step::FindService, error))?;
        match self.side.event(Step::FindService, self.timeout)? {
            EventKind::Established(Parameters::Datagrams(found)) => {
                let peer = endpoint.peer_at(&found.address, found.qp_num)?.with_qkey(found.qkey);
                Ok(DatagramService { peer, private_data: found.private_data })
            }
            other => Err(self.side.error(Step::FindService, Cause::of(&other))),
        }
    }
}

/// A service for datagrams that was found. Made by [`DatagramRoute::find`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DatagramService {
    /// Where to send to, from the endpoint that it was found for and any other of its domain.
    pub peer: Peer,
    /// What it has answered, padded with zeros.
    pub private_data: PrivateData,
}

/// Listens at an address for those who look for a service for datagrams.
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
/// // One endpoint can serve all who ask.
/// let pd = request.pd()?;
/// let mut endpoint = request.endpoint(Endpoint::builder(&pd).inline_data(64))?;
/// endpoint.receive(pd.allocate(1024)?)?;
/// request.answer(&endpoint, b"version 1")?;
/// let done = endpoint.wait(Duration::from_secs(5))?.ok()?;
/// if let Some(sender) = done.sender {
///     endpoint.send_inline(b"it is me", &endpoint.peer_of(&sender)?)?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DatagramListener(Listening);

impl DatagramListener {
    /// Listens at the first of these addresses that can be had, with room for 128 requests that were not taken yet. An unspecified
    /// IP address is every one of this host, on any device; port 0 is a free one.
    ///
    /// # Errors
    /// As [`Listener::bind`](super::Listener::bind).
    pub fn bind(addresses: impl ToSocketAddrs) -> Result<Self> {
        first_of(addresses, |address| DatagramListener::bind_with(address, 128))
    }

    /// As [`DatagramListener::bind`], of one address, with room for `backlog` requests. What comes beyond is dropped, and asked for
    /// again by the peer, after seconds.
    ///
    /// # Errors
    /// As there.
    pub fn bind_with(address: impl Into<Address>, backlog: u32) -> Result<Self> {
        Ok(DatagramListener(Listening::new(PortSpace::UDP, address.into(), backlog)?))
    }

    /// Makes endpoints on the device of `pd` in this domain, instead of one that is opened for it.
    #[must_use]
    pub fn pd(self, pd: &ProtectionDomain) -> Self {
        self.0.devices.set(pd);
        self
    }

    /// The address that it listens at, with the port that it got.
    #[must_use]
    pub fn local_address(&self) -> Address {
        self.0.local
    }

    /// The channel whose descriptor becomes readable when there is a request: for `epoll(7)` and async runtimes. Then call
    /// [`DatagramListener::next`] with no time to wait.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        self.0.channel()
    }

    /// Waits for the next request, at most for `timeout`; `None` when it passed.
    ///
    /// # Errors
    /// [`CmError::Call`]; [`CmError::Connect`] when the device goes away.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<DatagramRequest>> {
        let Some((mut id, Parameters::Datagrams(asked))) = self.0.next(timeout)? else { return Ok(None) };
        let moved = EventChannel::new().and_then(|channel| id.migrate(&channel));
        let side = Side::new(id, None);
        moved.map_err(|error| side.not_taken(error))?;
        Ok(Some(DatagramRequest { side, private_data: asked.private_data, devices: self.0.devices.clone() }))
    }
}

/// Somebody looks for the service. Dropping it refuses.
#[derive(Debug)]
pub struct DatagramRequest {
    side: Side,
    private_data: PrivateData,
    devices: Devices,
}

impl DatagramRequest {
    /// What the peer has to say; padded with zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The address of the peer. Its queue pair is not known before its first datagram, whose [`Sender`](crate::Sender) it is.
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

    /// Makes an endpoint that can answer: on the port that the request came by, with the queue key [`DATAGRAM_QKEY`].
    ///
    /// # Errors
    /// As [`DatagramRoute::endpoint`].
    pub fn endpoint(&self, builder: EndpointBuilder<'_>) -> Result<DatagramEndpoint> {
        self.side.datagrams(Step::Accept, builder)
    }

    /// Tells the peer to send to this endpoint, with at most 136 bytes for it. It may be one that has answered others already, and
    /// has its receives posted. Whether the answer arrives nobody says; a peer that has got none asks again.
    ///
    /// # Errors
    /// [`CmError::OtherDevice`] and [`CmError::OtherQueueKey`] for an endpoint that cannot answer; [`CmError::PrivateData`];
    /// [`CmError::Connect`]. The peer is refused then.
    pub fn answer(mut self, endpoint: &DatagramEndpoint, private_data: &[u8]) -> Result<()> {
        self.side.require_datagrams(Step::Accept, endpoint)?;
        let parameters = ConnectParameters::new(endpoint.queue_pair().number()).private_data(private_data)?;
        self.side.id.accept(&parameters).map_err(|error| self.side.call_failed(Step::Accept, error))
    }

    /// Refuses, with at most 136 bytes for the peer.
    ///
    /// # Errors
    /// [`CmError::PrivateData`], [`CmError::Call`]; the peer is refused without them then.
    pub fn reject(mut self, private_data: &[u8]) -> Result<()> {
        self.side.id.reject(private_data)
    }
}

impl Side {
    /// An endpoint for datagrams, on the port that was found.
    pub(super) fn datagrams(&self, step: Step, builder: EndpointBuilder<'_>) -> Result<DatagramEndpoint> {
        require(&self.id, builder.pd())?;
        let (builder, qkey) = self.placed(step, builder)?;
        builder.build_datagrams(qkey.unwrap_or(DATAGRAM_QKEY))
    }

    /// Whether datagrams of this endpoint go the way that was found, and those that come that way get to it.
    pub(super) fn require_datagrams(&self, step: Step, endpoint: &DatagramEndpoint) -> Result<()> {
        require(&self.id, endpoint.pd())?;
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
