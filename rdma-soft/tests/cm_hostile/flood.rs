//! Floods of requests with forged ids, while real clients connect.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use rdma_soft::cm::{Config, ConnectionId, Event, ListenAddress, Manager, Peer, Phase};
use rdma_soft::transport::Time;
use rdma_soft::wire::cm::{Mad, Message, Req, SidrReq};

use crate::heap;
use crate::support::{DATAGRAMS, Random, SERVICE, Scale, address, lookup, lookup_reply, peer, reply, request, scale};

/// Forged requests per second.
const RATE: u64 = 10_000;

/// Time that a packet needs to another host.
const LATENCY: Duration = Duration::from_micros(50);

/// Where forged requests seem to come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sources {
    One,
    Many,
}

/// What the server does with requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Service {
    /// It accepts each request at once.
    AtOnce,
    /// It takes and accepts a hundred requests a second.
    Slow,
    /// It rejects each forged request at once.
    RejectsOthers,
}

/// A server under a flood.
struct Server {
    manager: Manager,
    service: Service,
    /// Requests and lookups that the program has been told of, and has not taken yet.
    told: VecDeque<(ConnectionId, IpAddr)>,
    next_turn: Time,
    last_qpn: u32,
    /// Whether a connection to the client is established.
    has_client: bool,
    most: usize,
}

impl Server {
    fn new(service: Service, config: Config) -> Server {
        let mut manager = Manager::new(config);
        manager.listen(SERVICE, ListenAddress::Any, 128);
        manager.listen(DATAGRAMS, ListenAddress::Any, 128);
        Server { manager, service, told: VecDeque::new(), next_turn: Time(0), last_qpn: 0, has_client: false, most: 0 }
    }

    fn run(&mut self, now: Time) {
        self.manager.expire(now);
        self.learn(now);
        if self.service == Service::Slow {
            if now < self.next_turn {
                return;
            }
            self.next_turn = now + Duration::from_millis(10);
        }
        while let Some((id, from)) = self.told.pop_front() {
            self.answer(now, id, from);
            self.learn(now);
            if self.service == Service::Slow {
                break;
            }
        }
        let ((ended, live), (answered, waiting)) = (self.manager.counts(), self.manager.lookup_counts());
        self.most = self.most.max(ended + live + answered + waiting);
    }

    /// Handles the events. The program releases a connection when it ends.
    fn learn(&mut self, now: Time) {
        while let Some(event) = self.manager.poll_event() {
            match event {
                Event::Request { id, peer, .. } | Event::Lookup { id, peer, .. } => {
                    self.told.push_back((id, peer.address));
                }
                Event::Established { id } => {
                    self.has_client |= self.manager.peer(id).is_some_and(|peer| peer.address == address(1));
                }
                Event::Withdrawn { id } => self.told.retain(|(of, _)| *of != id),
                Event::Failed { id, .. } | Event::Disconnected { id, .. } => self.manager.release(now, id),
                _ => {}
            }
        }
    }

    fn answer(&mut self, now: Time, id: ConnectionId, from: IpAddr) {
        self.manager.take_request(id);
        if self.manager.phase(id) != Some(Phase::ReqReceived) {
            _ = self.manager.reply_lookup(now, id, lookup_reply(7));
        } else if self.service == Service::RejectsOthers && from != address(1) {
            self.manager.release(now, id);
        } else {
            self.last_qpn = (self.last_qpn + 1) & 0xff_ffff;
            self.manager.accept(now, id, reply(self.last_qpn, 1)).unwrap();
        }
    }
}

/// Packets in flight to a host, in the order of their arrival.
type Link = VecDeque<(Time, Box<[u8; 256]>)>;

fn arrive(link: &mut Link, now: Time) -> Option<Box<[u8; 256]>> {
    let (at, _) = link.front()?;
    if *at <= now { link.pop_front().map(|(_, mad)| mad) } else { None }
}

/// A client that connects to the server, or looks up its service.
struct Client {
    manager: Manager,
    to_server: Link,
    to_client: Link,
    is_done: bool,
}

impl Client {
    fn new(number: u64) -> Client {
        let manager = Manager::new(Config::new(1000 + number, number));
        Client { manager, to_server: Link::new(), to_client: Link::new(), is_done: false }
    }

    fn run(&mut self, now: Time, server: &mut Server) {
        self.manager.expire(now);
        while let Some(mad) = arrive(&mut self.to_client, now) {
            self.manager.handle(now, peer(0), &mad[..]);
        }
        while let Some(event) = self.manager.poll_event() {
            match event {
                Event::Reply { id, .. } => self.manager.establish(id).unwrap(),
                Event::LookupReply { .. } => self.is_done = true,
                other => panic!("the client fails: {other:?}"),
            }
        }
        while let Some(transmit) = self.manager.poll_transmit() {
            self.to_server.push_back((now + LATENCY, transmit.mad));
        }
        while let Some(mad) = arrive(&mut self.to_server, now) {
            server.manager.handle(now, peer(1), &mad[..]);
            server.run(now);
        }
        // Answers to forged requests go nowhere.
        while let Some(transmit) = server.manager.poll_transmit() {
            if transmit.to.address == address(1) {
                self.to_client.push_back((now + LATENCY, transmit.mad));
            }
        }
    }
}

