//! Queue pairs that are connected by address: librdmacm, for `--rdma-cm`.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rdma_safe::cm::{ConnectParameters, EventChannel, EventKind, Id, PortSpace};
use rdma_safe::{Access, QueuePair, QueuePairAddress, QueuePairState};
use serde::{Deserialize, Serialize};

use crate::plan::Plan;
use crate::worker::Check;

/// How long an address, and the way there, are looked for at a time, and how often again.
const RESOLVE: Duration = Duration::from_secs(2);
const RETRIES: u32 = 2;
/// How long the peer may take to answer.
const ANSWER: Duration = Duration::from_secs(20);
/// How long a client may take from one queue pair to the next.
const VISIT: Duration = Duration::from_secs(60);
/// Between two looks at whether to go on.
const TICK: Duration = Duration::from_millis(100);
/// How long a peer waits before it sends again what has found no receive, as with queue pairs that are connected otherwise.
const MIN_RNR_TIMER: u8 = 12;

/// Where a server waits for the queue pairs of one client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Meeting {
    pub(crate) address: SocketAddr,
    /// Known to the client only.
    token: u64,
}

/// What comes with a request: for which queue pair of the server it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket {
    token: u64,
    pub(crate) worker: u32,
    pub(crate) lane: u32,
}

impl Ticket {
    const LEN: usize = 16;

    fn encode(self) -> [u8; Ticket::LEN] {
        let mut bytes = [0; Ticket::LEN];
        bytes[..8].copy_from_slice(&self.token.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.worker.to_be_bytes());
        bytes[12..].copy_from_slice(&self.lane.to_be_bytes());
        bytes
    }

    /// Of bytes that may have zeros after them.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (token, rest) = bytes.split_first_chunk()?;
        let (worker, rest) = rest.split_first_chunk()?;
        let (lane, _) = rest.split_first_chunk()?;
        Some(Ticket {
            token: u64::from_be_bytes(*token),
            worker: u32::from_be_bytes(*worker),
            lane: u32::from_be_bytes(*lane),
        })
    }
}

/// Device and port that a test runs on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'p> {
    pub(crate) device: &'p str,
    pub(crate) port: u8,
}

impl Place<'_> {
    /// Refuses connections over others.
    fn require(self, id: &Id) -> Result<()> {
        let (device, port) = (id.device_name().unwrap_or_default(), id.port().unwrap_or(self.port));
        if device == self.device && port == self.port {
            return Ok(());
        }
        bail!(
            "the address of the server leads over port {port} of {device}, and the test is on port {} of {}: give --device and \
             --ib-port accordingly",
            self.port,
            self.device
        )
    }
}

/// A queue pair that is to be connected, and what is known of its peer.
pub(crate) struct Unconnected<'u> {
    pub(crate) qp: &'u mut QueuePair,
    pub(crate) own: QueuePairAddress,
    pub(crate) peer: QueuePairAddress,
}

impl Unconnected<'_> {
    /// Reads and atomics that this end serves, and that it asks for: as of queue pairs that are connected otherwise.
    fn atomics(&self, plan: &Plan) -> (u8, u8) {
        let asks = self.qp.context().attributes().max_qp_init_rd_atom().min(16) as u8;
        (self.own.rd_atomic, plan.outstanding.unwrap_or(asks.min(self.peer.rd_atomic)))
    }

    fn parameters(&self, plan: &Plan) -> ConnectParameters {
        let (serves, asks) = self.atomics(plan);
        ConnectParameters::new(self.qp.number())
            .responder_resources(serves)
            .initiator_depth(asks)
            .retry_count(plan.connection.retries)
            .rnr_retry_count(plan.connection.rnr_retries)
            .srq(self.qp.shared_receive_queue().is_some())
    }

    /// What the id has found of port and partition.
    fn begin(&mut self, id: &Id) -> Result<()> {
        Ok(self.qp.modify(&id.attributes(QueuePairState::INIT)?.set_access(Access::REMOTE))?)
    }

    /// To RTS, with all that the plan says otherwise than librdmacm.
    fn finish(&mut self, id: &Id, plan: &Plan) -> Result<()> {
        let (serves, asks) = self.atomics(plan);
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

/// The end that is connected to.
pub(crate) struct Reception {
    // Before its channel.
    _listener: Id,
    channel: EventChannel,
    meeting: Meeting,
}

/// What a reception is told.
pub(crate) enum Visit {
    /// A request with a ticket.
    Asked(Ticket, Id),
    /// A client knows that it was accepted.
    Established,
}

impl Reception {
    /// At a port of its own of `ip`.
    pub(crate) fn new(ip: IpAddr, backlog: u32) -> Result<Self> {
        let channel = EventChannel::new()?;
        let mut listener = Id::new(&channel, PortSpace::TCP)?;
        let what = || format!("cannot be connected to by rdmacm at {ip}; an RDMA device must have that address");
        listener.bind((ip, 0)).with_context(what)?;
        listener.listen(backlog).with_context(what)?;
        let address = listener.local_address().and_then(|address| address.ip()).with_context(what)?;
        // The keys of a hasher are random.
        let meeting = Meeting { address, token: RandomState::new().build_hasher().finish() };
        Ok(Reception { _listener: listener, channel, meeting })
    }

    pub(crate) fn meeting(&self) -> Meeting {
        self.meeting
    }

    /// What comes next, for as long as `check` finds that it shall go on. Who has no ticket is refused.
    pub(crate) fn next(&self, check: Check<'_>) -> Result<Visit> {
        loop {
            match next(&self.channel, VISIT, check)? {
                EventKind::ConnectRequest(mut id, parameters) => {
                    match Ticket::decode(parameters.private_data()).filter(|ticket| ticket.token == self.meeting.token)
                    {
                        Some(ticket) => return Ok(Visit::Asked(ticket, id)),
                        // Who has gone meanwhile cannot be refused any more.
                        None => drop(id.reject(&[])),
                    }
                }
                EventKind::Established(_) => return Ok(Visit::Established),
                other => bail!("a connection by rdmacm failed: {}", reason(&other)),
            }
        }
    }
}

/// Accepts what `id` came with. The id has to stay for as long as the connection shall.
pub(crate) fn accept(lane: &mut Unconnected<'_>, id: &mut Id, place: Place<'_>, plan: &Plan) -> Result<()> {
    place.require(id)?;
    lane.begin(id)?;
    lane.finish(id, plan)?;
    Ok(id.accept(&lane.parameters(plan))?)
}

/// The end that connects.
pub(crate) struct Visitor<'v> {
    channel: EventChannel,
    pub(crate) meeting: Meeting,
    /// Where to connect from, if it is known.
    pub(crate) source: Option<IpAddr>,
    pub(crate) place: Place<'v>,
}

