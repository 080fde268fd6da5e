//! Hostile packets: none accesses memory outside the registered region, and none causes a panic.

use proptest::prelude::*;
use rdma_sys::*;

use super::host::Shared;
use super::keys::{Binding, Registration};
use super::net_address::Destination;
use super::qp::{Answers, Qp};
use super::queues::Task;
use super::state::State;
use super::target::*;
use crate::transport::{Request, Time};
use crate::wire::{Ack, Atomic, Data, Header, Nak, Operation, Psn, RemoteRange, Syndrome, Trailer, Transport};

/// The first packet of a connection, or a datagram.
fn packet(dest_qp: u32, transport: Transport, operation: Operation, pkey: u16, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        transport,
        operation,
        pkey,
        dest_qp,
        psn: Psn::new(PSN),
        solicited: false,
        ack_request: true,
        migrated: true,
        congestion: (false, false),
    };
    datagram(&header, payload)
}

/// Addresses relative to the region: near its edges, or anywhere.
fn address() -> BoxedStrategy<u64> {
    let page = PAGE as u64;
    let edge = 0_u64.wrapping_sub(300);
    prop_oneof![edge..u64::MAX, 0..300_u64, page - 300..page + 300, Just(u64::MAX / 2), any::<u64>()].boxed()
}

fn len() -> impl Strategy<Value = u32> {
    prop_oneof![0..600_u32, Just(PAGE as u32), Just(PAGE as u32 + 1), Just(1 << 31), Just(u32::MAX), any::<u32>()]
}

/// Operations with an address and a key relative to the region's.
fn operation() -> impl Strategy<Value = Operation> {
    let key = prop_oneof![8 => Just(0_u32), 1 => Just(1), 1 => any::<u32>()].boxed();
    let range = (address(), key.clone(), len()).prop_map(|(address, rkey, len)| RemoteRange { address, rkey, len });
    let range = range.boxed();
    let atomic = (address(), key, any::<u64>(), any::<u64>())
        .prop_map(|(address, rkey, swap, compare)| Atomic { address, rkey, swap, compare })
        .boxed();
    let ack = (0..6_u8, any::<u32>()).prop_map(|(kind, msn)| Ack {
        syndrome: match kind {
            0 => Syndrome::Ack(31),
            1 => Syndrome::ReceiverNotReady(1),
            2 => Syndrome::Nak(Nak::SequenceError),
            3 => Syndrome::Nak(Nak::InvalidRequest),
            4 => Syndrome::Nak(Nak::RemoteAccess),
            _ => Syndrome::Nak(Nak::RemoteOperation),
        },
        msn: Psn::new(msn),
    });
    let ack = ack.boxed();
    let trailer = prop_oneof![
        Just(Trailer::None),
        any::<u32>().prop_map(Trailer::Immediate),
        any::<u32>().prop_map(Trailer::Invalidate),
    ]
    .boxed();
    let imm = proptest::option::of(any::<u32>());
    prop_oneof![
        Just(Operation::SendFirst),
        Just(Operation::SendMiddle),
        trailer.clone().prop_map(Operation::SendLast),
        trailer.prop_map(Operation::SendOnly),
        range.clone().prop_map(Operation::WriteFirst),
        Just(Operation::WriteMiddle),
        imm.clone().prop_map(Operation::WriteLast),
        (range.clone(), imm).prop_map(|(range, imm)| Operation::WriteOnly(range, imm)),
        range.prop_map(Operation::ReadRequest),
        atomic.clone().prop_map(Operation::CompareSwap),
        atomic.prop_map(Operation::FetchAdd),
        ack.clone().prop_map(Operation::Acknowledge),
        (ack.clone(), any::<u64>()).prop_map(|(ack, old)| Operation::AtomicAcknowledge(ack, old)),
        ack.clone().prop_map(Operation::ReadFirst),
        Just(Operation::ReadMiddle),
        ack.clone().prop_map(Operation::ReadLast),
        ack.prop_map(Operation::ReadOnly),
    ]
}

