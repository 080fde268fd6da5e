//! Completion counters: which operations they count, and how long they live.

use rdma_safe::counters::{CompletionCount, CompletionCounter, CountedOperations};
use rdma_safe::error::Verb;
use rdma_safe::{Errno, Error, Inline, QueuePairState, WcFields, WorkRequest};

use crate::fake::{Config, Fake};
use crate::support::{EXTENDED, post, raw_with, receive, to_rts};

const SEND: CountedOperations = CountedOperations::SEND;
const RECV: CountedOperations = CountedOperations::RECV;

fn with_counters() -> Fake {
    Fake::new(Config { comp_cntrs: Some((SEND | RECV).bits()), ..Config::default() })
}

#[test]
fn counters_count_unsignaled_work_by_operation() {
    let fake = with_counters();
    let pd = fake.pd();
    let context = pd.context();
    let caps = context.completion_counter_caps().unwrap();
    assert_eq!((caps.max_value, caps.max_counters, caps.operations), ((1 << 40) - 1, 2, SEND | RECV));
    let sends = context.completion_counter(CompletionCount::WorkRequests).unwrap();
    let received = context.completion_counter(CompletionCount::Bytes).unwrap();
    let make = || raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let (mut a, mut b) = (make(), make());
    a.qp.attach_counter(&sends, SEND).unwrap();
    b.qp.attach_counter(&sends, SEND).unwrap();
    b.qp.attach_counter(&received, RECV).unwrap();
    to_rts(&mut a.qp, b.qp.number());
    to_rts(&mut b.qp, a.qp.number());
    let inbox = pd.allocate(16).unwrap();
    (0..4).for_each(|wr_id| receive!(b, wr_id, inbox.sge()).unwrap());
    post!(a, send(WorkRequest::new(1), Inline(b"abc")); send(WorkRequest::new(2), Inline(b"defg"));).unwrap();
    assert_eq!((sends.read().unwrap(), received.read().unwrap()), (2, 7));
    sends.set(10).unwrap();
    sends.add(5).unwrap();
    sends.set_errors(1).unwrap();
    sends.add_errors(2).unwrap();
    post!(a, send(WorkRequest::new(3), Inline(b"h"));).unwrap();
    assert_eq!((sends.read().unwrap(), sends.read_errors().unwrap()), (16, 3));
    fake.break_qp(b.qp.number());
    assert_eq!((received.read().unwrap(), received.read_errors().unwrap()), (8, 1));
}

#[test]
fn a_queue_pair_keeps_its_counters_until_it_is_destroyed() {
    let fake = with_counters();
    let pd = fake.pd();
    let counter = pd.context().completion_counter(CompletionCount::WorkRequests).unwrap();
    let mut raw = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    raw.qp.attach_counter(&counter, SEND).unwrap();
    drop(counter);
    drop(pd);
    assert_eq!(fake.live().comp_cntrs, 1);
    raw.qp.destroy().unwrap();
    assert_eq!(fake.live().comp_cntrs, 0);
}

#[test]
fn invalid_uses_of_a_counter_are_refused_with_the_reason() {
    let fake = with_counters();
    let pd = fake.pd();
    let context = pd.context();
    let counter = context.completion_counter(CompletionCount::WorkRequests).unwrap();
    let mut raw = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    raw.qp.attach_counter(&counter, SEND).unwrap();
    let error = raw.qp.attach_counter(&counter, SEND | RECV).unwrap_err();
    assert!(matches!(error, Error::Verb { errno: Errno(libc::EBUSY), .. }), "{error}");
    let error = raw.qp.attach_counter(&counter, CountedOperations::RDMA_READ).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let calls = fake.calls("ibv_qp_attach_comp_cntr");
    let other = fake.open().completion_counter(CompletionCount::Bytes).unwrap();
    let error = raw.qp.attach_counter(&other, RECV).unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "completion counter" }), "{error}");
    let number = raw.qp.number();
    to_rts(&mut raw.qp, number);
    let error = raw.qp.attach_counter(&counter, RECV).unwrap_err();
    assert!(matches!(error, Error::WrongState { state: QueuePairState::RTS, .. }), "{error}");
    assert_eq!(fake.calls("ibv_qp_attach_comp_cntr"), calls);
    let error = context.completion_counter(CompletionCount::Bytes).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::CreateCompCntr, errno: Errno(libc::ENOMEM), .. }), "{error}");
    fake.fail("ibv_set_comp_cntr", libc::EOPNOTSUPP);
    assert!(matches!(counter.set(1), Err(Error::Unsupported { .. })));

    let fake = Fake::new(Config::default());
    let context = fake.open();
    let error = context.completion_counter(CompletionCount::Bytes).unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature, .. } if feature.contains("rdma-core 65")), "{error}");
    assert!(matches!(context.completion_counter_caps(), Err(Error::Unsupported { .. })));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_counter_that_cannot_be_destroyed_keeps_its_device() {
    let fake = with_counters();
    fake.may_leak();
    let counter = fake.open().completion_counter(CompletionCount::Bytes).unwrap();
    fake.fail("ibv_destroy_comp_cntr", libc::EBUSY);
    drop(counter);
    assert_eq!((fake.live().contexts, fake.live().comp_cntrs), (1, 1));
}

#[test]
fn an_adopted_counter_is_destroyed_once() {
    use rdma_safe::sys::*;
    let fake = with_counters();
    let context = fake.open();
    // SAFETY: follows the manual page.
    let counter = unsafe {
        let create = verbs().unwrap().ibv_create_comp_cntr.unwrap();
        let raw = create(context.as_raw(), &mut ibv_comp_cntr_init_attr::zeroed());
        CompletionCounter::from_raw(&context, std::ptr::NonNull::new(raw).unwrap()).unwrap()
    };
    assert_eq!(counter.read().unwrap(), 0);
    drop(counter);
    assert_eq!(fake.live().comp_cntrs, 0);
}
