//! Taking what is left on a queue pair: counted, with a deadline, on providers that flush everything and one that does not.

use std::time::{Duration, Instant};

use rdma_safe::{Errno, Error, PollError, QueuePairState, Sge, WcFields, WcStatus, WorkRequest};

use crate::fake::{Config, Cqe, Fake, Mode};
use crate::support::{DEADLINE, EXTENDED, Raw, on_each_interface, post, raw_pair, raw_with, receive, to_rts};

const SHORT: Duration = Duration::from_millis(5);

/// Takes everything with identifiers below 100.
fn drain(raw: &mut Raw, outstanding: u64, timeout: Duration) -> (u64, Vec<(u64, WcStatus)>) {
    let mut seen = Vec::new();
    let left = raw.qp.drain(&mut [&mut raw.cq], outstanding, timeout, |wc| {
        seen.push((wc.wr_id(), wc.status()));
        wc.wr_id() < 100
    });
    (left.unwrap(), seen)
}

#[test]
fn what_is_in_flight_is_flushed_and_counted() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, b) = raw_pair(&pd, interfaces);
        fake.set_mode(Mode::Manual);
        for id in 0..3 {
            receive!(a, id, Sge::EMPTY).unwrap();
        }
        let sent = post!(a, send(WorkRequest::new(3).signaled(), Sge::EMPTY); send(WorkRequest::new(100), Sge::EMPTY););
        sent.unwrap();
        let (left, seen) = drain(&mut a, 4, DEADLINE);
        assert_eq!(left, 0);
        let mut ids: Vec<u64> = seen.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2, 3, 100], "the unsignaled send is shown and does not count");
        assert!(seen.iter().all(|(_, status)| *status == WcStatus::WR_FLUSH_ERR), "{seen:?}");
        assert_eq!(a.qp.state(), QueuePairState::ERR);
        a.qp.destroy().unwrap();
        drop(b);
    });
}

#[test]
fn what_had_completed_before_is_counted_too() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        for id in 0..2 {
            receive!(b, id, Sge::EMPTY).unwrap();
        }
        post!(a, send(WorkRequest::new(7).signaled(), Sge::EMPTY);).unwrap();
        assert_eq!(drain(&mut b, 2, DEADLINE), (0, vec![(0, WcStatus::SUCCESS), (1, WcStatus::WR_FLUSH_ERR)]));
        assert_eq!(drain(&mut a, 1, DEADLINE), (0, vec![(7, WcStatus::SUCCESS)]));
        assert_eq!(drain(&mut a, 0, DEADLINE), (0, vec![]), "nothing is waited for that is not outstanding");
    });
}

/// Of a provider that flushes no receive that is posted after the queue pair has failed: waiting for a last one would never end.
#[test]
fn receives_that_are_never_flushed_are_left_at_the_deadline() {
    let keeps = Config { keeps_late_receives: true, ..Config::rxe() };
    for (config, flushed_late) in [(Config::default(), true), (Config::rxe(), true), (keeps, false)] {
        let fake = Fake::new(config);
        let pd = fake.pd();
        let (mut a, _b) = raw_pair(&pd, crate::support::CLASSIC);
        receive!(a, 1, Sge::EMPTY).unwrap();
        fake.break_qp(a.qp.number());
        receive!(a, 2, Sge::EMPTY).unwrap();
        let start = Instant::now();
        let (left, seen) = drain(&mut a, 2, if flushed_late { DEADLINE } else { SHORT });
        if flushed_late {
            assert_eq!((left, seen.len()), (0, 2));
        } else {
            assert_eq!((left, seen), (1, vec![(1, WcStatus::WR_FLUSH_ERR)]));
            assert!(start.elapsed() >= SHORT);
        }
        a.qp.destroy().unwrap();
    }
}

#[test]
fn completions_of_others_are_shown_and_do_not_count() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut a = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let mut other = pd.queue_pair(&a.cq, &a.cq).build().unwrap();
    let number = other.number();
    for qp in [&mut a.qp, &mut other] {
        to_rts(qp, number);
    }
    // SAFETY: there is no memory to keep.
    unsafe { other.receive(500, Sge::EMPTY) }.unwrap();
    receive!(a, 5, Sge::EMPTY).unwrap();
    fake.break_qp(number);
    let (left, seen) = drain(&mut a, 1, DEADLINE);
    assert_eq!((left, seen.len()), (0, 2), "{seen:?}");
    drop(other);
}

#[test]
fn others_that_never_stop_completing_do_not_hold_up_the_deadline() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = raw_pair(&pd, interfaces);
        let (cq, start) = (a.cq.as_raw(), Instant::now());
        let of_others = Cqe { wr_id: 100, opcode: rdma_sys::IBV_WC_SEND.0, ..Cqe::default() };
        fake.inject(cq, of_others);
        let left = a.qp.drain(&mut [&mut a.cq], 1, SHORT, |completion| {
            assert!(start.elapsed() < DEADLINE, "it goes on for as long as they do");
            fake.inject(cq, of_others);
            completion.wr_id() < 100
        });
        assert_eq!(left.unwrap(), 1);
    });
}

#[test]
fn two_queues_are_both_drained_and_none_may_be_missing() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let [mut send_cq, mut recv_cq] = [8, 8].map(|entries| pd.context().completion_queue(entries).build().unwrap());
    let mut qp = pd.queue_pair(&send_cq, &recv_cq).build().unwrap();
    let count = |seen: &mut u32| *seen += 1;
    for cqs in [&mut [&mut send_cq][..], &mut [&mut recv_cq], &mut []] {
        let refused = qp.drain(cqs, 1, DEADLINE, |_| true);
        assert!(matches!(refused, Err(Error::WrongParent { object: "completion queue" })), "{refused:?}");
    }
    let mut seen = 0;
    assert_eq!(
        qp.drain(&mut [&mut send_cq, &mut recv_cq], 3, DEADLINE, |_| true).unwrap(),
        3,
        "nothing completes in RESET"
    );
    let number = qp.number();
    to_rts(&mut qp, number);
    fake.set_mode(Mode::Manual);
    // SAFETY: there is no memory to keep.
    unsafe {
        qp.receive(1, Sge::EMPTY).unwrap();
        let mut batch = qp.send_batch().unwrap();
        batch.send(WorkRequest::new(2).signaled(), Sge::EMPTY).unwrap();
        batch.post().unwrap();
    }
    let drained = qp.drain(&mut [&mut recv_cq, &mut send_cq], 2, DEADLINE, |_| {
        count(&mut seen);
        true
    });
    assert_eq!((drained.unwrap(), seen), (0, 2));
}

#[test]
fn what_fails_while_draining_is_an_error() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (mut a, _b) = raw_pair(&pd, EXTENDED);
    fake.fail("ibv_modify_qp", libc::EIO);
    assert!(matches!(a.qp.drain(&mut [&mut a.cq], 1, DEADLINE, |_| true), Err(Error::Modify(_))));
    fake.heal("ibv_modify_qp");
    fake.fail("start_poll", libc::EIO);
    let failed = a.qp.drain(&mut [&mut a.cq], 1, DEADLINE, |_| true);
    assert!(matches!(failed, Err(Error::Poll(PollError::Provider(Errno(libc::EIO))))), "{failed:?}");
    fake.heal("start_poll");
}
