//! What strangers send: whatever arrives, nothing is written or read but what a key opens, and nothing panics.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use proptest::prelude::*;
use rdma_sys::*;

use super::cq::{Completions, Cq};
use super::host::{Identity, Shared};
use super::keys::{Binding, Registration};
use super::net_address::Destination;
use super::qp::{Qp, Sending};
use super::queues::Task;
use super::state::State;
use crate::net::Origin;
use crate::transport::{Payload, Request, Time};
use crate::wire::{Ack, Atomic, Header, ICRC, Nak, Operation, Psn, RemoteRange, Syndrome, Trailer, Transport};

pub(super) const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 1, 1, 1));
pub(super) const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 2, 2, 2));
const PAGE: usize = 4096;
const MTU: u32 = 256;
pub(super) const PSN: u32 = 0xff_fff0;
const QKEY: u32 = 0x1234;

/// A device with memory of which the middle of three pages is open.
pub(super) struct Target {
    pub(super) state: State,
    memory: Vec<u8>,
    open: usize,
    rkey: u32,
    pub(super) qp: u32,
    receive: Vec<u8>,
}

impl Target {
    pub(super) fn new(kind: ibv_qp_type, access: u32) -> Box<Target> {
        let mut target = Box::new(Target {
            state: State::new(),
            memory: vec![0x55; 4 * PAGE],
            open: 0,
            rkey: 0,
            qp: 0,
            receive: vec![0; 64],
        });
        target.open = (target.memory.as_ptr() as usize).next_multiple_of(PAGE) + PAGE;
        let open = target.open as u64;
        let mut register = |address, len, access| {
            let wanted = Registration { pd: 1, address, len, iova: address, access };
            target.state.shared.keys.register(&wanted)
        };
        target.rkey = register(open, PAGE as u64, access | IBV_ACCESS_LOCAL_WRITE.0);
        let (address, len) = (target.receive.as_ptr() as u64, target.receive.len());
        let lkey = register(address, len as u64, IBV_ACCESS_LOCAL_WRITE.0);
        let cq = |state: &mut State| {
            state.shared.cqs.insert(Cq {
                completions: Arc::new(Completions::new(64)),
                context: 1,
                channel: None,
                object: 0,
                users: 0,
                queued_events: 0,
                events: (0, 0),
            })
        };
        let (send_cq, recv_cq) = (cq(&mut target.state), cq(&mut target.state));
        let cap = ibv_qp_cap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        target.qp = target.state.add_qp(Identity {
            number: 0,
            pd: 1,
            context: 1,
            object: 0,
            kind,
            send_cq,
            recv_cq,
            srq: None,
            is_all_signaled: true,
            cap,
        });
        target.connect(kind);
        let qp = target.state.qps.get_mut(&target.qp).unwrap();
        let sge = ibv_sge { addr: address, length: len as u32, lkey };
        (0..4).for_each(|id| qp.queues.receive.push(id, &[sge]).unwrap());
        target
    }

    fn connect(&mut self, kind: ibv_qp_type) {
        let State { qps, shared, .. } = &mut self.state;
        let qp = qps.get_mut(&self.qp).unwrap();
        let attr = ibv_qp_attr {
            port_num: 1,
            qkey: QKEY,
            qp_access_flags: (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC).0,
            path_mtu: IBV_MTU_256,
            dest_qp_num: 77,
            rq_psn: PSN,
            sq_psn: PSN,
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            timeout: 20,
            retry_cnt: 7,
            rnr_retry: 7,
            ..ibv_qp_attr::zeroed()
        };
        let common = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
        let route = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        let masks = match kind {
            IBV_QPT_RC => [
                common | IBV_QP_ACCESS_FLAGS,
                route | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                IBV_QP_STATE
                    | IBV_QP_SQ_PSN
                    | IBV_QP_TIMEOUT
                    | IBV_QP_RETRY_CNT
                    | IBV_QP_RNR_RETRY
                    | IBV_QP_MAX_QP_RD_ATOMIC,
            ],
            IBV_QPT_UC => [common | IBV_QP_ACCESS_FLAGS, route, IBV_QP_STATE | IBV_QP_SQ_PSN],
            _ => [common | IBV_QP_QKEY, IBV_QP_STATE, IBV_QP_STATE | IBV_QP_SQ_PSN],
        };
        let peer = Some(Destination { link: 0, address: PEER, class: 0 });
        for (mask, state) in masks.into_iter().zip([IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS]) {
            let attr = ibv_qp_attr { qp_state: state, ..attr };
            qp.modify(&attr, mask.0, peer, 64, shared).unwrap();
        }
    }