/// A request with forged ids.
fn forged(random: &mut Random, sources: Sources, is_lookup: bool) -> (Peer, [u8; 256]) {
    let source = match sources {
        Sources::One => IpAddr::V4(Ipv4Addr::new(10, 9, 9, 9)),
        Sources::Many => IpAddr::V4(Ipv4Addr::from_bits(0x0b00_0000 | random.next() as u32 & 0xff_ffff)),
    };
    let message = if is_lookup {
        Message::SidrReq(SidrReq { id: random.next() as u32, ..lookup(source, address(0)) })
    } else {
        let (local_id, guid) = (random.next() as u32, random.next());
        Message::Req(Req { local_id, guid, ..request(source, address(0), random.next() as u32 & 0xff_ffff, 1) })
    };
    let from = Peer { link: 0, address: source, is_local: false };
    (from, Mad { transaction: random.next(), message }.encode())
}

/// Floods a server. Clients connect one after the other, each `before` after the last one. Returns the longest time of a client.
fn flood(sources: Sources, service: Service, is_lookup: bool, config: Config, before: Duration) -> Duration {
    let clients = if scale() == Scale::Soak { 200 } else { 4 };
    let (mut random, started) = (Random(1), heap::bytes());
    let most_connections = config.max_connections + 3 * config.max_timewait;
    let mut server = Server::new(service, config);
    let step = Duration::from_nanos(1_000_000_000 / RATE);
    let (mut now, mut longest, mut most_bytes) = (Time(0), Duration::ZERO, 0);
    for number in 0..clients {
        let (mut client, mut began) = (Client::new(number), None);
        let come_at = now + before;
        while !client.is_done {
            now = now + step;
            let (from, mad) = forged(&mut random, sources, is_lookup);
            server.manager.handle(now, from, &mad);
            server.run(now);
            if now >= come_at && began.is_none() {
                began = Some(now);
                if is_lookup {
                    client.manager.look_up(now, peer(0), lookup(address(1), address(0))).unwrap();
                } else {
                    let qpn = number as u32 + 1;
                    client.manager.connect(now, peer(0), request(address(1), address(0), qpn, 1)).unwrap();
                }
            }
            client.run(now, &mut server);
            client.is_done |= std::mem::take(&mut server.has_client);
            if now.0 % 500_000_000 == 0 {
                server.manager.assert_consistent();
            }
            most_bytes = most_bytes.max(heap::bytes() - started);
        }
        let took = Duration::from_nanos(now.0 - began.unwrap_or(now).0);
        longest = longest.max(took);
    }
    let most = server.most;
    println!(
        "{sources:?} {service:?} lookups {is_lookup}: {longest:?}; {most} connections and lookups, {most_bytes} bytes"
    );
    assert!(most <= most_connections, "{most} connections and lookups");
    // What `Config` promises, and 32 KiB for the client and the program of the server.
    assert!(most_bytes as usize <= most * 768 + (128 << 10) + (32 << 10), "{most_bytes} bytes for {most}");
    longest
}

/// Settings that a flood of a second or two fills.
fn small() -> Config {
    Config { max_connections: 3000, max_timewait: 1000, ..Config::new(1, 1) }
}

#[test]
fn a_client_connects_while_one_address_floods_the_listener() {
    let before = Duration::from_millis(600);
    assert!(flood(Sources::One, Service::Slow, false, small(), before) < Duration::from_secs(3));
    assert!(flood(Sources::One, Service::RejectsOthers, false, small(), before) < Duration::from_millis(100));
}

#[test]
fn a_client_connects_while_many_addresses_flood_the_listener() {
    let before = Duration::from_millis(600);
    assert!(flood(Sources::Many, Service::Slow, false, small(), before) < Duration::from_secs(5));
    assert!(flood(Sources::Many, Service::RejectsOthers, false, small(), before) < Duration::from_millis(100));
}

#[test]
fn a_client_connects_to_a_server_that_accepts_the_requests_of_a_flood() {
    let (config, before) = match scale() {
        Scale::Quick => (small(), Duration::from_millis(500)),
        Scale::Full | Scale::Soak => (Config::new(1, 1), Duration::from_secs(8)),
    };
    for sources in [Sources::One, Sources::Many] {
        assert!(flood(sources, Service::AtOnce, false, config.clone(), before) < Duration::from_millis(100));
    }
}

#[test]
fn a_lookup_is_answered_while_others_flood_the_listener() {
    let before = Duration::from_millis(600);
    for sources in [Sources::One, Sources::Many] {
        assert!(flood(sources, Service::Slow, true, small(), before) < Duration::from_secs(5));
        assert!(flood(sources, Service::AtOnce, true, small(), before) < Duration::from_millis(100));
    }
}
