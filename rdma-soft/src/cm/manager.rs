//! The manager: the connections of a device, its timers and its queues.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::time::Duration;

use super::backoff::Backoff;
use super::connection::{Connection, Ended, Negotiated, Phase};
use super::events::{Event, Transmit};
use super::listeners::Listeners;
use super::lookup::Lookups;
use super::timers::Timers;
use super::{CallError, ConnectionId, Peer};
use crate::random::Random;
use crate::transport::Time;
use crate::wire::cm::{MAD_LEN, Mad, Message};

/// Settings of a [`Manager`].
///
/// They limit its memory. A connection or lookup takes at most 768 bytes, also in timewait and in a backlog. With the default
/// limits of [`Config::new`] that is 84 MiB. A flooded listener whose program takes no requests takes 1024 times as much, 768 KiB,
/// and the memory of dropped requests takes 128 KiB. Each call adds at most three events and three MADs, except
/// [`Manager::expire`], so the queues stay short if the owner empties them after each call.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// GUID of this incarnation of the device. No other device and no earlier incarnation has it.
    pub guid: u64,
    /// Start of the random ids. An attacker that knows it can guess them.
    pub seed: u64,
    /// Intervals between retransmissions of the messages of a connection.
    pub backoff: Backoff,
    /// Intervals between retransmissions of a lookup.
    pub lookup_backoff: Backoff,
    /// Time that a connection stays in timewait: longer than a packet and its answer stay in the network.
    pub timewait: Duration,
    /// Time that the answer to a lookup is kept for duplicates: longer than a peer waits before it retransmits the lookup.
    pub answer_lifetime: Duration,
    /// Maximum number of connections and lookups, without those in timewait.
    pub max_connections: usize,
    /// Maximum number of connections in timewait, of rejected requests, and of answered lookups. Beyond it the oldest ones are
    /// forgotten early.
    pub max_timewait: usize,
    /// Maximum number of requests and lookups in a backlog, if the listener does not ask for fewer.
    pub max_backlog: usize,
}

impl Config {
    /// Default settings for a device with this GUID, which draws ids from `seed`.
    #[must_use]
    pub fn new(guid: u64, seed: u64) -> Self {
        Config {
            guid,
            seed,
            backoff: Backoff::default(),
            lookup_backoff: Backoff::of_lookups(),
            timewait: Duration::from_secs(1),
            answer_lifetime: Duration::from_secs(8),
            max_connections: 1 << 16,
            max_timewait: 1 << 14,
            max_backlog: 1 << 10,
        }
    }
}

/// The connection manager of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Manager {
    pub(super) config: Config,
    random: Random,
    pub(super) connections: BTreeMap<ConnectionId, Connection>,
    /// Connections by address, GUID and local id of the peer, to detect duplicate REQs.
    pub(super) by_remote_id: BTreeMap<(IpAddr, u64, u32), ConnectionId>,
    /// Connections by address and queue pair number of the peer, to detect stale connections.
    pub(super) by_remote_qpn: BTreeMap<(IpAddr, u32), ConnectionId>,
    /// Connections by local queue pair number.
    pub(super) by_local_qpn: BTreeSet<(u32, ConnectionId)>,
    pub(super) listeners: Listeners,
    pub(super) lookups: Lookups,
    /// Retransmissions of connections and of lookups.
    pub(super) timers: Timers,
    /// Ends of timewait of connections with a queue pair.
    pub(super) timewait: Timers,
    /// Ends of timewait of rejected requests, whose queue pairs were never connected.
    pub(super) rejected: Timers,
    /// Accepted connections that the peer has not answered, and when another connection may take their place.
    pub(super) half_open: Timers,
    transmits: VecDeque<Transmit>,
    events: VecDeque<Event>,
}