    /// Lets a datagram arrive, and everything follow from it; then looks around.
    fn arrive(&mut self, datagram: &[u8]) {
        let now = Time(1);
        self.state.arrived(origin(PEER), HERE, datagram, now);
        let State { qps, shared, .. } = &mut self.state;
        let qp = qps.get_mut(&self.qp).unwrap();
        // More than it ever has to say at once: 4 reads of a page.
        for _ in 0..200 {
            match qp.transmit(now, false, shared) {
                Some(Sending::Packet(_, outgoing)) => {
                    if let Payload::Remote { place, len } = outgoing.payload {
                        let (from, to) = (place.0 as usize, place.0 as usize + len as usize);
                        assert!(self.open <= from && to <= self.open + PAGE, "{from:#x} to {to:#x} is read");
                    }
                }
                Some(Sending::Datagram(_)) => {}
                None => break,
            }
        }
        qp.settle(shared);
        let open = self.open - self.memory.as_ptr() as usize;
        for closed in [&self.memory[..open], &self.memory[open + PAGE..]] {
            assert!(*closed == [0x55; 4 * PAGE][..closed.len()], "written outside of what is open");
        }
    }

    fn open_memory(&self) -> &[u8] {
        let open = self.open - self.memory.as_ptr() as usize;
        &self.memory[open..][..PAGE]
    }
}

pub(super) fn origin(address: IpAddr) -> Origin {
    Origin { address, class: 0, hops: 64 }
}

/// A packet without a right CRC, which is looked at before a packet gets so far.
pub(super) fn datagram(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header.encode(payload.len()).to_vec();
    bytes.extend(payload);
    bytes.resize(bytes.len() + Header::padding(payload.len()) + ICRC, 0);
    bytes
}

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

/// From the beginning of what is open: near its edges, or anywhere.
fn address() -> BoxedStrategy<u64> {
    let page = PAGE as u64;
    let edge = 0_u64.wrapping_sub(300);
    prop_oneof![edge..u64::MAX, 0..300_u64, page - 300..page + 300, Just(u64::MAX / 2), any::<u64>()].boxed()
}

fn len() -> impl Strategy<Value = u32> {
    prop_oneof![0..600_u32, Just(PAGE as u32), Just(PAGE as u32 + 1), Just(1 << 31), Just(u32::MAX), any::<u32>()]
}

/// Its address is from the beginning of what is open, and its key is the difference to the right one.
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

fn kinds() -> impl Strategy<Value = ibv_qp_type> {
    prop_oneof![Just(IBV_QPT_RC), Just(IBV_QPT_UC), Just(IBV_QPT_UD)]
}

fn all_access() -> u32 {
    (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC).0
}

/// Plans of packets: what each does, how far its number is from the expected one, how long its payload is, whether it asks for an
/// answer, and how far beyond what is open it ends, where that is to be near.
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

