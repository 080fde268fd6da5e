//! Shared receive queues of two queue pairs: limit, size, refused calls, and destruction.

use std::time::Duration;

use rdma_safe::async_event::{AsyncEventType, AsyncSource};
use rdma_safe::device::DeviceCapabilities;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{
    CompletionQueue, Device, Error, PostError, ProtectionDomain, QueuePair, QueuePairState, Sge, SharedReceiveQueue,
    WcOpcode,
};

use crate::support::child::{expect_kernel_objects, in_own_process};
use crate::support::lab::{Data, Memory, Mode, Op, Side, Wr, cq_builder, next, next_ok};
use crate::support::link::Link;
use crate::support::{DEADLINE, Rdma, device, error_of, pattern, rounds, within_deadline};

/// Length of a message in bytes.
const SIZE: usize = 64;

/// Two queue pairs that use one shared receive queue, each with its sender.
struct Shared {
    // Dropped before the memory: the queue pairs and the queue.
    receivers: [(QueuePair, CompletionQueue); 2],
    senders: [Side; 2],
    srq: SharedReceiveQueue,
    memory: Memory,
    pd: ProtectionDomain,
}

impl Shared {
    fn new(rdma: &Rdma, mode: Mode, depth: u32) -> Self {
        let pd = rdma.pd();
        let srq = pd.shared_receive_queue(depth).sges(2).build().expect("a shared receive queue");
        let receiver = || {
            let cq = cq_builder(rdma, 64, mode).build().expect("a completion queue");
            let builder = pd.queue_pair(&cq, &cq).shared_receive_queue(&srq).classic(mode.classic_qp);
            (builder.build().expect("a queue pair"), cq)
        };
        let sender = || {
            let cq = cq_builder(rdma, 64, mode).build().expect("a completion queue");
            let qp = pd.queue_pair(&cq, &cq).classic(mode.classic_qp).build().expect("a queue pair");
            Side { qp, cq, memory: Memory::new(&pd, SIZE) }
        };
        let (mut receivers, mut senders) = ([receiver(), receiver()], [sender(), sender()]);
        for ((receiver, _), sender) in receivers.iter_mut().zip(&mut senders) {
            Link::default().connect(rdma, receiver, sender.qp.number()).expect("a receiver connects");
            Link::default().connect(rdma, &mut sender.qp, receiver.number()).expect("a sender connects");
        }
        let memory = Memory::new(&pd, 64 * SIZE);
        Shared { receivers, senders, srq, memory, pd }
    }

    fn place(id: u64) -> std::ops::Range<usize> {
        id as usize * SIZE..(id as usize + 1) * SIZE
    }

    fn receive(&mut self, id: u64) -> Result<(), PostError> {
        let sge = self.memory.sge(Self::place(id));
        // SAFETY: memory of a `Memory` tolerates any access and is freed after the queue.
        unsafe { self.srq.receive(id, sge) }
    }

    /// Sends a message to a receiver. The message completes the receive `id`.
    #[track_caller]
    fn send(&mut self, receiver: usize, id: u64) {
        let sender = &mut self.senders[receiver];
        let bytes = pattern(id + 7, SIZE);
        sender.memory.put(0, &bytes);
        let sge = sender.memory.sge(0..SIZE);
        sender.post(&[Wr::new(1000 + id, Op::Send, Data::One(sge))]).unwrap();
        sender.next_ok(1000 + id);
        let (qp, cq) = &mut self.receivers[receiver];
        let wc = next_ok(cq, id);
        assert_eq!((wc.opcode, wc.byte_len, wc.qp_num), (WcOpcode::RECV, Some(SIZE as u32), Some(qp.number())));
        assert!(self.memory.get(Self::place(id)) == bytes, "message {id} arrived otherwise");
    }
}