impl Manager {
    /// A manager without connections.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Manager {
            random: Random(config.seed),
            connections: BTreeMap::new(),
            by_remote_id: BTreeMap::new(),
            by_remote_qpn: BTreeMap::new(),
            by_local_qpn: BTreeSet::new(),
            listeners: Listeners::new(&config),
            lookups: Lookups::default(),
            timers: Timers::default(),
            timewait: Timers::default(),
            rejected: Timers::default(),
            half_open: Timers::default(),
            transmits: VecDeque::new(),
            events: VecDeque::new(),
            config,
        }
    }

    /// Handles a MAD that a peer has sent to queue pair 1. Drops it if it is malformed.
    pub fn handle(&mut self, now: Time, from: Peer, mad: &[u8]) {
        let Ok(Mad { transaction, message }) = Mad::decode(mad) else { return };
        match message {
            Message::Req(req) => self.handle_req(now, from, transaction, req),
            Message::Mra(mra) => self.handle_mra(from, &mra),
            Message::Rej(rej) => self.handle_rej(now, from, &rej),
            Message::Rep(rep) => self.handle_rep(now, from, transaction, rep),
            Message::Rtu(rtu) => self.handle_rtu(from, transaction, &rtu),
            Message::Dreq(dreq) => self.handle_dreq(now, from, transaction, &dreq),
            Message::Drep(drep) => self.handle_drep(now, from, &drep),
            Message::SidrReq(request) => self.handle_sidr_req(now, from, transaction, request),
            Message::SidrRep(reply) => self.handle_sidr_rep(from, reply),
            Message::Lap(lap) => self.handle_lap(from, transaction, &lap),
            // This side sends no LAP.
            Message::Apr(_) => {}
        }
    }

    /// Takes the next MAD to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// Takes the next event for the program.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When to call [`Manager::expire`].
    #[must_use]
    pub fn wake_at(&self) -> Option<Time> {
        self.first_timer().map(|(at, _)| at)
    }

    /// Handles the timers that have expired.
    pub fn expire(&mut self, now: Time) {
        while let Some((_, id)) = self.first_timer().filter(|(at, _)| *at <= now) {
            self.expire_one(now, id);
        }
    }

    /// Handles the timer of one connection or lookup as if it had expired.
    ///
    /// A test that explores every order of timers and messages uses this.
    pub fn expire_one(&mut self, now: Time, id: ConnectionId) {
        let all = [&mut self.timers, &mut self.timewait, &mut self.rejected, &mut self.lookups.answered];
        if all.into_iter().any(|timers| timers.clear(id)) {
            self.handle_timeout(now, id);
        }
    }

    /// The connections and lookups with a timer.
    pub fn armed(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        self.all_timers().into_iter().flat_map(Timers::ids)
    }

    fn first_timer(&self) -> Option<(Time, ConnectionId)> {
        self.all_timers().into_iter().filter_map(Timers::first).min()
    }

    fn all_timers(&self) -> [&Timers; 4] {
        [&self.timers, &self.timewait, &self.rejected, &self.lookups.answered]
    }

    fn handle_timeout(&mut self, now: Time, id: ConnectionId) {
        if self.connections.contains_key(&id) {
            self.handle_connection_timeout(now, id);
        } else {
            self.handle_lookup_timeout(now, id);
        }
    }

    /// State of a connection, `None` if it does not exist any more.
    #[must_use]
    pub fn phase(&self, id: ConnectionId) -> Option<Phase> {
        self.connections.get(&id).map(|connection| connection.phase)
    }

    /// What both sides of a connection have agreed on.
    #[must_use]
    pub fn negotiated(&self, id: ConnectionId) -> Option<&Negotiated> {
        self.connections.get(&id).map(|connection| &connection.negotiated)
    }

    /// Source of the messages of a connection.
    #[must_use]
    pub fn peer(&self, id: ConnectionId) -> Option<Peer> {
        self.connections.get(&id).map(|connection| connection.peer)
    }

    /// Whether a queue pair number belongs to a connection, also to one in timewait. A new queue pair must not get it.
    #[must_use]
    pub fn uses_qpn(&self, qpn: u32) -> bool {
        self.by_local_qpn.range((qpn, 0)..=(qpn, u32::MAX)).next().is_some()
    }

    /// Number of connections: those in timewait, and all others.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let ended = self.timewait.len() + self.rejected.len();
        (ended, self.connections.len() - ended)
    }

    /// Makes room for one more connection or lookup. If the manager is full, the connection that has waited longest for an RTU
    /// fails.
    ///
    /// # Errors
    /// [`CallError::Full`] if no connection has waited for as long as a peer needs to answer.
    pub(super) fn make_room(&mut self, now: Time) -> Result<(), CallError> {
        let (_, live) = self.counts();
        if live + self.lookups.live() < self.config.max_connections {
            return Ok(());
        }
        let (_, id) = self.half_open.first().filter(|(at, _)| *at <= now).ok_or(CallError::Full)?;
        self.give_up_half_open(now, id);
        Ok(())
    }

    /// Draws an id that nothing uses.
    pub(super) fn new_id(&mut self) -> ConnectionId {
        loop {
            let id = self.random.next() as u32;
            if id != 0 && !self.connections.contains_key(&id) && !self.lookups.has(id) {
                return id;
            }
        }
    }

    /// The transaction id of the requests of a connection or lookup. Its lower half is the local id, like in Linux.
    pub(super) fn transaction(&self, id: ConnectionId) -> u64 {
        (self.config.guid << 32) ^ u64::from(id)
    }

    /// Sends a message once.
    pub(super) fn send(&mut self, to: Peer, transaction: u64, message: Message) {
        let mad = encode(transaction, message);
        self.transmit(to, mad);
    }

    pub(super) fn transmit(&mut self, to: Peer, mad: Box<[u8; MAD_LEN]>) {
        self.transmits.push_back(Transmit { to, mad });
    }

    /// Sends the message of a connection, and retransmits it until the connection changes its state.
    pub(super) fn send_until_answered(&mut self, now: Time, id: ConnectionId, transaction: u64, message: Message) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let mad = encode(transaction, message);
        connection.enter(connection.phase, Some(mad.clone()));
        let to = connection.peer;
        self.timers.set(id, now + self.config.backoff.interval(0));
        self.transmit(to, mad);
    }

    /// Ends the retransmission of a connection's message, and moves the connection to another state.
    pub(super) fn advance(&mut self, id: ConnectionId, phase: Phase) {
        self.timers.clear(id);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.enter(phase, None);
        }
    }

    pub(super) fn push_event(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// Reports an event of a connection, unless the program has released the connection.
    pub(super) fn report(&mut self, id: ConnectionId, event: Event) {
        if self.connections.get(&id).is_some_and(|connection| !connection.is_released) {
            self.events.push_back(event);
        }
    }

    /// Reports the end of a connection, once.
    pub(super) fn report_end(&mut self, id: ConnectionId, event: Event) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if !std::mem::replace(&mut connection.is_end_reported, true) {
            self.report(id, event);
        }
    }

    /// Finds the connection that a message is for by both its ids. A message from another address than the peer's is for none.
    pub(super) fn find(&self, from: Peer, local_id: u32, remote_id: u32) -> Option<ConnectionId> {
        let connection = self.connections.get(&local_id)?;
        let is_from_peer = connection.peer.address == from.address && connection.remote_id == Some(remote_id);
        is_from_peer.then_some(local_id)
    }

    /// Finds the connection that a message is for, if no REP has arrived for it, so that the id of the peer is not known.
    pub(super) fn find_unanswered(&self, from: Peer, local_id: u32) -> Option<ConnectionId> {
        let connection = self.connections.get(&local_id)?;
        (connection.phase == Phase::ReqSent && connection.peer.address == from.address).then_some(local_id)
    }

    /// Moves a connection to timewait. `answer` is sent in response to duplicates.
    pub(super) fn enter_timewait(
        &mut self,
        now: Time,
        id: ConnectionId,
        ended: Ended,
        answer: Option<Box<[u8; MAD_LEN]>>,
    ) {
        self.end_in_backlog(id);
        // The peer keeps its queue pair number out of use for its own timewait.
        self.forget_remote_qpn(id);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.is_in_timewait() {
            return;
        }
        connection.enter(Phase::Timewait(ended), answer);
        let has_qp = connection.negotiated.local_qpn != 0;
        self.timers.clear(id);
        self.half_open.clear(id);
        let timewait = if has_qp { &mut self.timewait } else { &mut self.rejected };
        timewait.set(id, now + self.config.timewait);
        if timewait.len() > self.config.max_timewait {
            let oldest = timewait.first();
            oldest.into_iter().for_each(|(_, id)| self.leave_timewait(id));
        }
    }

    /// Removes a connection from timewait, and its ids and queue pair numbers from use.
    pub(super) fn leave_timewait(&mut self, id: ConnectionId) {
        let is_disconnected = self.phase(id) == Some(Phase::Timewait(Ended::Disconnected));
        if is_disconnected {
            self.report(id, Event::TimewaitExit { id });
        }
        self.remove(id);
    }

    /// Removes a connection.
    pub(super) fn remove(&mut self, id: ConnectionId) {
        if self.leave_backlog(id) {
            self.report(id, Event::Withdrawn { id });
        }
        for timers in [&mut self.timers, &mut self.timewait, &mut self.rejected, &mut self.half_open] {
            timers.clear(id);
        }
        self.forget_remote_qpn(id);
        let Some(connection) = self.connections.remove(&id) else { return };
        let Connection { peer, guid, remote_id, negotiated, .. } = connection;
        let key = (peer.address, guid, remote_id.unwrap_or(0));
        if self.by_remote_id.get(&key) == Some(&id) {
            self.by_remote_id.remove(&key);
        }
        self.by_local_qpn.remove(&(negotiated.local_qpn, id));
    }

    /// Lets the peer use its queue pair for another connection.
    pub(super) fn forget_remote_qpn(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(&id) else { return };
        let key = (connection.peer.address, connection.negotiated.remote_qpn);
        if self.by_remote_qpn.get(&key) == Some(&id) {
            self.by_remote_qpn.remove(&key);
        }
    }
}

impl Hash for Manager {
    /// Leaves out the events, whose messages have no hash.
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.config, &self.random, &self.connections).hash(state);
        (&self.by_remote_id, &self.by_remote_qpn, &self.by_local_qpn).hash(state);
        (&self.listeners, &self.lookups, &self.timers, &self.timewait, &self.rejected, &self.half_open).hash(state);
        (&self.transmits, self.events.len()).hash(state);
    }
}

/// Encodes a message to keep or to send.
pub(super) fn encode(transaction: u64, message: Message) -> Box<[u8; MAD_LEN]> {
    Box::new(Mad { transaction, message }.encode())
}