/// So many bytes beyond what is open, and with the right key.
fn ending(operation: Operation, beyond: i8) -> Operation {
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

/// With an address and a key of the target.
fn aimed(operation: Operation, target: &Target) -> Operation {
    let range = |of: RemoteRange| RemoteRange {
        address: of.address.wrapping_add(target.open as u64),
        rkey: of.rkey.wrapping_add(target.rkey),
        ..of
    };
    let atomic = |of: Atomic| Atomic {
        address: of.address.wrapping_add(target.open as u64),
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

/// As it arrives, whatever it does.
fn send(target: &mut Target, kind: ibv_qp_type, plan: &[Plan]) {
    let mut psn = PSN;
    for (operation, advance, payload, ack_request, beyond) in plan {
        let transport = match kind {
            IBV_QPT_RC => Transport::Rc,
            IBV_QPT_UC => Transport::Uc,
            _ => Transport::Ud { qkey: QKEY, source_qp: 5 },
        };
        let operation = beyond.map_or(*operation, |beyond| ending(*operation, beyond));
        let operation = aimed(operation, target);
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
        target.arrive(&datagram(&header, &vec![0xaa; payload]));
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
    fn packets_that_make_sense_reach_what_is_open_and_nothing_else(
        kind in kinds(),
        plan in plans(),
    ) {
        let mut target = Target::new(kind, all_access());
        send(&mut target, kind, &plan);
    }

    #[test]
    fn bytes_of_any_kind_do_nothing(
        kind in kinds(),
        mut bytes in proptest::collection::vec(any::<u8>(), 0..if cfg!(miri) { 40 } else { 200 }),
    ) {
        let mut target = Target::new(kind, all_access());
        target.arrive(&bytes);
        // With a number and a transport that are right.
        let number = target.qp.to_be_bytes();
        if bytes.len() >= 12 {
            bytes[1] &= 0x30;
            bytes[2..4].copy_from_slice(&[0xff; 2]);
            bytes[5..8].copy_from_slice(&number[1..]);
            target.arrive(&bytes);
        }
    }
}

#[test]
fn an_operation_reaches_the_last_byte_that_is_open_and_not_the_next() {
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
            let is_written = *target.open_memory() != [0x55; PAGE];
            assert_eq!(is_written, writes && state == IBV_QPS_RTS, "{operation:?}");
        }
    }
}

#[test]
fn a_right_that_was_not_given_opens_nothing() {
    for (access, wanted) in [(0, None), (IBV_ACCESS_REMOTE_READ.0, None), (IBV_ACCESS_REMOTE_WRITE.0, Some(0xaa))] {
        let mut target = Target::new(IBV_QPT_RC, access);
        let range = RemoteRange { address: 0, rkey: 0, len: 8 };
        send(&mut target, IBV_QPT_RC, &[(Operation::WriteOnly(range, None), 1, 8, true, None)]);
        let written = target.open_memory()[0];
        assert_eq!(written, wanted.unwrap_or(0x55), "{access:#x}");
        let state = target.state.qps[&target.qp].state;
        assert_eq!(state, if wanted.is_some() { IBV_QPS_RTS } else { IBV_QPS_ERR });
    }
}

#[test]
fn a_stranger_a_wrong_partition_and_a_wrong_queue_key_are_not_heard() {
    let range = |target: &Target| RemoteRange { address: target.open as u64, rkey: target.rkey, len: 8 };
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
    target.arrive(&wrong);
    let right = datagram(&header(&target, Transport::Rc, write, 0xffff), &[0xaa; 8]);
    target.state.arrived(origin(HERE), HERE, &right, Time(1));
    assert_eq!(target.open_memory()[0], 0x55);
    target.arrive(&right);
    assert_eq!(target.open_memory()[0], 0xaa);

    let mut target = Target::new(IBV_QPT_UD, all_access());
    for (qkey, heard) in [(QKEY ^ 1, 4), (QKEY, 3)] {
        let transport = Transport::Ud { qkey, source_qp: 9 };
        let send = Operation::SendOnly(Trailer::None);
        let bytes = datagram(&header(&target, transport, send, 0xffff), &[0xbb; 8]);
        target.arrive(&bytes);
        assert_eq!(target.state.qps[&target.qp].queues.receive.waiting.len(), heard);
    }
    assert_eq!(target.receive[40..48], [0xbb; 8]);
}

#[test]
fn a_word_that_is_aligned_by_name_and_not_in_memory_is_refused() {
    let mut target = Target::new(IBV_QPT_RC, 0);
    let zero = IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    let (address, len) = (target.open as u64 + 4, 64);
    let wanted = Registration { pd: 1, address, len, iova: address, access: zero.0 };
    let rkey = target.state.shared.keys.register(&wanted);
    let add = Operation::FetchAdd(Atomic { address: 8, rkey, swap: 1, compare: 0 });
    target.arrive(&packet(target.qp, Transport::Rc, add, 0xffff, &[]));
    assert_eq!(target.state.qps[&target.qp].state, IBV_QPS_ERR);
    assert!(*target.open_memory() == [0x55; PAGE]);
}

#[test]
fn a_datagram_of_another_partition_is_not_heard() {
    let mut target = Target::new(IBV_QPT_UD, 0);
    for (pkey, waiting) in [(0x1234, 4), (0x7fff, 3)] {
        let transport = Transport::Ud { qkey: QKEY, source_qp: 9 };
        let send = Operation::SendOnly(Trailer::None);
        target.arrive(&packet(target.qp, transport, send, pkey, &[0xbb; 8]));
        assert_eq!(target.state.qps[&target.qp].queues.receive.waiting.len(), waiting, "{pkey:#x}");
    }
}

#[test]
fn a_queue_that_is_drained_begins_nothing() {
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
                let nowhere = Destination { link: 0, address: PEER, class: 0 };
                job.task = match kind {
                    IBV_QPT_UD => Task::Datagram { to: nowhere, qp: 1, qkey: 1, imm: None },
                    _ => Task::Request(Request::Send(Trailer::None)),
                };
                (job.is_inline, job.len) = (true, if kind == IBV_QPT_UD { 0 } else { 2 * MTU });
            });
        };
        // Two messages, of the first of which the first packet has gone; of datagrams none is ever amid.
        post(qp);
        post(qp);
        if kind != IBV_QPT_UD {
            assert!(qp.transmit(Time(1), false, shared).is_some());
            qp.taken(shared);
        }
        change(qp, IBV_QPS_SQD, shared);
        let rest =
            std::iter::from_fn(|| qp.transmit(Time(1), false, shared).inspect(|_| qp.taken(shared))).take(9).count();
        assert_eq!(rest, if kind == IBV_QPT_UD { 0 } else { 1 }, "{kind:?}");
        change(qp, IBV_QPS_RTS, shared);
        assert!(qp.transmit(Time(1), false, shared).is_some(), "{kind:?}");
    }
}

