//! Mutated messages to a manager that is in all states.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rdma_soft::cm::Config;
use rdma_soft::transport::Time;
use rdma_soft::wire::cm::{MAD_LEN, Mad};

use crate::heap;
use crate::support::host::{Content, Host, Input, LookupOp, Op, Packet, Stage};
use crate::support::plant::Plant;
use crate::support::{Random, Scale, peer, scale};

/// Hosts that the target exchanges messages with. The target is host 0.
const PARTNERS: u8 = 3;

/// Messages that are kept for mutation.
const POOL: usize = 512;

/// Most bytes that the target, its partners and the test allocate.
const MOST_BYTES: isize = 4 << 20;

/// Offsets of the attribute, and of the ids of most messages.
const ATTRIBUTE: usize = 17;
const LOCAL_ID: usize = 24;
const REMOTE_ID: usize = 28;

struct Storm {
    random: Random,
    now: Time,
    config: Config,
    /// The target, and its partners.
    hosts: Vec<Host>,
    pool: Vec<Packet>,
    tally: Tally,
}

/// Counts of messages and events.
#[derive(Default, Debug)]
struct Tally {
    mutated: u64,
    decoded: u64,
    sent: u64,
    established: u64,
    ended: u64,
    most_bytes: isize,
}

impl Storm {
    fn new(seed: u64) -> Storm {
        // Low limits, which are reached.
        let config = Config { max_connections: 48, max_timewait: 32, max_backlog: 8, ..Config::new(0, seed) };
        let mut hosts: Vec<Host> = (0..=PARTNERS).map(|number| Host::new(number, u8::MAX, &config)).collect();
        hosts.iter_mut().for_each(|host| host.is_checked = false);
        hosts[0].is_slow = true;
        Storm { random: Random(seed), now: Time(0), config, hosts, pool: Vec::new(), tally: Tally::default() }
    }

    /// Sends a mutated message to the target, and lets the hosts go on.
    fn step(&mut self) {
        let pause = if self.random.below(300) == 0 { 8_000_000 } else { 2_000 };
        self.now = self.now + Duration::from_micros(self.random.below(pause));
        for number in 0..=PARTNERS {
            let sent = self.hosts[usize::from(number)].expire(self.now).unwrap();
            self.deliver(sent);
        }
        for number in 0..=PARTNERS {
            self.act(number);
        }
        if let Some(packet) = self.mutated() {
            self.tally.mutated += 1;
            let Content::Mad(mad) = &packet.content else { return };
            self.tally.decoded += u64::from(Mad::decode(&mad[..]).is_ok());
            if self.random.below(64) == 0 {
                let length = self.random.below(MAD_LEN as u64) as usize;
                self.hosts[0].manager.handle(self.now, peer(packet.from), &mad[..length]);
            }
            let sent = self.step_host(0, Input::Packet(0), Some(&packet));
            self.deliver(sent);
        }
    }

    fn step_host(&mut self, number: u8, input: Input, packet: Option<&Packet>) -> Vec<Packet> {
        let host = &mut self.hosts[usize::from(number)];
        host.ids.clear();
        host.step(self.now, input, packet, &self.config, Plant::None).unwrap()
    }

    /// Keeps messages for mutation, and delivers most of them, and most answers to them.
    fn deliver(&mut self, sent: Vec<Packet>) {
        let mut queue = VecDeque::from(sent);
        for _ in 0..16 {
            let Some(packet) = queue.pop_front() else { break };
            self.tally.sent += 1;
            if self.pool.len() < POOL {
                self.pool.push(packet.clone());
            } else {
                let at = self.random.below(POOL as u64) as usize;
                self.pool[at] = packet.clone();
            }
            if packet.to <= PARTNERS && self.random.below(4) > 0 {
                queue.extend(self.step_host(packet.to, Input::Packet(0), Some(&packet)));
            }
        }
    }

    /// Lets the program of a host do something.
    fn act(&mut self, number: u8) {
        let sessions = self.hosts[usize::from(number)].sessions.len() as u64;
        let lookups = self.hosts[usize::from(number)].lookups.len() as u64;
        let input = match self.random.below(40) {
            0 if sessions < 24 => Input::Connect(self.other(number)),
            1 if lookups < 8 => Input::LookUp(self.other(number)),
            2..8 if lookups > 0 => {
                let index = self.random.below(lookups) as usize;
                let is_own = self.hosts[usize::from(number)].lookups[index].is_own;
                let releases = is_own || self.random.below(2) == 0;
                Input::Lookup(index as u8, if releases { LookupOp::Release } else { LookupOp::Answer })
            }
            8..30 if sessions > 0 => {
                let index = self.random.below(sessions) as usize;
                let host = &self.hosts[usize::from(number)];
                let ops = host.ops(&host.sessions[index]);
                let op = ops[self.random.below(ops.len() as u64).min(self.random.below(3)) as usize];
                let is_patient = !matches!(host.sessions[index].stage, Stage::Connecting | Stage::Accepted);
                self.tally.established += u64::from(op == Op::Establish);
                self.tally.ended += u64::from(op == Op::Disconnect);
                // A forged end of a connection leaves a peer that still sends data.
                if !is_patient && self.random.below(20) > 0 || op == Op::Send {
                    return;
                }
                Input::Program(index as u8, op)
            }
            _ => return,
        };
        let host = &mut self.hosts[usize::from(number)];
        host.starts = u8::MAX;
        let is_full = host.manager.counts().1 + host.manager.lookup_counts().1 >= self.config.max_connections;
        if is_full && matches!(input, Input::Connect(_) | Input::LookUp(_)) {
            return;
        }
        let sent = self.step_host(number, input, None);
        self.deliver(sent);
    }

