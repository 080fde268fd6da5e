//! Simulations of reliable connections over a network that drops, duplicates, reorders and delays packets. A seed can be
//! replayed.

mod sim_host;
mod sim_net;

use std::collections::BTreeMap;
use std::time::Duration;

use sim_host::{BASE, MEMORY, MTU, RECEIVE, RKEY, SimHost, pattern};
use sim_net::{End, Net, REQUESTER, one_way};

use proptest::prelude::*;
use rdma_soft::faults::{Faults, Injector};
use rdma_soft::transport::{Completion, Request, Requester, RequesterSettings, Status, Time, Work};
use rdma_soft::wire::{Atomic, Packet, Psn, Trailer};

fn sent(end: &End) -> Vec<(u64, Status)> {
    let sent = |completion: &Completion| match completion {
        Completion::Sent { id, status } => Some((*id, *status)),
        Completion::Received { .. } => None,
    };
    end.host.completions.iter().filter_map(sent).collect()
}

fn received(end: &End) -> Vec<(u64, Status, u32, Option<u32>)> {
    let received = |completion: &Completion| match completion {
        Completion::Received { id, status, len, imm, .. } => Some((id.0, *status, *len, *imm)),
        Completion::Sent { .. } => None,
    };
    end.host.completions.iter().filter_map(received).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Send { len: usize, imm: Option<u32> },
    Write { at: usize, len: usize, imm: Option<u32> },
    Read { at: usize, len: usize },
    Add { word: usize, value: u64 },
    Swap { word: usize, value: u64 },
}

/// Computes the memory and messages that result if every step is executed once and in order.
fn expected(
    steps: &[Step],
    memory: &mut [u8],
    results: &mut BTreeMap<u64, Vec<u8>>,
    messages: &mut Vec<(Vec<u8>, Option<u32>)>,
) {
    for (id, step) in (0_u64..).zip(steps) {
        match *step {
            Step::Send { len, imm } => messages.push((pattern(id, len), imm)),
            Step::Write { at, len, imm } => {
                memory[at..][..len].copy_from_slice(&pattern(id, len));
                if imm.is_some() {
                    messages.push((Vec::new(), imm));
                }
            }
            Step::Read { at, len } => drop(results.insert(id, memory[at..][..len].to_vec())),
            Step::Add { word, value } | Step::Swap { word, value } => {
                let bytes: &mut [u8; 8] = (&mut memory[8 * word..][..8]).try_into().unwrap();
                let old = u64::from_ne_bytes(*bytes);
                results.insert(id, old.to_ne_bytes().to_vec());
                let new = match step {
                    Step::Add { .. } => old.wrapping_add(value),
                    _ if old == 0 => value,
                    _ => old,
                };
                *bytes = new.to_ne_bytes();
            }
        }
    }
}

/// An atomic operation that leaves the word unchanged.
fn word(at: usize) -> Atomic {
    Atomic { address: BASE + 8 * at as u64, rkey: RKEY, swap: 0, compare: 0 }
}

