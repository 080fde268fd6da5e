//! Extended reliable connections (XRC), which soft0 lacks: one connection, many shared receive queues.

use std::ptr::NonNull;

use rdma_safe::error::Verb;
use rdma_safe::interface::{Classic, Extended};
use rdma_safe::mr::Pages;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::sys::*;
use rdma_safe::xrc::{XrcDomain, XrcOpen, XrcTarget};
use rdma_safe::{
    Access, Buffer, CompletionQueue, ConnectOptions, Context, Errno, Error, InitOptions, Inline, PostError,
    ProtectionDomain, QueuePairState, QueuePairType, SendOps, Sge, SharedReceiveQueue, WcFields, WcOpcode, WcStatus,
    WorkRequest,
};

use crate::fake::{Config, Fake, Live};
use crate::support::{
    CLASSIC, EXTENDED, Interfaces, Raw, drop_in_order, in_every_order, on_each_interface, one_under_miri, raw_with,
    seen,
};

/// A shared receive queue with one receive of sixteen bytes, `wr_id` 7.
struct Inbox {
    srq: SharedReceiveQueue,
    cq: CompletionQueue,
    memory: Buffer,
}

impl Inbox {
    fn new(domain: &XrcDomain, pd: &ProtectionDomain) -> Self {
        let cq = pd.context().completion_queue(8).build().unwrap();
        let mut srq = domain.shared_receive_queue(pd, &cq, 4).build().unwrap();
        let memory = pd.allocate(16).unwrap();
        // SAFETY: the memory is read only after the receive has completed, and outlives the queue.
        unsafe { srq.receive(7, memory.sge()) }.unwrap();
        Inbox { srq, cq, memory }
    }

    fn number(&self) -> u32 {
        self.srq.xrc_number().unwrap()
    }

    /// Received messages: opcode, number of the queue pair, length.
    fn received(&mut self) -> Vec<(WcOpcode, u32, u32)> {
        let all = seen(&mut self.cq);
        assert!(all.iter().all(|wc| wc.status == WcStatus::SUCCESS), "{all:?}");
        all.iter().map(|wc| (wc.opcode, wc.qp_num.unwrap(), wc.byte_len.unwrap())).collect()
    }
}

/// Both ends of a connection.
struct Connection {
    sender: Raw,
    target: XrcTarget,
}

fn sender(pd: &ProtectionDomain, interfaces: Interfaces) -> Raw {
    raw_with(pd, interfaces, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::XRC_SEND).recv_depth(0))
}

fn connect(mut sender: Raw, domain: &XrcDomain) -> Connection {
    let mut target = domain.create_target().unwrap();
    let options = InitOptions::default().peer_access(Access::REMOTE);
    let (here, there) = (sender.qp.init(&options).unwrap(), target.init(&options).unwrap());
    assert_eq!(there.qp_num, target.number());
    target.connect(&here, &ConnectOptions::default()).unwrap();
    sender.qp.connect(&there, &ConnectOptions::default()).unwrap();
    assert_eq!((sender.qp.state(), target.state()), (QueuePairState::RTS, QueuePairState::RTS));
    Connection { sender, target }
}

/// Posts one batch of the work that the lines add to it, for the queue `$number`.
macro_rules! post_to {
    ($raw:expr, $number:expr, $($method:ident($($argument:expr),* $(,)?);)+) => {{
        let mut batch = $raw.qp.send_batch().unwrap();
        let mut work = batch.to_srq($number);
        // SAFETY: as in `post!`.
        unsafe { $(work.$method($($argument),*).unwrap();)+ }
        batch.post()
    }};
}

#[test]
fn one_connection_reaches_every_queue_of_the_domain() {
    on_each_interface(|fake, interfaces| {
        let context = fake.open();
        let domain = context.open_xrcd().unwrap();
        let (near, pds) = (context.alloc_pd().unwrap(), [context.alloc_pd().unwrap(), context.alloc_pd().unwrap()]);
        let Connection { mut sender, target } = connect(self::sender(&near, interfaces), &domain);
        let mut inboxes = pds.each_ref().map(|pd| Inbox::new(&domain, pd));
        let [first, second] = inboxes.each_ref().map(Inbox::number);
        assert_ne!(first, second);
        post_to!(sender, second, send(WorkRequest::new(1).signaled(), Inline(b"to the second"));).unwrap();
        assert_eq!(inboxes[0].received(), []);
        assert_eq!(inboxes[1].received(), [(WcOpcode::RECV, target.number(), 13)]);
        post_to!(sender, first, send_imm(WorkRequest::new(2).signaled(), 9, Inline(b"to the first"));).unwrap();
        let received = seen(&mut inboxes[0].cq);
        assert_eq!((received[0].imm, received[0].wr_id, received[0].byte_len), (Some(9), 7, Some(12)));
        assert_eq!(&inboxes[0].memory[..12], b"to the first");
        assert_eq!(&inboxes[1].memory[..13], b"to the second");
        let sent: Vec<_> = seen(&mut sender.cq).iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(sent, [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]);
        assert_eq!(inboxes[0].srq.query().unwrap().max_wr, 4);
    });
}

