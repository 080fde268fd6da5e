//! Thread domains and parent domains: a parent domain is equivalent to the domain that it extends, and any drop order is
//! allowed.

use std::any::Any;

use rdma_safe::error::Verb;
use rdma_safe::pd::ThreadDomain;
use rdma_safe::{
    CompletionQueue, Context, Endpoint, Errno, Error, ProtectionDomain, QueuePair, SendFlags, WcFields, WorkRequest,
};

use crate::fake::{Config, Fake, Live};
use crate::support::{
    EXTENDED, builder, connect, done, drop_in_order, in_every_order, on_each_interface, post, raw_with, receive, seen,
    to_rts,
};

/// A parent domain with a thread domain, used by one thread only.
fn in_thread(pd: &ProtectionDomain) -> (ThreadDomain, ProtectionDomain) {
    let td = pd.context().alloc_td().unwrap();
    // SAFETY: each test has one thread.
    let parent = unsafe { pd.with_thread_domain(&td) }.unwrap();
    (td, parent)
}

#[test]
fn buffers_of_a_domain_go_through_endpoints_of_its_parent_domains() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (_td, threaded) = in_thread(&pd);
        let plain = pd.parent_domain().unwrap();
        assert_eq!(fake.live().pds, 3);
        let mut a = builder(&threaded, interfaces).build().unwrap();
        let mut b = builder(&plain, interfaces).build().unwrap();
        connect(&mut a, &mut b);
        // Three registrations: with the domain and with each of its parent domains.
        for from in [&pd, &threaded, &plain] {
            b.receive(from.allocate(8).unwrap()).unwrap();
            let mut buffer = from.allocate(8).unwrap();
            buffer.fill_from(b"hello").unwrap();
            a.send(buffer).unwrap();
            assert_eq!(&*done(&mut b).buffer.unwrap(), b"hello");
            assert!(done(&mut a).buffer.is_some());
        }
    });
}

#[test]
fn a_domain_and_its_parent_domains_count_as_the_same() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let other = pd.context().alloc_pd().unwrap();
    let (td, threaded) = in_thread(&pd);
    let (parent, nested) = (pd.parent_domain().unwrap(), threaded.parent_domain().unwrap());
    let family = [&pd, &threaded, &parent, &nested];
    for a in family {
        assert!(family.iter().all(|b| a.is_same(b)));
        assert!(!a.is_same(&other) && !other.is_same(a));
    }
    assert_eq!(family.map(ProtectionDomain::is_parent), [false, true, true, true]);
    assert_eq!(threaded.thread_domain().unwrap().as_raw(), td.as_raw());
    assert!([&pd, &parent, &nested].iter().all(|pd| pd.thread_domain().is_none()));
    // A buffer of an unrelated domain is still refused.
    let mut endpoint = Endpoint::builder(&parent).build().unwrap();
    let refused = endpoint.receive(other.allocate(8).unwrap());
    assert!(refused.is_err());
}

#[test]
fn work_is_posted_and_polled_within_a_thread_domain() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (_td, parent) = in_thread(&pd);
    let cq = || pd.context().completion_queue(16).parent_domain(&parent).build().unwrap();
    let make = || {
        let cq = cq();
        let qp = parent.queue_pair(&cq, &cq).inline_data(16).build().unwrap();
        crate::support::Raw { qp, cq }
    };
    let (mut a, mut b) = (make(), make());
    to_rts(&mut a.qp, b.qp.number());
    to_rts(&mut b.qp, a.qp.number());
    receive!(b, 7, rdma_safe::Sge::EMPTY).unwrap();
    post!(a, send(WorkRequest::new(3).with_flags(SendFlags::SIGNALED), rdma_safe::Inline(b""));).unwrap();
    assert_eq!(seen(&mut b.cq).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [7]);
    assert_eq!(seen(&mut a.cq).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [3]);
}

