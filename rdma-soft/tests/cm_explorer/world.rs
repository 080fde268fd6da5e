//! The states of two hosts and the network between them, and the steps from one to another.
//!
//! The hosts and the packets are interned, and each step of a host is executed once, so a state is a few numbers.

use std::collections::HashMap;
use std::rc::Rc;

use rdma_soft::cm::{Config, Negotiated, Phase};
use rdma_soft::transport::Time;

use crate::support::host::{Host, Input, LookupOp, Op, Packet, Session, Stage, incarnation_of};
use crate::support::plant::Plant;

/// Bounds of an exploration.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) config: Config,
    pub(crate) plant: Plant,
    /// Connections that each program starts.
    pub(crate) starts: [u8; 2],
    /// Whether a program starts a connection only when it has no other.
    pub(crate) is_sequential: bool,
    /// Whether a program releases a connection as soon as it learns its end.
    pub(crate) is_eager: bool,
    /// Whether the programs look up services instead of connecting.
    pub(crate) looks_up: bool,
    /// Whether a program may take a step in a stage.
    pub(crate) may: fn(Stage, Op) -> bool,
    pub(crate) faults: Faults,
    /// Whether every connection must be established. Then programs are quick, and timers expire in the order of their times.
    pub(crate) must_connect: bool,
}

/// A packet in flight, and the timewaits that cannot end before it has left the network, as bits.
///
/// A timewait lasts longer than a packet and the reply to it stay in the network. So a packet blocks each timewait that has begun
/// since it was sent (lower half). A packet that was sent while such a packet was in flight blocks the timewait, too (upper half).
pub(crate) type Flying = (u32, u64);

const LOWER_HALF: u64 = 0xffff_ffff;

/// A state.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct State {
    pub(crate) hosts: [u32; 2],
    /// Packets in flight to each host, in the order of their arrival.
    pub(crate) links: [Vec<Flying>; 2],
    /// Packets that arrive at any time.
    pub(crate) late: Vec<Flying>,
    /// Faults that can still happen.
    pub(crate) left: Faults,
}

/// Numbers of faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Faults {
    /// Packets that the network loses.
    pub(crate) losses: u8,
    /// Packets that the network duplicates. The copy arrives at any later time.
    pub(crate) duplicates: u8,
    /// Packets that the network delays, so that any number of later ones overtake them.
    pub(crate) delays: u8,
    /// Hosts that lose their state.
    pub(crate) crashes: u8,
    /// Timers that expire while packets are in flight, besides delayed ones.
    pub(crate) early: u8,
}

/// A step from a state to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// The next packet to a host is lost.
    Lose(u8),
    /// The next packet to a host is duplicated.
    Duplicate(u8),
    /// The next packet to a host is delayed.
    Delay(u8),
    /// The next packet to a host arrives.
    Arrive(u8, u32),
    /// A late packet to a host arrives.
    ArriveLate(u8, u32),
    /// Something else happens to a host.
    Happen(u8, Input),
}

/// A host and its possible inputs.
#[derive(Debug)]
pub(crate) struct HostInfo {
    pub(crate) host: Rc<Host>,
    /// Steps that the program must take at some time.
    pub(crate) mandatory: Vec<Input>,
    pub(crate) optional: Vec<Input>,
    /// Timers, with the bits of their timewaits.
    pub(crate) timers: Vec<(Input, u64)>,
    /// Bits of the timewaits.
    timewait: u64,
    pub(crate) connections: Vec<Connection>,
}

/// A connection of a program that the manager knows.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) index: u8,
    pub(crate) phase: Phase,
    pub(crate) negotiated: Negotiated,
}

/// The state of a host after an input, and the packets that it sends.
#[derive(Debug)]
struct Outcome {
    host: u32,
    sent: Vec<u32>,
}

/// The hosts, packets and steps seen so far.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) settings: Settings,
    hosts: Vec<HostInfo>,
    host_numbers: HashMap<Rc<Host>, u32>,
    packets: Vec<Rc<Packet>>,
    packet_numbers: HashMap<Rc<Packet>, u32>,
    steps: HashMap<(u32, Input), Rc<Result<Outcome, String>>>,
}

