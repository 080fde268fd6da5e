//! Shared receive queues: queue pairs that take receives from one, its limit and size, its events, and its end.

use rdma_safe::{
    AsyncEventType, AsyncSource, Buffer, CompletionQueue, Errno, Error, PostError, ProtectionDomain, QueuePairState,
    SharedReceiveQueue, WcFields, WcOpcode, WcStatus, WorkRequest,
};

use crate::fake::{Bad, Config, Fake, Live, Mode, PostFault};
use crate::support::{
    CLASSIC, EXTENDED, Interfaces, Raw, drop_in_order, in_every_order, on_each_interface, post, raw_with, seen, to_rts,
};

/// Two queue pairs that take receives from one queue, each connected to a sender of its own.
struct Shared {
    srq: SharedReceiveQueue,
    receivers: [Raw; 2],
    senders: [Raw; 2],
    inbox: Buffer,
    outbox: Buffer,
}

const SIZE: u32 = 8;

impl Shared {
    fn new(pd: &ProtectionDomain, interfaces: Interfaces) -> Self {
        let srq = pd.shared_receive_queue(8).sges(2).build().unwrap();
        let make = |srq: Option<&SharedReceiveQueue>| {
            raw_with(pd, interfaces, WcFields::STANDARD, |qp| match srq {
                Some(srq) => qp.shared_receive_queue(srq),
                None => qp,
            })
        };
        let mut receivers = [make(Some(&srq)), make(Some(&srq))];
        let mut senders = [make(None), make(None)];
        for (receiver, sender) in receivers.iter_mut().zip(&mut senders) {
            to_rts(&mut receiver.qp, sender.qp.number());
            to_rts(&mut sender.qp, receiver.qp.number());
        }
        let (inbox, outbox) = (pd.allocate(8 * SIZE as usize).unwrap(), pd.allocate(2 * SIZE as usize).unwrap());
        Shared { srq, receivers, senders, inbox, outbox }
    }

    /// The place in the inbox for a receive.
    fn place(&self, index: u64) -> rdma_safe::Sge {
        rdma_safe::Sge { address: self.inbox.address() + index * u64::from(SIZE), len: SIZE, lkey: self.inbox.lkey() }
    }

    #[track_caller]
    fn receive(&mut self, wr_id: u64) {
        let place = self.place(wr_id);
        // SAFETY: the inbox is looked at only after the receives have completed.
        unsafe { self.srq.receive(wr_id, place) }.unwrap();
    }

    /// Sends `text` to a receiver.
    #[track_caller]
    fn send(&mut self, receiver: usize, text: &[u8; SIZE as usize]) {
        let half = receiver * SIZE as usize;
        self.outbox[half..half + SIZE as usize].copy_from_slice(text);
        let from = self.outbox.address() + half as u64;
        let sge = rdma_safe::Sge { address: from, len: SIZE, lkey: self.outbox.lkey() };
        post!(self.senders[receiver], send(WorkRequest::new(1).signaled(), sge);).unwrap();
    }
}

/// Identifiers and queue pairs of the receives that have completed.
fn received(cq: &mut CompletionQueue) -> Vec<(u64, u32)> {
    let all = seen(cq);
    assert!(all.iter().all(|seen| (seen.status, seen.opcode) == (WcStatus::SUCCESS, WcOpcode::RECV)), "{all:?}");
    all.iter().map(|seen| (seen.wr_id, seen.qp_num.unwrap())).collect()
}

#[test]
fn messages_take_the_shared_receives_in_the_order_of_arrival() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut shared = Shared::new(&pd, interfaces);
        (0..5).for_each(|wr_id| shared.receive(wr_id));
        for (receiver, text) in [(1, b"message0"), (0, b"message1"), (0, b"message2"), (1, b"message3")] {
            shared.send(receiver, text);
        }
        let [a, b] = shared.receivers.each_ref().map(|raw| raw.qp.number());
        assert_eq!(received(&mut shared.receivers[0].cq), [(1, a), (2, a)]);
        assert_eq!(received(&mut shared.receivers[1].cq), [(0, b), (3, b)]);
        assert_eq!(&shared.inbox[..40], b"message0message1message2message3\0\0\0\0\0\0\0\0");
        for raw in &shared.receivers {
            assert_eq!(raw.qp.shared_receive_queue(), Some(shared.srq.id()));
        }
        assert_eq!(shared.senders[0].qp.shared_receive_queue(), None);
    });
}