#[test]
fn domains_and_their_objects_are_dropped_in_any_order() {
    let fake = Fake::new(Config::default());
    let mut orders = 0;
    in_every_order(&[0, 1, 2, 3, 4, 5], &mut |order| {
        orders += 1;
        // Miri tries only some orders.
        if cfg!(miri) && orders % 60 != 0 {
            return;
        }
        let context: Context = fake.open();
        let pd = context.alloc_pd().unwrap();
        let (td, parent) = in_thread(&pd);
        let cq: CompletionQueue = context.completion_queue(4).parent_domain(&parent).build().unwrap();
        let qp: QueuePair = parent.queue_pair(&cq, &cq).build().unwrap();
        let objects: [Box<dyn Any>; 6] =
            [Box::new(context), Box::new(pd), Box::new(td), Box::new(parent), Box::new(cq), Box::new(qp)];
        assert_eq!(fake.live(), Live { contexts: 1, pds: 2, tds: 1, cqs: 1, qps: 1, ..Live::default() });
        drop_in_order(order, objects);
        assert_eq!(fake.live(), Live::default(), "after {order:?}");
        assert_eq!(fake.take_violations(), [""; 0], "after {order:?}");
    });
    assert_eq!(orders, 720);
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_domain_that_cannot_be_freed_keeps_its_parts() {
    for (verb, live) in [
        ("ibv_dealloc_pd", Live { contexts: 1, pds: 2, tds: 1, ..Live::default() }),
        ("dealloc_td", Live { contexts: 1, tds: 1, ..Live::default() }),
    ] {
        let fake = Fake::new(Config::default());
        fake.may_leak();
        let pd = fake.pd();
        let (td, parent) = in_thread(&pd);
        fake.fail(verb, libc::EBUSY);
        drop((pd, td, parent));
        assert_eq!(fake.live(), live, "{verb}");
        assert_eq!(fake.calls(verb), 1, "tried only once");
    }
}

#[test]
fn unsupported_domains_are_refused_by_name() {
    for config in
        [Config { domains: false, ..Config::default() }, Config { extended_context: false, ..Config::default() }]
    {
        let fake = Fake::new(config);
        let pd = fake.pd();
        let error = pd.context().alloc_td().unwrap_err();
        assert!(matches!(error, Error::Unsupported { feature: "thread domains", .. }), "{error}");
        let error = pd.parent_domain().unwrap_err();
        assert!(matches!(error, Error::Unsupported { feature: "parent domains", .. }), "{error}");
        assert_eq!(fake.live().pds, 1);
    }
}

#[test]
fn a_failed_allocation_of_a_domain_has_its_errno() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    fake.fail("alloc_td", libc::ENOMEM);
    let error = pd.context().alloc_td().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::AllocTd, errno: Errno(libc::ENOMEM), .. }), "{error}");
    fake.fail("alloc_parent_domain", libc::ENOMEM);
    let error = pd.parent_domain().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::AllocParentDomain, errno: Errno(libc::ENOMEM), .. }), "{error}");
}

#[test]
fn domains_of_other_contexts_are_refused_before_the_call() {
    let fake = Fake::new(Config::default());
    let (pd, other) = (fake.pd(), fake.pd());
    let td = other.context().alloc_td().unwrap();
    // SAFETY: the call fails.
    let error = unsafe { pd.with_thread_domain(&td) }.unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "thread domain" }), "{error}");
    assert_eq!(fake.calls("alloc_parent_domain"), 0);
    let parent = other.parent_domain().unwrap();
    let error = pd.context().completion_queue(4).parent_domain(&parent).build().unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "parent domain" }), "{error}");
    assert_eq!(fake.calls("create_cq_ex"), 0);
}

#[test]
fn a_completion_queue_in_a_parent_domain_is_created_or_refused_with_the_reason() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let parent = pd.parent_domain().unwrap();
    let builder = pd.context().completion_queue(4);
    let error = builder.clone().parent_domain(&pd).build().unwrap_err();
    assert!(matches!(error, Error::NotParentDomain), "{error}");
    let builder = builder.parent_domain(&parent);
    let error = builder.clone().classic(true).build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature, .. } if feature.contains("parent domain")), "{error}");
    assert_eq!(fake.calls("create_cq_ex") + fake.calls("ibv_create_cq"), 0);
    let error = pd.context().completion_queue(0).parent_domain(&parent).build().unwrap_err();
    assert!(matches!(error, Error::CreateCompletionQueue { entries: 0, .. }), "{error}");
    assert!(builder.build().unwrap().is_extended());

    for config in
        [Config { domain_cqs: false, ..Config::default() }, Config { extended_cq: false, ..Config::default() }]
    {
        let fake = Fake::new(config);
        let pd = fake.pd();
        let parent = pd.parent_domain().unwrap();
        let error = pd.context().completion_queue(4).parent_domain(&parent).build().unwrap_err();
        assert!(matches!(error, Error::Unsupported { feature, .. } if feature.contains("parent domain")), "{error}");
        assert_eq!(fake.calls("ibv_create_cq"), 0, "not created outside of the parent domain");
        // Without a parent domain, creation works as usual.
        drop(raw_with(&parent, rdma_interfaces(&fake), WcFields::STANDARD, |qp| qp));
    }
}

fn rdma_interfaces(fake: &Fake) -> crate::support::Interfaces {
    let extended_cq = fake.open().completion_queue(4).build().unwrap().is_extended();
    crate::support::Interfaces { extended_cq, ..EXTENDED }
}