impl World {
    pub(crate) fn new(settings: Settings) -> (World, State) {
        let mut world = World {
            settings,
            hosts: Vec::new(),
            host_numbers: HashMap::new(),
            packets: Vec::new(),
            packet_numbers: HashMap::new(),
            steps: HashMap::new(),
        };
        let (starts, left) = (world.settings.starts, world.settings.faults);
        let config = world.settings.config.clone();
        let hosts = [0, 1].map(|number| {
            let host = Host::new(number, starts[usize::from(number)], &config);
            world.host_number(host).expect("a host without connections")
        });
        (world, State { hosts, left, ..State::default() })
    }

    pub(crate) fn info(&self, state: &State, host: usize) -> &HostInfo {
        &self.hosts[state.hosts[host] as usize]
    }

    pub(crate) fn packet(&self, number: u32) -> &Packet {
        &self.packets[number as usize]
    }

    /// Number of distinct states of a host.
    pub(crate) fn host_states(&self) -> usize {
        self.hosts.len()
    }

    /// The number of a host. A new one is checked.
    fn host_number(&mut self, host: Host) -> Result<u32, String> {
        if let Some(number) = self.host_numbers.get(&host) {
            return Ok(*number);
        }
        host.check_timers(&self.settings.config)?;
        let host = Rc::new(host);
        let number = u32::try_from(self.hosts.len()).expect("too many hosts");
        self.hosts.push(HostInfo::new(host.clone(), &self.settings));
        self.host_numbers.insert(host, number);
        Ok(number)
    }

    fn packet_number(&mut self, packet: Packet) -> u32 {
        if let Some(number) = self.packet_numbers.get(&packet) {
            return *number;
        }
        let packet = Rc::new(packet);
        let number = u32::try_from(self.packets.len()).expect("too many packets");
        self.packets.push(packet.clone());
        self.packet_numbers.insert(packet, number);
        number
    }

    /// All possible next steps except losses, duplicates, delays and crashes.
    pub(crate) fn steps(&self, state: &State, actions: &mut Vec<Action>) {
        let heads = [0, 1].into_iter().filter_map(|host| Some((host, state.links[usize::from(host)].first()?)));
        actions.extend(heads.map(|(host, (packet, _))| Action::Arrive(host, *packet)));
        for (at, &(packet, _)) in state.late.iter().enumerate() {
            if at == 0 || state.late[at - 1] != state.late[at] {
                actions.push(Action::ArriveLate(self.packet(packet).to, at as u32));
            }
        }
        for host in [0, 1] {
            let info = self.info(state, usize::from(host));
            let inputs = info.mandatory.iter().chain(&info.optional);
            actions.extend(inputs.map(|input| Action::Happen(host, *input)));
            actions.extend(self.keepalives(state, host));
            let is_due = !state.has_regular_packets() && (!self.settings.must_connect || self.is_next(state, host));
            if state.left.early > 0 || is_due {
                let blocked = state.flying().fold(0, |bits, (_, blocks)| bits | blocks | blocks >> 32);
                let free = info.timers.iter().filter(|(_, bit)| bit & blocked == 0);
                actions.extend(free.map(|(input, _)| Action::Happen(host, *input)));
            }
        }
    }

    /// All losses, duplicates, delays and crashes that are possible next.
    ///
    /// Only the next packet to arrive is lost, duplicated or delayed. Earlier, a fault would change nothing that a host can see.
    pub(crate) fn faults(&self, state: &State, actions: &mut Vec<Action>) {
        for host in [0, 1] {
            if !state.links[usize::from(host)].is_empty() {
                actions.extend((state.left.losses > 0).then_some(Action::Lose(host)));
                actions.extend((state.left.duplicates > 0).then_some(Action::Duplicate(host)));
                actions.extend((state.left.delays > 0).then_some(Action::Delay(host)));
            }
            actions.extend((state.left.crashes > 0).then_some(Action::Happen(host, Input::Crash)));
        }
    }

