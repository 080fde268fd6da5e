//! A host: the production manager, a program that uses it, and the program's queue pairs.

use rdma_soft::cm::{Config, ConnectionId, Event, ListenAddress, Manager, Phase};
use rdma_soft::transport::Time;
use rdma_soft::wire::cm::{MAD_LEN, RejectReason, timeout};

use crate::support::plant::Plant;
use crate::support::{DATAGRAMS, SERVICE, SERVICE_TIMEOUT, address, lookup, lookup_reply, peer, reply, request};

/// A connection as its program sees it. The program has a queue pair for it from the request or the acceptance on.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Session {
    pub(crate) id: ConnectionId,
    /// Number of the peer's host.
    pub(crate) peer: u8,
    pub(crate) qpn: Option<u32>,
    pub(crate) stage: Stage,
    /// Whether the program has sent data.
    pub(crate) has_sent: bool,
}

/// What the program knows about a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Stage {
    /// The program has sent a request.
    Connecting,
    /// The program has received a reply, and must answer it.
    Replied,
    /// The program has received a request, and must answer it.
    Requested,
    /// The program has accepted a request.
    Accepted,
    Established,
    /// The program has ended the connection.
    Disconnecting,
    /// The program was told that the connection has failed or ended.
    Ended {
        /// Whether the timewait of the connection is over, too.
        has_exited: bool,
    },
}

/// What a program does with one of its connections.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Op {
    Accept,
    Reject,
    Establish,
    /// Sends data to the peer.
    Send,
    /// Ends the connection, or confirms that the peer has ended it.
    Disconnect,
    /// Destroys the queue pair and gives up the connection.
    Release,
}

/// A lookup as its program sees it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Lookup {
    pub(crate) id: ConnectionId,
    /// Whether this host looks up a service. Otherwise it was asked.
    pub(crate) is_own: bool,
}

/// What a program does with one of its lookups.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum LookupOp {
    Answer,
    /// Gives up an own lookup, or refuses one of a peer.
    Release,
}

/// Something that happens to a host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Input {
    /// A packet with a number arrives.
    Packet(u32),
    Timer(ConnectionId),
    /// The program connects to the host with a number.
    Connect(u8),
    LookUp(u8),
    /// The program does something with the connection at an index.
    Program(u8, Op),
    Lookup(u8, LookupOp),
    /// The host loses all its state and starts again.
    Crash,
}

/// A packet that a host has sent.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Packet {
    pub(crate) from: u8,
    pub(crate) to: u8,
    pub(crate) content: Content,
}

/// Content of a packet.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Content {
    Mad(Box<[u8; MAD_LEN]>),
    /// Data for a queue pair, with the PSN that the receiver has chosen for it in the handshake.
    Data {
        qpn: u32,
        psn: u32,
    },
}

/// A host.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Host {
    pub(crate) number: u8,
    pub(crate) incarnation: u8,
    pub(crate) manager: Manager,
    pub(crate) sessions: Vec<Session>,
    pub(crate) lookups: Vec<Lookup>,
    /// Connections and lookups that the program may still start.
    pub(crate) starts: u8,
    /// The ids of all connections and lookups of all incarnations, in the order of their creation.
    pub(crate) ids: Vec<ConnectionId>,
    /// Whether a request stays in the backlog until the program answers it.
    pub(crate) is_slow: bool,
    /// Whether the indexes of the manager are checked after each step.
    pub(crate) is_checked: bool,
    /// Queue pairs that were created. Their PSNs tell handshakes apart.
    created: u32,
}

impl Session {
    /// Whether the program was told that the connection has failed or ended.
    pub(crate) fn is_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended { .. })
    }

    /// Whether the program must take a step with the connection at some time.
    pub(crate) fn is_answer_due(&self) -> bool {
        self.is_ended() || matches!(self.stage, Stage::Requested | Stage::Replied)
    }
}

/// Most MADs, and most events, that one input causes.
const MOST_OUTPUTS: usize = 3;

impl Host {
    pub(crate) fn new(number: u8, starts: u8, config: &Config) -> Host {
        let manager = Manager::new(config.clone());
        let mut host = Host {
            number,
            incarnation: 0,
            manager,
            sessions: Vec::new(),
            lookups: Vec::new(),
            starts,
            ids: Vec::new(),
            is_slow: false,
            is_checked: true,
            created: 0,
        };
        host.start(config, Plant::None);
        host
    }