#[test]
fn a_message_waits_for_a_shared_receive() {
    on_each_interface(|fake, interfaces| {
        let mut shared = Shared::new(&fake.pd(), interfaces);
        shared.send(0, b"too soon");
        assert_eq!(received(&mut shared.receivers[0].cq), []);
        shared.receive(3);
        assert_eq!(received(&mut shared.receivers[0].cq).len(), 1);
        assert_eq!(&shared.inbox[24..32], b"too soon");
    });
}

#[test]
fn a_batch_of_shared_receives_is_posted_at_once_and_split_over_elements() {
    on_each_interface(|fake, interfaces| {
        let mut shared = Shared::new(&fake.pd(), interfaces);
        let (first, second, third) = (shared.place(0), shared.place(4), shared.place(2));
        let mut batch = shared.srq.recv_batch();
        assert!(batch.is_empty());
        // SAFETY: the inbox is looked at only after the receives have completed.
        unsafe {
            let halves = [rdma_safe::Sge { len: 3, ..first }, second];
            batch.receive(10, &halves).unwrap();
            batch.receive(11, &[third]).unwrap();
            let refused = batch.receive(12, &[first; 3]);
            assert_eq!(refused, Err(PostError::TooManySges { count: 3, max: 2 }));
        }
        assert_eq!(batch.len(), 2);
        batch.post().unwrap();
        assert_eq!(fake.calls("ibv_post_srq_recv"), 1);
        shared.send(0, b"abcdefgh");
        shared.send(1, b"01234567");
        assert_eq!(received(&mut shared.receivers[0].cq)[0].0, 10);
        assert_eq!(received(&mut shared.receivers[1].cq)[0].0, 11);
        assert_eq!((&shared.inbox[..4], &shared.inbox[32..38]), (&b"abc\0"[..], &b"defgh\0"[..]));
        assert_eq!(&shared.inbox[16..24], b"01234567");
    });
}

#[test]
fn an_empty_or_dropped_batch_of_shared_receives_posts_nothing() {
    let fake = Fake::new(Config::default());
    let mut shared = Shared::new(&fake.pd(), EXTENDED);
    shared.srq.recv_batch().post().unwrap();
    let place = shared.place(0);
    let mut batch = shared.srq.recv_batch();
    // SAFETY: nothing is posted.
    unsafe { batch.receive(1, &[place]) }.unwrap();
    drop(batch);
    assert_eq!(fake.calls("ibv_post_srq_recv"), 0);
}

#[test]
fn a_queue_pair_with_shared_receives_takes_none_of_its_own_and_says_why() {
    on_each_interface(|fake, interfaces| {
        let mut shared = Shared::new(&fake.pd(), interfaces);
        let place = shared.place(0);
        let qp = &mut shared.receivers[0].qp;
        assert_eq!((qp.capacity().max_recv_wr, qp.capacity().max_recv_sge), (0, 0));
        for state in [QueuePairState::RTS, QueuePairState::RESET] {
            if state == QueuePairState::RESET {
                qp.modify(&rdma_safe::QueuePairAttributes::new().set_state(state)).unwrap();
            }
            // SAFETY: nothing is posted.
            let error = unsafe { qp.receive(1, place) }.unwrap_err();
            assert_eq!(error, PostError::SharedReceives);
            assert!(error.to_string().contains("shared receive queue"), "{error}");
            assert_eq!(qp.recv_batch().unwrap_err(), PostError::SharedReceives);
            assert_eq!(qp.split().1.batch().unwrap_err(), PostError::SharedReceives);
        }
        assert_eq!(fake.calls("ibv_post_recv"), 0);
    });
}

