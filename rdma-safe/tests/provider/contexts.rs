//! Objects of different contexts, and capabilities that a provider claims but lacks.

use rdma_safe::device::Quirks;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{Error, PostError, QueuePairState, SendOps, Sge, WcFields, Work, WorkRequest};

use crate::fake::{Config, Cqe, Fake};
use crate::support::{CLASSIC, EXTENDED, endpoints, init, nothing, post, raw_with, receive, rtr, rts, seen, to_rts};

#[test]
fn objects_of_another_context_are_refused() {
    let fake = Fake::new(Config::default());
    let (mine, other) = (fake.open(), fake.open());
    assert!(!mine.is_same(&other) && mine.is_same(&mine.clone()));
    let pd = mine.alloc_pd().unwrap();
    let (own, foreign) = (mine.completion_queue(4).build().unwrap(), other.completion_queue(4).build().unwrap());
    for (send, recv) in [(&own, &foreign), (&foreign, &own), (&foreign, &foreign)] {
        let error = pd.queue_pair(send, recv).build().unwrap_err();
        assert!(matches!(error, Error::ForeignContext { object: "completion queue" }), "{error}");
    }
    let channel = other.create_channel().unwrap();
    for classic in [false, true] {
        let builder = mine.completion_queue(4).channel(&channel);
        let error = builder.classic(classic).build().unwrap_err();
        assert!(matches!(error, Error::ForeignContext { object: "completion channel" }), "{error}");
    }
    assert_eq!(fake.calls("create_qp_ex") + fake.calls("ibv_create_qp"), 0);
}

#[test]
fn operations_that_a_provider_accepts_and_lacks_are_not_enabled() {
    let fake = Fake::new(Config { hollow_ops: SendOps::SEND_WITH_INV.bits(), ..Config::default() });
    let pd = fake.pd();
    let (mut a, _b) = endpoints(&pd, EXTENDED);
    let rejected = a.post(Work::send_invalidate(pd.allocate(8).unwrap(), 7)).unwrap_err();
    assert_eq!(rejected.error, PostError::NotEnabled { op: SendOps::SEND_WITH_INV });
    nothing(&mut a);

    let cq = pd.context().completion_queue(4).build().unwrap();
    let asked = SendOps::SEND | SendOps::SEND_WITH_INV;
    let error = pd.queue_pair(&cq, &cq).operations(asked).build().unwrap_err();
    assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::SEND_WITH_INV }), "{error}");
    assert_eq!(fake.live().qps, 2, "the incomplete queue pair is destroyed");
}

#[test]
fn a_provider_without_extended_operations_is_used_through_post_send() {
    let fake = Fake::new(Config { hollow_ops: !0, ..Config::default() });
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let qp = pd.queue_pair(&cq, &cq).build().unwrap();
    assert!(!qp.is_extended());
    assert_eq!(qp.operations(), SendOps::RC | SendOps::WINDOWS);
}

#[test]
fn a_provider_that_miscounts_lists_gets_single_elements_only() {
    let fake = Fake::new(Config { granted_sges: Some(4), ..Config::rxe() });
    let pd = fake.pd();
    assert!(pd.context().quirks().contains(Quirks::SGE_LISTS_MISCOUNTED));
    let buffer = pd.allocate(64).unwrap();
    let mut raw = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    assert_eq!(raw.qp.capacity().max_send_sge, 1);
    let peer = raw.qp.number();
    to_rts(&mut raw.qp, peer);
    let list: &[Sge] = &[buffer.sge(), buffer.sge()];
    let mut batch = raw.qp.send_batch().unwrap();
    // SAFETY: nothing is posted.
    let refused = unsafe { batch.send(WorkRequest::new(1), list) };
    assert_eq!(refused, Err(PostError::TooManySges { count: 2, max: 1 }));
}

#[test]
fn a_queue_pair_dropped_during_a_poll_is_destroyed_after_the_poll() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let other = pd.queue_pair(&raw.cq, &raw.cq).build().unwrap();
    raw.qp.modify(&init()).unwrap();
    (0..2).for_each(|wr_id| fake.inject(raw.cq.as_raw(), Cqe { wr_id, ..Cqe::default() }));

    let mut poll = raw.cq.poll();
    assert!(poll.next().unwrap().is_some());
    let reset = QueuePairAttributes::new().set_state(QueuePairState::RESET);
    assert!(matches!(raw.qp.modify(&reset), Err(Error::PollInProgress { .. })));
    assert_eq!(raw.qp.state(), QueuePairState::INIT);
    drop(raw.qp);
    assert!(matches!(other.destroy(), Err(Error::PollInProgress { .. })));
    assert_eq!(fake.live().qps, 2, "destroying it now would deadlock");
    assert_eq!(poll.next().unwrap().map(|wc| wc.wr_id()), Some(1));
    drop(poll);
    assert_eq!(fake.live().qps, 0);
}

#[test]
fn another_thread_may_destroy_a_queue_pair_while_its_queue_is_polled() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    fake.inject(raw.cq.as_raw(), Cqe::default());
    let mut poll = raw.cq.poll();
    assert!(poll.next().unwrap().is_some());
    let qp = raw.qp;
    std::thread::scope(|scope| scope.spawn(|| qp.destroy().unwrap()).join().unwrap());
    assert_eq!(fake.live().qps, 0);
}

#[test]
fn a_forgotten_batch_is_aborted_before_the_queue_pair_changes_state() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let peer = raw.qp.number();
    to_rts(&mut raw.qp, peer);
    std::mem::forget(raw.qp.send_batch().unwrap());
    raw.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::RESET)).unwrap();
    assert_eq!(fake.calls("wr_abort"), 1);
    for attributes in [init(), rtr(peer), rts()] {
        raw.qp.modify(&attributes).unwrap();
    }
    let inbox = pd.allocate(8).unwrap();
    receive!(raw, 1, inbox.sge()).unwrap();
    post!(raw, send(WorkRequest::new(2).signaled(), rdma_safe::Inline(b"after"));).unwrap();
    assert_eq!(seen(&mut raw.cq).len(), 2);
    assert_eq!(&inbox[..5], b"after");
}

#[test]
fn a_cursor_polls_the_provider_before_it_reports_an_empty_queue() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = raw_with(&pd, CLASSIC, WcFields::STANDARD, |qp| qp);
    let complete = |wr_id| fake.inject(raw.cq.as_raw(), Cqe { wr_id, ..Cqe::default() });
    complete(0);
    complete(1);
    let mut poll = raw.cq.poll();
    assert_eq!(poll.next().unwrap().map(|wc| wc.wr_id()), Some(0));
    drop(poll);
    fake.inject(raw.cq.as_raw(), Cqe { wr_id: 2, ..Cqe::default() });
    // The first cursor left the second completion, and the third arrived later. Arming now would cause no event for them.
    let left: Vec<u64> = seen(&mut raw.cq).iter().map(|seen| seen.wr_id).collect();
    assert_eq!(left, [1, 2]);
}
