//! The raw API: work that is refused before posting, and full queues.

use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{Errno, Error, PostError, QueuePair, QueuePairState, SendFlags, SendOps, Sge, WcStatus, WorkRequest};

use crate::support::lab::{Data, Lab, Mode, Op, Wr, add, cq_builder, post, try_next};
use crate::support::link::Link;
use crate::support::{device, error_of, pattern};

#[test]
fn too_many_elements_are_refused_and_do_not_change_the_batch() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::builder(&rdma, mode).sges(2).build();
        let capacity = lab.a.qp.capacity();
        let count = capacity.max_send_sge as usize + 1;
        let sges = vec![lab.a.memory.sge(0..1); count.max(capacity.max_recv_sge as usize + 1)];
        lab.b.receive(1, 0..64).unwrap();
        let mut batch = lab.a.qp.send_batch().unwrap();
        add(&mut batch, Wr::new(1, Op::Send, Data::One(sges[0]))).unwrap();
        let refused = PostError::TooManySges { count, max: capacity.max_send_sge };
        assert_eq!(add(&mut batch, Wr::new(2, Op::Send, Data::List(&sges[..count]))), Err(refused), "{mode}");
        assert!(refused.to_string().starts_with(&format!("{count} scatter/gather elements")), "{refused}");
        assert_eq!(batch.len(), 1);
        batch.post().unwrap();
        lab.a.next_ok(1);
        lab.b.next_ok(1);

        let count = capacity.max_recv_sge as usize + 1;
        let mut batch = lab.b.qp.recv_batch().unwrap();
        // SAFETY: the receive is refused, so the device never uses its memory.
        let refused = unsafe { batch.receive(3, &sges[..count]) };
        assert_eq!(refused, Err(PostError::TooManySges { count, max: capacity.max_recv_sge }), "{mode}");
        assert!(batch.is_empty());
        batch.post().unwrap();
        assert_eq!((try_next(&mut lab.a.cq), try_next(&mut lab.b.cq)), (None, None));
    }
}

#[test]
fn too_much_inline_data_is_refused() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        for asked in [0, 64] {
            let mut lab = Lab::builder(&rdma, mode).inline(asked).build();
            let max = lab.a.qp.capacity().max_inline_data;
            let bytes = pattern(1, max as usize + 1);
            let error = PostError::InlineTooLong { len: bytes.len(), max };
            assert!(error.to_string().contains("QueuePairBuilder::inline_data"), "{error}");
            let refused = Err(error);
            assert_eq!(lab.a.post(&[Wr::new(1, Op::Send, Data::Inline(&bytes))]), refused, "{mode}");
            let (head, tail) = bytes.split_at(max as usize);
            assert_eq!(lab.a.post(&[Wr::new(1, Op::Send, Data::InlineList(&[head, tail]))]), refused, "{mode}");
            lab.b.receive(1, 0..2000).unwrap();
            lab.a.post(&[Wr::new(1, Op::Send, Data::Inline(head))]).unwrap();
            lab.a.next_ok(1);
            assert_eq!(lab.b.next_ok(1).byte_len, Some(max));
        }
    }
}

#[test]
fn an_operation_that_was_not_enabled_cannot_be_posted() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::builder(&rdma, mode).ops(SendOps::SEND).build();
        let (to, local) = (lab.b.memory.remote(0), Data::One(lab.a.memory.sge(0..8)));
        for (wr, op) in [
            (Op::SendImm(1), SendOps::SEND_WITH_IMM),
            (Op::SendInvalidate(1), SendOps::SEND_WITH_INV),
            (Op::Write(to), SendOps::RDMA_WRITE),
            (Op::WriteImm(to, 1), SendOps::RDMA_WRITE_WITH_IMM),
            (Op::Read(to), SendOps::RDMA_READ),
            (Op::CompareSwap(to, 0, 1), SendOps::ATOMIC_CMP_AND_SWP),
            (Op::FetchAdd(to, 1), SendOps::ATOMIC_FETCH_AND_ADD),
        ] {
            assert_eq!(lab.a.post(&[Wr::new(1, wr, local)]), Err(PostError::NotEnabled { op }), "{mode}: {wr:?}");
        }
        lab.b.receive(1, 0..64).unwrap();
        lab.a.post(&[Wr::new(1, Op::Send, local)]).unwrap();
        lab.a.next_ok(1);
        assert_eq!(lab.b.memory.get_u64(0), 0, "none of it was executed");
    }
}

