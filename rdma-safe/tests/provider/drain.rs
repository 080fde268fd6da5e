//! Draining a queue pair when the provider does not flush, fails, or keeps completing work of other queue pairs.

use std::time::{Duration, Instant};

use rdma_safe::{Errno, Error, PollError, Sge, WcStatus};

use crate::fake::{Config, Cqe, Fake};
use crate::support::{DEADLINE, EXTENDED, Raw, on_each_interface, raw_pair, receive};

const SHORT: Duration = Duration::from_millis(5);

/// Takes all completions with identifiers below 100.
fn drain(raw: &mut Raw, outstanding: u64, timeout: Duration) -> (u64, Vec<(u64, WcStatus)>) {
    let mut seen = Vec::new();
    let left = raw.qp.drain(&mut [&mut raw.cq], outstanding, timeout, |wc| {
        seen.push((wc.wr_id(), wc.status()));
        wc.wr_id() < 100
    });
    (left.unwrap(), seen)
}

/// This provider never flushes receives that were posted after the queue pair failed, so waiting for the last of them would not
/// end.
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
fn completions_of_other_queue_pairs_do_not_delay_the_deadline() {
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
fn a_failure_while_draining_is_an_error() {
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