fn qp_types() -> impl Strategy<Value = ibv_qp_type> {
    prop_oneof![Just(IBV_QPT_RC), Just(IBV_QPT_UC), Just(IBV_QPT_UD)]
}

fn all_access() -> u32 {
    (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC).0
}

/// A packet: operation, distance to the PSN of the next packet, length of the payload, and whether it requests an ACK. The last
/// field, if any, makes the operation end that many bytes beyond the end of the region.
type Plan = (Operation, u32, usize, bool, Option<i8>);

fn plans() -> impl Strategy<Value = Vec<Plan>> {
    let advance = prop_oneof![20 => Just(1_u32), 1 => Just(0), 1 => Just(2), 1 => 0..0xff_ffff_u32];
    let payload = prop_oneof![4 => Just(MTU as usize), 1 => 0..300_usize];
    let longest = if cfg!(miri) { 4 } else { 20 };
    proptest::collection::vec(
        (operation(), advance, payload, any::<bool>(), proptest::option::of(-4..5_i8)),
        1..longest,
    )
}

/// Moves an operation so that it ends `beyond` bytes after the region, with the key of the region.
fn near_region_end(operation: Operation, beyond: i8) -> Operation {
    let end = (PAGE as u64).wrapping_add_signed(beyond.into());
    let range = |of: RemoteRange, most: u32| {
        let len = of.len % most + 1;
        RemoteRange { address: end.wrapping_sub(len.into()), rkey: 0, len }
    };
    match operation {
        Operation::WriteFirst(of) => Operation::WriteFirst(range(of, PAGE as u32)),
        Operation::WriteOnly(of, imm) => Operation::WriteOnly(range(of, MTU), imm),
        Operation::ReadRequest(of) => Operation::ReadRequest(range(of, PAGE as u32)),
        Operation::CompareSwap(of) => Operation::CompareSwap(Atomic { address: end & !7, rkey: 0, ..of }),
        Operation::FetchAdd(of) => Operation::FetchAdd(Atomic { address: end & !7, rkey: 0, ..of }),
        other => other,
    }
}

/// Adds the address and the key of the target's region.
fn at_target(operation: Operation, target: &Target) -> Operation {
    let range = |of: RemoteRange| RemoteRange {
        address: of.address.wrapping_add(target.region as u64),
        rkey: of.rkey.wrapping_add(target.rkey),
        ..of
    };
    let atomic = |of: Atomic| Atomic {
        address: of.address.wrapping_add(target.region as u64),
        rkey: of.rkey.wrapping_add(target.rkey),
        ..of
    };
    match operation {
        Operation::WriteFirst(of) => Operation::WriteFirst(range(of)),
        Operation::WriteOnly(of, imm) => Operation::WriteOnly(range(of), imm),
        Operation::ReadRequest(of) => Operation::ReadRequest(range(of)),
        Operation::CompareSwap(of) => Operation::CompareSwap(atomic(of)),
        Operation::FetchAdd(of) => Operation::FetchAdd(atomic(of)),
        other => other,
    }
}

fn send(target: &mut Target, kind: ibv_qp_type, plan: &[Plan]) {
    let mut psn = PSN;
    for (operation, advance, payload, ack_request, beyond) in plan {
        let transport = match kind {
            IBV_QPT_RC => Transport::Rc,
            IBV_QPT_UC => Transport::Uc,
            _ => Transport::Ud { qkey: QKEY, source_qp: 5 },
        };
        let operation = beyond.map_or(*operation, |beyond| near_region_end(*operation, beyond));
        let operation = at_target(operation, target);
        let header = Header {
            transport,
            operation,
            pkey: 0xffff,
            dest_qp: target.qp,
            psn: Psn::new(psn),
            solicited: false,
            ack_request: *ack_request,
            migrated: true,
            congestion: (false, false),
        };
        psn = psn.wrapping_add(*advance);
        let payload = match operation {
            Operation::WriteOnly(range, _) if beyond.is_some() => range.len as usize,
            _ if operation.carries_payload() => *payload,
            _ => 0,
        };
        target.deliver(&datagram(&header, &vec![0xaa; payload]));
    }
}

