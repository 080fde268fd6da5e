//! Helpers shared by the tests.

use std::any::Any;
use std::time::Duration;

use rdma_safe::address::AddressVector;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{
    Access, Completion, CompletionQueue, Endpoint, EndpointBuilder, Gid, Mtu, ProtectionDomain, QueuePair,
    QueuePairBuilder, QueuePairState, WcFields, WcOpcode, WcStatus,
};

use crate::fake::{Config, Fake};

#[path = "../../../tests/device/support/miri.rs"]
mod miri;

pub(crate) use miri::one_under_miri;

/// Longest wait for an event that must happen; it only ends a test that hangs. Under Miri it is an hour, since the clock there
/// advances with the program's steps.
pub(crate) const DEADLINE: Duration = Duration::from_secs(if cfg!(miri) { 3600 } else { 120 });

/// The interface for polling and the interface for posting.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interfaces {
    pub(crate) extended_cq: bool,
    pub(crate) extended_qp: bool,
}

pub(crate) const EXTENDED: Interfaces = Interfaces { extended_cq: true, extended_qp: true };
pub(crate) const CLASSIC: Interfaces = Interfaces { extended_cq: false, extended_qp: false };

/// Runs a test with both interfaces for polling and for posting. Miri runs no mixed combination.
pub(crate) fn on_each_interface(test: impl Fn(&Fake, Interfaces)) {
    let mixed = |extended_cq, extended_qp| Interfaces { extended_cq, extended_qp };
    let natively = [EXTENDED, mixed(true, false), mixed(false, true), CLASSIC];
    let all = if cfg!(miri) { &[EXTENDED, CLASSIC][..] } else { &natively };
    for &interfaces in one_under_miri(all) {
        // Shown when the test fails.
        println!("{interfaces:?}");
        test(&Fake::new(Config::default()), interfaces);
    }
}

/// An endpoint with eight sends, eight receives and 64 inline bytes, and with all rights for its peer.
pub(crate) fn builder(pd: &ProtectionDomain, interfaces: Interfaces) -> EndpointBuilder<'_> {
    Endpoint::builder(pd)
        .send_depth(8)
        .recv_depth(8)
        .inline_data(64)
        .peer_access(Access::REMOTE)
        .classic_poll(!interfaces.extended_cq)
        .classic_post(!interfaces.extended_qp)
}

pub(crate) fn connect(a: &mut Endpoint, b: &mut Endpoint) {
    a.connect(&b.address()).unwrap();
    b.connect(&a.address()).unwrap();
}

/// Two endpoints made by [`builder`], connected to each other.
pub(crate) fn endpoints(pd: &ProtectionDomain, interfaces: Interfaces) -> (Endpoint, Endpoint) {
    let mut a = builder(pd, interfaces).build().unwrap();
    let mut b = builder(pd, interfaces).build().unwrap();
    connect(&mut a, &mut b);
    (a, b)
}

/// Sends and receives in flight.
pub(crate) fn in_flight(endpoint: &Endpoint) -> (u64, u64) {
    (endpoint.sends_in_flight(), endpoint.receives_in_flight())
}

/// Takes the next completion, which must exist and be successful.
#[track_caller]
pub(crate) fn done(endpoint: &mut Endpoint) -> Completion {
    endpoint.poll().unwrap().expect("a completion").ok().unwrap()
}

#[track_caller]
pub(crate) fn nothing(endpoint: &mut Endpoint) {
    assert!(endpoint.poll().unwrap().is_none(), "an unexpected completion");
}

/// A queue pair with a completion queue for both directions.
pub(crate) struct Raw {
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
}