#[test]
fn two_queue_pairs_take_from_one_queue_in_order() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut shared = Shared::new(&rdma, mode, 16);
        let (first, second, third) =
            (shared.memory.sge(0..SIZE), shared.memory.sge(SIZE..SIZE + 10), shared.memory.sge(SIZE + 10..2 * SIZE));
        assert_eq!(shared.senders[0].qp.shared_receive_queue(), None);
        let mut batch = shared.srq.recv_batch();
        assert!(batch.is_empty());
        // SAFETY: the same as in `Shared::receive`.
        unsafe {
            batch.receive(0, &[first]).unwrap();
            batch.receive(1, &[second, third]).unwrap();
            let refused = batch.receive(2, &[first; 33]).unwrap_err();
            assert!(matches!(refused, PostError::TooManySges { count: 33, .. }), "{refused}");
        }
        assert_eq!(batch.len(), 2);
        batch.post().unwrap();
        (2..10).for_each(|id| shared.receive(id).unwrap());
        for (receiver, id) in [1, 0, 0, 1, 1, 1, 0, 1, 0, 0].into_iter().zip(0..) {
            shared.send(receiver, id);
        }
    }
}

#[test]
fn a_message_waits_until_a_shared_receive_is_posted() {
    let Some(rdma) = device() else { return };
    let mut shared = Shared::new(&rdma, Mode::EXTENDED, 4);
    let sge = shared.senders[0].memory.sge(0..SIZE);
    shared.senders[0].post(&[Wr::new(1, Op::Send, Data::One(sge))]).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    assert!(crate::support::lab::try_next(&mut shared.receivers[0].1).is_none());
    shared.receive(5).unwrap();
    next_ok(&mut shared.receivers[0].1, 5);
    shared.senders[0].next_ok(1);
}

#[test]
fn the_limit_of_a_queue_is_reported_once_and_disarmed() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let events = rdma.async_events().unwrap();
        while events.try_event().unwrap().is_some() {}
        let mut shared = Shared::new(&rdma, mode, 10);
        (0..10).for_each(|id| shared.receive(id).unwrap());
        shared.srq.set_limit(7).unwrap();
        assert_eq!(shared.srq.query().unwrap().limit, 7);
        (0..4).for_each(|id| shared.send(id as usize % 2, id));
        let event = within_deadline("the limit", || {
            events.try_event().unwrap().filter(|event| event.event_type == AsyncEventType::SRQ_LIMIT_REACHED)
        });
        assert_eq!(event.source, AsyncSource::Srq(shared.srq.id()), "{mode}");
        assert_eq!(shared.srq.query().unwrap().limit, 0, "{mode}");
        (4..10).for_each(|id| shared.send(id as usize % 2, id));
        // The port may report other events.
        let mut later = std::iter::from_fn(|| events.wait(Duration::from_millis(30)).unwrap());
        assert!(later.all(|event| event.event_type != AsyncEventType::SRQ_LIMIT_REACHED), "{mode}");
        // A limit of 0 disarms the event.
        (0..3).for_each(|id| shared.receive(id).unwrap());
        shared.srq.set_limit(2).unwrap();
        shared.srq.set_limit(0).unwrap();
        (0..3).for_each(|id| shared.send(0, id));
        assert_eq!(events.try_event().unwrap(), None, "{mode}");
        let error = shared.srq.set_limit(shared.srq.max_wr() + 1).unwrap_err();
        assert!(matches!(error, Error::LimitSharedReceiveQueue { .. }), "{error}");
    }
}