fn cases() -> ProptestConfig {
    let cases = match (cfg!(miri), cfg!(debug_assertions)) {
        (true, _) => 2,
        (_, true) => 400,
        (_, false) => 20_000,
    };
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn well_formed_packets_access_only_the_registered_region(
        kind in qp_types(),
        plan in plans(),
    ) {
        let mut target = Target::new(kind, all_access());
        send(&mut target, kind, &plan);
    }

    #[test]
    fn random_bytes_access_nothing_outside_the_region(
        kind in qp_types(),
        mut bytes in proptest::collection::vec(any::<u8>(), 0..if cfg!(miri) { 40 } else { 200 }),
    ) {
        let mut target = Target::new(kind, all_access());
        target.deliver(&bytes);
        // The same bytes, with the right queue pair number and a valid transport.
        let number = target.qp.to_be_bytes();
        if bytes.len() >= 12 {
            bytes[1] &= 0x30;
            bytes[2..4].copy_from_slice(&[0xff; 2]);
            bytes[5..8].copy_from_slice(&number[1..]);
            target.deliver(&bytes);
        }
    }
}

#[test]
fn an_operation_may_end_at_the_last_byte_of_the_region_but_not_beyond() {
    let before_end =
        |len: u32, beyond: u64| RemoteRange { address: PAGE as u64 - u64::from(len) + beyond, rkey: 0, len };
    let word = |at: u64| Atomic { address: PAGE as u64 - 8 + 8 * at, rkey: 0, swap: 1, compare: 0x5555_5555_5555_5555 };
    for (beyond, state) in [(0, IBV_QPS_RTS), (1, IBV_QPS_ERR)] {
        for (operation, payload, writes) in [
            (Operation::WriteFirst(before_end(2 * MTU, beyond)), MTU as usize, true),
            (Operation::WriteOnly(before_end(99, beyond), None), 99, true),
            (Operation::WriteOnly(before_end(99, beyond), Some(1)), 99, true),
            (Operation::ReadRequest(before_end(2 * MTU, beyond)), 0, false),
            (Operation::CompareSwap(word(beyond)), 0, true),
            (Operation::FetchAdd(word(beyond)), 0, true),
        ] {
            let mut target = Target::new(IBV_QPT_RC, all_access());
            send(&mut target, IBV_QPT_RC, &[(operation, 1, payload, true, None)]);
            assert_eq!(target.state.qps[&target.qp].state, state, "{operation:?}");
            let is_written = *target.region_bytes() != [0x55; PAGE];
            assert_eq!(is_written, writes && state == IBV_QPS_RTS, "{operation:?}");
        }
    }
}

#[test]
fn an_access_right_that_was_not_granted_is_refused() {
    for (access, wanted) in [(0, None), (IBV_ACCESS_REMOTE_READ.0, None), (IBV_ACCESS_REMOTE_WRITE.0, Some(0xaa))] {
        let mut target = Target::new(IBV_QPT_RC, access);
        let range = RemoteRange { address: 0, rkey: 0, len: 8 };
        send(&mut target, IBV_QPT_RC, &[(Operation::WriteOnly(range, None), 1, 8, true, None)]);
        let written = target.region_bytes()[0];
        assert_eq!(written, wanted.unwrap_or(0x55), "{access:#x}");
        let state = target.state.qps[&target.qp].state;
        assert_eq!(state, if wanted.is_some() { IBV_QPS_RTS } else { IBV_QPS_ERR });
    }
}