#[test]
fn a_full_shared_queue_and_a_refused_receive_say_how_far_it_got() {
    let fake = Fake::new(Config::default());
    let mut shared = Shared::new(&fake.pd(), EXTENDED);
    (0..6).for_each(|wr_id| shared.receive(wr_id));
    let place = shared.place(7);
    let batch_of_three = |srq: &mut SharedReceiveQueue| {
        let mut batch = srq.recv_batch();
        // SAFETY: nobody sends, and the memory outlives the queue.
        (0..3).for_each(|wr_id| unsafe { batch.receive(wr_id, &[place]) }.unwrap());
        batch.post()
    };
    assert_eq!(batch_of_three(&mut shared.srq), Err(PostError::QueueFull { posted: 2 }));
    // SAFETY: as above.
    assert_eq!(unsafe { shared.srq.receive(1, place) }, Err(PostError::QueueFull { posted: 0 }));
    let mut shared = Shared::new(&fake.pd(), EXTENDED);
    let fault = |bad| PostFault { errno: libc::EIO, taken: 1, bad };
    fake.fail_post_recv(fault(Bad::FirstNotTaken));
    assert_eq!(batch_of_three(&mut shared.srq), Err(PostError::Refused { posted: 1, errno: Errno(libc::EIO) }));
    fake.fail_post_recv(fault(Bad::Untouched));
    assert_eq!(batch_of_three(&mut shared.srq), Err(PostError::InDoubt { errno: Errno(libc::EIO) }));
}

#[test]
fn a_batch_of_shared_receives_has_a_length() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    for (depth, max_batch, fits) in [(8, 3, 3), (2, 64, 2), (1, 0, 1)] {
        let mut srq = pd.shared_receive_queue(depth).max_batch(max_batch).build().unwrap();
        let mut batch = srq.recv_batch();
        let results: Vec<_> = (0..=fits)
            // SAFETY: nothing is posted.
            .map(|wr_id| unsafe { batch.receive(u64::from(wr_id), &[]) })
            .collect();
        let (last, before) = results.split_last().unwrap();
        assert!(before.iter().all(Result::is_ok));
        assert_eq!(*last, Err(PostError::BatchFull { max: fits }));
    }
}

#[test]
fn the_limit_is_reported_once_and_names_the_queue() {
    on_each_interface(|fake, interfaces| {
        let context = fake.open();
        let events = context.async_events().unwrap();
        let mut shared = Shared::new(&context.alloc_pd().unwrap(), interfaces);
        (0..6).for_each(|wr_id| shared.receive(wr_id));
        shared.srq.set_limit(4).unwrap();
        assert_eq!(shared.srq.query().unwrap().limit, 4);
        shared.send(0, b"5 remain");
        shared.send(1, b"4 remain");
        assert_eq!(events.try_event().unwrap(), None);
        shared.send(0, b"3 remain");
        shared.send(1, b"2 remain");
        let event = events.try_event().unwrap().expect("the limit");
        assert_eq!(event.event_type, AsyncEventType::SRQ_LIMIT_REACHED);
        assert_eq!(event.source, AsyncSource::Srq(shared.srq.id()));
        assert_eq!(events.try_event().unwrap(), None, "it is disarmed");
        assert_eq!(shared.srq.query().unwrap().limit, 0);
        shared.srq.set_limit(2).unwrap();
        shared.srq.set_limit(0).unwrap();
        shared.send(0, b"1 remain");
        assert_eq!(events.try_event().unwrap(), None, "it was taken back");
    });
}

#[test]
fn a_queue_can_be_made_with_a_limit() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let srq = pd.shared_receive_queue(5).sges(3).limit(4).build().unwrap();
    let attributes = srq.query().unwrap();
    assert_eq!((attributes.max_wr, attributes.max_sge, attributes.limit), (8, 3, 4));
    assert_eq!((srq.max_wr(), srq.max_sge()), (8, 3), "what was granted");
    let error = pd.shared_receive_queue(5).limit(9).build().unwrap_err();
    assert!(
        matches!(error, Error::LimitSharedReceiveQueue { limit: 9, work_requests: 8, errno: Errno(libc::EINVAL) }),
        "{error}"
    );
    drop(srq);
    assert_eq!(fake.live().srqs, 0, "a queue without its limit is not left behind");
}

#[test]
fn a_queue_is_resized_and_keeps_what_is_posted() {
    on_each_interface(|fake, interfaces| {
        let mut shared = Shared::new(&fake.pd(), interfaces);
        (0..7).for_each(|wr_id| shared.receive(wr_id));
        shared.srq.resize(33).unwrap();
        assert_eq!((shared.srq.max_wr(), shared.srq.query().unwrap().max_wr), (64, 64));
        let error = shared.srq.resize(6).unwrap_err();
        assert!(
            matches!(error, Error::ResizeSharedReceiveQueue { work_requests: 6, max_work_requests: 2048, .. }),
            "{error}"
        );
        assert!(matches!(shared.srq.resize(2049), Err(Error::ResizeSharedReceiveQueue { .. })));
        assert_eq!(shared.srq.max_wr(), 64, "a refusal changes nothing");
        (0..7).for_each(|_| shared.send(1, b"whatever"));
        let ids: Vec<u64> = received(&mut shared.receivers[1].cq).iter().map(|(wr_id, _)| *wr_id).collect();
        assert_eq!(ids, [0, 1, 2, 3, 4, 5, 6]);
    });
}

