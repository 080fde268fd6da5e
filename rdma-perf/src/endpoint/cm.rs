//! Queue pairs connected by librdmacm, for `--rdma-cm`.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rdma_safe::cm::{ConnectParameters, EventChannel, EventKind, Id, PortSpace};
use rdma_safe::{Access, QueuePair, QueuePairAddress, QueuePairState};
use serde::{Deserialize, Serialize};

use crate::interrupt::Check;
use crate::plan::Plan;

/// Timeout of one attempt to resolve an address or a route, and number of retries.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(2);
const RESOLVE_RETRIES: u32 = 2;
/// Longest time until the peer answers a connection request.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest time between two requests of a client.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which a waiting thread checks whether to continue.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// RNR NAK timer, the same as for queue pairs connected without librdmacm.
const MIN_RNR_TIMER: u8 = 12;

/// Address at which a server listens for the queue pairs of one client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct CmAddress {
    pub(crate) address: SocketAddr,
    /// Identifies the client, which received it over the control connection.
    token: u64,
}

/// Private data of a connection request: the server's queue pair to connect to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PrivateData {
    token: u64,
    pub(crate) worker: u32,
    pub(crate) lane: u32,
}

impl PrivateData {
    const LEN: usize = 16;

    fn encode(self) -> [u8; PrivateData::LEN] {
        let mut bytes = [0; PrivateData::LEN];
        bytes[..8].copy_from_slice(&self.token.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.worker.to_be_bytes());
        bytes[12..].copy_from_slice(&self.lane.to_be_bytes());
        bytes
    }

    /// Decodes bytes that may be followed by zeros.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (token, rest) = bytes.split_first_chunk()?;
        let (worker, rest) = rest.split_first_chunk()?;
        let (lane, _) = rest.split_first_chunk()?;
        Some(PrivateData {
            token: u64::from_be_bytes(*token),
            worker: u32::from_be_bytes(*worker),
            lane: u32::from_be_bytes(*lane),
        })
    }
}

/// Device and port of a test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DevicePort<'p> {
    pub(crate) device: &'p str,
    pub(crate) port: u8,
}

impl DevicePort<'_> {
    /// Fails if `id` uses another device or port.
    fn check(self, id: &Id) -> Result<()> {
        let (device, port) = (id.device_name().unwrap_or_default(), id.port().unwrap_or(self.port));
        if device == self.device && port == self.port {
            return Ok(());
        }
        bail!(
            "the server's address is reached over port {port} of {device}, but the test uses port {} of {}: give --device and \
             --ib-port accordingly",
            self.port,
            self.device
        )
    }
}

/// A queue pair to connect, and its peer's address.
pub(crate) struct CmQueuePair<'u> {
    pub(crate) qp: &'u mut QueuePair,
    pub(crate) own: QueuePairAddress,
    pub(crate) peer: QueuePairAddress,
}

impl CmQueuePair<'_> {
    /// Reads and atomics that this end serves as responder, and that it issues as requester; the same as for queue
    /// pairs connected without librdmacm.
    fn rd_atomic_depths(&self, plan: &Plan) -> (u8, u8) {
        let asks = self.qp.context().attributes().max_qp_init_rd_atom().min(16) as u8;
        (self.own.rd_atomic, plan.outstanding.unwrap_or(asks.min(self.peer.rd_atomic)))
    }

    fn parameters(&self, plan: &Plan) -> ConnectParameters {
        let (serves, asks) = self.rd_atomic_depths(plan);
        ConnectParameters::new(self.qp.number())
            .responder_resources(serves)
            .initiator_depth(asks)
            .retry_count(plan.connection.retries)
            .rnr_retry_count(plan.connection.rnr_retries)
            .srq(self.qp.shared_receive_queue().is_some())
    }

    /// Moves the queue pair to INIT, with the port and partition of `id`.
    fn move_to_init(&mut self, id: &Id) -> Result<()> {
        Ok(self.qp.modify(&id.attributes(QueuePairState::INIT)?.set_access(Access::REMOTE))?)
    }

    /// Moves the queue pair to RTS, with the plan's attributes in place of librdmacm's defaults.
    fn move_to_rts(&mut self, id: &Id, plan: &Plan) -> Result<()> {
        let (serves, asks) = self.rd_atomic_depths(plan);
        let wanted = &plan.connection;
        let mut ready = id.attributes(QueuePairState::RTR)?;
        ready = ready.set_max_dest_rd_atomic(serves).set_min_rnr_timer(MIN_RNR_TIMER);
        if let Some(mtu) = plan.mtu {
            ready = ready.set_path_mtu(mtu);
        }
        if let Some(mut way) = ready.address() {
            if wanted.service_level != 0 {
                way.sl = wanted.service_level;
            }
            if let Some(route) = way.route.as_mut().filter(|_| wanted.traffic_class != 0) {
                route.traffic_class = wanted.traffic_class;
            }
            ready = ready.set_address(way);
        }
        self.qp.modify(&ready)?;
        let sends = id
            .attributes(QueuePairState::RTS)?
            .set_timeout(wanted.timeout)
            .set_retry_count(wanted.retries)
            .set_rnr_retry(wanted.rnr_retries)
            .set_max_rd_atomic(asks);
        Ok(self.qp.modify(&sends)?)
    }
}