#[test]
fn unsupported_operations_are_refused_by_name() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let cq = rdma.completion_queue(8).build().unwrap();
    // A flag that no release defines.
    let unknown = SendOps::from_bits_retain(1 << 40);
    let error = error_of(pd.queue_pair(&cq, &cq).operations(SendOps::SEND | unknown).build());
    let Error::UnsupportedOperations { ops } = error else { panic!("{error:?}") };
    assert_eq!(ops, unknown);
}

#[test]
fn atomic_operands_must_be_eight_aligned_bytes() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        let (a, b) = (&lab.a.memory, &lab.b.memory);
        let cases = [(b.remote(4), a.sge(0..8)), (b.remote(0), a.sge(4..12)), (b.remote(0), a.sge(0..16))];
        for (remote, sge) in cases.into_iter().chain([(b.remote(8), Sge::EMPTY)]) {
            for op in [Op::FetchAdd(remote, 1), Op::CompareSwap(remote, 0, 1)] {
                let refused = post(lab.a.qp.send_batch(), &[Wr::new(1, op, Data::One(sge))]);
                assert_eq!(refused, Err(PostError::AtomicOperand), "{mode}: {op:?} {sge:?}");
            }
        }
    }
}

#[test]
fn a_batch_collected_in_memory_has_a_maximum_length() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::builder(&rdma, mode).max_batch(3).build();
        let local = lab.a.memory.sge(0..8);
        let receives: Vec<(u64, &[Sge])> = (0..4).map(|id| (id, std::slice::from_ref(&local))).collect();
        assert_eq!(lab.a.receive_batch(&receives), Err(PostError::BatchFull { max: 3 }), "{mode}");
        let sges = [lab.b.memory.sge(0..64)];
        lab.b.receive_batch(&[(0, &sges), (1, &sges), (2, &sges)]).unwrap();
        lab.b.receive_batch(&[(3, &sges)]).unwrap();
        let wrs: Vec<Wr<'_>> = (0..4).map(|id| Wr::new(id, Op::Send, Data::One(local))).collect();
        if lab.a.qp.is_extended() {
            lab.a.post(&wrs).unwrap();
        } else {
            assert_eq!(lab.a.post(&wrs), Err(PostError::BatchFull { max: 3 }));
            lab.a.post(&wrs[..3]).unwrap();
            lab.a.post(&wrs[3..]).unwrap();
        }
        for id in 0..4 {
            lab.a.next_ok(id);
            lab.b.next_ok(id);
        }
    }
}

/// Fills the send queue of `lab.a`, whose peer has no receives. Returns the number of posted sends.
fn fill(lab: &mut Lab, mode: Mode) -> u64 {
    let capacity = u64::from(lab.a.qp.capacity().max_send_wr);
    for id in 0.. {
        lab.a.memory.put_u64(id as usize * 8, id);
        let at = id as usize * 8;
        match lab.a.post(&[Wr::new(id, Op::Send, Data::One(lab.a.memory.sge(at..at + 8)))]) {
            Ok(()) => assert!(id < 1000, "{mode}: the queue never fills"),
            Err(error) => {
                assert_eq!(error, PostError::QueueFull { posted: 0 }, "{mode}");
                assert!(error.to_string().contains("take completions first"), "{error}");
                assert!(id >= capacity, "{mode}: full after {id} of {capacity}");
                return id;
            }
        }
    }
    unreachable!()
}

#[test]
fn a_full_send_queue_refuses_work_and_recovers() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::builder(&rdma, mode).depth(8).build();
        let count = fill(&mut lab, mode);
        for round in 0..3 {
            // Receives are posted one at a time, and the messages arrive in order.
            for id in 0..count {
                let at = id as usize * 8;
                lab.b.receive(id, at..at + 8).unwrap();
                assert_eq!(lab.b.next_ok(id).byte_len, Some(8));
                lab.a.next_ok(id);
                assert_eq!(lab.b.memory.get_u64(at), id, "{mode}");
            }
            assert_eq!(try_next(&mut lab.a.cq), None, "{mode}: refused work was not posted");
            if round < 2 {
                assert_eq!(fill(&mut lab, mode), count, "{mode}: the queue has as much room as before");
            }
        }
    }
}

