//! Objects that other code has made by the table of verbs, and those that are given up to it.

use std::ptr::{NonNull, null_mut};

use rdma_safe::sys::*;
use rdma_safe::{
    Access, AddressHandle, CompletionChannel, CompletionQueue, Context, Error, PostError, ProtectionDomain, QueuePair,
    QueuePairState, QueuePairType, RawMemoryRegion, SendOps, Sge, ThreadDomain, WcFields, WcStatus, WorkRequest,
};

use crate::fake::{Config, Fake, Live};
use crate::support::{CLASSIC, EXTENDED, Interfaces, init, rtr, rts, seen, to_rts};

fn table() -> &'static Verbs {
    verbs().unwrap()
}

#[track_caller]
fn made<T>(raw: *mut T) -> NonNull<T> {
    NonNull::new(raw).expect("an object")
}

/// Opens the device as a program in C does.
fn open(fake: &Fake) -> NonNull<ibv_context> {
    let mut count = 0;
    // SAFETY: the list is freed after the device was opened, and the names are those of its devices.
    unsafe {
        let list = (table().ibv_get_device_list)(&mut count);
        let device = (0..count as usize).map(|index| *list.add(index)).find(|device| {
            let name = std::ffi::CStr::from_ptr((table().ibv_get_device_name)(*device));
            name.to_str() == Ok(fake.name())
        });
        let context = (table().ibv_open_device)(device.expect("the device is there"));
        (table().ibv_free_device_list)(list);
        made(context)
    }
}

fn create_cq(
    context: &Context,
    extended: bool,
    fields: WcFields,
    channel: Option<&CompletionChannel>,
) -> NonNull<ibv_cq> {
    let channel = channel.map_or(null_mut(), CompletionChannel::as_raw);
    // SAFETY: the context and the channel are valid.
    unsafe {
        if extended {
            let mut attr = ibv_cq_init_attr_ex { cqe: 16, channel, wc_flags: fields.bits(), ..std::mem::zeroed() };
            return made(ibv_create_cq_ex(context.as_raw(), &mut attr)).cast();
        }
        made((table().ibv_create_cq)(context.as_raw(), 16, null_mut(), channel, 0))
    }
}

fn create_qp(
    pd: &ProtectionDomain,
    cq: &CompletionQueue,
    qp_type: QueuePairType,
    ops: Option<SendOps>,
) -> NonNull<ibv_qp> {
    let mut attr = ibv_qp_init_attr_ex::zeroed();
    (attr.send_cq, attr.recv_cq, attr.pd) = (cq.as_raw(), cq.as_raw(), pd.as_raw());
    attr.qp_type = ibv_qp_type(qp_type.0);
    attr.cap = ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 2, max_recv_sge: 2, max_inline_data: 32 };
    attr.comp_mask = IBV_QP_INIT_ATTR_PD.0;
    if let Some(ops) = ops {
        attr.send_ops_flags = ops.bits();
        attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
    }
    // SAFETY: the domain and the queue are valid.
    made(unsafe { ibv_create_qp_ex(pd.context().as_raw(), &mut attr) })
}

/// A queue pair and its completion queue, both made by other code and adopted.
fn adopt(
    pd: &ProtectionDomain,
    interfaces: Interfaces,
    channel: Option<&CompletionChannel>,
) -> (QueuePair, CompletionQueue) {
    let context = pd.context();
    let raw = create_cq(context, interfaces.extended_cq, WcFields::STANDARD, channel);
    let mut builder = context.completion_queue(0).classic(!interfaces.extended_cq);
    if let Some(channel) = channel {
        builder = builder.channel(channel);
    }
    // SAFETY: just made, as the builder says.
    let cq = unsafe { builder.from_raw(raw) }.unwrap();
    assert_eq!((cq.is_extended(), cq.capacity() >= 16), (interfaces.extended_cq, true));
    let ops = interfaces.extended_qp.then_some(SendOps::RC);
    let raw = create_qp(pd, &cq, QueuePairType::RC, ops);
    // SAFETY: likewise.
    let qp = unsafe { pd.queue_pair(&cq, &cq).from_raw(raw) }.unwrap();
    assert_eq!((qp.is_extended(), qp.as_raw_ex().is_some()), (interfaces.extended_qp, interfaces.extended_qp));
    assert_eq!((qp.as_raw(), qp.operations()), (raw.as_ptr(), SendOps::RC));
    assert_eq!((qp.capacity().max_send_sge, qp.capacity().max_inline_data), (2, 32));
    (qp, cq)
}