#[test]
fn memory_access_follows_the_domain_of_the_queue() {
    on_each_interface(|fake, interfaces| {
        let context = fake.open();
        let domain = context.open_xrcd().unwrap();
        let (near, far) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
        let Connection { mut sender, target } = connect(self::sender(&near, interfaces), &domain);
        let mut inbox = Inbox::new(&domain, &far);
        let exposed = far.expose(Pages::new(32).unwrap(), Access::REMOTE).unwrap();
        let at = |offset, len| exposed.remote().slice(offset, len).unwrap();
        let results = near.allocate(24).unwrap();
        let place = |index: u64| Sge { address: results.address() + 8 * index, len: 8, lkey: results.lkey() };
        post_to!(sender, inbox.number(),
            write(WorkRequest::new(1), at(0, 8), Inline(&5_u64.to_ne_bytes()));
            fetch_add(WorkRequest::new(2), at(0, 8), 3, place(0));
            compare_swap(WorkRequest::new(3), at(0, 8), 8, 40, place(1));
            read(WorkRequest::new(4), at(0, 8), place(2));
            write_imm(WorkRequest::new(5).signaled(), at(8, 8), 6, Inline(b"written!"));
        )
        .unwrap();
        assert_eq!(seen(&mut sender.cq)[0].wr_id, 5);
        let words: Vec<u64> = results.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, [5, 8, 40]);
        assert_eq!(inbox.received(), [(WcOpcode::RECV_RDMA_WITH_IMM, target.number(), 8)]);
        let mut bytes = [0; 8];
        exposed.read(8, &mut bytes).unwrap();
        assert_eq!(&bytes, b"written!");
        // A queue of another domain gives no access to this memory.
        let other = Inbox::new(&domain, &near);
        post_to!(sender, other.number(), write(WorkRequest::new(6), at(0, 8), Inline(b"trespass"));).unwrap();
        assert_eq!(seen(&mut sender.cq)[0].status, WcStatus::REM_ACCESS_ERR);
        drop((sender, target, other));
    });
}

#[test]
fn a_send_invalidates_a_key_of_the_queues_domain() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let domain = pd.context().open_xrcd().unwrap();
        let Connection { mut sender, target } = connect(self::sender(&pd, interfaces), &domain);
        let mut inbox = Inbox::new(&domain, &pd);
        let exposed = pd.expose(Pages::new(8).unwrap(), Access::REMOTE).unwrap();
        let key = exposed.remote().rkey;
        post_to!(sender, inbox.number(), send_invalidate(WorkRequest::new(1), key, Inline(b"gone"));).unwrap();
        assert_eq!(seen(&mut inbox.cq)[0].invalidated_rkey, Some(key));
        drop(target);
    });
}

#[test]
fn work_must_name_a_queue_on_xrc_and_only_there() {
    for &interfaces in one_under_miri(&[EXTENDED, CLASSIC]) {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let domain = pd.context().open_xrcd().unwrap();
        let Connection { mut sender, target: _target } = connect(self::sender(&pd, interfaces), &domain);
        assert_eq!(sender.qp.operations(), SendOps::RC);
        let remote = rdma_safe::Remote { address: 0, rkey: 1 };
        let mut batch = sender.qp.send_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe {
            let wr = WorkRequest::new(1);
            let refused = [
                batch.send(wr, Sge::EMPTY),
                batch.send_imm(wr, 1, Sge::EMPTY),
                batch.send_invalidate(wr, 1, Sge::EMPTY),
                batch.write(wr, remote, Sge::EMPTY),
                batch.write_imm(wr, remote, 1, Sge::EMPTY),
                batch.read(wr, remote, Sge::EMPTY),
                batch.fetch_add(wr, remote, 1, Sge { len: 8, ..Sge::EMPTY }),
                batch.compare_swap(wr, remote, 1, 1, Sge { len: 8, ..Sge::EMPTY }),
            ];
            assert_eq!(refused, [Err(PostError::NoRemoteQueue); 8]);
        }
        assert!(batch.is_empty());
        drop(batch);
        let (mut connected, _peer) = crate::support::raw_pair(&pd, interfaces);
        let mut batch = connected.qp.send_batch().unwrap();
        // SAFETY: nothing is posted.
        assert_eq!(unsafe { batch.to_srq(1).send(WorkRequest::new(1), Sge::EMPTY) }, Err(PostError::NotXrc));
        assert!(batch.is_empty());
        assert!(PostError::NoRemoteQueue.to_string().contains("SendBatch::to_srq"));
    }
}

