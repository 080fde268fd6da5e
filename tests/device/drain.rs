//! Taking what is left on a queue pair before it goes.

use std::time::{Duration, Instant};

use rdma_safe::{QueuePairState, SendFlags, WcStatus};

use crate::support::lab::{Data, Lab, Mode, Op, Wr};
use crate::support::link::Link;
use crate::support::{DEADLINE, device};

#[test]
fn work_in_flight_is_flushed_and_counted() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let mut lab = Lab::new(&rdma, mode);
        for id in 0..20 {
            lab.a.receive(id, 0..64).unwrap();
        }
        // The peer has no receive, and waits for ever.
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
        assert_eq!(lab.a.qp.query().unwrap().state(), Some(QueuePairState::ERR), "{mode}");
        lab.a.qp.destroy().unwrap();
    }
}

/// A queue pair fails by itself, and receives are posted to it before that is noticed. SoftRoCE flushes those only when it is sent
/// to the error state anew.
#[test]
fn receives_that_came_too_late_to_be_flushed_are_drained() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
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
fn what_is_not_there_is_left_at_the_deadline() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::ALL[0]);
    lab.a.receive(1, 0..64).unwrap();
    let (start, limit) = (Instant::now(), Duration::from_millis(50));
    assert_eq!(lab.a.qp.drain(&mut [&mut lab.a.cq], 3, limit, |_| true).unwrap(), 2);
    assert!(start.elapsed() >= limit && start.elapsed() < limit + DEADLINE);
}