    /// The layer above notices that the peer of an established connection has lost its state, and releases the connection.
    pub(crate) fn keepalives<'a>(&'a self, state: &State, host: u8) -> impl Iterator<Item = Action> + 'a {
        let incarnation = self.info(state, usize::from(1 - host)).host.incarnation;
        let established = self.info(state, usize::from(host)).connections.iter();
        established
            .filter(move |connection| {
                let of_peer = incarnation_of(connection.negotiated.send_psn);
                connection.phase == Phase::Established && of_peer != incarnation
            })
            .map(move |connection| Action::Happen(host, Input::Program(connection.index, Op::Release)))
    }

    /// Whether a timer of a host expires next, if programs are quick and timers that are set to a longer time expire later.
    fn is_next(&self, state: &State, host: u8) -> bool {
        let wake_at = |host: u8| self.info(state, host.into()).host.manager.wake_at();
        let is_first = wake_at(1 - host).is_none_or(|other| wake_at(host).is_some_and(|own| own <= other));
        is_first && [0, 1].iter().all(|host| self.info(state, *host).mandatory.is_empty())
    }

    /// Carries out an action, which leads from `state` to `next`.
    ///
    /// # Errors
    /// A text that says which rule a host has broken.
    pub(crate) fn apply(&mut self, state: &State, action: Action, next: &mut State) -> Result<(), String> {
        next.copy(state);
        let left = &mut next.left;
        let (host, input) = match action {
            Action::Lose(host) => {
                left.losses -= 1;
                next.links[usize::from(host)].remove(0);
                return Ok(());
            }
            Action::Duplicate(host) => {
                left.duplicates -= 1;
                next.add_late(state.links[usize::from(host)][0]);
                return Ok(());
            }
            Action::Delay(host) => {
                left.delays -= 1;
                let packet = next.links[usize::from(host)].remove(0);
                next.add_late(packet);
                return Ok(());
            }
            Action::Arrive(host, packet) => {
                next.links[usize::from(host)].remove(0);
                (host, Input::Packet(packet))
            }
            Action::ArriveLate(host, at) => (host, Input::Packet(next.late.remove(at as usize).0)),
            Action::Happen(host, input) => {
                left.crashes -= u8::from(input == Input::Crash);
                left.early -= u8::from(matches!(input, Input::Timer(_)) && state.has_regular_packets());
                (host, input)
            }
        };
        let host = usize::from(host);
        let outcome = self.outcome(state.hosts[host], input);
        let outcome = outcome.as_ref().as_ref().map_err(Clone::clone)?;
        let (before, after) = (self.info(state, host).timewait, self.hosts[outcome.host as usize].timewait);
        next.hosts[host] = outcome.host;
        let blocked = state.flying().fold(0, |bits, (_, blocks)| bits | blocks & LOWER_HALF);
        next.links[1 - host].extend(outcome.sent.iter().map(|packet| (*packet, blocked << 32)));
        let (begun, over) = (after & !before, before & !after);
        if begun | over != 0 {
            let all = next.links.iter_mut().flatten().chain(&mut next.late);
            all.for_each(|(_, blocks)| *blocks = *blocks & !(over | over << 32) | begun);
            next.late.sort_unstable();
        }
        Ok(())
    }

    fn outcome(&mut self, number: u32, input: Input) -> Rc<Result<Outcome, String>> {
        if let Some(outcome) = self.steps.get(&(number, input)) {
            return outcome.clone();
        }
        let packet = if let Input::Packet(packet) = input { Some(self.packets[packet as usize].clone()) } else { None };
        let mut host = Host::clone(&self.hosts[number as usize].host);
        let Settings { config, plant, .. } = &self.settings;
        let sent = host.step(Time(0), input, packet.as_deref(), config, *plant).and_then(|mut sent| {
            while let Some(index) = host.sessions.iter().position(Session::is_ended).filter(|_| self.settings.is_eager)
            {
                sent.extend(host.step(Time(0), Input::Program(index as u8, Op::Release), None, config, *plant)?);
            }
            Ok(sent)
        });
        let outcome = Rc::new(sent.and_then(|sent| {
            let host = self.host_number(host)?;
            Ok(Outcome { host, sent: sent.into_iter().map(|packet| self.packet_number(packet)).collect() })
        }));
        self.steps.insert((number, input), outcome.clone());
        outcome
    }
}