pub(crate) fn raw_with(
    pd: &ProtectionDomain,
    interfaces: Interfaces,
    fields: WcFields,
    change: impl FnOnce(QueuePairBuilder<'_>) -> QueuePairBuilder<'_>,
) -> Raw {
    let cq = pd.context().completion_queue(64).fields(fields).classic(!interfaces.extended_cq);
    let cq = cq.build().unwrap();
    assert_eq!(cq.is_extended(), interfaces.extended_cq);
    let qp = pd.queue_pair(&cq, &cq).send_depth(8).recv_depth(8).inline_data(64).classic(!interfaces.extended_qp);
    let qp = change(qp).build().unwrap();
    assert_eq!(qp.is_extended(), interfaces.extended_qp);
    Raw { qp, cq }
}

/// Two queue pairs with four elements each way, connected to each other.
pub(crate) fn raw_pair(pd: &ProtectionDomain, interfaces: Interfaces) -> (Raw, Raw) {
    let make = || raw_with(pd, interfaces, WcFields::STANDARD, |qp| qp.send_sges(4).recv_sges(4));
    let (mut a, mut b) = (make(), make());
    to_rts(&mut a.qp, b.qp.number());
    to_rts(&mut b.qp, a.qp.number());
    (a, b)
}

pub(crate) fn init() -> QueuePairAttributes {
    QueuePairAttributes::new().set_state(QueuePairState::INIT).set_port(1).set_pkey_index(0).set_access(Access::REMOTE)
}

pub(crate) fn rtr(peer: u32) -> QueuePairAttributes {
    let gid: Gid = "::ffff:10.9.9.1".parse().unwrap();
    QueuePairAttributes::new()
        .set_state(QueuePairState::RTR)
        .set_address(AddressVector::from_gid(1, gid, 1))
        .set_path_mtu(Mtu::MTU_1024)
        .set_dest_qp_num(peer)
        .set_rq_psn(7)
        .set_max_dest_rd_atomic(4)
        .set_min_rnr_timer(12)
}

pub(crate) fn rts() -> QueuePairAttributes {
    QueuePairAttributes::new()
        .set_state(QueuePairState::RTS)
        .set_sq_psn(7)
        .set_timeout(14)
        .set_retry_count(7)
        .set_rnr_retry(7)
        .set_max_rd_atomic(4)
}

pub(crate) fn to_rts(qp: &mut QueuePair, peer: u32) {
    for attributes in [init(), rtr(peer), rts()] {
        qp.modify(&attributes).unwrap();
    }
}

/// Calls `visit` with every order of `items`.
pub(crate) fn in_every_order(items: &[usize], visit: &mut impl FnMut(&[usize])) {
    fn permute(items: &mut [usize], from: usize, visit: &mut impl FnMut(&[usize])) {
        if from == items.len() {
            return visit(items);
        }
        for index in from..items.len() {
            items.swap(from, index);
            permute(items, from + 1, visit);
            items.swap(from, index);
        }
    }
    permute(&mut items.to_vec(), 0, visit);
}

/// Drops all `objects`, by their indices.
pub(crate) fn drop_in_order<const N: usize>(order: &[usize], objects: [Box<dyn Any>; N]) {
    assert_eq!(order.len(), N);
    let mut objects = objects.map(Some);
    for index in order {
        drop(objects[*index].take());
    }
}

/// All fields of a completion, for comparison.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Seen {
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) opcode: WcOpcode,
    pub(crate) byte_len: Option<u32>,
    pub(crate) imm: Option<u32>,
    pub(crate) invalidated_rkey: Option<u32>,
    pub(crate) qp_num: Option<u32>,
}

/// Takes all available completions.
pub(crate) fn seen(cq: &mut CompletionQueue) -> Vec<Seen> {
    let mut all = Vec::new();
    let mut poll = cq.poll();
    while let Some(wc) = poll.next().unwrap() {
        all.push(Seen {
            wr_id: wc.wr_id(),
            status: wc.status(),
            opcode: wc.opcode(),
            byte_len: wc.byte_len(),
            imm: wc.imm(),
            invalidated_rkey: wc.invalidated_rkey(),
            qp_num: wc.qp_num(),
        });
    }
    all
}

/// Posts one batch. Each line is a method of `SendBatch` that adds work.
macro_rules! post {
    ($raw:expr, $($method:ident($($argument:expr),* $(,)?);)+) => {{
        let mut batch = $raw.qp.send_batch().unwrap();
        // SAFETY: the tests neither access nor drop the memory before its work has completed or the queue pair is destroyed,
        // and memory that peers write to is exposed memory.
        unsafe { $(batch.$method($($argument),*).unwrap();)+ }
        batch.post()
    }};
}

/// Posts one receive.
macro_rules! receive {
    ($raw:expr, $wr_id:expr, $sge:expr) => {
        // SAFETY: as in `post!`.
        unsafe { $raw.qp.receive($wr_id, $sge) }
    };
}

pub(crate) use {post, receive};