#[test]
fn a_peer_that_is_never_ready_has_few_timers_set() {
    let mut target = Target::new(IBV_QPT_RC, 0);
    let (state, number) = (&mut target.state, target.qp);
    state.qps.get_mut(&number).unwrap().queues.send.push(|job| {
        job.task = Task::Request(Request::Send(Trailer::None));
        job.is_inline = true;
    });
    for turn in 1..if cfg!(miri) { 120_u64 } else { 5000 } {
        let now = Time(turn * 1_000_000);
        // It is a pause, which is over though nobody may have listened.
        state.expire(now, Time(0));
        let qp = state.qps.get_mut(&number).unwrap();
        assert!(qp.transmit(now, false, &mut state.shared).is_some(), "{turn}");
        state.set_timer(number);
        let refusal = Ack { syndrome: Syndrome::ReceiverNotReady(1), msn: Psn::new(0) };
        let bytes = packet(number, Transport::Rc, Operation::Acknowledge(refusal), 0xffff, &[]);
        state.arrived(origin(PEER), HERE, &bytes, now);
        state.set_timer(number);
        assert!(state.timers() < 100, "{}", state.timers());
    }
}

#[test]
fn an_answer_is_not_missed_before_all_was_heard() {
    let mut target = Target::new(IBV_QPT_RC, 0);
    let (state, number) = (&mut target.state, target.qp);
    let qp = state.qps.get_mut(&number).unwrap();
    qp.queues.send.push(|job| {
        job.task = Task::Request(Request::Send(Trailer::None));
        job.is_inline = true;
    });
    let sends =
        |state: &mut State, now| state.qps.get_mut(&number).unwrap().transmit(now, false, &mut state.shared).is_some();
    assert!(sends(state, Time(0)));
    state.set_timer(number);
    let (due, later) = (state.wake_at().unwrap(), Time(3_600_000_000_000));
    state.expire(later, Time(due.0 - 1));
    assert!(!sends(state, later) && !state.ready.contains(&number));
    assert_eq!(state.wake_at(), Some(due));
    // The time to ask what has become of it has come, and that to send it again, which may not be needed.
    state.expire(later, due);
    assert!(state.ready.contains(&number) && sends(state, later));
}

#[test]
fn work_that_cannot_be_done_ends_its_queue_pair_at_once() {
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
        assert!(qp.transmit(Time(1), false, shared).is_some());
        qp.fail_at(1, IBV_WC_LOC_PROT_ERR, shared);
        assert_eq!(qp.state, IBV_QPS_ERR, "{kind:?}");
        let mut ends = Vec::new();
        shared.cqs.get(qp.id.send_cq).unwrap().completions.take(9, |wc| ends.push(wc.status)).unwrap();
        assert_eq!(ends, [IBV_WC_WR_FLUSH_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR], "{kind:?}");
    }
}

#[test]
fn a_window_that_one_peer_was_given_is_closed_to_the_next() {
    let mut target = Target::new(IBV_QPT_RC, IBV_ACCESS_MW_BIND.0);
    let (address, len, number) = (target.open as u64, 8, target.qp);
    let keys = &mut target.state.shared.keys;
    let window = keys.add_window(1, 2);
    let access = IBV_ACCESS_REMOTE_WRITE.0;
    let wanted = Binding { window, rkey: window, region: target.rkey, address, len, access };
    let rkey = keys.bind(1, number, 2, &wanted).unwrap();
    let write = Operation::WriteOnly(RemoteRange { address, rkey, len: 8 }, None);
    let bytes = packet(number, Transport::Rc, write, 0xffff, &[0xaa; 8]);
    target.arrive(&bytes);
    assert_eq!(target.open_memory()[..8], [0xaa; 8]);

    let State { qps, shared, .. } = &mut target.state;
    let reset = ibv_qp_attr { qp_state: IBV_QPS_RESET, ..ibv_qp_attr::zeroed() };
    qps.get_mut(&number).unwrap().modify(&reset, IBV_QP_STATE.0, None, 64, shared).unwrap();
    target.connect(IBV_QPT_RC);
    target.memory.fill(0x55);
    target.arrive(&bytes);
    assert_eq!(target.open_memory()[..8], [0x55; 8]);
    assert_eq!(target.state.qps[&number].state, IBV_QPS_ERR, "it was refused");
    assert_eq!(target.state.shared.keys.deregister(target.rkey), Ok(()), "nothing is bound to the region any more");
}