    /// Starts an incarnation: a manager with its own GUID and ids, and listeners.
    fn start(&mut self, config: &Config, plant: Plant) {
        let incarnation = if plant == Plant::SameIdentity { 0 } else { self.incarnation };
        let guid = 0xf000 | u64::from(self.number) << 8 | u64::from(incarnation);
        self.manager = Manager::new(Config { guid, seed: config.seed ^ guid << 32, ..config.clone() });
        self.manager.listen(SERVICE, ListenAddress::Any, 16);
        self.manager.listen(DATAGRAMS, ListenAddress::AnyV4, 16);
    }

    fn crash(&mut self, config: &Config, plant: Plant) {
        (self.sessions, self.lookups) = (Vec::new(), Vec::new());
        self.incarnation += 1;
        self.start(config, plant);
    }

    /// What the program may do with its connection.
    pub(crate) fn ops(&self, session: &Session) -> &'static [Op] {
        match session.stage {
            Stage::Requested => &[Op::Accept, Op::Reject, Op::Release],
            Stage::Replied => &[Op::Establish, Op::Reject, Op::Release],
            Stage::Established if session.has_sent => &[Op::Disconnect, Op::Release],
            Stage::Established => &[Op::Send, Op::Disconnect, Op::Release],
            Stage::Connecting | Stage::Accepted | Stage::Disconnecting => &[Op::Release],
            Stage::Ended { .. } if self.manager.phase(session.id) == Some(Phase::DreqReceived) => {
                &[Op::Disconnect, Op::Release]
            }
            Stage::Ended { .. } => &[Op::Release],
        }
    }

    /// Whether the manager is in timewait for a connection.
    pub(crate) fn is_in_timewait(&self, id: ConnectionId) -> bool {
        matches!(self.manager.phase(id), Some(Phase::Timewait(_)))
    }

    /// Handles an input, and returns the MADs that the host sends.
    ///
    /// # Errors
    /// A text that says which rule the manager has broken.
    pub(crate) fn step(
        &mut self,
        now: Time,
        input: Input,
        packet: Option<&Packet>,
        config: &Config,
        plant: Plant,
    ) -> Result<Vec<Packet>, String> {
        let mut sent = Vec::new();
        match input {
            Input::Packet(_) => {
                let packet = packet.ok_or("no packet")?;
                let is_connecting = |id| self.manager.phase(id) == Some(Phase::ReqSent);
                if let Some(answer) = plant.answer(packet, is_connecting) {
                    return Ok(vec![answer]);
                }
                match &packet.content {
                    Content::Mad(mad) => self.manager.handle(now, peer(packet.from), &mad[..]),
                    Content::Data { qpn, psn } => self.receive(packet.from, *qpn, *psn)?,
                }
            }
            Input::Timer(id) => self.manager.expire_one(now, id),
            Input::Connect(to) => self.connect(now, to)?,
            Input::LookUp(to) => self.look_up(now, to)?,
            Input::Program(index, Op::Send) => sent.extend(self.send(usize::from(index))),
            Input::Program(index, op) => self.act(now, usize::from(index), op)?,
            Input::Lookup(index, op) => self.act_on_lookup(now, usize::from(index), op)?,
            Input::Crash => self.crash(config, plant),
        }
        self.drain(&mut sent)?;
        if plant == Plant::NoTimewait {
            let ended: Vec<ConnectionId> = self.manager.armed().filter(|id| self.is_in_timewait(*id)).collect();
            ended.into_iter().for_each(|id| self.manager.expire_one(now, id));
            self.drain(&mut sent)?;
        }
        plant.change(input, packet, &mut sent);
        Ok(sent)
    }

    /// Checks that all timers expire without any MAD: in bounded time none is left, and the program waits for no event.
    ///
    /// # Errors
    /// A text with the broken rule.
    pub(crate) fn check_timers(&self, config: &Config) -> Result<(), String> {
        let mut host = self.clone();
        // A REP and a DREQ, each with all its retransmissions, also those that an MRA permits, and timewait.
        let permitted = timeout(SERVICE_TIMEOUT).as_nanos().div_ceil(config.backoff.longest.as_nanos()) as usize;
        let retries = usize::from(config.backoff.retries) + permitted;
        let most = self.manager.armed().count() * (2 * (retries + 1) + 1);
        for _ in 0..most {
            let Some(id) = host.manager.armed().next() else { break };
            host.manager.expire_one(Time(0), id);
            host.drain(&mut Vec::new())?;
        }
        if let Some(id) = host.manager.armed().next() {
            return Err(format!("{id:#x} still has a timer after {most} timers"));
        }
        let waits = |stage| matches!(stage, Stage::Connecting | Stage::Accepted | Stage::Disconnecting);
        match host.sessions.iter().find(|session| waits(session.stage)) {
            Some(session) => Err(format!("after all timers, the program still waits for {session:?}")),
            None => Ok(()),
        }
    }

    /// Handles the events, and takes the MADs to send.
    fn drain(&mut self, sent: &mut Vec<Packet>) -> Result<(), String> {
        let (events, transmits) = self.drain_all(sent)?;
        if events > MOST_OUTPUTS || transmits > MOST_OUTPUTS {
            return Err(format!("one input has caused {events} events and {transmits} MADs"));
        }
        Ok(())
    }

    /// Handles the timers that have expired by `now`, and returns the packets that the host sends.
    ///
    /// # Errors
    /// A text that says which rule the manager has broken.
    pub(crate) fn expire(&mut self, now: Time) -> Result<Vec<Packet>, String> {
        let mut sent = Vec::new();
        self.manager.expire(now);
        self.drain_all(&mut sent)?;
        Ok(sent)
    }

    /// Returns how many events and MADs there were.
    fn drain_all(&mut self, sent: &mut Vec<Packet>) -> Result<(usize, usize), String> {
        if self.is_checked {
            self.manager.assert_consistent();
        }
        let mut events = 0;
        while let Some(event) = self.manager.poll_event() {
            events += 1;
            self.learn(&event).map_err(|reason| format!("{reason}: {:.200}", format!("{event:?}")))?;
        }
        let mut transmits = 0;
        while let Some(transmit) = self.manager.poll_transmit() {
            transmits += 1;
            let to = (0..u8::MAX).find(|host| address(*host) == transmit.to.address).ok_or("unknown destination")?;
            sent.push(Packet { from: self.number, to, content: Content::Mad(transmit.mad) });
        }
        Ok((events, transmits))
    }

    fn learn(&mut self, event: &Event) -> Result<(), String> {
        match *event {
            Event::Request { id, ref peer, .. } => {
                let peer = (0..u8::MAX).find(|host| address(*host) == peer.address).ok_or("unknown source")?;
                self.take(id);
                self.sessions.push(Session { id, peer, qpn: None, stage: Stage::Requested, has_sent: false });
            }
            Event::Withdrawn { id } => {
                self.sessions.retain(|session| session.id != id);
                self.lookups.retain(|lookup| lookup.id != id);
            }
            Event::Reply { id, .. } => {
                self.session(id, |stage| stage == Stage::Connecting)?.stage = Stage::Replied;
            }
            Event::Established { id } => {
                self.session(id, |stage| stage == Stage::Accepted)?.stage = Stage::Established;
            }
            Event::Failed { id, .. } => {
                let is_unestablished =
                    |stage| matches!(stage, Stage::Connecting | Stage::Replied | Stage::Requested | Stage::Accepted);
                self.session(id, is_unestablished)?.stage = Stage::Ended { has_exited: false };
            }
            Event::Disconnected { id, .. } => {
                let is_begun = |stage| {
                    matches!(stage, Stage::Replied | Stage::Accepted | Stage::Established | Stage::Disconnecting)
                };
                self.session(id, is_begun)?.stage = Stage::Ended { has_exited: false };
            }
            Event::TimewaitExit { id } => {
                let session = self.session(id, |stage| stage == Stage::Ended { has_exited: false })?;
                session.stage = Stage::Ended { has_exited: true };
            }
            Event::Lookup { id, .. } => {
                self.take(id);
                self.lookups.push(Lookup { id, is_own: false });
            }
            Event::LookupReply { id, .. } | Event::LookupUnreachable { id } => {
                let at = self.lookups.iter().position(|lookup| lookup.id == id && lookup.is_own);
                self.lookups.remove(at.ok_or("the program has no such lookup")?);
            }
        }
        Ok(())
    }

    fn take(&mut self, id: ConnectionId) {
        self.ids.push(id);
        if !self.is_slow {
            self.manager.take_request(id);
        }
    }

    /// The program's connection that an event is about.
    fn session(&mut self, id: ConnectionId, is_expected: impl Fn(Stage) -> bool) -> Result<&mut Session, String> {
        let session = self.sessions.iter_mut().find(|session| session.id == id);
        let session = session.ok_or("the program has no such connection")?;
        if is_expected(session.stage) { Ok(session) } else { Err(format!("unexpected while {:?}", session.stage)) }
    }

    /// Creates a queue pair with the lowest free number, and with a unique PSN.
    fn create_qp(&mut self) -> (u32, u32) {
        let is_free =
            |qpn: &u32| !self.manager.uses_qpn(*qpn) && self.sessions.iter().all(|session| session.qpn != Some(*qpn));
        let qpn = (1..).find(is_free).unwrap_or(0);
        self.created += 1;
        (qpn, u32::from(self.number + 1) << 20 | u32::from(self.incarnation) << 16 | self.created)
    }

    fn connect(&mut self, now: Time, to: u8) -> Result<(), String> {
        self.starts -= 1;
        let (qpn, psn) = self.create_qp();
        let request = request(address(self.number), address(to), qpn, psn);
        let id = self.manager.connect(now, peer(to), request).map_err(|error| error.to_string())?;
        self.ids.push(id);
        self.sessions.push(Session { id, peer: to, qpn: Some(qpn), stage: Stage::Connecting, has_sent: false });
        Ok(())
    }

    fn look_up(&mut self, now: Time, to: u8) -> Result<(), String> {
        self.starts -= 1;
        let request = lookup(address(self.number), address(to));
        let id = self.manager.look_up(now, peer(to), request).map_err(|error| error.to_string())?;
        self.ids.push(id);
        self.lookups.push(Lookup { id, is_own: true });
        Ok(())
    }

    fn send(&mut self, index: usize) -> Option<Packet> {
        let session = &mut self.sessions[index];
        session.has_sent = true;
        let negotiated = self.manager.negotiated(session.id)?;
        let content = Content::Data { qpn: negotiated.remote_qpn, psn: negotiated.send_psn };
        Some(Packet { from: self.number, to: session.peer, content })
    }

    /// Handles data. A queue pair receives from its peer only, and only while it is connected.
    ///
    /// Data for an earlier incarnation does not arrive: a device begins with a random queue pair number. The model reuses the
    /// numbers.
    fn receive(&mut self, from: u8, qpn: u32, psn: u32) -> Result<(), String> {
        let is_of_qp = |session: &&Session| {
            let phase = self.manager.phase(session.id);
            session.qpn == Some(qpn)
                && session.peer == from
                && matches!(phase, Some(Phase::RepSent | Phase::RepReceived | Phase::Established))
        };
        let Some(session) = self.sessions.iter().find(is_of_qp) else { return Ok(()) };
        if incarnation_of(psn) != self.incarnation {
            return Ok(());
        }
        let expected = self.manager.negotiated(session.id).map(|negotiated| negotiated.receive_psn);
        if expected != Some(psn) {
            return Err("data of an old connection reaches a reused queue pair".to_owned());
        }
        self.manager.establish_by_data(qpn);
        Ok(())
    }

    fn act(&mut self, now: Time, index: usize, op: Op) -> Result<(), String> {
        let id = self.sessions[index].id;
        self.manager.take_request(id);
        let refused = |error: rdma_soft::cm::CallError| format!("{op:?} was refused: {error}");
        match op {
            Op::Accept => {
                let (qpn, psn) = self.create_qp();
                (self.sessions[index].qpn, self.sessions[index].stage) = (Some(qpn), Stage::Accepted);
                self.manager.accept(now, id, reply(qpn, psn)).map_err(refused)?;
            }
            Op::Establish => {
                self.sessions[index].stage = Stage::Established;
                self.manager.establish(id).map_err(refused)?;
            }
            Op::Reject => {
                self.sessions.remove(index);
                self.manager.reject(now, id, RejectReason::CONSUMER_DEFINED, [0; 148]).map_err(refused)?;
            }
            Op::Disconnect => {
                if self.sessions[index].stage == Stage::Established {
                    self.sessions[index].stage = Stage::Disconnecting;
                }
                self.manager.disconnect(now, id).map_err(refused)?;
            }
            Op::Send => {}
            Op::Release => {
                self.sessions.remove(index);
                self.manager.release(now, id);
            }
        }
        Ok(())
    }

    fn act_on_lookup(&mut self, now: Time, index: usize, op: LookupOp) -> Result<(), String> {
        let id = self.lookups.remove(index).id;
        match op {
            LookupOp::Answer => self.manager.reply_lookup(now, id, lookup_reply(5)).map_err(|error| error.to_string()),
            LookupOp::Release => {
                self.manager.release_lookup(now, id);
                Ok(())
            }
        }
    }
}

/// The incarnation of the host that has chosen a PSN.
pub(crate) fn incarnation_of(psn: u32) -> u8 {
    (psn >> 16 & 0xf) as u8
}
