//! Random runs of three hosts in virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::thread;
use std::time::{Duration, Instant};

use rdma_soft::cm::{Config, ConnectionId, Phase};
use rdma_soft::transport::Time;

use crate::invariants::{are_peers, check_end};
use crate::support::host::{Host, Input, LookupOp, Op, Packet, Session, Stage, incarnation_of};
use crate::support::plant::Plant;
use crate::support::{Random, Scale, scale};

const HOSTS: u8 = 3;

/// Most losses of copies of one message. The manager transmits a message up to eleven times.
const MOST_LOSSES: u8 = 5;

/// Longest time that a packet stays in the network: less than half of timewait.
const LONGEST_DELAY: Duration = Duration::from_millis(480);

/// Longest time from the last stimulus, a program's step or a crash, until no event is left: a REQ, a REP and a DREQ with all their
/// retransmissions, also those that MRAs permit, and timewait.
const LONGEST_END: Duration = Duration::from_secs(30 * 60);

/// An event at some time.
#[derive(Debug)]
enum Event {
    Arrive(Packet),
    /// The program decides about a connection: host, incarnation, connection and its stage. Void if one of them has changed.
    Decide(u8, u8, ConnectionId, Stage),
    DecideLookup(u8, u8, ConnectionId),
    Start(u8),
    Wake(u8),
    Crash(u8),
}

/// How bad the network and the programs of a run are, in percent.
#[derive(Debug)]
struct Rates {
    loss: u64,
    duplicate: u64,
    delay: u64,
    /// Programs that refuse or give up a connection.
    refusal: u64,
}

/// Counts of events in runs.
#[derive(Default, Debug, Clone, Copy)]
struct Tally {
    established: u64,
    refused: u64,
    lost: u64,
    duplicated: u64,
    delayed: u64,
    crashes: u64,
    reused: u64,
    lookups: u64,
    lasting: u64,
}

/// A run.
struct Run {
    random: Random,
    rates: Rates,
    config: Config,
    now: Time,
    hosts: Vec<Host>,
    queue: BinaryHeap<Reverse<(Time, u64)>>,
    events: BTreeMap<u64, Event>,
    number: u64,
    wakes: [Option<Time>; HOSTS as usize],
    /// Stage of each connection and lookup when its last decision was planned.
    planned: HashMap<(u8, ConnectionId), Stage>,
    losses: HashMap<Packet, u8>,
    /// The last connection of each queue pair number.
    qpns: HashMap<(u8, u32), ConnectionId>,
    last_stimulus: Time,
    tally: Tally,
    is_traced: bool,
}

impl Run {
    fn new(seed: u64, is_traced: bool) -> Run {
        let mut random = Random(seed);
        let mut rate = |most: u64| if random.next() % 3 == 0 { 0 } else { random.next() % most };
        let rates = Rates { loss: rate(40), duplicate: rate(25), delay: rate(25), refusal: rate(30) };
        let config = Config::new(0, seed);
        let hosts = (0..HOSTS).map(|number| Host::new(number, u8::MAX, &config)).collect();
        let mut run = Run {
            random,
            rates,
            config,
            now: Time(0),
            hosts,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            number: 0,
            wakes: [None; HOSTS as usize],
            planned: HashMap::new(),
            losses: HashMap::new(),
            qpns: HashMap::new(),
            last_stimulus: Time(0),
            tally: Tally::default(),
            is_traced,
        };
        let length = Duration::from_millis(1 + run.random.below(20_000));
        for _ in 0..1 + run.random.below(12) {
            let host = run.random.below(HOSTS.into()) as u8;
            run.plan_within(length, Event::Start(host));
        }
        for _ in 0..run.random.below(4).saturating_sub(1) {
            let host = run.random.below(HOSTS.into()) as u8;
            run.plan_within(length, Event::Crash(host));
        }
        run
    }

    fn plan(&mut self, after: Duration, event: Event) {
        self.number += 1;
        self.queue.push(Reverse((self.now + after, self.number)));
        self.events.insert(self.number, event);
    }

    fn plan_within(&mut self, most: Duration, event: Event) {
        let after = Duration::from_nanos(self.random.below(most.as_nanos() as u64 + 1));
        self.plan(after, event);
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.random.below(100) < percent
    }