#[test]
fn a_shared_queue_that_grows_keeps_what_is_posted() {
    let Some(rdma) = device() else { return };
    if !rdma.attributes().capabilities().contains(DeviceCapabilities::SRQ_RESIZE) {
        let mut srq = rdma.pd().shared_receive_queue(4).build().unwrap();
        assert!(matches!(srq.resize(8), Err(Error::Unsupported { .. })));
        return;
    }
    let max = rdma.attributes().max_srq_wr();
    for mode in Mode::each() {
        let (small, large) = (rounds(4, 2), rounds(40, 5));
        let mut shared = Shared::new(&rdma, mode, small as u32);
        (0..small).for_each(|id| shared.receive(id).unwrap());
        shared.srq.resize(large as u32).unwrap();
        let granted = shared.srq.max_wr();
        assert!(granted >= large as u32, "{mode}: {granted}");
        assert_eq!(shared.srq.query().unwrap().max_wr, granted);
        (small..large).for_each(|id| shared.receive(id).unwrap());
        (0..large).for_each(|id| shared.send(id as usize % 2, id));
        // A refused size changes neither the queue nor its receives.
        (0..small).for_each(|id| shared.receive(id).unwrap());
        for refused in [small as u32 - 1, max + 1] {
            let error = shared.srq.resize(refused).unwrap_err();
            let Error::ResizeSharedReceiveQueue { work_requests, max_work_requests, .. } = error else {
                panic!("{mode}: {error}")
            };
            assert_eq!((work_requests, max_work_requests), (refused, max), "{mode}");
            assert_eq!(shared.srq.max_wr(), granted, "{mode}");
        }
        (0..small).for_each(|id| shared.send(id as usize % 2, id));
    }
}

#[test]
fn a_shared_queue_is_full_where_no_receive_fits() {
    let Some(rdma) = device() else { return };
    let mut shared = Shared::new(&rdma, Mode::EXTENDED, 4);
    let mut posted = 0;
    // Devices may have room for more receives than they report.
    let error = loop {
        match shared.receive(posted % 4) {
            Ok(()) => posted += 1,
            Err(error) => break error,
        }
        assert!(posted < 10_000, "the queue is never full");
    };
    assert!(posted >= 4 && matches!(error, PostError::QueueFull { posted: 0 }), "{posted}: {error}");
}

#[test]
fn a_queue_pair_with_a_shared_queue_refuses_receives_of_its_own() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut shared = Shared::new(&rdma, mode, 4);
        let sge = shared.memory.sge(0..SIZE);
        let qp = &mut shared.receivers[0].0;
        assert_eq!(qp.shared_receive_queue(), Some(shared.srq.id()));
        if rdma.is_soft() {
            assert_eq!((qp.capacity().max_recv_wr, qp.capacity().max_recv_sge), (0, 0));
        }
        for state in [QueuePairState::RTS, QueuePairState::RESET] {
            if state == QueuePairState::RESET {
                qp.modify(&QueuePairAttributes::new().set_state(state)).unwrap();
            }
            // SAFETY: the same as in `Shared::receive`.
            let error = unsafe { qp.receive(1, sge) }.unwrap_err();
            assert_eq!(error, PostError::SharedReceives);
            assert!(error.to_string().contains("shared receive queue"), "{error}");
            assert_eq!(qp.recv_batch().unwrap_err(), PostError::SharedReceives);
            assert_eq!(qp.split().1.batch().unwrap_err(), PostError::SharedReceives);
        }
    }
}

#[test]
fn a_shared_queue_beyond_the_limits_of_the_device_is_refused_with_them() {
    let Some(rdma) = device() else { return };
    let (pd, device) = (rdma.pd(), rdma.attributes());
    let (max_wr, max_sge) = (device.max_srq_wr(), device.max_srq_sge());
    for (depth, sges) in [(0, 1), (max_wr + 1, 1), (16, max_sge + 1)] {
        let error = error_of(pd.shared_receive_queue(depth).sges(sges).build());
        let Error::CreateSharedReceiveQueue { work_requests, max_work_requests, max_elements, .. } = error else {
            panic!("{depth} with {sges}: {error:?}")
        };
        assert_eq!((work_requests, max_work_requests, max_elements), (depth, max_wr, max_sge));
    }
    let largest = pd.shared_receive_queue(16).sges(max_sge).build().unwrap();
    assert!(largest.max_wr() >= 16 && largest.max_sge() >= max_sge);
}