#[test]
fn objects_of_other_code_work_and_are_destroyed_once() {
    for interfaces in [EXTENDED, CLASSIC] {
        let fake = Fake::new(Config::default());
        // SAFETY: each was just made with those it is said to belong to, and nobody else knows of it.
        unsafe {
            let context = Context::from_raw(open(&fake)).unwrap();
            assert_eq!((context.device_name(), context.attributes().ports()), (fake.name(), 1));
            let pd = ProtectionDomain::from_raw(&context, made((table().ibv_alloc_pd)(context.as_raw())));
            let channel = made((table().ibv_create_comp_channel)(context.as_raw()));
            let channel = CompletionChannel::from_raw(&context, channel).unwrap();
            let mut bytes = vec![0_u8; 64].into_boxed_slice();
            let address = bytes.as_mut_ptr();
            let mr = (table().ibv_reg_mr)(pd.as_raw(), address.cast(), 64, Access::LOCAL_WRITE.bits() as i32);
            let mr = RawMemoryRegion::from_raw(&pd, made(mr));
            assert_eq!((mr.address(), mr.len()), (address.expose_provenance() as u64, 64));
            let ((mut a, mut a_cq), (mut b, mut b_cq)) =
                (adopt(&pd, interfaces, None), adopt(&pd, interfaces, Some(&channel)));
            to_rts(&mut a, b.number());
            to_rts(&mut b, a.number());
            assert_ne!(a.id(), b.id());
            b_cq.arm(false).unwrap();
            let sge = |range: std::ops::Range<u64>| Sge {
                address: mr.address() + range.start,
                len: (range.end - range.start) as u32,
                lkey: mr.lkey(),
            };
            b.receive(1, sge(32..64)).unwrap();
            address.write(77);
            let mut batch = a.send_batch().unwrap();
            batch.send(WorkRequest::new(2).signaled(), sge(0..8)).unwrap();
            batch.post().unwrap();
            assert_eq!(channel.try_event().unwrap(), Some(b_cq.id()), "the name is the adopted queue's");
            assert_eq!(seen(&mut a_cq)[0].wr_id, 2);
            let received = seen(&mut b_cq)[0];
            assert_eq!((received.wr_id, received.status, received.byte_len), (1, WcStatus::SUCCESS, Some(8)));
            assert_eq!(address.add(32).read(), 77);
            // In an order that C would not allow.
            drop((context, pd, channel, a_cq, b_cq));
            assert_eq!(
                fake.live(),
                Live { contexts: 1, pds: 1, mrs: 1, channels: 1, cqs: 2, qps: 2, ..Live::default() }
            );
            drop((a, b, mr));
            assert_eq!(fake.live(), Live::default());
            for (verb, count) in
                [("ibv_close_device", 1), ("ibv_dealloc_pd", 1), ("ibv_destroy_cq", 2), ("ibv_destroy_qp", 2)]
            {
                assert_eq!(fake.calls(verb), count, "{verb}");
            }
            drop(bytes);
        }
    }
}