    /// Runs until no event is left.
    fn run(&mut self) -> Result<Tally, String> {
        loop {
            while let Some(Reverse((at, number))) = self.queue.pop() {
                self.now = at;
                let event = self.events.remove(&number).ok_or("no event")?;
                self.happen(event)?;
            }
            if !self.notice_crashes()? {
                break;
            }
        }
        if self.now > self.last_stimulus + LONGEST_END {
            return Err(format!("busy until {:?}, after the last stimulus at {:?}", self.now, self.last_stimulus));
        }
        check_end(&self.hosts.iter().collect::<Vec<_>>())?;
        self.tally.lasting = self.hosts.iter().map(|host| host.sessions.len() as u64).sum();
        Ok(self.tally)
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        if self.is_traced {
            println!("{:>12.6} {}", self.now.0 as f64 / 1e9, describe(&event));
        }
        match event {
            Event::Arrive(packet) => self.step(packet.to, Input::Packet(0), Some(&packet)),
            Event::Wake(host) => {
                if self.wakes[usize::from(host)] == Some(self.now) {
                    self.wakes[usize::from(host)] = None;
                    let sent = self.hosts[usize::from(host)].expire(self.now)?;
                    return self.follow(host, sent);
                }
                Ok(())
            }
            Event::Start(host) => {
                self.last_stimulus = self.now;
                let to = (host + 1 + self.random.below(2) as u8) % HOSTS;
                let input = if self.chance(15) { Input::LookUp(to) } else { Input::Connect(to) };
                self.tally.lookups += u64::from(matches!(input, Input::LookUp(_)));
                self.step(host, input, None)
            }
            Event::Crash(host) => {
                (self.last_stimulus, self.tally.crashes) = (self.now, self.tally.crashes + 1);
                self.planned.retain(|(of, _), _| *of != host);
                self.wakes[usize::from(host)] = None;
                self.step(host, Input::Crash, None)
            }
            Event::Decide(host, incarnation, id, stage) => self.decide(host, incarnation, id, stage),
            Event::DecideLookup(number, incarnation, id) => {
                let host = &self.hosts[usize::from(number)];
                let at = host.lookups.iter().position(|lookup| lookup.id == id && !lookup.is_own);
                let Some(index) = at.filter(|_| host.incarnation == incarnation) else { return Ok(()) };
                let op = if self.chance(80) { LookupOp::Answer } else { LookupOp::Release };
                self.step(number, Input::Lookup(index as u8, op), None)
            }
        }
    }

    fn decide(&mut self, number: u8, incarnation: u8, id: ConnectionId, stage: Stage) -> Result<(), String> {
        let host = &self.hosts[usize::from(number)];
        let at = host.sessions.iter().position(|session| session.id == id && session.stage == stage);
        let Some(index) = at.filter(|_| host.incarnation == incarnation) else { return Ok(()) };
        let (ops, has_sent) = (host.ops(&host.sessions[index]), host.sessions[index].has_sent);
        let refuses = self.chance(self.rates.refusal);
        let op = match stage {
            Stage::Requested if !refuses => Op::Accept,
            Stage::Replied if !refuses => Op::Establish,
            Stage::Established if !has_sent && self.chance(60) => Op::Send,
            // Some connections last.
            Stage::Established if self.chance(20) => return Ok(()),
            Stage::Connecting | Stage::Accepted | Stage::Disconnecting if !refuses => return Ok(()),
            _ => ops[self.random.below(ops.len() as u64) as usize],
        };
        self.last_stimulus = self.now;
        self.tally.established += u64::from(op == Op::Establish);
        self.tally.refused += u64::from(op == Op::Reject);
        self.planned.remove(&(number, id));
        self.step(number, Input::Program(index as u8, op), None)
    }

    fn step(&mut self, number: u8, input: Input, packet: Option<&Packet>) -> Result<(), String> {
        let config = self.config.clone();
        let sent = self.hosts[usize::from(number)].step(self.now, input, packet, &config, Plant::None)?;
        self.follow(number, sent)
    }

    /// Sends the packets of a step, and plans the next timer and the next actions of the program.
    fn follow(&mut self, number: u8, sent: Vec<Packet>) -> Result<(), String> {
        sent.into_iter().for_each(|packet| self.send(packet));
        let host = &self.hosts[usize::from(number)];
        let wake = host.manager.wake_at();
        let (incarnation, mut decisions) = (host.incarnation, Vec::new());
        for session in &host.sessions {
            let old = self.planned.insert((number, session.id), session.stage);
            if old != Some(session.stage) {
                decisions.push(Event::Decide(number, incarnation, session.id, session.stage));
            }
            let last = session.qpn.and_then(|qpn| self.qpns.insert((number, qpn), session.id));
            self.tally.reused += u64::from(last.is_some_and(|last| last != session.id));
        }
        for lookup in host.lookups.iter().filter(|lookup| !lookup.is_own) {
            if self.planned.insert((number, lookup.id), Stage::Requested).is_none() {
                decisions.push(Event::DecideLookup(number, incarnation, lookup.id));
            }
        }
        for decision in decisions {
            let most = if self.chance(4) { 40_000 } else { 300 };
            self.plan_within(Duration::from_millis(most), decision);
        }
        if wake != self.wakes[usize::from(number)] {
            self.wakes[usize::from(number)] = wake;
            if let Some(at) = wake {
                self.plan(Duration::from_nanos(at.0.saturating_sub(self.now.0)), Event::Wake(number));
                self.wakes[usize::from(number)] = Some(at.max(self.now));
            }
        }
        self.check_pairs(number)
    }