impl State {
    fn copy(&mut self, from: &State) {
        let State { hosts, links, late, left } = from;
        (self.hosts, self.left) = (*hosts, *left);
        self.links.iter_mut().chain([&mut self.late]).for_each(Vec::clear);
        self.links.iter_mut().zip(links).for_each(|(to, from)| to.extend(from));
        self.late.extend(late);
    }

    /// Replaces the content of a list by the numbers of the state.
    pub(crate) fn encode(&self, to: &mut Vec<u32>) {
        let Faults { losses, duplicates, delays, crashes, early } = self.left;
        let [to_first, to_second] = self.links.each_ref().map(|link| link.len() as u8);
        let faults = u32::from_ne_bytes([losses, duplicates, delays, crashes]);
        to.clear();
        to.extend([self.hosts[0], self.hosts[1], faults, u32::from_ne_bytes([early, to_first, to_second, 0])]);
        to.extend(self.flying().flat_map(|(packet, blocks)| [*packet, *blocks as u32, (*blocks >> 32) as u32]));
    }

    /// Reads what [`State::encode`] has written.
    pub(crate) fn decode(&mut self, from: &[u32]) {
        let [first, second, faults, rest, flying @ ..] = from else { return };
        let [losses, duplicates, delays, crashes] = faults.to_ne_bytes();
        let [early, to_first, to_second, _] = rest.to_ne_bytes();
        self.hosts = [*first, *second];
        self.left = Faults { losses, duplicates, delays, crashes, early };
        let mut flying = flying.chunks_exact(3).map(|of| (of[0], u64::from(of[2]) << 32 | u64::from(of[1])));
        self.links.iter_mut().chain([&mut self.late]).for_each(Vec::clear);
        self.links[0].extend(flying.by_ref().take(to_first.into()));
        self.links[1].extend(flying.by_ref().take(to_second.into()));
        self.late.extend(flying);
    }

    pub(crate) fn flying(&self) -> impl Iterator<Item = &Flying> {
        self.links.iter().flatten().chain(&self.late)
    }

    fn has_regular_packets(&self) -> bool {
        self.links.iter().any(|link| !link.is_empty())
    }

    pub(crate) fn has_packets(&self) -> bool {
        self.flying().next().is_some()
    }

    fn add_late(&mut self, packet: Flying) {
        let at = self.late.partition_point(|of| *of < packet);
        self.late.insert(at, packet);
    }
}

impl HostInfo {
    fn new(host: Rc<Host>, settings: &Settings) -> HostInfo {
        let (mut mandatory, mut optional) = (Vec::new(), Vec::new());
        for (index, session) in host.sessions.iter().enumerate() {
            let ops = host.ops(session).iter();
            let inputs =
                ops.filter(|op| (settings.may)(session.stage, **op)).map(|op| Input::Program(index as u8, *op));
            if session.is_answer_due() { &mut mandatory } else { &mut optional }.extend(inputs);
        }
        for (index, lookup) in host.lookups.iter().enumerate() {
            let release = Input::Lookup(index as u8, LookupOp::Release);
            if lookup.is_own {
                optional.push(release);
            } else {
                mandatory.extend([Input::Lookup(index as u8, LookupOp::Answer), release]);
            }
        }
        if host.starts > 0 && (host.sessions.is_empty() || !settings.is_sequential) {
            let to = 1 - host.number;
            optional.push(if settings.looks_up { Input::LookUp(to) } else { Input::Connect(to) });
        }
        let bit = |id| {
            let at = host.ids.iter().position(|of| *of == id).filter(|at| *at < 16).expect("a place for each timewait");
            if host.is_in_timewait(id) { 1_u64 << (at + 16 * usize::from(host.number)) } else { 0 }
        };
        let timers: Vec<(Input, u64)> = host.manager.armed().map(|id| (Input::Timer(id), bit(id))).collect();
        let timewait = timers.iter().fold(0, |bits, (_, bit)| bits | bit);
        let connections = host.sessions.iter().enumerate().filter_map(|(index, session)| {
            Some(Connection {
                index: index as u8,
                phase: host.manager.phase(session.id)?,
                negotiated: *host.manager.negotiated(session.id)?,
            })
        });
        let connections = connections.collect();
        HostInfo { host, mandatory, optional, timers, timewait, connections }
    }
}