#[test]
fn packets_with_a_wrong_source_partition_or_queue_key_are_dropped() {
    let range = |target: &Target| RemoteRange { address: target.region as u64, rkey: target.rkey, len: 8 };
    let header = |target: &Target, transport, operation, pkey| Header {
        transport,
        operation,
        pkey,
        dest_qp: target.qp,
        psn: Psn::new(PSN),
        solicited: false,
        ack_request: true,
        migrated: true,
        congestion: (false, false),
    };
    let mut target = Target::new(IBV_QPT_RC, all_access());
    let write = Operation::WriteOnly(range(&target), None);
    let wrong = datagram(&header(&target, Transport::Rc, write, 0x1234), &[0xaa; 8]);
    target.deliver(&wrong);
    let right = datagram(&header(&target, Transport::Rc, write, 0xffff), &[0xaa; 8]);
    target.state.handle_packets(0, origin(LOCAL), LOCAL, Data::from(&right).chunks(right.len()), Time(1));
    assert_eq!(target.region_bytes()[0], 0x55);
    target.deliver(&right);
    assert_eq!(target.region_bytes()[0], 0xaa);

    let mut target = Target::new(IBV_QPT_UD, all_access());
    for (qkey, posted) in [(QKEY ^ 1, 4), (QKEY, 3)] {
        let transport = Transport::Ud { qkey, source_qp: 9 };
        let send = Operation::SendOnly(Trailer::None);
        let bytes = datagram(&header(&target, transport, send, 0xffff), &[0xbb; 8]);
        target.deliver(&bytes);
        assert_eq!(target.state.qps[&target.qp].queues.receive.posted.len(), posted);
    }
    assert_eq!(target.receive_buffer[40..48], [0xbb; 8]);
}

#[test]
fn packets_that_arrive_together_are_handled_like_single_ones() {
    // Distances from the first PSN: in order, with a duplicate, with a gap, and with the last packet first.
    for numbers in [[1, 2, 3], [1, 1, 2], [1, 3, 2], [3, 1, 2]] {
        let [together, single] = [true, false].map(|is_together| {
            let mut target = Target::new(IBV_QPT_RC, all_access());
            let (dest_qp, now) = (target.qp, Time(1));
            let range = RemoteRange { address: target.region as u64, rkey: target.rkey, len: 4 * MTU };
            let packet = |number: u32, operation| {
                let header = Header {
                    transport: Transport::Rc,
                    operation,
                    pkey: 0xffff,
                    dest_qp,
                    psn: Psn::new(PSN).add(number),
                    solicited: false,
                    ack_request: false,
                    migrated: true,
                    congestion: (false, false),
                };
                datagram(&header, &[number as u8; MTU as usize])
            };
            let operation = |number| if number == 3 { Operation::WriteLast(None) } else { Operation::WriteMiddle };
            let first = packet(0, Operation::WriteFirst(range));
            let rest = numbers.map(|number| packet(number, operation(number))).concat();
            let len = rest.len() / numbers.len();
            target.handle(&first, first.len(), now);
            rest.chunks(if is_together { rest.len() } else { len })
                .for_each(|packets| target.handle(packets, len, now));
            let State { qps, shared, .. } = &mut target.state;
            let packets = shared.packets;
            let answer = qps.get_mut(&dest_qp).unwrap().transmit(now, Answers::Send, shared);
            (target.region_bytes().to_vec(), packets, format!("{answer:?}"))
        });
        assert_eq!(together, single, "{numbers:?}");
        assert_eq!((together.0[2 * MTU as usize], together.1), (2, 4), "{numbers:?}");
    }
}

