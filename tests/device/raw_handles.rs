//! Objects that other code creates through the table of verbs: they are adopted, used, and given up.

use std::ptr::{NonNull, null_mut};

use rdma_safe::sys::*;
use rdma_safe::{
    Access, AddressHandle, CompletionChannel, CompletionQueue, Context, Error, PostError, ProtectionDomain, QueuePair,
    QueuePairState, QueuePairType, RawMemoryRegion, SendOps, Sge, WcFields, WcStatus, WorkRequest,
};

use crate::support::child::{expect_kernel_objects, in_own_process};
use crate::support::lab::{Memory, Mode, next_ok};
use crate::support::link::{Link, address};
use crate::support::{DEADLINE, Rdma, device, error_of, within_deadline};

#[track_caller]
fn created<T>(raw: *mut T) -> NonNull<T> {
    NonNull::new(raw).unwrap_or_else(|| panic!("{}", std::io::Error::last_os_error()))
}

/// Opens the device of the tests as a C program does.
fn open_raw(rdma: &Rdma) -> NonNull<ibv_context> {
    // SAFETY: the device belongs to an open context.
    unsafe { created((verbs().unwrap().ibv_open_device)((*rdma.as_raw()).device)) }
}

fn open(rdma: &Rdma) -> Context {
    // SAFETY: nothing else uses the context.
    unsafe { Context::from_raw(open_raw(rdma)) }.unwrap()
}

/// Creates a completion queue as a C program does, classic or with `fields`.
fn create_raw_cq(context: &Context, fields: Option<WcFields>, channel: &CompletionChannel) -> NonNull<ibv_cq> {
    let channel = channel.as_raw();
    // SAFETY: the context and the channel are valid.
    unsafe {
        let Some(fields) = fields else {
            return created((verbs().unwrap().ibv_create_cq)(context.as_raw(), 16, null_mut(), channel, 0));
        };
        let mut attr = ibv_cq_init_attr_ex { cqe: 16, channel, wc_flags: fields.bits(), ..std::mem::zeroed() };
        created(ibv_create_cq_ex(context.as_raw(), &mut attr)).cast()
    }
}

fn create_cq(context: &Context, classic: bool, channel: &CompletionChannel) -> CompletionQueue {
    let raw = create_raw_cq(context, (!classic).then_some(WcFields::STANDARD), channel);
    // SAFETY: the queue was created for this channel, with these fields. Nothing else uses it.
    unsafe { context.completion_queue(0).classic(classic).channel(channel).from_raw(raw) }.unwrap()
}

/// Creates a queue pair as a C program does, extended if `ops` are given.
fn create_qp(
    pd: &ProtectionDomain,
    cq: &CompletionQueue,
    qp_type: QueuePairType,
    ops: Option<SendOps>,
) -> NonNull<ibv_qp> {
    let mut attr = ibv_qp_init_attr_ex::zeroed();
    (attr.send_cq, attr.recv_cq, attr.pd) = (cq.as_raw(), cq.as_raw(), pd.as_raw());
    attr.qp_type = ibv_qp_type(qp_type.0);
    attr.cap = ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 16 };
    attr.comp_mask = IBV_QP_INIT_ATTR_PD.0;
    if let Some(ops) = ops {
        attr.send_ops_flags = ops.bits();
        attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
    }
    // SAFETY: the domain and the queue are valid.
    created(unsafe { ibv_create_qp_ex(pd.context().as_raw(), &mut attr) })
}

/// Sends eight bytes from one half of the memory to the other, over a queue pair that is connected to itself.
fn send(qp: &mut QueuePair, cq: &mut CompletionQueue, mr: &RawMemoryRegion, id: u64) {
    let sge = |at: u64, len| Sge { address: mr.address() + at, len, lkey: mr.lkey() };
    // SAFETY: the memory outlives the queue pair, and is accessed only by volatile reads and writes.
    unsafe {
        let memory = std::ptr::with_exposed_provenance_mut::<u64>(mr.address() as usize);
        memory.write_volatile(id);
        qp.receive(id, sge(2048, 64)).unwrap();
        let mut batch = qp.send_batch().unwrap();
        batch.send(WorkRequest::new(id).signaled(), sge(0, 8)).unwrap();
        batch.post().unwrap();
        for _ in 0..2 {
            assert_eq!(next_ok(cq, id).status, WcStatus::SUCCESS);
        }
        assert_eq!(memory.add(2048 / 8).read_volatile(), id);
    }
}

