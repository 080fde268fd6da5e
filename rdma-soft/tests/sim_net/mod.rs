//! Two ends of a reliable connection, and a network between them that drops, duplicates, reorders and delays packets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use rdma_soft::faults::{Faults, Injector};
use rdma_soft::transport::{
    Outgoing, Payload, Request, Requester, RequesterSettings, Responder, ResponderSettings, Time, Work,
};
use rdma_soft::wire::{Packet, Psn, Transport};

use crate::sim_host::{MTU, SimHost, has_valid_icrc};

/// Both directions of a queue pair.
pub(crate) struct End {
    pub(crate) host: SimHost,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
    /// Encoded packets of the last run that are not sent yet.
    run: VecDeque<Vec<u8>>,
}

pub(crate) const REQUESTER: RequesterSettings = RequesterSettings {
    psn: Psn::new(0xff_fff0),
    mtu: MTU,
    window: 16,
    reads: 4,
    timeout: Some(Duration::from_millis(1)),
    retries: 7,
    rnr_retries: 7,
};

const RESPONDER: ResponderSettings =
    ResponderSettings { psn: Psn::new(0xff_fff0), mtu: MTU, resources: 4, min_rnr_timer: 1 };

impl End {
    pub(crate) fn new() -> Self {
        End::with(REQUESTER)
    }

    pub(crate) fn with(settings: RequesterSettings) -> Self {
        End {
            host: SimHost::new(),
            requester: Requester::new(settings),
            responder: Responder::new(RESPONDER),
            run: VecDeque::new(),
        }
    }

    pub(crate) fn post(&mut self, id: u64, request: Request, data: Vec<u8>) {
        let len = data.len() as u32;
        self.host.data.insert(id, data);
        // A read is not ordered with later operations on the same memory, unless these are fenced.
        let is_fenced = !matches!(request, Request::Send(_) | Request::Read { .. });
        let work = Work { id, request, len, is_fenced, is_solicited: false };
        self.requester.post(work, &mut self.host);
    }

    /// Encodes the next packet, so that the peer sees only what a network carries.
    pub(crate) fn transmit(&mut self, now: Time) -> Option<Vec<u8>> {
        if let Some(bytes) = self.run.pop_front() {
            return Some(bytes);
        }
        let End { host, requester, responder, run } = self;
        let first = match responder.transmit(host) {
            Some(first) => {
                let mut one_by_one = responder.clone();
                let count = responder.extend_run(&first, run_limit(&first), host);
                run.extend(encode_run(host, &first, count, || one_by_one.transmit(host)));
                assert_eq!(format!("{responder:?}"), format!("{one_by_one:?}"));
                first
            }
            None => {
                let first = requester.transmit(now)?;
                let mut one_by_one = requester.clone();
                let count = requester.extend_run(&first, run_limit(&first));
                run.extend(encode_run(host, &first, count, || one_by_one.transmit(now)));
                assert_eq!(format!("{requester:?}"), format!("{one_by_one:?}"));
                first
            }
        };
        Some(host.encode(&first, Transport::Rc))
    }

    pub(crate) fn handle(&mut self, bytes: &[u8], now: Time) {
        let Packet { header, payload } = Packet::parse(bytes).unwrap();
        if header.operation.is_answer() {
            self.requester.handle(&header, payload, now, &mut self.host);
        } else {
            self.responder.handle(&header, payload, &mut self.host);
        }
    }
}

/// Limit for the run that this packet starts. Varies with the PSN.
fn run_limit(first: &Outgoing) -> u32 {
    first.psn.get() % 6
}

/// Checks that `next` returns the `count` packets that continue the run of `first`, and encodes them.
fn encode_run(
    host: &SimHost,
    first: &Outgoing,
    count: u32,
    mut next: impl FnMut() -> Option<Outgoing>,
) -> Vec<Vec<u8>> {
    let mut expected = *first;
    let mut encode_next = || {
        expected.psn = expected.psn.add(1);
        match &mut expected.payload {
            Payload::Work { offset, len, .. } => *offset += *len,
            Payload::Remote { place, len } => place.0 += u64::from(*len),
            Payload::None => unreachable!("packets of a run have a payload"),
        }
        assert_eq!(next(), Some(expected));
        host.encode(&expected, Transport::Rc)
    };
    (0..count).map(|_| encode_next()).collect()
}

/// A simulation in which only the first end posts work.
pub(crate) fn one_way(settings: RequesterSettings) -> Net {
    Net::new([End::with(settings), End::new()], Faults::default())
}

/// Two ends and the network between them.
pub(crate) struct Net {
    pub(crate) ends: [End; 2],
    pub(crate) now: Time,
    /// Packets in flight: arrival time, destination and bytes.
    pub(crate) in_flight: BTreeMap<(Time, u64), (usize, Vec<u8>)>,
    number: u64,
    pub(crate) injector: Injector,
    pub(crate) packets: u64,
    /// Packets to drop regardless of the injector, counted from 1.
    pub(crate) lost: BTreeSet<u64>,
}

impl Net {
    pub(crate) fn new(ends: [End; 2], faults: Faults) -> Self {
        let injector = Injector::new(faults);
        Net { ends, now: Time(0), in_flight: BTreeMap::new(), number: 0, injector, packets: 0, lost: BTreeSet::new() }
    }

    /// Sends a packet, which takes 10 µs plus its faults.
    fn send(&mut self, to: usize, mut bytes: Vec<u8>) {
        if self.lost.remove(&self.packets) {
            return;
        }
        let fate = self.injector.next(&mut bytes);
        let after = Duration::from_micros(10 * (1 + u64::from(fate.overtaken_by))) + fate.delay;
        for _ in 0..fate.copies {
            self.number += 1;
            self.in_flight.insert((self.now + after, self.number), (to, bytes.clone()));
        }
    }

    /// Runs until nothing is left to do.
    pub(crate) fn run(&mut self) {
        while self.advance() {}
    }

    /// Sends all packets and advances to the next event. Returns whether there was one.
    pub(crate) fn advance(&mut self) -> bool {
        for end in 0..2 {
            while let Some(bytes) = self.ends[end].transmit(self.now) {
                self.packets += 1;
                assert!(self.packets < 100_000, "the simulation does not end");
                self.send(1 - end, bytes);
            }
        }
        let arrival = self.in_flight.keys().next().map(|(time, _)| *time);
        let wake = self.ends.iter().filter_map(|end| end.requester.wake_at()).min();
        let Some(next) = arrival.into_iter().chain(wake).min() else { return false };
        self.now = self.now.max(next);
        if arrival == Some(next) {
            let (_, (to, bytes)) = self.in_flight.pop_first().unwrap();
            if has_valid_icrc(&bytes) {
                self.ends[to].handle(&bytes, self.now);
            }
        } else {
            let now = self.now;
            for End { requester, host, .. } in &mut self.ends {
                requester.expire(now, now, host);
            }
        }
        true
    }
}