#[test]
fn a_resize_whose_result_cannot_be_asked_for_is_as_asked() {
    let fake = Fake::new(Config::default());
    let mut srq = fake.pd().shared_receive_queue(4).build().unwrap();
    fake.fail("ibv_query_srq", libc::EIO);
    let error = srq.resize(20).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: "ibv_query_srq", errno: Errno(libc::EIO), .. }), "{error}");
    assert_eq!(srq.max_wr(), 20);
    fake.heal("ibv_query_srq");
    assert_eq!(srq.query().unwrap().max_wr, 32);
}

#[test]
fn what_a_device_lacks_of_shared_receive_queues_is_refused_by_name() {
    let without = |change: fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        Fake::new(config)
    };
    let unsupported = |error: Error, expected: &str| {
        assert!(matches!(error, Error::Unsupported { feature, .. } if feature == expected), "{error}");
    };
    let fake = without(|config| config.srqs = false);
    unsupported(fake.pd().shared_receive_queue(4).build().unwrap_err(), "shared receive queues");
    let fake = without(|config| config.srq_resize = false);
    let mut srq = fake.pd().shared_receive_queue(4).build().unwrap();
    unsupported(srq.resize(8).unwrap_err(), "resizing shared receive queues");
    assert_eq!(fake.calls("ibv_modify_srq"), 0, "the device was not asked");
    fake.fail("ibv_modify_srq", libc::EOPNOTSUPP);
    unsupported(srq.set_limit(2).unwrap_err(), "limits of shared receive queues");
    fake.fail("ibv_modify_srq", libc::EINVAL);
    assert!(matches!(srq.set_limit(2), Err(Error::LimitSharedReceiveQueue { limit: 2, work_requests: 4, .. })));
}

#[test]
fn a_queue_beyond_the_device_is_refused_with_its_limits() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    for (depth, sges) in [(0, 1), (2049, 1), (1, 9)] {
        let error = pd.shared_receive_queue(depth).sges(sges).build().unwrap_err();
        let Error::CreateSharedReceiveQueue { work_requests, elements, max_work_requests, max_elements, .. } = error
        else {
            panic!("{error}")
        };
        assert_eq!((work_requests, elements), (depth, sges));
        assert_eq!((max_work_requests, max_elements), (2048, 8));
    }
}

#[test]
fn a_shared_receive_queue_of_another_context_is_refused() {
    for interfaces in [EXTENDED, CLASSIC] {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let srq = fake.pd().shared_receive_queue(4).build().unwrap();
        let cq = pd.context().completion_queue(4).build().unwrap();
        let builder = pd.queue_pair(&cq, &cq).classic(!interfaces.extended_qp).shared_receive_queue(&srq);
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::ForeignContext { object: "shared receive queue" }), "{error}");
    }
}

#[test]
fn the_last_receive_of_a_failed_queue_pair_is_reported_by_its_id() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
    let mut shared = Shared::new(&context.alloc_pd().unwrap(), EXTENDED);
    shared.receive(0);
    let broken = &shared.receivers[0].qp;
    fake.break_qp(broken.number());
    let event = events.try_event().unwrap().expect("the last one");
    assert_eq!(event.event_type, AsyncEventType::QP_LAST_WQE_REACHED);
    assert_eq!(event.source, AsyncSource::Qp { id: broken.id(), number: broken.number() });
    // What it had not taken is the other's.
    shared.send(1, b"survives");
    assert_eq!(received(&mut shared.receivers[1].cq).len(), 1);
    assert_eq!(received(&mut shared.receivers[0].cq).len(), 0);
}

