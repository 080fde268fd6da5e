//! Shared receive queues: two queue pairs that take from one, its limit and size, refusals, and its end.

use std::time::Duration;

use rdma_safe::{
    AsyncEventType, AsyncSource, CompletionQueue, DeviceCapabilities, Error, PostError, ProtectionDomain, QueuePair,
    SharedReceiveQueue, WcOpcode,
};

use crate::support::child::{expect_kernel_objects, in_own_process};
use crate::support::lab::{Data, Memory, Mode, Op, Side, Wr, cq_builder, next, next_ok};
use crate::support::link::Link;
use crate::support::{DEADLINE, Rdma, device, error_of, pattern, within_deadline};

/// Bytes of a message.
const SIZE: usize = 64;

/// Two queue pairs that take from one queue, each with its sender.
struct Shared {
    // The queue pairs and the queue go before the memory.
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
        // SAFETY: memory of a `Memory`, which tolerates any access, and which is freed after the queue.
        unsafe { self.srq.receive(id, sge) }
    }

    /// Sends a message to a receiver, which arrives as `id`.
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
    for mode in Mode::ALL {
        let mut shared = Shared::new(&rdma, mode, 16);
        let (first, second, third) =
            (shared.memory.sge(0..SIZE), shared.memory.sge(SIZE..SIZE + 10), shared.memory.sge(SIZE + 10..2 * SIZE));
        let mut batch = shared.srq.recv_batch();
        // SAFETY: as in `Shared::receive`.
        unsafe {
            batch.receive(0, &[first]).unwrap();
            batch.receive(1, &[second, third]).unwrap();
            let refused = batch.receive(2, &[first; 33]).unwrap_err();
            assert!(matches!(refused, PostError::TooManySges { count: 33, .. }), "{refused}");
        }
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
    let mut shared = Shared::new(&rdma, Mode::ALL[0], 4);
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
    for mode in Mode::ALL {
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
        // Of ports there may be others.
        let mut later = std::iter::from_fn(|| events.wait(Duration::from_millis(30)).unwrap());
        assert!(later.all(|event| event.event_type != AsyncEventType::SRQ_LIMIT_REACHED), "{mode}");
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
    for mode in Mode::ALL {
        let mut shared = Shared::new(&rdma, mode, 4);
        (0..4).for_each(|id| shared.receive(id).unwrap());
        shared.srq.resize(40).unwrap();
        assert!(shared.srq.max_wr() >= 40, "{mode}: {}", shared.srq.max_wr());
        assert_eq!(shared.srq.query().unwrap().max_wr, shared.srq.max_wr());
        (4..40).for_each(|id| shared.receive(id).unwrap());
        (0..40).for_each(|id| shared.send(id as usize % 2, id));
        let max = rdma.attributes().max_srq_wr();
        let error = shared.srq.resize(max + 1).unwrap_err();
        assert!(matches!(error, Error::ResizeSharedReceiveQueue { max_work_requests, .. } if max_work_requests == max));
        // It is as before.
        shared.receive(0).unwrap();
        shared.send(1, 0);
    }
}

#[test]
fn a_shared_queue_is_full_where_no_receive_fits() {
    let Some(rdma) = device() else { return };
    let mut shared = Shared::new(&rdma, Mode::ALL[0], 4);
    let mut posted = 0;
    // Devices have room for more than they say.
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
    for mode in Mode::ALL {
        let mut shared = Shared::new(&rdma, mode, 4);
        let sge = shared.memory.sge(0..SIZE);
        let qp = &mut shared.receivers[0].0;
        assert_eq!(qp.shared_receive_queue(), Some(shared.srq.id()));
        // SAFETY: as in `Shared::receive`.
        assert_eq!(unsafe { qp.receive(1, sge) }, Err(PostError::SharedReceives));
        assert_eq!(qp.recv_batch().unwrap_err(), PostError::SharedReceives);
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
fn a_shared_queue_its_queue_pairs_and_its_domain_go_in_any_order() {
    in_own_process("shared_receives::a_shared_queue_its_queue_pairs_and_its_domain_go_in_any_order", || {
        let Some(rdma) = device() else { return };
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2], [3, 0, 1, 2], [1, 2, 3, 0]] {
            let mut shared = Shared::new(&rdma, Mode::ALL[order[0]], 8);
            (0..8).for_each(|id| shared.receive(id).unwrap());
            shared.send(0, 0);
            let Shared { receivers: [first, second], senders, srq, memory, pd } = shared;
            let mut objects: [Option<Box<dyn std::any::Any>>; 4] =
                [Some(Box::new(srq)), Some(Box::new(first)), Some(Box::new(second)), Some(Box::new(pd))];
            order.iter().for_each(|index| objects[*index] = None);
            drop((senders, memory));
            for kind in ["qp", "cq", "mr", "pd"] {
                expect_kernel_objects(kind, 0);
            }
        }
    });
}

#[test]
fn messages_to_a_failed_queue_pair_leave_the_shared_receives_to_the_other() {
    let Some(rdma) = device() else { return };
    let mut shared = Shared::new(&rdma, Mode::ALL[0], 8);
    (0..4).for_each(|id| shared.receive(id).unwrap());
    shared.send(0, 0);
    let error = rdma_safe::QueuePairAttributes::new().set_state(rdma_safe::QueuePairState::ERR);
    shared.receivers[0].0.modify(&error).unwrap();
    (1..4).for_each(|id| shared.send(1, id));
    let sge = shared.senders[0].memory.sge(0..SIZE);
    shared.senders[0].qp.modify(&error).unwrap();
    shared.senders[0].post(&[Wr::new(9, Op::Send, Data::One(sge))]).unwrap();
    let wc = next(&mut shared.senders[0].cq);
    assert_eq!((wc.wr_id, wc.status), (9, rdma_safe::WcStatus::WR_FLUSH_ERR), "within {DEADLINE:?}");
}
