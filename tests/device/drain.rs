//! Draining: taking all completions of a queue pair before its destruction.

use std::time::{Duration, Instant};

use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::sys::{Zeroed, ibv_wc};
use rdma_safe::{Errno, Error, PollError, QueuePairState, SendFlags, Sge, WcStatus, WorkRequest};

use crate::support::interposer::interposed;
use crate::support::interposer::rig::{lab, on_each_mode};
use crate::support::lab::{Data, Lab, Mode, Op, Side, Wr};
use crate::support::link::Link;
use crate::support::{DEADLINE, device, error_of, within_deadline};

#[test]
fn work_in_flight_is_flushed_and_counted() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        for id in 0..20 {
            lab.a.receive(id, 0..64).unwrap();
        }
        // The peer has no receive, so the sends stay in flight.
        let from = Data::One(lab.a.memory.sge(64..72));
        lab.a.post(&[Wr::new(20, Op::Send, from), Wr::new(100, Op::Send, from).flags(SendFlags::empty())]).unwrap();
        let mut seen = Vec::new();
        let left = lab.a.qp.drain(&mut [&mut lab.a.cq], 21, DEADLINE, |wc| {
            seen.push((wc.wr_id(), wc.status()));
            wc.wr_id() < 100
        });
        assert_eq!(left.unwrap(), 0, "{mode}: {seen:?}");
        for id in 0..21 {
            let of: Vec<_> = seen.iter().filter(|(seen, _)| *seen == id).collect();
            assert_eq!(of, [&(id, WcStatus::WR_FLUSH_ERR)], "{mode}");
        }
        // A device may report the unsignaled send. Its completion does not count.
        assert!(!rdma.is_soft() || seen.contains(&(100, WcStatus::WR_FLUSH_ERR)), "{mode}: {seen:?}");
        assert_eq!(lab.a.qp.query().unwrap().state(), Some(QueuePairState::ERR), "{mode}");
        lab.a.qp.destroy().unwrap();
    }
}

/// The queue pair fails, and receives are posted before the program notices the failure. SoftRoCE flushes such receives only
/// when the queue pair is moved to the error state again.
#[test]
fn receives_that_came_too_late_to_be_flushed_are_drained() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let link = Link { retry_count: 6, rnr_retry: 1, min_rnr_timer: 1, ..Link::default() };
        let mut lab = Lab::builder(&rdma, mode).link(link).build();
        lab.a.receive(1, 0..64).unwrap();
        lab.a.post(&[Wr::new(50, Op::Send, Data::One(lab.a.memory.sge(64..72)))]).unwrap();
        let wc = lab.a.next();
        assert_eq!((wc.wr_id, wc.status), (50, WcStatus::RNR_RETRY_EXC_ERR), "{mode}");
        for id in 2..5 {
            lab.a.receive(id, 0..64).unwrap();
        }
        let mut seen = Vec::new();
        let left = lab.a.qp.drain(&mut [&mut lab.a.cq], 4, DEADLINE, |wc| {
            seen.push((wc.wr_id(), wc.status()));
            true
        });
        assert_eq!(left.unwrap(), 0, "{mode}: {seen:?}");
        assert_eq!(seen, [1, 2, 3, 4].map(|id| (id, WcStatus::WR_FLUSH_ERR)), "{mode}");
        lab.a.qp.destroy().unwrap();
    }
}

#[test]
fn draining_returns_the_missing_completions_at_the_deadline() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    lab.a.receive(1, 0..64).unwrap();
    let (start, limit) = (Instant::now(), Duration::from_millis(50));
    assert_eq!(lab.a.qp.drain(&mut [&mut lab.a.cq], 3, limit, |_| true).unwrap(), 2);
    assert!(start.elapsed() >= limit && start.elapsed() < limit + DEADLINE);
}

#[test]
fn work_that_completed_before_the_drain_is_counted() {
    const READ: u64 = 0x0123_4567_89ab_cdef;
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        for id in 0..2 {
            lab.b.receive(id, 0..64).unwrap();
        }
        lab.b.memory.put_u64(64, READ);
        let (sent, read) = (Data::One(lab.a.memory.sge(64..72)), Data::One(lab.a.memory.sge(0..8)));
        lab.a.post(&[Wr::new(7, Op::Send, sent), Wr::new(8, Op::Read(lab.b.memory.remote(64)), read)]).unwrap();
        // When the data of the read arrives, the send has completed at both ends.
        within_deadline("data of the read", || (lab.a.memory.get_u64(0) == READ).then_some(()));
        let drain = |side: &mut Side, outstanding| {
            let mut seen = Vec::new();
            let left = side.qp.drain(&mut [&mut side.cq], outstanding, DEADLINE, |wc| {
                seen.push((wc.wr_id(), wc.status()));
                true
            });
            assert_eq!(left.unwrap(), 0, "{mode}: {seen:?}");
            seen
        };
        assert_eq!(drain(&mut lab.b, 2), [(0, WcStatus::SUCCESS), (1, WcStatus::WR_FLUSH_ERR)], "{mode}");
        let seen = drain(&mut lab.a, 2);
        assert_eq!((seen.len(), seen[0]), (2, (7, WcStatus::SUCCESS)), "{mode}: {seen:?}");
        assert_eq!(drain(&mut lab.a, 0), [], "{mode}: nothing is outstanding");
    }
}