#[test]
fn objects_of_other_code_carry_messages_and_are_destroyed_once() {
    let Some(rdma) = device() else { return };
    in_own_process("raw_handles::objects_of_other_code_carry_messages_and_are_destroyed_once", || {
        let table = verbs().unwrap();
        for mode in Mode::each() {
            let mut page = vec![0_u8; 4096].into_boxed_slice();
            // SAFETY: each object was just created with its parents, and nothing else uses it. The page outlives them.
            unsafe {
                let context = open(&rdma);
                let pd = ProtectionDomain::from_raw(&context, created((table.ibv_alloc_pd)(context.as_raw())));
                let access = Access::LOCAL_WRITE.bits() as i32;
                let mr = created((table.ibv_reg_mr)(pd.as_raw(), page.as_mut_ptr().cast(), 4096, access));
                let mr = RawMemoryRegion::from_raw(&pd, mr);
                let _ = page.as_mut_ptr().expose_provenance();
                assert_eq!(mr.len(), 4096);
                let channel = created((table.ibv_create_comp_channel)(context.as_raw()));
                let channel = CompletionChannel::from_raw(&context, channel).unwrap();
                let mut cq = create_cq(&context, mode.classic_cq, &channel);
                assert_eq!((cq.is_extended(), cq.capacity() >= 16), (!mode.classic_cq, true));
                let raw = create_qp(&pd, &cq, QueuePairType::RC, (!mode.classic_qp).then_some(SendOps::RC));
                let mut qp = pd.queue_pair(&cq, &cq).from_raw(raw).unwrap();
                assert!(!rdma.is_rxe() || qp.is_extended() != mode.classic_qp, "{mode}");
                assert!(qp.capacity().max_send_wr >= 8 && qp.capacity().max_inline_data >= 16, "{:?}", qp.capacity());
                let number = qp.number();
                Link::default().connect(&rdma, &mut qp, number).unwrap();
                cq.arm(false).unwrap();
                send(&mut qp, &mut cq, &mr, 5);
                assert_eq!(channel.wait(DEADLINE).unwrap(), Some(cq.id()), "{mode}: the event names the adopted queue");

                // Given up, and adopted again in its state.
                let raw = qp.into_raw().unwrap();
                let mut qp = pd.queue_pair(&cq, &cq).classic(mode.classic_qp).from_raw(raw).unwrap();
                assert_eq!(qp.state(), QueuePairState::RTS, "{mode}");
                send(&mut qp, &mut cq, &mr, 6);
                expect_kernel_objects("qp", 1);
                drop((context, pd, channel, cq));
                qp.destroy().unwrap();
                mr.deregister().unwrap();
                for kind in ["qp", "cq", "mr", "pd"] {
                    expect_kernel_objects(kind, 0);
                }
            }
        }
    });
}

#[test]
fn a_shared_receive_queue_of_other_code_is_destroyed_once() {
    let Some(rdma) = device() else { return };
    in_own_process("raw_handles::a_shared_receive_queue_of_other_code_is_destroyed_once", || {
        let (pd, other) = (rdma.pd(), rdma.pd());
        let memory = Memory::new(&pd, 8);
        let limits = ibv_srq_attr { max_wr: 5, max_sge: 2, srq_limit: 0 };
        let mut attr = ibv_srq_init_attr { srq_context: null_mut(), attr: limits };
        // SAFETY: the queue belongs to the domain, and nothing else uses it. A `Memory` tolerates any access.
        unsafe {
            let raw = created((verbs().unwrap().ibv_create_srq)(pd.as_raw(), &mut attr));
            let error = error_of(other.shared_receive_queue(1).from_raw(raw));
            assert!(matches!(error, Error::WrongParent { object: "protection domain" }), "{error}");
            let mut srq = pd.shared_receive_queue(1).from_raw(raw).unwrap();
            assert!(srq.max_wr() >= 5 && srq.max_sge() >= 2);
            srq.receive(9, memory.sge(0..8)).unwrap();
            expect_kernel_objects("srq", 1);
            srq.destroy().unwrap();
        }
        expect_kernel_objects("srq", 0);
    });
}

#[test]
fn an_address_handle_is_given_up_and_adopted_again() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let raw = pd.address_handle(&address(&rdma)).unwrap().into_raw();
    // SAFETY: the handle was given up, and nothing else uses it.
    unsafe { AddressHandle::from_raw(&pd, raw) }.destroy().unwrap();
}

#[test]
fn a_region_is_given_up_and_adopted_again() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (region, memory) = Memory::new(&pd, 64).into_parts();
    let (lkey, address) = (region.lkey(), region.address());
    let raw = region.into_raw().unwrap();
    // SAFETY: the region was given up, nothing else uses it, and its memory outlives it.
    let region = unsafe { RawMemoryRegion::from_raw(&pd, raw) };
    assert_eq!((region.lkey(), region.address(), region.len()), (lkey, address, 64));
    region.deregister().unwrap();
    drop(memory);
}