#[test]
fn specialized_send_loops_can_name_a_queue() {
    for &interfaces in one_under_miri(&[EXTENDED, CLASSIC]) {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let domain = pd.context().open_xrcd().unwrap();
        let Connection { mut sender, target } = connect(self::sender(&pd, interfaces), &domain);
        let mut inbox = Inbox::new(&domain, &pd);
        let number = inbox.number();
        let (sends, _) = sender.qp.split();
        macro_rules! send {
            ($batch:ident) => {
                // SAFETY: the bytes are copied.
                unsafe { $batch.to_srq(number).send(WorkRequest::new(1), Inline(b"a")) }
            };
        }
        match interfaces.extended_qp {
            true => sends.with_interface::<Extended>().unwrap().post(|batch| send!(batch)),
            false => sends.with_interface::<Classic>().unwrap().post(|batch| send!(batch)),
        }
        .unwrap();
        assert_eq!(inbox.received(), [(WcOpcode::RECV, target.number(), 1)]);
    }
}

#[test]
fn a_queue_outside_the_domain_is_not_reached() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (domain, other) = (pd.context().open_xrcd().unwrap(), pd.context().open_xrcd().unwrap());
        let mut elsewhere = Inbox::new(&other, &pd);
        let basic = pd.shared_receive_queue(4).build().unwrap();
        assert_eq!(basic.xrc_number(), None);
        for number in [elsewhere.number(), 0x00ff_ffff] {
            let Connection { mut sender, target } = connect(self::sender(&pd, interfaces), &domain);
            post_to!(sender, number, send(WorkRequest::new(1), Inline(b"x"));).unwrap();
            assert_eq!(seen(&mut sender.cq)[0].status, WcStatus::REM_INV_REQ_ERR);
            assert_eq!(target.query().unwrap().state(), Some(QueuePairState::ERR));
            assert_eq!(target.state(), QueuePairState::ERR);
        }
        assert_eq!(elsewhere.received(), []);
    });
}

#[test]
fn connecting_sets_the_attributes_of_each_end() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let domain = pd.context().open_xrcd().unwrap();
    fake.take_modified();
    let _connection = connect(sender(&pd, EXTENDED), &domain);
    let masks: Vec<_> = fake.take_modified().iter().map(|(_, mask)| *mask).collect();
    assert_eq!(masks, [0x39, 0x39, 0x12_9181, 0x1_0201, 0x10_1181, 0x1_2e01], "both, then the target, then the sender");
}