#[test]
fn an_atomic_at_an_unaligned_memory_address_is_refused() {
    let mut target = Target::new(IBV_QPT_RC, 0);
    let zero = IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    let (address, len) = (target.region as u64 + 4, 64);
    let wanted = Registration { pd: 1, address, len, iova: address, access: zero.0 };
    let rkey = target.state.shared.keys.register(&wanted);
    let add = Operation::FetchAdd(Atomic { address: 8, rkey, swap: 1, compare: 0 });
    target.deliver(&packet(target.qp, Transport::Rc, add, 0xffff, &[]));
    assert_eq!(target.state.qps[&target.qp].state, IBV_QPS_ERR);
    assert!(*target.region_bytes() == [0x55; PAGE]);
}

#[test]
fn a_datagram_of_another_partition_is_dropped() {
    let mut target = Target::new(IBV_QPT_UD, 0);
    for (pkey, posted) in [(0x1234, 4), (0x7fff, 3)] {
        let transport = Transport::Ud { qkey: QKEY, source_qp: 9 };
        let send = Operation::SendOnly(Trailer::None);
        target.deliver(&packet(target.qp, transport, send, pkey, &[0xbb; 8]));
        assert_eq!(target.state.qps[&target.qp].queues.receive.posted.len(), posted, "{pkey:#x}");
    }
}

#[test]
fn a_draining_send_queue_starts_no_message() {
    for kind in [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD] {
        let mut target = Target::new(kind, 0);
        let qp = target.state.qps.get_mut(&target.qp).unwrap();
        let shared = &mut target.state.shared;
        let change = |qp: &mut Qp, state, shared: &mut Shared| {
            let attr = ibv_qp_attr { qp_state: state, ..ibv_qp_attr::zeroed() };
            qp.modify(&attr, IBV_QP_STATE.0, None, 64, shared).unwrap();
        };
        let post = |qp: &mut Qp| {
            qp.queues.send.push(|job| {
                let to = Destination { link: 0, address: PEER, class: 0 };
                job.task = match kind {
                    IBV_QPT_UD => Task::Datagram { to, qp: 1, qkey: 1, imm: None },
                    _ => Task::Request(Request::Send(Trailer::None)),
                };
                (job.is_inline, job.len) = (true, if kind == IBV_QPT_UD { 0 } else { 2 * MTU });
            });
        };
        // Two messages. One packet of the first one is sent, except for datagrams, which have a single packet.
        post(qp);
        post(qp);
        if kind != IBV_QPT_UD {
            assert!(qp.transmit(Time(1), Answers::Send, shared).is_some());
            qp.packet_built(shared);
        }
        change(qp, IBV_QPS_SQD, shared);
        let next = || qp.transmit(Time(1), Answers::Send, shared).inspect(|_| qp.packet_built(shared));
        let packets = std::iter::from_fn(next).take(9).count();
        assert_eq!(packets, if kind == IBV_QPT_UD { 0 } else { 1 }, "{kind:?}");
        change(qp, IBV_QPS_RTS, shared);
        assert!(qp.transmit(Time(1), Answers::Send, shared).is_some(), "{kind:?}");
    }
}

#[test]
fn endless_rnr_naks_set_few_timers() {
    let mut target = Target::new(IBV_QPT_RC, 0);
    let (state, number) = (&mut target.state, target.qp);
    state.qps.get_mut(&number).unwrap().queues.send.push(|job| {
        job.task = Task::Request(Request::Send(Trailer::None));
        job.is_inline = true;
    });
    for turn in 1..if cfg!(miri) { 120_u64 } else { 5000 } {
        let now = Time(turn * 1_000_000);
        // The RNR timer expires no matter which packets were received.
        state.expire(now, Time(0));
        let qp = state.qps.get_mut(&number).unwrap();
        assert!(qp.transmit(now, Answers::Send, &mut state.shared).is_some(), "{turn}");
        state.set_timer(number);
        let refusal = Ack { syndrome: Syndrome::ReceiverNotReady(1), msn: Psn::new(0) };
        let bytes = packet(number, Transport::Rc, Operation::Acknowledge(refusal), 0xffff, &[]);
        state.handle_packets(0, origin(PEER), LOCAL, Data::from(&bytes).chunks(bytes.len()), now);
        state.set_timer(number);
        assert!(state.timers() < 100, "{}", state.timers());
    }
}