#[test]
fn borrowed_objects_are_not_destroyed() {
    let Some(rdma) = device() else { return };
    in_own_process("raw_handles::borrowed_objects_are_not_destroyed", || {
        let (table, raw) = (verbs().unwrap(), open_raw(&rdma));
        // SAFETY: the domain and the context are destroyed once, after all objects that use them.
        unsafe {
            let raw_pd = created((table.ibv_alloc_pd)(raw.as_ptr()));
            let context = Context::from_raw_borrowed(raw).unwrap();
            assert_eq!(context.device_name(), rdma.device_name());
            let pd = ProtectionDomain::from_raw_borrowed(&context, raw_pd);
            drop(pd.allocate(64).unwrap());
            drop((context, pd));
            expect_kernel_objects("pd", 1);
            assert_eq!((table.ibv_dealloc_pd)(raw_pd.as_ptr()), 0);
            assert_eq!((table.ibv_close_device)(raw.as_ptr()), 0);
        }
        expect_kernel_objects("pd", 0);
    });
}

#[test]
fn a_queue_pair_that_was_given_up_is_destroyed_by_the_caller() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    for mode in [Mode::EXTENDED, Mode::CLASSIC] {
        let cq = rdma.completion_queue(8).classic(mode.classic_cq).build().unwrap();
        let mut qp = pd.queue_pair(&cq, &cq).classic(mode.classic_qp).build().unwrap();
        let number = qp.number();
        Link::default().connect(&rdma, &mut qp, number).unwrap();
        // The provider may hold a lock for an open batch, so `into_raw` aborts it.
        std::mem::forget(qp.send_batch().unwrap());
        let raw = qp.into_raw().unwrap();
        // SAFETY: the queue pair was given up.
        assert_eq!(unsafe { (verbs().unwrap().ibv_destroy_qp)(raw.as_ptr()) }, 0, "{mode}");
        cq.destroy().unwrap();
    }
}

#[test]
fn an_object_with_other_parents_is_refused_and_stays_the_callers() {
    let Some(rdma) = device() else { return };
    let (pd, sibling, foreign) = (rdma.pd(), rdma.pd(), open(&rdma).alloc_pd().unwrap());
    let (channel, uc) = (rdma.create_channel().unwrap(), QueuePairType::UC);
    let refused = |error: Error, expected: &str| {
        let Error::WrongParent { object } = error else { panic!("{error:?}") };
        assert_eq!(object, expected);
    };
    // SAFETY: each object is refused until the builder names its parents. Nothing else uses it.
    unsafe {
        let raw = create_raw_cq(&rdma, Some(WcFields::STANDARD), &channel);
        refused(error_of(foreign.context().completion_queue(0).channel(&channel).from_raw(raw)), "context");
        refused(error_of(rdma.completion_queue(0).from_raw(raw)), "completion channel");
        assert!((*raw.as_ptr()).cq_context.is_null(), "a refused queue is unchanged");
        let cq = rdma.completion_queue(0).channel(&channel).from_raw(raw).unwrap();
        let other = rdma.completion_queue(16).build().unwrap();
        let raw = create_qp(&pd, &cq, uc, None);
        refused(error_of(pd.queue_pair(&cq, &cq).from_raw(raw)), "type");
        refused(error_of(foreign.queue_pair(&cq, &cq).qp_type(uc).from_raw(raw)), "context");
        refused(error_of(sibling.queue_pair(&cq, &cq).qp_type(uc).from_raw(raw)), "protection domain");
        refused(error_of(pd.queue_pair(&other, &cq).qp_type(uc).from_raw(raw)), "completion queue of sends");
        refused(error_of(pd.queue_pair(&cq, &other).qp_type(uc).from_raw(raw)), "completion queue of receives");
        let srq = pd.shared_receive_queue(4).build().unwrap();
        let builder = pd.queue_pair(&cq, &cq).qp_type(uc).shared_receive_queue(&srq);
        refused(error_of(builder.from_raw(raw)), "shared receive queue");
        let error = error_of(pd.queue_pair(&cq, &cq).qp_type(QueuePairType::DRIVER).from_raw(raw));
        assert!(matches!(error, Error::WrongType { .. }), "{error}");
        assert_eq!((verbs().unwrap().ibv_destroy_qp)(raw.as_ptr()), 0);
    }
}