#[test]
fn a_batch_that_does_not_fit_reports_how_much_was_posted() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::builder(&rdma, mode).depth(8).build();
        let room = fill(&mut lab, mode);
        for id in 0..3 {
            lab.b.receive(id, 0..8).unwrap();
            lab.a.next_ok(id);
            lab.b.next_ok(id);
        }
        // The queue has room for three of the five.
        let local = Data::One(lab.a.memory.sge(0..8));
        let wrs: Vec<Wr<'_>> = (100..105).map(|id| Wr::new(id, Op::Send, local)).collect();
        let error = error_of(lab.a.post(&wrs));
        let PostError::QueueFull { posted } = error else { panic!("{mode}: {error:?}") };
        let expected = if lab.a.qp.is_extended() { 0 } else { 3 };
        assert_eq!(posted, expected, "{mode}: all or nothing by ibv_wr_complete, a prefix by ibv_post_send");
        for id in (3..room).chain(100..100 + u64::from(posted)) {
            lab.b.receive(id, 0..8).unwrap();
            lab.a.next_ok(id);
            lab.b.next_ok(id);
        }
        lab.b.receive(7, 0..8).unwrap();
        lab.a.post(&[Wr::new(7, Op::Send, local)]).unwrap();
        lab.a.next_ok(7);
        lab.b.next_ok(7);
        assert_eq!((try_next(&mut lab.a.cq), try_next(&mut lab.b.cq)), (None, None), "{mode}");
    }
}

/// Posts receives until the queue is full. Returns their number.
fn fill_receives(qp: &mut QueuePair, sge: Sge, at_least: u32) -> u64 {
    for id in 0..1000 {
        // SAFETY: memory of the lab tolerates any access and outlives its queue pair.
        if let Err(error) = unsafe { qp.receive(id, sge) } {
            assert_eq!(error, PostError::QueueFull { posted: 0 });
            assert!(id >= at_least.into(), "full after {id} of {at_least}");
            return id;
        }
    }
    panic!("the queue never fills");
}

#[test]
fn a_full_receive_queue_refuses_work_and_recovers() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::builder(&rdma, mode).depth(8).build();
        let (capacity, sge) = (lab.b.qp.capacity().max_recv_wr, lab.b.memory.sge(0..64));
        let count = fill_receives(&mut lab.b.qp, sge, capacity);
        let receives: Vec<(u64, &[Sge])> = (0..4).map(|id| (1000 + id, std::slice::from_ref(&sge))).collect();
        assert_eq!(lab.b.receive_batch(&receives), Err(PostError::QueueFull { posted: 0 }), "{mode}");
        for id in 0..2 {
            lab.a.post(&[Wr::new(id, Op::Send, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
            lab.a.next_ok(id);
            lab.b.next_ok(id);
        }
        // The queue has room for two of the four.
        assert_eq!(lab.b.receive_batch(&receives), Err(PostError::QueueFull { posted: 2 }), "{mode}");
        for id in (2..count).chain(1000..1002) {
            lab.a.post(&[Wr::new(id, Op::Send, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
            lab.a.next_ok(id);
            lab.b.next_ok(id);
        }
        assert_eq!(try_next(&mut lab.b.cq), None, "{mode}");
    }
}

/// SoftRoCE returns `EINVAL` for such a send and executes it once the queue pair is in RTS.
#[test]
fn a_send_before_rts_is_refused_and_never_executed() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::builder(&rdma, mode).inline(8).connected(false).build();
        let link = Link::default();
        let (a, b) = (lab.a.qp.number(), lab.b.qp.number());
        link.connect(&rdma, &mut lab.b.qp, a).unwrap();
        lab.b.receive(1, 0..64).unwrap();
        lab.b.receive(2, 0..64).unwrap();
        let refused = |lab: &mut Lab, state| {
            lab.a.memory.put(0, b"too soon");
            let (to, from) = (lab.b.memory.remote(1000), Data::One(lab.a.memory.sge(0..8)));
            for op in [Op::Send, Op::Write(to)] {
                assert_eq!(lab.a.post(&[Wr::new(9, op, from)]), Err(PostError::NotReady { state }), "{mode}");
                let inline = Data::Inline(b"too soon");
                assert_eq!(lab.a.post(&[Wr::new(9, op, inline)]), Err(PostError::NotReady { state }), "{mode}");
            }
        };
        refused(&mut lab, QueuePairState::RESET);
        lab.a.qp.modify(&link.to_init(&rdma)).unwrap();
        refused(&mut lab, QueuePairState::INIT);
        lab.a.qp.modify(&link.to_rtr(&rdma, b)).unwrap();
        refused(&mut lab, QueuePairState::RTR);
        let text = PostError::NotReady { state: QueuePairState::RTR }.to_string();
        assert!(text.contains("RTR") && text.contains("sends need RTS"), "{text}");
        lab.a.qp.modify(&link.to_rts()).unwrap();

        lab.a.memory.put(0, b"in time!");
        lab.a.post(&[Wr::new(1, Op::Send, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
        lab.a.next_ok(1);
        assert_eq!(lab.b.next_ok(1).byte_len, Some(8));
        assert_eq!(lab.b.memory.get(0..8), b"in time!");
        assert_eq!(lab.b.memory.get(1000..1008), [0; 8]);
        assert_eq!((try_next(&mut lab.a.cq), try_next(&mut lab.b.cq)), (None, None), "{mode}");

        // After RESET sends are refused again.
        lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::RESET)).unwrap();
        refused(&mut lab, QueuePairState::RESET);
    }
}

#[test]
fn a_receive_in_reset_is_refused_and_one_in_init_is_used() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::builder(&rdma, mode).connected(false).build();
        let link = Link::default();
        let (a, b) = (lab.a.qp.number(), lab.b.qp.number());
        let refused = PostError::NotReady { state: QueuePairState::RESET };
        assert_eq!(lab.b.receive(9, 0..8), Err(refused), "{mode}");
        assert_eq!(error_of(lab.b.qp.recv_batch()), refused, "{mode}");
        lab.b.qp.modify(&link.to_init(&rdma)).unwrap();
        lab.b.receive(1, 100..108).unwrap();
        lab.b.qp.modify(&link.to_rtr(&rdma, a)).unwrap();
        lab.b.receive(2, 200..208).unwrap();
        link.connect(&rdma, &mut lab.a.qp, b).unwrap();
        for id in 1..3 {
            lab.a.memory.put_u64(0, id);
            lab.a.post(&[Wr::new(id, Op::Send, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
            // RTR suffices for the receiver.
            lab.a.next_ok(id);
            lab.b.next_ok(id);
        }
        assert_eq!((lab.b.memory.get_u64(100), lab.b.memory.get_u64(200)), (1, 2), "{mode}");
        assert_eq!(lab.b.memory.get_u64(0), 0, "{mode}: the refused receive is not used");
    }
}

#[test]
fn work_in_flight_and_sends_posted_later_are_flushed_in_the_error_state() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        for id in 0..3 {
            lab.a.receive(id, 0..64).unwrap();
        }
        lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR)).unwrap();
        let from = Data::One(lab.a.memory.sge(0..8));
        lab.a.post(&[Wr::new(10, Op::Send, from), Wr::new(11, Op::Send, from).flags(SendFlags::empty())]).unwrap();
        let mut flushed: Vec<u64> = (0..5)
            .map(|_| {
                let wc = lab.a.next();
                assert_eq!(wc.status, WcStatus::WR_FLUSH_ERR, "{mode}");
                wc.wr_id
            })
            .collect();
        flushed.sort_unstable();
        assert_eq!(flushed, [0, 1, 2, 10, 11], "{mode}: unsignaled work also fails with a completion");
    }
}