    /// The target for partners, and a partner for the target.
    fn other(&mut self, number: u8) -> u8 {
        if number == 0 { 1 + self.random.below(PARTNERS.into()) as u8 } else { 0 }
    }

    fn mutated(&mut self) -> Option<Packet> {
        let mut packet = self.any_packet()?;
        let other = self.any_packet()?;
        let Content::Mad(mad) = &mut packet.content else { return None };
        for _ in 0..self.random.below(4) {
            let length = if self.random.below(4) > 0 { 80 } else { MAD_LEN as u64 };
            let place = self.random.below(length) as usize;
            match self.random.below(9) {
                0 => mad[place] ^= 1 << self.random.below(8),
                1 => mad[place] = [0, 1, 0xff, self.random.next() as u8][self.random.below(4) as usize],
                2 => mad[ATTRIBUTE] = 0x10 + self.random.below(12) as u8,
                3 | 4 => {
                    let at = if self.random.below(2) == 0 { LOCAL_ID } else { REMOTE_ID };
                    mad[at..at + 4].copy_from_slice(&self.id().to_be_bytes());
                }
                5 => {
                    if let Content::Mad(other) = &other.content {
                        let end = (place + self.random.below(64) as usize).min(MAD_LEN);
                        mad[place..end].copy_from_slice(&other[place..end]);
                    }
                }
                6 => packet.from = self.random.below(7) as u8,
                // The GUID of a REQ.
                7 => mad[47] = self.random.next() as u8,
                // The queue pair of a REQ.
                _ => mad[58] = self.random.below(64) as u8,
            }
        }
        packet.to = 0;
        Some(packet)
    }

    fn any_packet(&mut self) -> Option<Packet> {
        let at = self.random.below(self.pool.len() as u64) as usize;
        self.pool.get(at).cloned()
    }

    /// An id of the target or a partner, or a random one.
    fn id(&mut self) -> u32 {
        let number = self.random.below(u64::from(PARTNERS) + 1) as usize;
        let sessions = &self.hosts[number].sessions;
        let at = self.random.below(sessions.len() as u64 + 1) as usize;
        sessions.get(at).map_or(self.random.next() as u32, |session| session.id)
    }

    /// Checks the sizes and the indexes of the target.
    fn check(&mut self, before: isize) {
        let (manager, config) = (&self.hosts[0].manager, &self.config);
        manager.assert_consistent();
        let ((ended, live), (answered, waiting)) = (manager.counts(), manager.lookup_counts());
        assert!(live + waiting <= config.max_connections, "{live} connections, {waiting} lookups");
        assert!(ended <= 2 * config.max_timewait && answered <= config.max_timewait, "{ended}, {answered} ended");
        let bytes = heap::bytes() - before;
        self.tally.most_bytes = self.tally.most_bytes.max(bytes);
        assert!(bytes < MOST_BYTES, "{bytes} bytes");
    }

    /// Without the mutated messages, each partner gets a connection to the target.
    fn check_service(&mut self) {
        let started = self.now;
        let is_connected =
            |host: &Host| host.sessions.iter().any(|session| session.stage == Stage::Established && session.peer == 0);
        let limit = started + Duration::from_secs(3600);
        for number in 1..=PARTNERS {
            for session in std::mem::take(&mut self.hosts[usize::from(number)].sessions) {
                self.hosts[usize::from(number)].manager.release(self.now, session.id);
            }
            while !is_connected(&self.hosts[usize::from(number)]) {
                assert!(self.now < limit, "partner {number} gets no connection: {:?}", self.hosts[0].manager.counts());
                self.now = self.now + Duration::from_millis(20);
                for host in 0..=PARTNERS {
                    let sent = self.hosts[usize::from(host)].expire(self.now).unwrap();
                    self.deliver(sent);
                    self.act(host);
                }
            }
        }
    }
}

#[test]
fn mutated_messages_do_no_harm() {
    let steps: u64 = match scale() {
        Scale::Quick => 20_000,
        Scale::Full => 10_000_000,
        Scale::Soak => 500_000_000,
    };
    let (started, threads) = (Instant::now(), if scale() == Scale::Quick { 1 } else { 2 });
    let storm = |seed| {
        let before = heap::bytes();
        let mut storm = Storm::new(seed);
        while storm.tally.mutated < steps / threads {
            storm.step();
            if storm.tally.mutated % 500 == 0 {
                storm.check(before);
            }
        }
        storm.check_service();
        storm.tally
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (1..=threads).map(|seed| scope.spawn(move || storm(seed))).collect();
        for storm in all {
            let tally = storm.join().unwrap();
            println!("{tally:?}, {:.1} s", started.elapsed().as_secs_f64());
            assert!(tally.decoded > tally.mutated / 2 && tally.established > 20 && tally.ended > 20, "{tally:?}");
        }
    });
}