#[test]
fn a_shared_queue_its_parents_and_its_users_are_dropped_in_every_order() {
    in_own_process("shared_receives::a_shared_queue_its_parents_and_its_users_are_dropped_in_every_order", || {
        let Some(rdma) = device() else { return };
        let mut orders = 0;
        let mut check = |order: &[usize]| {
            orders += 1;
            // Miri tests only 6 of the 720 orders.
            if orders % rounds(1, 121) != 0 {
                return;
            }
            let context = Device::by_name(rdma.device_name()).unwrap().open().unwrap();
            let pd = context.alloc_pd().unwrap();
            let cq = context.completion_queue(8).build().unwrap();
            let mut srq = pd.shared_receive_queue(4).build().unwrap();
            // SAFETY: the receive has no memory.
            unsafe { srq.receive(1, Sge::EMPTY) }.unwrap();
            let qp = || pd.queue_pair(&cq, &cq).shared_receive_queue(&srq).classic(orders % 2 == 0).build().unwrap();
            let (first, second) = (qp(), qp());
            let objects: [Box<dyn std::any::Any>; 6] =
                [Box::new(context), Box::new(pd), Box::new(cq), Box::new(srq), Box::new(first), Box::new(second)];
            let mut objects = objects.map(Some);
            order.iter().for_each(|index| objects[*index] = None);
            if rdma.is_soft() || orders % 100 == 0 {
                for kind in ["qp", "cq", "mr", "pd"] {
                    expect_kernel_objects(kind, 0);
                }
            }
        };
        in_every_order(&mut [0, 1, 2, 3, 4, 5], 0, &mut check);
        assert_eq!(orders, 720);
    });
}

/// Calls `visit` with every order of the items from `from` on.
fn in_every_order(items: &mut [usize], from: usize, visit: &mut impl FnMut(&[usize])) {
    if from == items.len() {
        return visit(items);
    }
    for index in from..items.len() {
        items.swap(from, index);
        in_every_order(items, from + 1, visit);
        items.swap(from, index);
    }
}

#[test]
fn a_shared_queue_outlives_its_handle_while_queue_pairs_take_from_it() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut shared = Shared::new(&rdma, mode, 8);
        shared.receive(0).unwrap();
        let Shared { receivers: [(first, mut cq), second], mut senders, srq, memory, pd } = shared;
        drop(srq);
        senders[0].memory.put(0, b"it lives");
        let sge = senders[0].memory.sge(0..8);
        senders[0].post(&[Wr::new(1, Op::Send, Data::One(sge))]).unwrap();
        senders[0].next_ok(1);
        next_ok(&mut cq, 0);
        assert_eq!(memory.get(0..8), b"it lives");
        drop((first, second, cq, senders, memory, pd));
    }
}

#[test]
fn a_shared_queue_is_destroyed_at_once_or_with_its_last_queue_pair() {
    in_own_process("shared_receives::a_shared_queue_is_destroyed_at_once_or_with_its_last_queue_pair", || {
        let Some(rdma) = device() else { return };
        rdma.pd().shared_receive_queue(8).build().unwrap().destroy().unwrap();
        let expect_queues = |count| {
            if rdma.is_soft() {
                expect_kernel_objects("srq", count);
            }
        };
        expect_queues(0);
        let Shared { receivers, senders, srq, memory, pd } = Shared::new(&rdma, Mode::EXTENDED, 8);
        let error = srq.destroy().unwrap_err();
        assert!(matches!(error, Error::InUse { .. }), "{error}");
        let [first, second] = receivers;
        drop(first);
        expect_queues(1);
        drop(second);
        expect_queues(0);
        drop((senders, memory, pd));
    });
}

#[test]
fn a_shared_queue_can_be_created_with_a_limit() {
    in_own_process("shared_receives::a_shared_queue_can_be_created_with_a_limit", || {
        let Some(rdma) = device() else { return };
        let pd = rdma.pd();
        let srq = pd.shared_receive_queue(5).sges(3).limit(4).build().unwrap();
        let attributes = srq.query().unwrap();
        assert_eq!(attributes.max_sge, srq.max_sge(), "what was granted");
        // SoftRoCE of kernel 6.1 rounds the size up after it has reported it.
        let rounds_up = rdma.is_rxe() && attributes.max_wr > srq.max_wr();
        assert!(rounds_up || attributes.max_wr == srq.max_wr(), "{} of {}", srq.max_wr(), attributes.max_wr);
        assert!(attributes.max_wr >= 5 && attributes.max_sge >= 3 && attributes.limit == 4);
        let limit = srq.max_wr() + 1;
        drop(srq);
        let error = error_of(pd.shared_receive_queue(5).limit(limit).build());
        assert!(matches!(error, Error::LimitSharedReceiveQueue { limit: found, .. } if found == limit), "{error}");
        if rdma.is_soft() {
            expect_kernel_objects("srq", 0);
        }
    });
}