#[test]
fn domains_handles_and_shared_queues_of_other_code_are_destroyed_once() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let context = pd.context();
    // SAFETY: each was just made with those it is said to belong to, and nobody else knows of it.
    unsafe {
        let mut attr = ibv_td_init_attr::zeroed();
        let td = ThreadDomain::from_raw(context, made(ibv_alloc_td(context.as_raw(), &mut attr)));
        let mut attr =
            ibv_parent_domain_init_attr { pd: pd.as_raw(), td: td.as_raw(), ..ibv_parent_domain_init_attr::zeroed() };
        let parent = pd.parent_from_raw(Some(&td), made(ibv_alloc_parent_domain(context.as_raw(), &mut attr)));
        assert!(parent.is_parent() && parent.is_same(&pd) && parent.thread_domain().is_some());
        assert_ne!(parent.as_raw(), pd.as_raw());
        drop(td);

        let mut attr =
            ibv_srq_init_attr { srq_context: null_mut(), attr: ibv_srq_attr { max_wr: 5, max_sge: 2, srq_limit: 0 } };
        let raw = made((table().ibv_create_srq)(pd.as_raw(), &mut attr));
        let error = parent.shared_receive_queue(1).from_raw(raw).unwrap_err();
        assert!(matches!(error, Error::WrongParent { object: "protection domain" }), "{error}");
        let mut srq = pd.shared_receive_queue(1).from_raw(raw).unwrap();
        assert!(srq.max_wr() >= 5 && srq.max_sge() >= 2);
        let buffer = pd.register_raw(Box::leak(Box::new([0_u8; 8])).as_mut_ptr(), 8, Access::LOCAL_WRITE).unwrap();
        srq.receive(9, Sge { address: buffer.address(), len: 8, lkey: buffer.lkey() }).unwrap();
        assert_eq!(fake.shared_receives(srq.as_raw()), [9]);
        srq.destroy().unwrap();
        drop(Box::from_raw(std::ptr::with_exposed_provenance_mut::<[u8; 8]>(buffer.address() as usize)));

        let rdma_safe::AddressVector { port, .. } = rdma_safe::AddressVector::from_lid(1, 0);
        let gid: rdma_safe::Gid = "::ffff:10.9.9.1".parse().unwrap();
        let handle = pd.address_handle(&rdma_safe::AddressVector::from_gid(port, gid, 1)).unwrap();
        let raw = handle.into_raw();
        assert_eq!(fake.live().ahs, 1, "given up, not destroyed");
        let handle = AddressHandle::from_raw(&pd, raw);
        handle.destroy().unwrap();
        assert_eq!(fake.calls("ibv_destroy_ah"), 1);
    }
}

#[test]
fn what_is_borrowed_stays_its_owners() {
    let fake = Fake::new(Config::default());
    let raw = open(&fake);
    // SAFETY: the owner closes and deallocates below, after what was made from them.
    unsafe {
        let pd_raw = made((table().ibv_alloc_pd)(raw.as_ptr()));
        let context = Context::from_raw_borrowed(raw).unwrap();
        let pd = ProtectionDomain::from_raw_borrowed(&context, pd_raw);
        drop(pd.allocate(64).unwrap());
        drop((context, pd));
        assert_eq!(fake.live(), Live { contexts: 1, pds: 1, ..Live::default() });
        assert_eq!((table().ibv_dealloc_pd)(pd_raw.as_ptr()), 0);
        assert_eq!((table().ibv_close_device)(raw.as_ptr()), 0);
    }
}

#[test]
fn a_context_that_cannot_be_asked_is_closed_only_if_it_was_given_away() {
    let fake = Fake::new(Config::default());
    for (borrowed, left) in [(false, 0), (true, 1)] {
        let raw = open(&fake);
        fake.fail("query_device_ex", libc::EIO);
        // SAFETY: as the contract says; the borrowed one is closed below.
        let adopted = unsafe { if borrowed { Context::from_raw_borrowed(raw) } else { Context::from_raw(raw) } };
        let error = adopted.unwrap_err();
        assert!(matches!(error, Error::Verb { verb: "ibv_query_device_ex", .. }), "{error}");
        assert_eq!(fake.live().contexts, left);
        if borrowed {
            // SAFETY: it is the test's.
            assert_eq!(unsafe { (table().ibv_close_device)(raw.as_ptr()) }, 0);
        }
        fake.heal("query_device_ex");
    }
}

#[test]
fn a_queue_without_an_accessor_that_it_is_said_to_have_is_not_adopted() {
    for (hollow_fields, no_end_poll) in [(WcFields::BYTE_LEN.bits(), false), (0, true)] {
        let fake = Fake::new(Config { hollow_fields, no_end_poll, ..Config::default() });
        let context = fake.open();
        let raw = create_cq(&context, true, WcFields::STANDARD, None);
        // SAFETY: just made, with these fields.
        let error = unsafe { context.completion_queue(0).from_raw(raw) }.unwrap_err();
        match error {
            Error::CompletionFields { fields } => assert_eq!(fields, WcFields::BYTE_LEN),
            Error::Unsupported { feature, .. } => assert!(no_end_poll && feature == "extended completion queues"),
            other => panic!("{other}"),
        }
        // SAFETY: it is still the test's.
        unsafe {
            assert!((*raw.as_ptr()).cq_context.is_null(), "it is as before");
            assert_eq!((table().ibv_destroy_cq)(raw.as_ptr()), 0);
        }
    }
}

