//! Hosts that exchange messages without a network.

use std::time::Duration;

use rdma_soft::cm::{Config, ConnectionId, Event, ListenAddress, ListenerId, Manager};
use rdma_soft::transport::Time;
use rdma_soft::wire::cm::{Mad, Message, RejectReason};

use crate::support::{DATAGRAMS, SERVICE, address, peer, reply, request};

/// Private data of rejections.
pub(crate) const PRIVATE: [u8; 148] = [7; 148];

/// Queue pairs of the active and the passive side.
pub(crate) const QPNS: (u32, u32) = (0x21, 0x42);

/// A host with listeners for connections and lookups.
pub(crate) struct Host {
    pub(crate) manager: Manager,
    pub(crate) number: u8,
    pub(crate) now: Time,
    pub(crate) listener: ListenerId,
    pub(crate) lookup_listener: ListenerId,
}

impl Host {
    pub(crate) fn new(number: u8) -> Host {
        Host::with(number, |_| {})
    }

    pub(crate) fn with(number: u8, change: impl FnOnce(&mut Config)) -> Host {
        let mut config = Config::new(guid(number), number.into());
        change(&mut config);
        let mut manager = Manager::new(config);
        let listener = manager.listen(SERVICE, ListenAddress::Any, 4);
        let lookup_listener = manager.listen(DATAGRAMS, ListenAddress::Any, 4);
        Host { manager, number, now: Time(0), listener, lookup_listener }
    }

    pub(crate) fn connect(&mut self, to: u8, qpn: u32) -> ConnectionId {
        let request = request(address(self.number), address(to), qpn, 100 + u32::from(self.number));
        self.manager.connect(self.now, peer(to), request).unwrap()
    }

    /// Accepts the request that has arrived.
    pub(crate) fn accept(&mut self, qpn: u32) -> ConnectionId {
        let id = self.requested();
        self.manager.take_request(id);
        self.manager.accept(self.now, id, reply(qpn, 100 + u32::from(self.number))).unwrap();
        id
    }

    pub(crate) fn reject(&mut self, id: ConnectionId) {
        self.manager.reject(self.now, id, RejectReason::CONSUMER_DEFINED, PRIVATE).unwrap();
    }

    /// The request that has arrived, the only event.
    pub(crate) fn requested(&mut self) -> ConnectionId {
        match &self.events()[..] {
            [Event::Request { id, .. }] => *id,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn receive(&mut self, from: u8, message: Message) {
        let mad = Mad { transaction: 9, message };
        self.manager.handle(self.now, peer(from), &mad.encode());
        self.manager.assert_consistent();
    }

    pub(crate) fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.manager.poll_event()).collect()
    }

    /// The messages that the host has sent, and their destinations.
    pub(crate) fn sent(&mut self) -> Vec<(u8, Message)> {
        let number = |to| (0..9).find(|host| address(*host) == to).unwrap_or(u8::MAX);
        let transmits = std::iter::from_fn(|| self.manager.poll_transmit());
        transmits.map(|of| (number(of.to.address), Mad::decode(&of.mad[..]).unwrap().message)).collect()
    }

    /// The only message that the host has sent.
    pub(crate) fn sent_one(&mut self) -> Message {
        let mut sent = self.sent();
        assert_eq!(sent.len(), 1, "{sent:?}");
        sent.remove(0).1
    }

    pub(crate) fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
        self.manager.expire(self.now);
        self.manager.assert_consistent();
    }

    /// Waits until the next timer has expired. Returns how long that took.
    pub(crate) fn wait_for_timer(&mut self) -> Duration {
        let took = Duration::from_nanos(self.manager.wake_at().expect("a timer").0 - self.now.0);
        self.wait(took);
        took
    }

    /// Waits until there are no timers any more. Discards the messages.
    pub(crate) fn wait_for_end(&mut self) {
        while self.manager.wake_at().is_some() {
            self.wait_for_timer();
            self.sent();
        }
    }
}

pub(crate) fn guid(number: u8) -> u64 {
    0xabc0 + u64::from(number)
}

/// Delivers all that a host has sent.
pub(crate) fn deliver(from: &mut Host, to: &mut Host) {
    while let Some(transmit) = from.manager.poll_transmit() {
        assert_eq!(transmit.to.address, address(to.number));
        to.manager.handle(to.now, peer(from.number), &transmit.mad[..]);
        to.manager.assert_consistent();
    }
}

/// A connection of two hosts, before or after a step of its handshake.
pub(crate) struct Pair {
    pub(crate) a: Host,
    pub(crate) b: Host,
    /// The connection at the active side.
    pub(crate) at_a: ConnectionId,
    /// The connection at the passive side, once there is one.
    pub(crate) at_b: ConnectionId,
}

impl Pair {
    /// The REQ has been sent, and is not in flight.
    pub(crate) fn req_sent() -> (Pair, Message) {
        let (mut a, b) = (Host::new(0), Host::new(1));
        let at_a = a.connect(1, QPNS.0);
        let req = a.sent_one();
        (Pair { a, b, at_a, at_b: 0 }, req)
    }

    /// The REQ has been received, and its event been taken.
    pub(crate) fn req_received() -> Pair {
        let (mut pair, req) = Pair::req_sent();
        pair.b.receive(0, req);
        pair.at_b = pair.b.requested();
        pair.b.manager.take_request(pair.at_b);
        pair
    }

    /// The REP has been sent, and is not in flight.
    pub(crate) fn rep_sent() -> (Pair, Message) {
        let mut pair = Pair::req_received();
        pair.b.manager.accept(pair.b.now, pair.at_b, reply(QPNS.1, 101)).unwrap();
        let rep = pair.b.sent_one();
        (pair, rep)
    }

    /// The REP has been received.
    pub(crate) fn rep_received() -> Pair {
        let (mut pair, rep) = Pair::rep_sent();
        pair.a.receive(1, rep);
        assert!(matches!(pair.a.events()[..], [Event::Reply { .. }]));
        pair
    }

    /// The RTU has been sent, and is not in flight.
    pub(crate) fn rtu_sent() -> (Pair, Message) {
        let mut pair = Pair::rep_received();
        pair.a.manager.establish(pair.at_a).unwrap();
        let rtu = pair.a.sent_one();
        (pair, rtu)
    }

    pub(crate) fn established() -> Pair {
        let (mut pair, rtu) = Pair::rtu_sent();
        pair.b.receive(0, rtu);
        assert!(matches!(pair.b.events()[..], [Event::Established { .. }]));
        pair
    }

    /// The active side has sent a DREQ, which is not in flight.
    pub(crate) fn dreq_sent() -> (Pair, Message) {
        let mut pair = Pair::established();
        pair.a.manager.disconnect(pair.a.now, pair.at_a).unwrap();
        let dreq = pair.a.sent_one();
        (pair, dreq)
    }

    /// Delivers everything in flight, again and again.
    pub(crate) fn settle(&mut self) {
        for _ in 0..10 {
            deliver(&mut self.a, &mut self.b);
            deliver(&mut self.b, &mut self.a);
        }
        assert_eq!((self.a.manager.poll_transmit(), self.b.manager.poll_transmit()), (None, None));
    }
}