#[test]
#[cfg_attr(miri, ignore = "looks at files")]
fn processes_share_a_domain_by_a_file() {
    let fake = Fake::new(Config::default());
    // Like two processes, each of which opens the device.
    let (ours, theirs) = (fake.open(), fake.open());
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let missing = ours.open_shared_xrcd(&file, XrcOpen::OpenExisting).unwrap_err();
    assert!(matches!(missing, Error::Verb { verb: Verb::OpenXrcd, .. }), "{missing}");
    let domain = ours.open_shared_xrcd(&file, XrcOpen::CreateNew).unwrap();
    let exists = theirs.open_shared_xrcd(&file, XrcOpen::CreateNew).unwrap_err();
    assert!(matches!(exists, Error::Verb { verb: Verb::OpenXrcd, .. }), "{exists}");
    let same = theirs.open_shared_xrcd(&file, XrcOpen::OpenExisting).unwrap();
    drop(theirs.open_shared_xrcd(&file, XrcOpen::OpenOrCreate).unwrap());
    let pd = ours.alloc_pd().unwrap();
    let Connection { mut sender, target } = connect(self::sender(&pd, EXTENDED), &domain);
    let mut inbox = Inbox::new(&same, &theirs.alloc_pd().unwrap());
    post_to!(sender, inbox.number(), send(WorkRequest::new(1), Inline(b"across"));).unwrap();
    assert_eq!(inbox.received(), [(WcOpcode::RECV, target.number(), 6)]);
    assert_eq!(&inbox.memory[..6], b"across");
    // A target stays open until each process that opened it has closed it.
    let kept = same.open_target(target.number()).unwrap();
    assert_eq!((kept.number(), kept.state()), (target.number(), QueuePairState::RTS));
    assert_ne!(kept.id(), target.id());
    target.destroy().unwrap();
    // SAFETY: as in `Inbox::new`.
    unsafe { inbox.srq.receive(8, inbox.memory.sge()) }.unwrap();
    post_to!(sender, inbox.number(), send(WorkRequest::new(2), Inline(b"still"));).unwrap();
    assert_eq!(inbox.received(), [(WcOpcode::RECV, kept.number(), 5)]);
    assert_eq!(fake.live().qps, 2);
    kept.destroy().unwrap();
    assert_eq!(fake.live().qps, 1);
    post_to!(sender, inbox.number(), send(WorkRequest::new(3), Inline(b"gone"));).unwrap();
    assert_eq!(seen(&mut sender.cq)[0].status, WcStatus::RETRY_EXC_ERR);
}

#[test]
fn a_target_is_opened_in_its_domain_only() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let (domain, other) = (context.open_xrcd().unwrap(), context.open_xrcd().unwrap());
    let mut target = domain.create_target().unwrap();
    target.init(&InitOptions::default()).unwrap();
    let mut opened = domain.open_target(target.number()).unwrap();
    assert_eq!(opened.state(), QueuePairState::INIT);
    opened.modify(&QueuePairAttributes::new().set_state(QueuePairState::RESET)).unwrap();
    assert_eq!(target.query().unwrap().state(), Some(QueuePairState::RESET));
    let error = other.open_target(target.number()).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::OpenQp, .. }), "{error}");
    fake.fail_once("ibv_query_qp", libc::EIO);
    fake.fail("ibv_query_qp", libc::EIO);
    let error = domain.open_target(target.number()).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryQp, .. }), "{error}");
    fake.heal("ibv_query_qp");
    assert_eq!(fake.live().qps, 2, "a target that cannot be queried is closed");
    let Err(error) = domain.create_target().unwrap().connect(
        &rdma_safe::QueuePairAddress::new(1, 1, rdma_safe::Gid::ZERO, rdma_safe::Mtu::MTU_1024),
        &ConnectOptions::default(),
    ) else {
        panic!("it has no address yet")
    };
    assert!(matches!(error, Error::NotInitialised), "{error}");
}

#[test]
fn receives_on_an_xrc_queue_pair_are_refused() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let domain = pd.context().open_xrcd().unwrap();
        let mut raw = sender(&pd, interfaces);
        assert_eq!((raw.qp.capacity().max_recv_wr, raw.qp.capacity().max_recv_sge), (0, 0));
        for connected in [false, true] {
            if connected {
                raw = connect(raw, &domain).sender;
            }
            // SAFETY: nothing is posted.
            let error = unsafe { raw.qp.receive(1, Sge::EMPTY) }.unwrap_err();
            assert_eq!(error, PostError::NoReceiveQueue);
            assert!(error.to_string().contains("XrcDomain::shared_receive_queue"), "{error}");
            assert_eq!(raw.qp.recv_batch().unwrap_err(), PostError::NoReceiveQueue);
        }
        assert_eq!(fake.calls("ibv_post_recv"), 0);
    });
}

#[test]
fn a_shared_receive_queue_of_the_wrong_kind_is_refused() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let domain = pd.context().open_xrcd().unwrap();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let xrc = domain.shared_receive_queue(&pd, &cq, 4).build().unwrap();
    let basic = pd.shared_receive_queue(4).build().unwrap();
    for (qp_type, srq) in
        [(QueuePairType::RC, &xrc), (QueuePairType::XRC_SEND, &xrc), (QueuePairType::XRC_SEND, &basic)]
    {
        let error = pd.queue_pair(&cq, &cq).qp_type(qp_type).shared_receive_queue(srq).build().unwrap_err();
        assert!(matches!(error, Error::WrongType { qp_type: found, .. } if found == qp_type), "{error}");
        assert!(error.to_string().contains("SendBatch::to_srq"), "{error}");
    }
    let error = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::XRC_RECV).build().unwrap_err();
    assert!(error.to_string().contains("XrcDomain::create_target"), "{error}");
}