#[test]
fn what_is_given_up_is_its_callers_to_destroy() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    for interfaces in [EXTENDED, CLASSIC] {
        let (mut qp, cq) = adopt(&pd, interfaces, None);
        let number = qp.number();
        to_rts(&mut qp, number);
        // A batch that was forgotten is aborted, as the provider holds a lock for it.
        std::mem::forget(qp.send_batch().unwrap());
        let raw = qp.into_raw().unwrap();
        assert_eq!(fake.live().qps, 1);
        // SAFETY: it was given up.
        assert_eq!(unsafe { (table().ibv_destroy_qp)(raw.as_ptr()) }, 0);
        drop(cq);
        assert_eq!((fake.live().qps, fake.live().cqs), (0, 0));
    }
    let mut bytes = [0_u8; 16];
    // SAFETY: the memory stays longer than the region, and no work names it.
    unsafe {
        let region = pd.register_raw(bytes.as_mut_ptr(), 16, Access::LOCAL_WRITE).unwrap();
        let (lkey, raw) = (region.lkey(), region.into_raw().unwrap());
        assert_eq!(fake.live().mrs, 1);
        let region = RawMemoryRegion::from_raw(&pd, raw);
        assert_eq!((region.lkey(), region.len()), (lkey, 16));
        region.deregister().unwrap();
    }
    assert_eq!((fake.live().mrs, fake.calls("ibv_dereg_mr")), (0, 1));
}

#[test]
fn what_does_not_belong_together_is_refused_and_stays_the_callers() {
    let fake = Fake::new(Config::default());
    let (pd, other) = (fake.pd(), fake.pd());
    let context = pd.context();
    let channel = context.create_channel().unwrap();
    let raw = create_cq(context, true, WcFields::STANDARD, Some(&channel));
    // SAFETY: the contract is kept but for what the builders say, which is refused.
    unsafe {
        let wrong = |error: Error, expected: &str| {
            let Error::WrongParent { object } = error else { panic!("{error:?}") };
            assert_eq!(object, expected);
        };
        wrong(other.context().completion_queue(0).channel(&channel).from_raw(raw).unwrap_err(), "context");
        wrong(context.completion_queue(0).from_raw(raw).unwrap_err(), "completion channel");
        let cq = context.completion_queue(0).channel(&channel).from_raw(raw).unwrap();
        let second = context.completion_queue(16).build().unwrap();
        let raw = create_qp(&pd, &cq, QueuePairType::UC, None);
        let uc = QueuePairType::UC;
        wrong(pd.queue_pair(&cq, &cq).from_raw(raw).unwrap_err(), "type");
        wrong(other.queue_pair(&cq, &cq).qp_type(uc).from_raw(raw).unwrap_err(), "context");
        let sibling = context.alloc_pd().unwrap();
        wrong(sibling.queue_pair(&cq, &cq).qp_type(uc).from_raw(raw).unwrap_err(), "protection domain");
        let builder = pd.queue_pair(&second, &cq).qp_type(uc);
        wrong(builder.from_raw(raw).unwrap_err(), "completion queue of sends");
        wrong(pd.queue_pair(&cq, &second).qp_type(uc).from_raw(raw).unwrap_err(), "completion queue of receives");
        let srq = pd.shared_receive_queue(4).build().unwrap();
        let builder = pd.queue_pair(&cq, &cq).qp_type(uc).shared_receive_queue(&srq);
        wrong(builder.from_raw(raw).unwrap_err(), "shared receive queue");
        let builder = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::DRIVER);
        assert!(matches!(builder.from_raw(raw), Err(Error::WrongType { .. })));
        fake.fail("ibv_query_qp", libc::EIO);
        let error = pd.queue_pair(&cq, &cq).qp_type(uc).from_raw(raw).unwrap_err();
        assert!(matches!(error, Error::Verb { verb: "ibv_query_qp", .. }), "{error}");
        assert_eq!((table().ibv_destroy_qp)(raw.as_ptr()), 0, "it was the caller's all the time");
    }
}