#[test]
fn a_timer_expires_only_after_all_earlier_packets_were_handled() {
    let mut target = Target::new(IBV_QPT_RC, 0);
    let (state, number) = (&mut target.state, target.qp);
    let qp = state.qps.get_mut(&number).unwrap();
    qp.queues.send.push(|job| {
        job.task = Task::Request(Request::Send(Trailer::None));
        job.is_inline = true;
    });
    let sends = |State { qps, shared, .. }: &mut State, now| {
        qps.get_mut(&number).unwrap().transmit(now, Answers::Send, shared).is_some()
    };
    assert!(sends(state, Time(0)));
    state.set_timer(number);
    let (due, later) = (state.wake_at().unwrap(), Time(3_600_000_000_000));
    state.expire(later, Time(due.0 - 1));
    assert!(!sends(state, later) && !state.ready.contains(&number));
    assert_eq!(state.wake_at(), Some(due));
    // Both the probe and the ACK timeout are due.
    state.expire(later, due);
    assert!(state.ready.contains(&number) && sends(state, later));
}

#[test]
fn invalid_work_moves_its_queue_pair_to_the_error_state_at_once() {
    for kind in [IBV_QPT_RC, IBV_QPT_UC] {
        let mut target = Target::new(kind, 0);
        let State { qps, shared, .. } = &mut target.state;
        let qp = qps.get_mut(&target.qp).unwrap();
        (0..3).for_each(|_| {
            qp.queues.send.push(|job| {
                job.task = Task::Request(Request::Send(Trailer::None));
                job.is_inline = true;
            });
        });
        assert!(qp.transmit(Time(1), Answers::Send, shared).is_some());
        qp.fail_at(1, IBV_WC_LOC_PROT_ERR, shared);
        assert_eq!(qp.state, IBV_QPS_ERR, "{kind:?}");
        let mut ends = Vec::new();
        shared.cqs.get(qp.id.send_cq).unwrap().completions.take(9, |wc| ends.push(wc.status)).unwrap();
        assert_eq!(ends, [IBV_WC_WR_FLUSH_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR], "{kind:?}");
    }
}

#[test]
fn a_reset_unbinds_the_windows_of_the_previous_peer() {
    let mut target = Target::new(IBV_QPT_RC, IBV_ACCESS_MW_BIND.0);
    let (address, len, number) = (target.region as u64, 8, target.qp);
    let keys = &mut target.state.shared.keys;
    let window = keys.add_window(1, 2);
    let access = IBV_ACCESS_REMOTE_WRITE.0;
    let wanted = Binding { window, rkey: window, region: target.rkey, address, len, access };
    let rkey = keys.bind(1, number, 2, &wanted).unwrap();
    let write = Operation::WriteOnly(RemoteRange { address, rkey, len: 8 }, None);
    let bytes = packet(number, Transport::Rc, write, 0xffff, &[0xaa; 8]);
    target.deliver(&bytes);
    assert_eq!(target.region_bytes()[..8], [0xaa; 8]);

    let State { qps, shared, .. } = &mut target.state;
    let reset = ibv_qp_attr { qp_state: IBV_QPS_RESET, ..ibv_qp_attr::zeroed() };
    qps.get_mut(&number).unwrap().modify(&reset, IBV_QP_STATE.0, None, 64, shared).unwrap();
    target.connect(target.qp, IBV_QPT_RC);
    target.memory.fill(0x55);
    target.deliver(&bytes);
    assert_eq!(target.region_bytes()[..8], [0x55; 8]);
    assert_eq!(target.state.qps[&number].state, IBV_QPS_ERR, "the write was refused");
    assert_eq!(target.state.shared.keys.deregister(target.rkey), Ok(()), "no window is bound to the region");
}