#[test]
fn capacities_beyond_the_device_limits_are_refused_and_they_are_named() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let limits = rdma.attributes();
    for mode in [Mode::EXTENDED, Mode::CLASSIC] {
        let cq = cq_builder(&rdma, 8, mode).build().unwrap();
        let builder = || {
            let builder = pd.queue_pair(&cq, &cq);
            builder.classic(mode.classic_qp)
        };
        for (what, builder) in [
            ("sends", builder().send_depth(limits.max_qp_wr() + 1)),
            ("receives", builder().recv_depth(limits.max_qp_wr() + 1)),
            ("elements of a send", builder().send_sges(limits.max_sge() + 1)),
            ("elements of a receive", builder().recv_sges(limits.max_sge() + 1)),
            ("inline bytes", builder().inline_data(1 << 20)),
        ] {
            let error = error_of(builder.build());
            let text = error.to_string();
            let Error::CreateQueuePair { errno: Errno(libc::EINVAL | libc::ENOMEM), .. } = error else {
                panic!("{mode}, {what}: {error:?}");
            };
            assert!(text.contains(&format!("{} work requests", limits.max_qp_wr())), "{text}");
        }
        let largest = builder().send_sges(limits.max_sge()).recv_sges(limits.max_sge()).build();
        if rdma.is_rxe() {
            largest.unwrap();
        }
    }
}

#[test]
fn a_work_request_carries_the_flags_it_was_given() {
    let all = WorkRequest::new(7).signaled().fenced().solicited();
    let flags = SendFlags::SIGNALED | SendFlags::FENCE | SendFlags::SOLICITED;
    assert_eq!(all, WorkRequest::new(7).with_flags(flags));
}