    fn send(&mut self, packet: Packet) {
        if self.chance(self.rates.loss) {
            let lost = self.losses.entry(packet.clone()).or_default();
            if *lost < MOST_LOSSES {
                *lost += 1;
                self.tally.lost += 1;
                return;
            }
        }
        let copies = 1 + usize::from(self.chance(self.rates.duplicate));
        self.tally.duplicated += copies as u64 - 1;
        for _ in 0..copies {
            let is_delayed = self.chance(self.rates.delay);
            self.tally.delayed += u64::from(is_delayed);
            let most = if is_delayed { LONGEST_DELAY } else { Duration::from_micros(300) };
            self.plan_within(most, Event::Arrive(packet.clone()));
        }
    }

    /// No established connection of a host uses the queue pair of another connection.
    fn check_pairs(&self, number: u8) -> Result<(), String> {
        let host = &self.hosts[usize::from(number)];
        for session in host.sessions.iter().filter(|session| is_established(host, session)) {
            let peer = &self.hosts[usize::from(session.peer)];
            let of_peer = peer.sessions.iter().filter(|of| of.peer == number && is_established(peer, of));
            let Some(a) = host.manager.negotiated(session.id) else { continue };
            for b in of_peer.filter_map(|of| peer.manager.negotiated(of.id)) {
                let is_near = a.remote_qpn == b.local_qpn || b.remote_qpn == a.local_qpn;
                if is_near && !are_peers(a, b) {
                    return Err(format!("hosts {number} and {}: {a:?} meets {b:?}", session.peer));
                }
            }
        }
        Ok(())
    }

    /// Releases the established connections whose peers have lost their state. Returns whether there were any.
    fn notice_crashes(&mut self) -> Result<bool, String> {
        let mut noticed = false;
        for number in 0..HOSTS {
            let host = &self.hosts[usize::from(number)];
            let orphan = host.sessions.iter().position(|session| {
                let negotiated = host.manager.negotiated(session.id).filter(|_| is_established(host, session));
                let incarnation = self.hosts[usize::from(session.peer)].incarnation;
                negotiated.is_some_and(|negotiated| incarnation_of(negotiated.send_psn) != incarnation)
            });
            if let Some(index) = orphan {
                (self.last_stimulus, noticed) = (self.now, true);
                self.step(number, Input::Program(index as u8, Op::Release), None)?;
            }
        }
        Ok(noticed)
    }
}

fn is_established(host: &Host, session: &Session) -> bool {
    host.manager.phase(session.id) == Some(Phase::Established)
}

fn describe(event: &Event) -> String {
    match event {
        Event::Arrive(packet) => {
            let text =
                crate::support::plant::message(packet).map_or("Data".to_owned(), |message| format!("{message:?}"));
            let text = text.split("private_data").next().unwrap_or_default().to_owned();
            format!("{} receives from {}: {text}", packet.to, packet.from)
        }
        other => format!("{other:?}"),
    }
}

impl Tally {
    fn add(&mut self, other: &Tally) {
        self.established += other.established;
        self.refused += other.refused;
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.delayed += other.delayed;
        self.crashes += other.crashes;
        self.reused += other.reused;
        self.lookups += other.lookups;
        self.lasting += other.lasting;
    }
}

/// Runs this thread's share of the seeds.
fn run_share(seeds: u64, thread: u64, threads: u64) -> Tally {
    let mut all = Tally::default();
    for seed in (1..=seeds).skip(thread as usize).step_by(threads as usize) {
        match Run::new(seed, false).run() {
            Ok(tally) => all.add(&tally),
            Err(reason) => panic!("RDMA_TEST_SEED={seed}: {reason}"),
        }
    }
    all
}

#[test]
fn random_runs_leave_only_connections_that_both_sides_have() {
    if let Some(seed) = std::env::var("RDMA_TEST_SEED").ok().and_then(|seed| seed.parse().ok()) {
        let tally = Run::new(seed, true).run().unwrap_or_else(|reason| panic!("RDMA_TEST_SEED={seed}: {reason}"));
        println!("seed {seed}: {tally:?}");
        return;
    }
    let (seeds, threads) = match scale() {
        Scale::Quick => (200, 1),
        Scale::Full => (100_000, 2),
        Scale::Soak => (3_000_000, 2),
    };
    let started = Instant::now();
    let mut all = Tally::default();
    thread::scope(|scope| {
        let threads: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || run_share(seeds, thread, threads))).collect();
        threads.into_iter().for_each(|thread| all.add(&thread.join().unwrap()));
    });
    println!("{seeds} random runs: {all:?}, {:.1} s", started.elapsed().as_secs_f64());
    let Tally { established, refused, lost, duplicated, delayed, crashes, reused, lookups, lasting } = all;
    let counts = [established, refused, lost, duplicated, delayed, crashes, reused, lookups, lasting];
    assert!(counts.iter().all(|count| *count > seeds / 10), "the runs do not do enough: {all:?}");
}