/// Functions that an object was not created with are NULL.
#[test]
fn only_functions_that_an_object_was_created_with_are_called() {
    let Some(rdma) = device() else { return };
    let (pd, channel) = (rdma.pd(), rdma.create_channel().unwrap());
    let memory = Memory::new(&pd, 16);
    // SAFETY: the builders claim no more than the objects were created with, and nothing else uses the objects. A `Memory`
    // tolerates any access, and outlives the queue pairs.
    unsafe {
        let raw = create_raw_cq(&rdma, Some(WcFields::BYTE_LEN), &channel);
        let builder = rdma.completion_queue(0).fields(WcFields::BYTE_LEN).channel(&channel);
        let mut cq = builder.from_raw(raw).unwrap();
        assert_eq!(cq.fields(), WcFields::BYTE_LEN);

        // A queue pair of ibv_create_qp has no extended interface.
        let raw = create_qp(&pd, &cq, QueuePairType::RC, None);
        let error = error_of(pd.queue_pair(&cq, &cq).operations(SendOps::ATOMIC_WRITE).from_raw(raw));
        assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::ATOMIC_WRITE }), "{error}");
        let classic = pd.queue_pair(&cq, &cq).from_raw(raw).unwrap();
        assert!(!classic.is_extended() && classic.as_raw_ex().is_none());

        // A queue pair that was created with sends alone.
        let raw = create_qp(&pd, &cq, QueuePairType::RC, Some(SendOps::SEND));
        let error = error_of(pd.queue_pair(&cq, &cq).operations(SendOps::SEND | SendOps::RDMA_READ).from_raw(raw));
        assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::RDMA_READ }), "{error}");
        let mut qp = pd.queue_pair(&cq, &cq).from_raw(raw).unwrap();
        assert_eq!(qp.operations(), SendOps::SEND);
        let number = qp.number();
        Link::default().connect(&rdma, &mut qp, number).unwrap();
        let mut batch = qp.send_batch().unwrap();
        let refused = batch.read(WorkRequest::new(1), memory.remote(0), memory.sge(8..16));
        assert_eq!(refused, Err(PostError::NotEnabled { op: SendOps::RDMA_READ }));
        drop(batch);
        qp.receive(3, memory.sge(8..16)).unwrap();
        let mut batch = qp.send_batch().unwrap();
        batch.send(WorkRequest::new(4).signaled(), memory.sge(0..8)).unwrap();
        batch.post().unwrap();
        for _ in 0..2 {
            within_deadline("a completion", || {
                let mut poll = cq.poll();
                let wc = poll.next().unwrap()?;
                assert_eq!((wc.status(), wc.imm(), wc.qp_num(), wc.src_qp()), (WcStatus::SUCCESS, None, None, None));
                wc.byte_len()
            });
        }
        qp.destroy().unwrap();
    }
}

/// Miri reports a data race if the adoption creates a reference to the whole queue pair.
#[test]
fn a_queue_pair_is_adopted_while_another_thread_locks_its_mutex() {
    let Some(rdma) = device() else { return };
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
    let raw = create_qp(&pd, &cq, QueuePairType::RC, Some(SendOps::RC));
    // SAFETY: the queue pair is valid.
    let mutex = Shared(unsafe { &raw mut (*raw.as_ptr()).mutex });
    let qp = std::thread::scope(|scope| {
        scope.spawn(move || {
            let Shared(mutex) = { mutex };
            // SAFETY: a valid mutex, which libibverbs initialized, or which is zero, as PTHREAD_MUTEX_INITIALIZER.
            unsafe {
                assert_eq!((libc::pthread_mutex_lock(mutex.cast()), libc::pthread_mutex_unlock(mutex.cast())), (0, 0));
            }
        });
        // SAFETY: the queue pair was just created for this domain and queue.
        unsafe { pd.queue_pair(&cq, &cq).from_raw(raw) }.unwrap()
    });
    assert_eq!(qp.as_raw(), raw.as_ptr());
}

/// A pointer that can be sent to another thread.
struct Shared<T>(*mut T);

// SAFETY: the test locks the mutex in one thread, and uses the rest of the queue pair in the other.
unsafe impl<T> Send for Shared<T> {}

#[test]
fn a_queue_pair_is_adopted_in_its_state() {
    let Some(rdma) = device() else { return };
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
    let mut qp = pd.queue_pair(&cq, &cq).build().unwrap();
    let (link, number) = (Link::default(), qp.number());
    for (attributes, state) in [
        (link.to_init(&rdma), QueuePairState::INIT),
        (link.to_rtr(&rdma, number), QueuePairState::RTR),
        (link.to_rts(), QueuePairState::RTS),
    ] {
        qp.modify(&attributes).unwrap();
        let raw = qp.into_raw().unwrap();
        // SAFETY: the queue pair was given up, and was created for this domain and queue.
        qp = unsafe { pd.queue_pair(&cq, &cq).from_raw(raw) }.unwrap();
        assert_eq!(qp.state(), state);
        assert_eq!(qp.send_batch().is_ok(), state == QueuePairState::RTS);
        assert!(qp.recv_batch().is_ok());
    }
}