/// The server's end of connections by librdmacm.
pub(crate) struct CmListener {
    // Dropped before its channel.
    _listener: Id,
    channel: EventChannel,
    address: CmAddress,
}

/// An event at the listener.
pub(crate) enum CmEvent {
    /// A valid connection request.
    Request(PrivateData, Id),
    /// A client has completed a connection.
    Established,
}

impl CmListener {
    /// Listens on an ephemeral port of `ip`.
    pub(crate) fn new(ip: IpAddr, backlog: u32) -> Result<Self> {
        let channel = EventChannel::new()?;
        let mut listener = Id::new(&channel, PortSpace::TCP)?;
        let what = || format!("cannot listen for rdmacm connections at {ip}; an RDMA device must have that address");
        listener.bind((ip, 0)).with_context(what)?;
        listener.listen(backlog).with_context(what)?;
        let address = listener.local_address().and_then(|address| address.ip()).with_context(what)?;
        // A hasher has random keys.
        let address = CmAddress { address, token: RandomState::new().build_hasher().finish() };
        Ok(CmListener { _listener: listener, channel, address })
    }

    pub(crate) fn cm_address(&self) -> CmAddress {
        self.address
    }

    /// Waits for the next event, as long as `check` succeeds. Rejects requests without the token.
    pub(crate) fn next(&self, check: Check<'_>) -> Result<CmEvent> {
        loop {
            match next(&self.channel, REQUEST_TIMEOUT, check)? {
                EventKind::ConnectRequest(mut id, parameters) => {
                    match PrivateData::decode(parameters.private_data()).filter(|data| data.token == self.address.token)
                    {
                        Some(data) => return Ok(CmEvent::Request(data, id)),
                        // Rejecting fails if the client is gone.
                        None => drop(id.reject(&[])),
                    }
                }
                EventKind::Established(_) => return Ok(CmEvent::Established),
                other => bail!("a connection by rdmacm failed: {}", describe(&other)),
            }
        }
    }
}

/// Accepts the request of `id`. The connection lasts as long as `id`.
pub(crate) fn accept(lane: &mut CmQueuePair<'_>, id: &mut Id, device_port: DevicePort<'_>, plan: &Plan) -> Result<()> {
    device_port.check(id)?;
    lane.move_to_init(id)?;
    lane.move_to_rts(id, plan)?;
    Ok(id.accept(&lane.parameters(plan))?)
}

/// The client's end of connections by librdmacm.
pub(crate) struct CmConnector<'v> {
    channel: EventChannel,
    pub(crate) address: CmAddress,
    /// Address to connect from, if it is known.
    pub(crate) source: Option<IpAddr>,
    pub(crate) device_port: DevicePort<'v>,
}

impl<'v> CmConnector<'v> {
    pub(crate) fn new(address: CmAddress, source: Option<IpAddr>, device_port: DevicePort<'v>) -> Result<Self> {
        let source = source.filter(|source| source.is_ipv4() == address.address.is_ipv4());
        Ok(CmConnector { channel: EventChannel::new()?, address, source, device_port })
    }