#[test]
fn a_shared_queue_outlives_its_handle_while_queue_pairs_take_from_it() {
    on_each_interface(|fake, interfaces| {
        let mut shared = Shared::new(&fake.pd(), interfaces);
        shared.receive(0);
        let Shared { srq, receivers, mut senders, mut outbox, inbox } = shared;
        drop(srq);
        assert_eq!(fake.live().srqs, 1);
        outbox[..8].copy_from_slice(b"it lives");
        post!(senders[0], send(WorkRequest::new(1), rdma_safe::Sge { len: SIZE, ..outbox.sge() });).unwrap();
        let [mut first, second] = receivers;
        assert_eq!((received(&mut first.cq).len(), &inbox[..8]), (1, &b"it lives"[..]));
        drop(first);
        assert_eq!((fake.live().srqs, fake.calls("ibv_destroy_srq")), (1, 0));
        drop(second);
        assert_eq!((fake.live().srqs, fake.calls("ibv_destroy_srq")), (0, 1));
        drop((senders, inbox));
    });
}

#[test]
#[cfg_attr(miri, ignore = "720 orders; Miri takes those of the test above")]
fn a_shared_queue_and_what_it_is_used_with_go_in_every_order() {
    let fake = Fake::new(Config::default());
    let mut rounds = 0;
    in_every_order(&[0, 1, 2, 3, 4, 5], &mut |order| {
        fake.set_mode(Mode::Manual);
        let context = fake.open();
        let pd = context.alloc_pd().unwrap();
        let cq = context.completion_queue(8).build().unwrap();
        let mut srq = pd.shared_receive_queue(4).build().unwrap();
        // SAFETY: no bytes.
        unsafe { srq.receive(1, rdma_safe::Sge::EMPTY) }.unwrap();
        let qp = || pd.queue_pair(&cq, &cq).shared_receive_queue(&srq).classic(rounds % 2 == 0).build().unwrap();
        let (first, second) = (qp(), qp());
        let objects: [Box<dyn std::any::Any>; 6] =
            [Box::new(context), Box::new(pd), Box::new(cq), Box::new(srq), Box::new(first), Box::new(second)];
        drop_in_order(order, objects);
        assert_eq!(fake.live(), Live::default(), "{order:?}");
        rounds += 1;
    });
    assert_eq!((rounds, fake.calls("ibv_destroy_srq")), (720, 720));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_shared_queue_that_cannot_be_destroyed_keeps_its_domain() {
    let fake = Fake::new(Config::default());
    let srq = fake.pd().shared_receive_queue(4).build().unwrap();
    fake.fail("ibv_destroy_srq", libc::EBUSY);
    drop(srq);
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, srqs: 1, ..Live::default() });
    assert_eq!((fake.calls("ibv_destroy_srq"), fake.calls("ibv_dealloc_pd")), (1, 0));
    fake.may_leak();
}

#[test]
fn threads_share_the_handle_and_nothing_is_lost() {
    const EACH: u64 = if cfg!(miri) { 8 } else { 200 };
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut srq = pd.shared_receive_queue(4 * EACH as u32).build().unwrap();
    let (cq, qp) = {
        let Raw { cq, qp } = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp.shared_receive_queue(&srq));
        (cq, qp)
    };
    let shared = std::sync::Mutex::new(&mut srq);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let shared = &shared;
            scope.spawn(move || {
                for index in 0..EACH {
                    // SAFETY: no bytes.
                    unsafe { shared.lock().unwrap().receive(thread * EACH + index, rdma_safe::Sge::EMPTY) }.unwrap();
                }
            });
        }
        // The queue pair comes and goes meanwhile.
        drop((qp, cq));
    });
    assert_eq!(fake.calls("ibv_post_srq_recv") as u64, 4 * EACH);
    let mut ids = fake.shared_receives(srq.as_raw());
    ids.sort_unstable();
    assert!(ids.iter().copied().eq(0..4 * EACH), "{ids:?}");
}

#[test]
fn a_shared_queue_is_destroyed_at_once_or_when_nobody_takes_from_it() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    pd.shared_receive_queue(8).build().unwrap().destroy().unwrap();
    assert_eq!(fake.live().srqs, 0);
    let Shared { srq, receivers, senders, .. } = Shared::new(&pd, EXTENDED);
    let error = srq.destroy().unwrap_err();
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    assert_eq!(fake.live().srqs, 1);
    drop((receivers, senders));
    assert_eq!(fake.live().srqs, 0);
}