#[test]
fn objects_of_other_contexts_are_refused() {
    let fake = Fake::new(Config::default());
    let (ours, theirs) = (fake.pd(), fake.pd());
    let domain = ours.context().open_xrcd().unwrap();
    let cq = ours.context().completion_queue(4).build().unwrap();
    let foreign = theirs.context().completion_queue(4).build().unwrap();
    let refused = |error: Error, expected: &str| {
        assert!(matches!(error, Error::ForeignContext { object } if object == expected), "{error}");
    };
    refused(domain.shared_receive_queue(&ours, &foreign, 4).build().unwrap_err(), "completion queue");
    refused(domain.shared_receive_queue(&theirs, &foreign, 4).build().unwrap_err(), "XRC domain");
    drop(cq);
}

#[test]
fn failed_creations_leak_nothing() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let domain = pd.context().open_xrcd().unwrap();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let before = fake.live();
    fake.fail("get_srq_num", libc::EIO);
    let error = domain.shared_receive_queue(&pd, &cq, 4).build().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::GetSrqNum, .. }), "{error}");
    fake.fail("create_srq_ex", libc::EOPNOTSUPP);
    let error = domain.shared_receive_queue(&pd, &cq, 4).build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature, .. } if feature.contains("XRC")), "{error}");
    fake.fail("create_srq_ex", libc::ENOMEM);
    let error = domain.shared_receive_queue(&pd, &cq, 4).build().unwrap_err();
    assert!(matches!(error, Error::CreateSharedReceiveQueue { work_requests: 4, .. }), "{error}");
    fake.fail("create_qp_ex", libc::EOPNOTSUPP);
    assert!(matches!(domain.create_target().unwrap_err(), Error::Unsupported { .. }));
    fake.fail("create_qp_ex", libc::ENOMEM);
    let error = domain.create_target().unwrap_err();
    assert!(matches!(error, Error::CreateQueuePair { qp_type: QueuePairType::XRC_RECV, .. }), "{error}");
    fake.fail("open_xrcd", libc::EPERM);
    let error = pd.context().open_xrcd().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::OpenXrcd, .. }), "{error}");
    assert_eq!(fake.live(), before);
}

#[test]
fn a_queue_that_its_own_thread_polls_is_destroyed_after_the_poll() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let domain = pd.context().open_xrcd().unwrap();
    let Connection { mut sender, target } = connect(self::sender(&pd, EXTENDED), &domain);
    let Inbox { srq, mut cq, memory } = Inbox::new(&domain, &pd);
    post_to!(sender, srq.xrc_number().unwrap(), send(WorkRequest::new(1), Inline(b"x"));).unwrap();
    let mut poll = cq.poll();
    assert_eq!(poll.next().unwrap().unwrap().wr_id(), 7);
    let error = srq.destroy().unwrap_err();
    assert!(matches!(error, Error::PollInProgress { verb: Verb::DestroySrq }), "{error}");
    assert_eq!((fake.live().srqs, fake.calls("ibv_destroy_srq")), (1, 0));
    drop(poll);
    assert_eq!((fake.live().srqs, fake.calls("ibv_destroy_srq")), (0, 1));
    drop((target, memory));
}

#[test]
#[cfg_attr(miri, ignore = "5040 orders; natively all of them are tried")]
fn xrc_objects_are_dropped_in_every_order() {
    let fake = Fake::new(Config::default());
    in_every_order(&[0, 1, 2, 3, 4, 5, 6], &mut |order| {
        let context = fake.open();
        let pd = context.alloc_pd().unwrap();
        let domain = context.open_xrcd().unwrap();
        let cq = context.completion_queue(8).build().unwrap();
        let srq = domain.shared_receive_queue(&pd, &cq, 4).build().unwrap();
        let sender = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::XRC_SEND).build().unwrap();
        let target = domain.create_target().unwrap();
        let objects: [Box<dyn std::any::Any>; 7] = [
            Box::new(context),
            Box::new(pd),
            Box::new(domain),
            Box::new(cq),
            Box::new(srq),
            Box::new(sender),
            Box::new(target),
        ];
        drop_in_order(order, objects);
        assert_eq!(fake.live(), Live::default(), "{order:?}");
    });
}