#[test]
fn a_batch_of_shared_receives_has_a_length() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    for (depth, max_batch) in [(8, 3), (2, 64), (1, 0)] {
        let mut srq = pd.shared_receive_queue(depth).max_batch(max_batch).build().unwrap();
        let fits = max_batch.clamp(1, srq.max_wr());
        let mut batch = srq.recv_batch();
        // SAFETY: nothing is posted.
        (0..fits).for_each(|id| unsafe { batch.receive(id.into(), &[]) }.unwrap());
        // SAFETY: as above.
        assert_eq!(unsafe { batch.receive(0, &[]) }, Err(PostError::BatchFull { max: fits }));
    }
}

#[test]
fn a_shared_queue_of_another_context_is_refused() {
    let Some(rdma) = device() else { return };
    let other = Device::by_name(rdma.device_name()).unwrap().open().unwrap();
    let srq = other.alloc_pd().unwrap().shared_receive_queue(4).build().unwrap();
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
    for classic in [false, true] {
        let error = error_of(pd.queue_pair(&cq, &cq).classic(classic).shared_receive_queue(&srq).build());
        assert!(matches!(error, Error::ForeignContext { object: "shared receive queue" }), "{error}");
    }
}

#[test]
fn threads_post_to_one_shared_queue_and_no_receive_is_lost() {
    const EACH: u64 = rounds(100, 3);
    let Some(rdma) = device() else { return };
    let mut shared = Shared::new(&rdma, Mode::EXTENDED, 4 * EACH as u32);
    let srq = std::sync::Mutex::new(&mut shared.srq);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let srq = &srq;
            scope.spawn(move || {
                for index in 0..EACH {
                    // SAFETY: the receive has no memory.
                    unsafe { srq.lock().unwrap().receive(thread * EACH + index, Sge::EMPTY) }.unwrap();
                }
            });
        }
    });
    let mut ids = Vec::new();
    for id in 0..4 * EACH {
        shared.senders[0].post(&[Wr::new(id, Op::Send, Data::List(&[]))]).unwrap();
        shared.senders[0].next_ok(id);
        ids.push(next(&mut shared.receivers[0].1).wr_id);
    }
    ids.sort_unstable();
    assert!(ids.iter().copied().eq(0..4 * EACH), "{ids:?}");
}

#[test]
fn messages_to_a_failed_queue_pair_leave_the_shared_receives_to_the_other() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    let mut shared = Shared::new(&rdma, Mode::EXTENDED, 8);
    (0..4).for_each(|id| shared.receive(id).unwrap());
    shared.send(0, 0);
    let error = QueuePairAttributes::new().set_state(QueuePairState::ERR);
    shared.receivers[0].0.modify(&error).unwrap();
    let failed = &shared.receivers[0].0;
    let source = AsyncSource::Qp { id: failed.id(), number: failed.number() };
    if !rdma.is_rxe() {
        // The failed queue pair uses no more shared receives.
        let event = within_deadline("the event", || {
            events.try_event().unwrap().filter(|event| event.event_type == AsyncEventType::QP_LAST_WQE_REACHED)
        });
        assert_eq!(event.source, source);
    }
    (1..4).for_each(|id| shared.send(1, id));
    let sge = shared.senders[0].memory.sge(0..SIZE);
    shared.senders[0].qp.modify(&error).unwrap();
    shared.senders[0].post(&[Wr::new(9, Op::Send, Data::One(sge))]).unwrap();
    let wc = next(&mut shared.senders[0].cq);
    assert_eq!((wc.wr_id, wc.status), (9, rdma_safe::WcStatus::WR_FLUSH_ERR), "within {DEADLINE:?}");
}