/// Functions that an object was not created with are NULL.
#[test]
fn nothing_is_called_that_an_object_was_not_created_with() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let context = pd.context();
    // SAFETY: each is said to have what it was created with, or less.
    unsafe {
        let raw = create_cq(context, true, WcFields::BYTE_LEN, None);
        let mut cq = context.completion_queue(0).fields(WcFields::BYTE_LEN).from_raw(raw).unwrap();
        assert_eq!(cq.fields(), WcFields::BYTE_LEN);

        // Made by ibv_create_qp: it has no extended part, and what needs one is refused.
        let raw = create_qp(&pd, &cq, QueuePairType::RC, None);
        let error = pd.queue_pair(&cq, &cq).operations(SendOps::ATOMIC_WRITE).from_raw(raw).unwrap_err();
        assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::ATOMIC_WRITE }), "{error}");
        let classic = pd.queue_pair(&cq, &cq).from_raw(raw).unwrap();
        assert!(!classic.is_extended() && classic.as_raw_ex().is_none());

        // Made with sends alone: the rest is neither enabled nor called.
        let raw = create_qp(&pd, &cq, QueuePairType::RC, Some(SendOps::SEND));
        let error = pd.queue_pair(&cq, &cq).operations(SendOps::SEND | SendOps::RDMA_READ).from_raw(raw).unwrap_err();
        assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::RDMA_READ }), "{error}");
        let mut qp = pd.queue_pair(&cq, &cq).from_raw(raw).unwrap();
        assert_eq!(qp.operations(), SendOps::SEND);
        let number = qp.number();
        to_rts(&mut qp, number);
        let sge = Sge::EMPTY;
        let mut batch = qp.send_batch().unwrap();
        let remote = rdma_safe::Remote { address: 0, rkey: 0 };
        let refused = batch.read(WorkRequest::new(1), remote, sge);
        assert_eq!(refused, Err(PostError::NotEnabled { op: SendOps::RDMA_READ }));
        drop(batch);
        qp.receive(3, sge).unwrap();
        let mut batch = qp.send_batch().unwrap();
        batch.send(WorkRequest::new(4).signaled(), sge).unwrap();
        batch.post().unwrap();
        let mut poll = cq.poll();
        while let Some(wc) = poll.next().unwrap() {
            assert_eq!((wc.status(), wc.imm(), wc.qp_num(), wc.src_qp()), (WcStatus::SUCCESS, None, None, None));
            assert!(wc.byte_len().is_some());
        }
    }
}

/// Under Miri a reference to the whole queue pair races with the thread that locks its mutex.
#[test]
fn a_queue_pair_is_adopted_while_its_mutex_changes_hands() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let raw = create_qp(&pd, &cq, QueuePairType::RC, Some(SendOps::RC));
    // SAFETY: the queue pair is valid.
    let mutex = Shared(unsafe { &raw mut (*raw.as_ptr()).mutex });
    let qp = std::thread::scope(|scope| {
        scope.spawn(move || {
            let Shared(mutex) = { mutex };
            // SAFETY: a mutex of zeros is an open one, which this thread is the only one to lock.
            unsafe {
                assert_eq!((libc::pthread_mutex_lock(mutex.cast()), libc::pthread_mutex_unlock(mutex.cast())), (0, 0));
            }
        });
        // SAFETY: just made, as the builder says.
        unsafe { pd.queue_pair(&cq, &cq).from_raw(raw) }.unwrap()
    });
    assert_eq!(qp.as_raw(), raw.as_ptr());
}

/// A pointer that can be sent to another thread.
struct Shared<T>(*mut T);

// SAFETY: the test orders the accesses of both threads.
unsafe impl<T> Send for Shared<T> {}

#[test]
fn a_queue_pair_is_adopted_in_the_state_that_it_is_in() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (mut qp, cq) = adopt(&pd, EXTENDED, None);
    for (attributes, state) in
        [(init(), QueuePairState::INIT), (rtr(qp.number()), QueuePairState::RTR), (rts(), QueuePairState::RTS)]
    {
        qp.modify(&attributes).unwrap();
        let raw = qp.into_raw().unwrap();
        // SAFETY: it was given up just now, and is what it was.
        qp = unsafe { pd.queue_pair(&cq, &cq).from_raw(raw) }.unwrap();
        assert_eq!(qp.state(), state);
        assert_eq!(qp.send_batch().is_ok(), state == QueuePairState::RTS);
        assert!(qp.recv_batch().is_ok());
    }
    // The port is known, too: an address of another one is refused by it.
    assert_eq!(qp.query().unwrap().port(), Some(1));
}