impl<'v> Visitor<'v> {
    pub(crate) fn new(meeting: Meeting, source: Option<IpAddr>, place: Place<'v>) -> Result<Self> {
        let source = source.filter(|source| source.is_ipv4() == meeting.address.is_ipv4());
        Ok(Visitor { channel: EventChannel::new()?, meeting, source, place })
    }

    /// Connects to the queue pair of these numbers. The id has to stay for as long as the connection shall.
    pub(crate) fn connect(
        &self,
        lane: &mut Unconnected<'_>,
        (worker, number): (usize, usize),
        plan: &Plan,
        check: Check<'_>,
    ) -> Result<Id> {
        let address = self.meeting.address;
        let ticket = Ticket { token: self.meeting.token, worker: worker as u32, lane: number as u32 };
        self.try_connect(lane, ticket, plan, check).with_context(|| format!("cannot connect to {address} by rdmacm"))
    }

    fn try_connect(&self, lane: &mut Unconnected<'_>, ticket: Ticket, plan: &Plan, check: Check<'_>) -> Result<Id> {
        let mut id = Id::new(&self.channel, PortSpace::TCP)?;
        if plan.connection.traffic_class != 0 {
            id.set_type_of_service(plan.connection.traffic_class)?;
        }
        let source = self.source.map(|source| (source, 0).into());
        self.resolve(&mut id, check, |id| id.resolve_address(source, self.meeting.address, RESOLVE))?;
        self.place.require(&id)?;
        self.resolve(&mut id, check, |id| id.resolve_route(RESOLVE))?;
        lane.begin(&id)?;
        id.connect(&lane.parameters(plan).private_data(&ticket.encode())?)?;
        match next(&self.channel, ANSWER, check)? {
            EventKind::ConnectResponse(_) => {}
            other => bail!("{}", reason(&other)),
        }
        lane.finish(&id, plan)?;
        id.establish()?;
        Ok(id)
    }

    fn resolve(&self, id: &mut Id, check: Check<'_>, begin: impl Fn(&mut Id) -> rdma_safe::Result<()>) -> Result<()> {
        let mut retries = RETRIES;
        loop {
            begin(id)?;
            // The kernel tells by itself when the time is over.
            match next(&self.channel, RESOLVE + ANSWER, check)? {
                EventKind::AddressResolved | EventKind::RouteResolved => return Ok(()),
                EventKind::AddressError(_) | EventKind::RouteError(_) if retries > 0 => retries -= 1,
                other => bail!("{}", reason(&other)),
            }
        }
    }
}

/// The next event, for as long as `check` finds that it shall go on.
fn next(channel: &EventChannel, limit: Duration, check: Check<'_>) -> Result<EventKind> {
    let start = Instant::now();
    loop {
        check()?;
        match channel.wait(TICK)? {
            Some(event) => return Ok(event.kind),
            None if start.elapsed() > limit => bail!("nothing came within {} s", limit.as_secs()),
            None => {}
        }
    }
}

/// What an event means that should not have come.
fn reason(event: &EventKind) -> String {
    match event {
        EventKind::AddressError(errno) => {
            format!("no RDMA device leads there, or nobody answers to the address: {errno}")
        }
        EventKind::RouteError(errno) => format!("there is no way there: {errno}"),
        EventKind::Rejected(reason, _) => format!("{reason}"),
        EventKind::Unreachable(errno) => format!("the peer does not answer: {errno}"),
        EventKind::ConnectError(errno) => format!("{errno}"),
        EventKind::Disconnected => "the peer has ended it".to_owned(),
        EventKind::DeviceRemoval => "the device is going away".to_owned(),
        other => format!("unexpected: {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_are_read_from_bytes_with_zeros_after_them() {
        let ticket = Ticket { token: 0x0102_0304_0506_0708, worker: 9, lane: 10 };
        let mut bytes = [0; 56];
        bytes[..Ticket::LEN].copy_from_slice(&ticket.encode());
        assert_eq!(bytes[..17], [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0, 0, 0, 10, 0]);
        assert_eq!(Ticket::decode(&bytes), Some(ticket));
        assert_eq!(Ticket::decode(&bytes[..15]), None);
    }

    #[test]
    fn no_two_meetings_have_the_same_token() {
        let token = || RandomState::new().build_hasher().finish();
        assert_ne!(token(), token());
    }
}