#[test]
fn completions_of_other_queue_pairs_are_shown_and_do_not_count() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    let mut other = lab.pd.queue_pair(&lab.a.cq, &lab.a.cq).build().unwrap();
    let number = other.number();
    Link::default().connect(&rdma, &mut other, number).unwrap();
    // SAFETY: the receive has no memory.
    unsafe { other.receive(500, Sge::EMPTY) }.unwrap();
    other.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR)).unwrap();
    lab.a.receive(5, 0..64).unwrap();
    let mut seen = Vec::new();
    let left = lab.a.qp.drain(&mut [&mut lab.a.cq], 1, DEADLINE, |wc| {
        seen.push(wc.wr_id());
        wc.wr_id() < 100
    });
    assert_eq!((left.unwrap(), seen), (0, vec![500, 5]));
}

#[test]
fn both_queues_of_a_queue_pair_are_drained_and_none_may_be_missing() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let [mut send_cq, mut recv_cq] = [8, 8].map(|entries| rdma.completion_queue(entries).build().unwrap());
    let mut qp = pd.queue_pair(&send_cq, &recv_cq).build().unwrap();
    for cqs in [&mut [&mut send_cq][..], &mut [&mut recv_cq], &mut []] {
        let error = error_of(qp.drain(cqs, 1, DEADLINE, |_| true));
        assert!(matches!(error, Error::WrongParent { object: "completion queue" }), "{error}");
    }
    let left = qp.drain(&mut [&mut send_cq, &mut recv_cq], 3, DEADLINE, |_| true);
    assert_eq!(left.unwrap(), 3, "nothing completes in RESET");
    let number = qp.number();
    Link::default().connect(&rdma, &mut qp, number).unwrap();
    // SAFETY: the work has no memory.
    unsafe {
        qp.receive(1, Sge::EMPTY).unwrap();
        let mut batch = qp.send_batch().unwrap();
        batch.send(WorkRequest::new(2).signaled(), Sge::EMPTY).unwrap();
        batch.post().unwrap();
    }
    let mut seen = 0;
    let left = qp.drain(&mut [&mut recv_cq, &mut send_cq], 2, DEADLINE, |_| {
        seen += 1;
        true
    });
    assert_eq!((left.unwrap(), seen), (0, 2));
}

const SHORT: Duration = Duration::from_millis(5);

/// The provider never flushes a receive that is posted after the queue pair failed, so `drain` must stop at the deadline.
#[test]
fn a_receive_that_is_never_flushed_is_left_at_the_deadline() {
    on_each_mode(|soft, mode| {
        let mut lab = lab(soft, mode).build();
        soft.change_completions(|wc| if wc.wr_id == 2 { Vec::new() } else { vec![wc] });
        lab.a.receive(1, 0..8).unwrap();
        // SAFETY: only this thread uses the queue pair.
        unsafe { soft.break_qp(lab.a.qp.number()) };
        lab.a.receive(2, 0..8).unwrap();
        let before = soft.calls("ibv_modify_qp");
        let (start, mut seen) = (Instant::now(), Vec::new());
        let left = lab.a.qp.drain(&mut [&mut lab.a.cq], 2, SHORT, |wc| {
            seen.push((wc.wr_id(), wc.status()));
            true
        });
        assert_eq!((left.unwrap(), seen), (1, vec![(1, WcStatus::WR_FLUSH_ERR)]));
        assert!(start.elapsed() >= SHORT);
        assert_eq!(soft.calls("ibv_modify_qp"), before + 1);
        // SoftRoCE flushes such a receive when it is told again that the queue pair has failed, so each drain says it.
        assert_eq!(lab.a.qp.drain(&mut [&mut lab.a.cq], 1, SHORT, |_| true).unwrap(), 1);
        assert_eq!(soft.calls("ibv_modify_qp"), before + 2);
        lab.a.qp.destroy().unwrap();
    });
}

#[test]
fn completions_of_other_queue_pairs_do_not_delay_the_deadline() {
    on_each_mode(|soft, mode| {
        let mut lab = lab(soft, mode).build();
        let (cq, start) = (lab.a.cq.as_raw(), Instant::now());
        let of_others = ibv_wc { wr_id: 100, ..ibv_wc::zeroed() };
        soft.inject(cq, of_others);
        let left = lab.a.qp.drain(&mut [&mut lab.a.cq], 1, SHORT, |completion| {
            assert!(start.elapsed() < DEADLINE, "it goes on for as long as they do");
            soft.inject(cq, of_others);
            completion.wr_id() < 100
        });
        assert_eq!(left.unwrap(), 1);
    });
}

#[test]
fn a_failure_while_draining_is_an_error() {
    let Some(soft) = interposed() else { return };
    let mut lab = lab(&soft, Mode::EXTENDED).build();
    soft.fail("ibv_modify_qp", libc::EIO);
    assert!(matches!(lab.a.qp.drain(&mut [&mut lab.a.cq], 1, DEADLINE, |_| true), Err(Error::Modify(_))));
    soft.heal("ibv_modify_qp");
    soft.fail("start_poll", libc::EIO);
    let failed = lab.a.qp.drain(&mut [&mut lab.a.cq], 1, DEADLINE, |_| true);
    assert!(matches!(failed, Err(Error::Poll(PollError::Provider(Errno(libc::EIO))))), "{failed:?}");
}