fn post(end: &mut End, steps: &[Step]) {
    for (id, step) in (0_u64..).zip(steps) {
        let address = |at: usize| BASE + at as u64;
        let atomic = |at, swap| Atomic { swap, ..word(at) };
        match *step {
            Step::Send { len, imm } => {
                let trailer = imm.map_or(Trailer::None, Trailer::Immediate);
                end.post(id, Request::Send(trailer), pattern(id, len));
            }
            Step::Write { at, len, imm } => {
                end.post(id, Request::Write { address: address(at), rkey: RKEY, imm }, pattern(id, len));
            }
            Step::Read { at, len } => {
                end.post(id, Request::Read { address: address(at), rkey: RKEY }, vec![0; len]);
            }
            Step::Add { word, value } => end.post(id, Request::FetchAdd(atomic(word, value)), vec![0; 8]),
            Step::Swap { word, value } => end.post(id, Request::CompareSwap(atomic(word, value)), vec![0; 8]),
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    let imm = || prop::option::of(any::<u32>());
    let range = || (0..MEMORY - 2000, prop_oneof![0..10_usize, 250..260_usize, 0..2000_usize]);
    prop_oneof![
        (prop_oneof![0..10_usize, 250..260_usize, 0..2000_usize], imm()).prop_map(|(len, imm)| Step::Send { len, imm }),
        (range(), imm()).prop_map(|((at, len), imm)| Step::Write { at, len, imm }),
        range().prop_map(|(at, len)| Step::Read { at, len }),
        (0..4_usize, any::<u64>()).prop_map(|(word, value)| Step::Add { word, value }),
        (0..4_usize, any::<u64>()).prop_map(|(word, value)| Step::Swap { word, value }),
    ]
}

/// Runs the steps of both ends, and checks that each is executed once and in order.
fn both_ways(steps: &[Vec<Step>; 2], timeout: Duration, faults: Faults) {
    let end = || End::with(RequesterSettings { timeout: Some(timeout), ..REQUESTER });
    let mut net = Net::new([end(), end()], faults);
    for (end, steps) in net.ends.iter_mut().zip(steps) {
        post(end, steps);
    }
    for end in &mut net.ends {
        (0..200).for_each(|id| end.host.post_receive(id));
    }
    net.run();
    for (end, steps) in steps.iter().enumerate() {
        let (own, other) = (&net.ends[end], &net.ends[1 - end]);
        let (mut memory, mut results, mut messages) = (vec![0; MEMORY], BTreeMap::new(), Vec::new());
        expected(steps, &mut memory, &mut results, &mut messages);
        let ids = (0..steps.len() as u64).map(|id| (id, Status::Success)).collect::<Vec<_>>();
        assert_eq!(sent(own), ids);
        assert!(other.host.memory == memory, "memory differs from what was written");
        for (id, result) in results {
            assert!(own.host.data[&id] == result, "wrong response data of {id}");
        }
        let arrived = received(other);
        assert_eq!(arrived.len(), messages.len());
        for ((id, status, _, imm), (data, wanted)) in arrived.iter().zip(&messages) {
            assert_eq!((*status, imm), (Status::Success, wanted));
            assert_eq!(other.host.received.get(id).map_or(&[][..], |data| data), data);
        }
        assert!(own.requester.is_idle());
    }
}

#[test]
fn the_middle_of_a_write_is_sent_in_runs() {
    let mut net = one_way(RequesterSettings { window: 32, ..REQUESTER });
    net.ends[0].post(1, Request::Write { address: BASE, rkey: RKEY, imm: None }, vec![0; 12 * MTU as usize]);
    let requester = &mut net.ends[0].requester;
    let run = || {
        let first = requester.transmit(Time(0))?;
        Some(1 + requester.extend_run(&first, 4))
    };
    // The first packet, packets 2 to 6, the seventh, the eighth, which requests an ACK, 9 to 11, and the last.
    assert_eq!(std::iter::from_fn(run).collect::<Vec<_>>(), [1, 5, 1, 1, 3, 1]);
}

#[test]
fn the_middle_of_a_read_response_is_sent_in_runs() {
    let mut net = one_way(RequesterSettings { window: 32, ..REQUESTER });
    net.ends[0].post(1, Request::Read { address: BASE, rkey: RKEY }, vec![0; 12 * MTU as usize]);
    let request = net.ends[0].transmit(Time(0)).unwrap();
    net.ends[1].handle(&request, Time(0));
    let End { host, responder, .. } = &mut net.ends[1];
    let mut counts = Vec::new();
    while let Some(first) = responder.transmit(host) {
        // The memory is inaccessible after the second packet, so no run starts there.
        host.is_closed = counts.len() == 1;
        counts.push(1 + responder.extend_run(&first, 4, host));
        host.is_closed = false;
    }
    assert_eq!(counts, [1, 1, 5, 4, 1]);
}

#[test]
fn a_message_waits_for_a_receive() {
    let mut net = one_way(REQUESTER);
    net.ends[0].post(0, Request::Send(Trailer::Immediate(7)), pattern(0, 700));
    net.ends[0].post(1, Request::Write { address: BASE, rkey: RKEY, imm: Some(8) }, pattern(1, 300));
    // Until the third RNR delay has started.
    for _ in 0..3 {
        while net.ends[0].requester.wake_at().is_none_or(|_| !net.in_flight.is_empty()) {
            net.advance();
        }
        net.advance();
    }
    assert_eq!(sent(&net.ends[0]), []);
    net.ends[1].host.post_receive(10);
    net.ends[1].host.post_receive(11);
    net.run();
    assert_eq!(sent(&net.ends[0]), [(0, Status::Success), (1, Status::Success)]);
    assert_eq!(received(&net.ends[1]), [(10, Status::Success, 700, Some(7)), (11, Status::Success, 300, Some(8))]);
    assert_eq!(net.ends[1].host.received[&10], pattern(0, 700));
    assert!(net.now >= Time(30_000), "three RNR delays of 10 µs: {:?}", net.now);
}

#[test]
fn a_peer_without_receives_fails_work_after_rnr_retries() {
    for rnr_retries in [0, 1, 6] {
        let mut net = one_way(RequesterSettings { rnr_retries, ..REQUESTER });
        net.ends[0].post(0, Request::Send(Trailer::None), pattern(0, 10));
        net.ends[0].post(1, Request::Send(Trailer::None), pattern(1, 10));
        net.run();
        assert_eq!(sent(&net.ends[0]), [(0, Status::ReceiverNotReadyExceeded), (1, Status::Flushed)]);
        let tries = u64::from(rnr_retries) + 1;
        assert_eq!(net.now, Time(tries * 20_000 + u64::from(rnr_retries) * 10_000));
        assert!(net.ends[0].requester.has_failed());
    }
}

#[test]
fn a_peer_that_never_answers_fails_work_after_retries() {
    for retries in [0, 1, 7] {
        let mut net = one_way(RequesterSettings { retries, ..REQUESTER });
        net.injector = Injector::new(Faults::default().with_drop(1.0));
        net.ends[0].post(0, Request::Send(Trailer::None), pattern(0, 500));
        net.run();
        assert_eq!(sent(&net.ends[0]), [(0, Status::RetryExceeded)]);
        let tries = u64::from(retries) + 1;
        assert_eq!((net.packets, net.now), (tries * 2, Time(tries * 1_000_000)));
    }
}

#[test]
fn a_lost_tail_is_probed_before_the_timeout_without_a_retry() {
    let settings = RequesterSettings { timeout: Some(Duration::from_millis(640)), retries: 0, ..REQUESTER };
    // Four packets and their ACK, some of which are lost.
    for lost in [&[5][..], &[4], &[3, 4], &[1, 2, 3, 4], &[2, 3, 4, 5], &[4, 5]] {
        let mut net = one_way(settings);
        net.lost = lost.iter().copied().collect();
        net.ends[1].host.post_receive(1);
        net.ends[0].post(0, Request::Send(Trailer::None), pattern(0, 1000));
        net.run();
        assert_eq!(sent(&net.ends[0]), [(0, Status::Success)], "{lost:?}");
        assert_eq!(net.ends[1].host.received[&1], pattern(0, 1000));
        // The first probe is sent after 10 ms. Some losses need further probes.
        assert!((10_000_000..42_000_000).contains(&net.now.0), "{lost:?}: {:?}", net.now);
    }
    for request in [Request::Read { address: BASE, rkey: RKEY }, Request::FetchAdd(word(0))] {
        for lost in [1, 2] {
            let mut net = one_way(settings);
            net.lost.insert(lost);
            net.ends[0].post(0, request, vec![1; 8]);
            net.run();
            assert_eq!(sent(&net.ends[0]), [(0, Status::Success)], "{request:?}, {lost}");
            assert_eq!(net.now, Time(10_020_000), "{request:?}, {lost}");
        }
    }
}

#[test]
fn the_window_shrinks_on_a_lossy_network() {
    let timeout = Some(Duration::from_millis(640));
    let mut net = one_way(RequesterSettings { window: 256, timeout, ..REQUESTER });
    let faults = Faults::default().with_seed(1).with_drop(0.05).with_reorder(0.05).with_dup(0.01);
    net.injector = Injector::new(faults);
    let messages = if cfg!(miri) { 1 } else { 50 };
    for id in 0..messages {
        net.ends[0].post(id, Request::Write { address: BASE, rkey: RKEY, imm: None }, pattern(id, MEMORY));
    }
    net.run();
    // Each packet may have an ACK.
    let needed = 2 * messages * MEMORY as u64 / u64::from(MTU);
    assert!(net.packets < 3 * needed, "{} packets for {needed}", net.packets);
    assert!(net.ends[1].host.memory == pattern(messages - 1, MEMORY));
}

#[test]
fn a_peer_that_is_slow_to_receive_is_not_flooded() {
    let (window, messages) = if cfg!(miri) { (16, 32) } else { (256, 512) };
    let mut net = one_way(RequesterSettings { window, ..REQUESTER });
    let at_once = 8;
    for id in 0..messages {
        net.ends[0].post(id, Request::Send(Trailer::None), pattern(id, 10));
    }
    let mut receives = 0;
    while receives < messages {
        // The peer posts receives every 100 µs, which is ten times its RNR delay.
        while net.now < Time(100_000 * (receives / at_once)) && net.advance() {}
        (receives..receives + at_once).for_each(|id| net.ends[1].host.post_receive(id));
        receives += at_once;
    }
    net.run();
    assert_eq!(received(&net.ends[1]).len() as u64, messages);
    assert!(net.packets < 6 * messages, "{} packets for {messages}", net.packets);
}

#[test]
fn an_rnr_nak_resets_the_retry_counter() {
    let mut net = one_way(RequesterSettings { retries: 1, ..REQUESTER });
    net.ends[0].post(0, Request::Send(Trailer::None), pattern(0, 10));
    // Every fifth packet is lost, a request or an RNR NAK: more than `retries` in total, but never two in a row.
    let rounds = if cfg!(miri) { 16 } else { 40 };
    net.lost = (0..rounds).map(|round| 3 + 5 * round).collect();
    for _ in 0..10 * rounds {
        net.advance();
    }
    assert_eq!(sent(&net.ends[0]), []);
    let lost = rounds - net.lost.len() as u64;
    assert!(net.packets > 5 * rounds / 2 && lost > rounds / 2, "{} packets, {lost} lost", net.packets);
    net.ends[1].host.post_receive(10);
    net.run();
    assert_eq!(sent(&net.ends[0]), [(0, Status::Success)]);
}

#[test]
fn a_lost_nak_is_sent_again() {
    for lost in [vec![2], vec![2, 4], vec![2, 3, 5]] {
        let mut net = one_way(REQUESTER);
        net.lost = lost.iter().copied().collect();
        net.ends[0].post(0, Request::Write { address: BASE, rkey: RKEY + 1, imm: None }, pattern(0, 10));
        net.run();
        assert_eq!(sent(&net.ends[0]), [(0, Status::RemoteAccess)], "{lost:?}");
        assert!(net.ends[1].host.memory == vec![0; MEMORY]);
    }
    // A responder whose application has put it into the error state sends no NAK.
    let mut net = one_way(REQUESTER);
    net.ends[1].responder.abandon();
    net.ends[0].post(0, Request::Write { address: BASE, rkey: RKEY + 1, imm: None }, pattern(0, 10));
    net.run();
    assert_eq!(sent(&net.ends[0]), [(0, Status::RetryExceeded)]);
}

#[test]
fn a_nak_fails_its_work_with_the_reason_and_flushes_the_rest() {
    let atomic = |address| Atomic { address, rkey: RKEY, swap: 1, compare: 0 };
    let end = BASE + MEMORY as u64;
    let cases = [
        (Request::Write { address: BASE, rkey: RKEY + 1, imm: None }, Status::RemoteAccess),
        (Request::Write { address: end - 999, rkey: RKEY, imm: None }, Status::RemoteAccess),
        (Request::Write { address: u64::MAX - 10, rkey: RKEY, imm: Some(1) }, Status::RemoteAccess),
        (Request::Read { address: end - 999, rkey: RKEY }, Status::RemoteAccess),
        (Request::FetchAdd(atomic(end)), Status::RemoteAccess),
        (Request::FetchAdd(atomic(BASE + 4)), Status::RemoteInvalidRequest),
        (Request::Send(Trailer::Invalidate(RKEY + 1)), Status::RemoteAccess),
    ];
    for (request, status) in cases {
        let mut net = one_way(REQUESTER);
        net.ends[1].host.post_receive(1);
        net.ends[0].post(0, Request::Write { address: BASE, rkey: RKEY, imm: None }, pattern(0, 10));
        net.ends[0].post(1, request, pattern(1, 1000));
        net.ends[0].post(2, Request::Write { address: BASE, rkey: RKEY, imm: None }, pattern(2, 10));
        net.run();
        assert_eq!(sent(&net.ends[0]), [(0, Status::Success), (1, status), (2, Status::Flushed)], "{request:?}");
        assert!(net.ends[1].responder.has_failed());
        let mut memory = vec![0; MEMORY];
        memory[..10].copy_from_slice(&pattern(0, 10));
        assert!(net.ends[1].host.memory == memory, "memory was written: {request:?}");
    }
}

#[test]
fn a_message_longer_than_its_receive_fails_at_both_ends() {
    let mut net = one_way(REQUESTER);
    net.ends[1].host.post_receive(5);
    net.ends[0].post(0, Request::Send(Trailer::None), pattern(0, RECEIVE + 1));
    net.run();
    assert_eq!(sent(&net.ends[0]), [(0, Status::RemoteInvalidRequest)]);
    assert_eq!(received(&net.ends[1]), [(5, Status::LocalLength, 0, None)]);
}

#[test]
fn no_more_reads_are_outstanding_than_configured() {
    let mut net = one_way(RequesterSettings { reads: 2, ..REQUESTER });
    for id in 0..5 {
        net.ends[0].post(id, Request::Read { address: BASE, rkey: RKEY }, vec![0; 10]);
    }
    let now = net.now;
    let requests = std::iter::from_fn(|| net.ends[0].transmit(now)).collect::<Vec<_>>();
    assert_eq!(requests.len(), 2);
    for bytes in requests {
        net.ends[1].handle(&bytes, now);
    }
    net.run();
    assert_eq!(sent(&net.ends[0]).len(), 5);
    // A requester that exceeds the responder resources of its peer violates the protocol.
    let mut net = one_way(RequesterSettings { reads: 9, window: 256, ..REQUESTER });
    for id in 0..9 {
        net.ends[0].post(id, Request::Read { address: BASE, rkey: RKEY }, vec![0; 2000]);
    }
    let requests = std::iter::from_fn(|| net.ends[0].transmit(now)).collect::<Vec<_>>();
    for bytes in requests {
        net.ends[1].handle(&bytes, now);
    }
    net.run();
    assert_eq!(sent(&net.ends[0]).iter().filter(|(_, status)| *status == Status::RemoteInvalidRequest).count(), 1);
}

#[test]
fn duplicate_requests_do_not_exceed_the_responder_resources() {
    let mut net = one_way(REQUESTER);
    let now = net.now;
    for id in 0..3 {
        net.ends[0].post(id, Request::FetchAdd(word(0)), vec![0; 8]);
    }
    let requests = std::iter::from_fn(|| net.ends[0].transmit(now)).collect::<Vec<_>>();
    // Each request arrives three times before any is answered. Then the fourth request arrives.
    for bytes in requests.iter().chain(&requests).chain(&requests) {
        net.ends[1].handle(bytes, now);
    }
    net.ends[0].post(3, Request::FetchAdd(word(0)), vec![0; 8]);
    net.run();
    assert_eq!(sent(&net.ends[0]), [0, 1, 2, 3].map(|id| (id, Status::Success)));
}

#[test]
fn memory_closed_during_a_read_fails_the_read() {
    let mut net = one_way(REQUESTER);
    net.ends[0].post(0, Request::Read { address: BASE, rkey: RKEY }, vec![0; 1000]);
    let now = net.now;
    let request = net.ends[0].transmit(now).unwrap();
    net.ends[1].handle(&request, now);
    let first = net.ends[1].transmit(now).unwrap();
    net.ends[0].handle(&first, now);
    net.ends[1].host.is_closed = true;
    net.run();
    assert_eq!(sent(&net.ends[0]), [(0, Status::RemoteAccess)]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 3 } else { 300 }, ..ProptestConfig::default() })]

    #[test]
    fn work_is_done_once_and_in_order(
        first in prop::collection::vec(step(), 0..if cfg!(miri) { 5 } else { 40 }),
        second in prop::collection::vec(step(), 0..if cfg!(miri) { 5 } else { 40 }),
        drop in 0.0..0.06,
        dup in 0.0..0.06,
        reorder in 0.0..0.06,
        corrupt in 0.0..0.02,
        // Only the longer timeout is long enough for probes.
        timeout in prop_oneof![Just(1), Just(100)],
        seed: u64,
    ) {
        let delay = Duration::from_micros(seed % 50);
        let faults = Faults::default().with_seed(seed).with_drop(drop).with_dup(dup).with_reorder(reorder);
        let faults = faults.with_corrupt(corrupt).with_delay(delay);
        both_ways(&[first, second], Duration::from_millis(timeout), faults);
    }

    #[test]
    fn arbitrary_packets_do_no_harm(
        steps in prop::collection::vec(step(), 0..if cfg!(miri) { 5 } else { 10 }),
        noise in prop::collection::vec(
            (0..2_usize, any::<u8>(), 0_u32..40, any::<[u64; 4]>(), 0..600_usize),
            0..if cfg!(miri) { 20 } else { 60 },
        ),
    ) {
        let mut net = one_way(REQUESTER);
        post(&mut net.ends[0], &steps);
        (0..20).for_each(|id| net.ends[1].host.post_receive(id));
        for (to, opcode, psn, words, len) in noise {
            // PSNs near the expected ones, and mostly valid addresses.
            let mut bytes = vec![opcode & 0x1f, 0x40, 0xff, 0xff, 0, 0, 0, 2];
            bytes.extend(Psn::new(0xff_fff0 - 10).add(psn).get().to_be_bytes());
            for word in words {
                bytes.extend((BASE + word % (2 * MEMORY as u64)).to_be_bytes());
                bytes.extend(RKEY.to_be_bytes());
                bytes.extend((word as u32 % 3000).to_be_bytes());
            }
            bytes.resize(16 + len / 4 * 4, 0);
            if let Ok(packet) = Packet::parse(&bytes) {
                prop_assert_eq!(packet.header.dest_qp, 2);
                net.ends[to].handle(&bytes, net.now);
            }
            net.advance();
        }
        net.run();
        // All work completes once and in order.
        let ids: Vec<u64> = sent(&net.ends[0]).iter().map(|(id, _)| *id).collect();
        prop_assert_eq!(ids, (0..steps.len() as u64).collect::<Vec<_>>());
    }
}