    /// Connects to queue pair `number` of thread `worker`. The connection lasts as long as the returned id.
    pub(crate) fn connect(
        &self,
        lane: &mut CmQueuePair<'_>,
        (worker, number): (usize, usize),
        plan: &Plan,
        check: Check<'_>,
    ) -> Result<Id> {
        let address = self.address.address;
        let data = PrivateData { token: self.address.token, worker: worker as u32, lane: number as u32 };
        self.try_connect(lane, data, plan, check).with_context(|| format!("cannot connect to {address} by rdmacm"))
    }

    fn try_connect(&self, lane: &mut CmQueuePair<'_>, data: PrivateData, plan: &Plan, check: Check<'_>) -> Result<Id> {
        let mut id = Id::new(&self.channel, PortSpace::TCP)?;
        if plan.connection.traffic_class != 0 {
            id.set_type_of_service(plan.connection.traffic_class)?;
        }
        let source = self.source.map(|source| (source, 0).into());
        self.resolve(&mut id, check, |id| id.resolve_address(source, self.address.address, RESOLVE_TIMEOUT))?;
        self.device_port.check(&id)?;
        self.resolve(&mut id, check, |id| id.resolve_route(RESOLVE_TIMEOUT))?;
        lane.move_to_init(&id)?;
        id.connect(&lane.parameters(plan).private_data(&data.encode())?)?;
        match next(&self.channel, RESPONSE_TIMEOUT, check)? {
            EventKind::ConnectResponse(_) => {}
            other => bail!("{}", describe(&other)),
        }
        lane.move_to_rts(&id, plan)?;
        id.establish()?;
        Ok(id)
    }

    fn resolve(
        &self,
        id: &mut Id,
        check: Check<'_>,
        move_to_init: impl Fn(&mut Id) -> rdma_safe::Result<()>,
    ) -> Result<()> {
        let mut retries = RESOLVE_RETRIES;
        loop {
            move_to_init(id)?;
            // The kernel reports its own timeout first.
            match next(&self.channel, RESOLVE_TIMEOUT + RESPONSE_TIMEOUT, check)? {
                EventKind::AddressResolved | EventKind::RouteResolved => return Ok(()),
                EventKind::AddressError(_) | EventKind::RouteError(_) if retries > 0 => retries -= 1,
                other => bail!("{}", describe(&other)),
            }
        }
    }
}

/// Waits for the next event, as long as `check` succeeds.
fn next(channel: &EventChannel, limit: Duration, check: Check<'_>) -> Result<EventKind> {
    let start = Instant::now();
    loop {
        check()?;
        match channel.wait(CHECK_INTERVAL)? {
            Some(event) => return Ok(event.kind),
            None if start.elapsed() > limit => bail!("no event within {} s", limit.as_secs()),
            None => {}
        }
    }
}

/// Describes an unexpected event.
fn describe(event: &EventKind) -> String {
    match event {
        EventKind::AddressError(errno) => {
            format!("no RDMA device has a route to the address, or no host answers: {errno}")
        }
        EventKind::RouteError(errno) => format!("the route cannot be resolved: {errno}"),
        EventKind::Rejected(reason, _) => format!("{reason}"),
        EventKind::Unreachable(errno) => format!("the peer does not answer: {errno}"),
        EventKind::ConnectError(errno) => format!("{errno}"),
        EventKind::Disconnected => "the peer has disconnected".to_owned(),
        EventKind::DeviceRemoval => "the device is being removed".to_owned(),
        other => format!("unexpected: {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_may_be_followed_by_zeros() {
        let data = PrivateData { token: 0x0102_0304_0506_0708, worker: 9, lane: 10 };
        let mut bytes = [0; 56];
        bytes[..PrivateData::LEN].copy_from_slice(&data.encode());
        assert_eq!(bytes[..17], [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0, 0, 0, 10, 0]);
        assert_eq!(PrivateData::decode(&bytes), Some(data));
        assert_eq!(PrivateData::decode(&bytes[..15]), None);
    }

    #[test]
    fn tokens_differ() {
        let token = || RandomState::new().build_hasher().finish();
        assert_ne!(token(), token());
    }
}