#[test]
fn a_domain_is_closed_once_and_not_while_in_use() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    context.open_xrcd().unwrap().close().unwrap();
    assert_eq!(fake.live().xrcds, 0);
    let domain = context.open_xrcd().unwrap();
    let target = domain.create_target().unwrap();
    let error = domain.close().unwrap_err();
    assert!(matches!(error, Error::InUse { object: "XRC domain", .. }), "{error}");
    assert_eq!(fake.live().xrcds, 1);
    drop(target);
    assert_eq!((fake.live().xrcds, fake.calls("close_xrcd")), (0, 2));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn an_object_that_cannot_be_destroyed_keeps_its_parents() {
    let fake = Fake::new(Config::default());
    fake.fail("close_xrcd", libc::EBUSY);
    let error = fake.open().open_xrcd().unwrap().close().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::CloseXrcd, .. }), "{error}");
    assert_eq!(fake.live(), Live { contexts: 1, xrcds: 1, ..Live::default() });
    fake.heal("close_xrcd");
    fake.fail("ibv_destroy_srq", libc::EBUSY);
    let context = fake.open();
    let cq = context.completion_queue(8).build().unwrap();
    let domain = context.open_xrcd().unwrap();
    drop(domain.shared_receive_queue(&context.alloc_pd().unwrap(), &cq, 4).build().unwrap());
    drop((domain, context, cq));
    assert_eq!(fake.live(), Live { contexts: 2, pds: 1, cqs: 1, srqs: 1, xrcds: 2, ..Live::default() });
    fake.fail("ibv_destroy_qp", libc::EBUSY);
    let error = fake.open().open_xrcd().unwrap().create_target().unwrap().destroy().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::DestroyQp, .. }), "{error}");
    assert_eq!(fake.live(), Live { contexts: 3, pds: 1, cqs: 1, srqs: 1, qps: 1, xrcds: 3, ..Live::default() });
    fake.may_leak();
}

/// A domain and a target, created as a C program does.
fn created_by_c(context: &Context) -> (NonNull<ibv_xrcd>, NonNull<ibv_qp>) {
    let mut attr = ibv_xrcd_init_attr { comp_mask: 3, fd: -1, oflags: libc::O_CREAT };
    let mut qp = ibv_qp_init_attr_ex::zeroed();
    (qp.qp_type, qp.comp_mask) = (IBV_QPT_XRC_RECV, IBV_QP_INIT_ATTR_XRCD.0);
    // SAFETY: the context and the attributes are valid.
    unsafe {
        let xrcd = ibv_open_xrcd(context.as_raw(), &mut attr);
        qp.xrcd = xrcd;
        (NonNull::new(xrcd).unwrap(), NonNull::new(ibv_create_qp_ex(context.as_raw(), &mut qp)).unwrap())
    }
}

#[test]
fn objects_of_other_code_are_adopted_and_destroyed_once() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let (xrcd, qp) = created_by_c(&context);
    // SAFETY: the domain belongs to this context, and nothing else uses it.
    let domain = unsafe { XrcDomain::from_raw(&context, xrcd) };
    // SAFETY: the target belongs to this domain, and nothing else uses it.
    let mut target = unsafe { XrcTarget::from_raw(&domain, qp) }.unwrap();
    assert_eq!((domain.as_raw(), target.as_raw()), (xrcd.as_ptr(), qp.as_ptr()));
    assert_eq!(target.state(), QueuePairState::RESET);
    target.init(&InitOptions::default()).unwrap();
    drop((context, domain));
    assert_eq!(fake.live(), Live { contexts: 1, xrcds: 1, qps: 1, ..Live::default() });
    drop(target);
    assert_eq!(fake.live(), Live::default());
}

#[test]
fn a_target_that_cannot_be_queried_stays_the_callers() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let (xrcd, qp) = created_by_c(&context);
    // SAFETY: the domain belongs to this context, and nothing else uses it.
    let domain = unsafe { XrcDomain::from_raw(&context, xrcd) };
    fake.fail("ibv_query_qp", libc::ENOMEM);
    // SAFETY: the target belongs to this domain, and nothing else uses it.
    let error = unsafe { XrcTarget::from_raw(&domain, qp) }.unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryQp, errno: Errno(libc::ENOMEM), .. }), "{error}");
    assert_eq!((fake.calls("ibv_destroy_qp"), fake.live().qps), (0, 1));
    // SAFETY: the target still belongs to the test.
    assert_eq!(unsafe { (verbs().unwrap().ibv_destroy_qp)(qp.as_ptr()) }, 0);
}