#[test]
fn settings_can_change_while_work_is_in_flight() {
    let timeout = Duration::from_micros(10);
    let before = RequesterSettings { retries: 0, timeout: Some(timeout), ..REQUESTER };
    let (mut host, mut requester) = (SimHost::new(), Requester::new(before));
    requester.change(RequesterSettings { retries: 2, psn: Psn::new(1), mtu: 4 * MTU, ..before });
    let write = Request::Write { address: BASE, rkey: RKEY, imm: None };
    let work = Work { id: 7, request: write, len: 2 * MTU, is_fenced: false, is_solicited: false };
    requester.post(work, &mut host);
    let (mut now, mut sent) = (Time(0), Vec::new());
    while !requester.has_failed() {
        sent.extend(std::iter::from_fn(|| requester.transmit(now)).map(|outgoing| outgoing.psn));
        now = now + timeout;
        requester.expire(now, now, &mut host);
    }
    assert_eq!(host.completions, [Completion::Sent { id: 7, status: Status::RetryExceeded }]);
    // The PSN and the MTU have not changed. The first packet was sent once and retransmitted twice.
    let times = sent.iter().filter(|psn| **psn == REQUESTER.psn).count();
    assert_eq!((times, sent[1]), (3, REQUESTER.psn.add(1)));
}
