//! Keepalives over a device that drops, refuses or invents work, and with full queues.

use std::time::Duration;

use rdma_safe::sys::{IBV_SEND_SIGNALED, Zeroed, ibv_wc};
use rdma_safe::{Endpoint, Operation, PollError, PostError, ProtectionDomain, ReceivePool, WcStatus};

use crate::keepalive::{limit, short};
use crate::support::interposer::rig::{builder, cq_of, done, next};
use crate::support::interposer::{Interposed, interposed};
use crate::support::lab::Mode;
use crate::support::link::connect;
use crate::support::miri::one_under_miri;
use crate::support::{filled, within_deadline};

/// The bit that marks the `wr_id` of a probe.
const PROBE: u64 = 1 << 62;

fn is_probe(wr_id: u64) -> bool {
    wr_id >> 62 == 1
}

/// Runs a test with the extended and with the classic interface, each time with another device.
fn on_both_interfaces(test: impl Fn(&Interposed, Mode)) {
    for &mode in one_under_miri(&[Mode::EXTENDED, Mode::CLASSIC]) {
        let Some(device) = interposed() else { return };
        println!("{mode}");
        test(&device, mode);
    }
}

/// Two connected ends, of which the first has a keepalive.
fn ends(soft: &Interposed, pd: &ProtectionDomain, mode: Mode, within: Duration) -> (Endpoint, Endpoint) {
    let mut a = builder(soft, pd, mode).keepalive(within).build().unwrap();
    let mut b = builder(soft, pd, mode).build().unwrap();
    connect(&mut a, &mut b);
    (a, b)
}

/// Polls `a` until it has posted a probe.
fn await_probe(soft: &Interposed, a: &mut Endpoint) {
    within_deadline("a probe", || {
        assert!(a.poll().unwrap().is_none());
        soft.take_posted().iter().any(|posted| is_probe(posted.wr_id)).then_some(())
    });
}

#[test]
fn a_probe_is_a_signaled_write_of_zero_bytes() {
    on_both_interfaces(|soft, mode| {
        let pd = soft.pd();
        let (mut a, _b) = ends(soft, &pd, mode, limit(soft));
        soft.take_posted();
        let probe = within_deadline("a probe", || {
            assert!(a.poll().unwrap().is_none());
            soft.take_posted().pop()
        });
        assert_eq!((probe.wr_id, probe.len, probe.flags), (PROBE | 1, 0, IBV_SEND_SIGNALED.0));
    });
}

#[test]
fn a_provider_that_drops_probes_loses_the_connection() {
    on_both_interfaces(|soft, mode| {
        let pd = soft.pd();
        let (mut a, _b) = ends(soft, &pd, mode, short(soft));
        a.receive(pd.allocate(8).unwrap()).unwrap();
        soft.change_completions(|wc| if is_probe(wc.wr_id) { vec![] } else { vec![wc] });
        let lost = next(&mut a).connection_lost().expect("the report");
        // The transport has not failed, so it is the time limit.
        assert_eq!((lost.status, lost.within), (WcStatus::RESP_TIMEOUT_ERR, short(soft)));
        assert!(lost.to_string().contains("drops writes of zero bytes"), "{lost}");
        let flushed = next(&mut a);
        assert_eq!((flushed.operation, flushed.status), (Operation::Receive, WcStatus::WR_FLUSH_ERR));
    });
}

#[test]
fn a_probe_takes_no_place_of_the_users_sends() {
    on_both_interfaces(|soft, mode| {
        let pd = soft.pd();
        let (mut a, mut b) = ends(soft, &pd, mode, limit(soft));
        for _ in 0..8 {
            b.receive(pd.allocate(8).unwrap()).unwrap();
            a.receive(pd.allocate(8).unwrap()).unwrap();
        }
        soft.hold();
        await_probe(soft, &mut a);
        assert_eq!(a.sends_in_flight(), 0);
        // From here to the release `a` is not polled, so no time passes for its keepalive.
        for index in 0..8_u8 {
            a.send(filled(&pd, &[index])).unwrap();
        }
        let full = a.send(filled(&pd, b"too many")).unwrap_err();
        assert!(matches!(full.error, PostError::EndpointFull { send_depth: 8, .. }), "{}", full.error);
        assert_eq!(a.sends_in_flight(), 8);
        // All receives complete too: the queue has an entry for each of them, and for the probe.
        for index in 0..8_u8 {
            b.send(filled(&pd, &[index])).unwrap();
        }
        soft.release();
        let cq = cq_of(a.queue_pair());
        soft.await_completions(cq, 8 + 8 + 1);
        // SAFETY: the queue exists as long as the endpoint, and its size does not change.
        assert!(unsafe { (*cq).cqe } > 8 + 8);
        let mut operations: Vec<_> = (0..16).map(|_| done(&mut a).operation).collect();
        operations.sort_by_key(|operation| *operation == Operation::Receive);
        assert_eq!(operations, [[Operation::Send; 8], [Operation::Receive; 8]].concat());
    });
}

#[test]
fn a_refused_probe_is_posted_again() {
    on_both_interfaces(|soft, mode| {
        let pd = soft.pd();
        let (mut a, _b) = ends(soft, &pd, mode, limit(soft));
        soft.refuse_send(mode);
        // The failed posting is not recorded. The next probe needs an answer to the one before.
        await_probe(soft, &mut a);
        await_probe(soft, &mut a);
    });
}

#[test]
fn a_device_that_refuses_all_probes_has_failed() {
    on_both_interfaces(|soft, mode| {
        let pd = soft.pd();
        let (mut a, _b) = ends(soft, &pd, mode, limit(soft));
        let completion = within_deadline("the report", || {
            soft.refuse_send(mode);
            a.poll().unwrap()
        });
        let lost = completion.connection_lost().expect("the report");
        assert_eq!(lost.status, WcStatus::FATAL_ERR);
        assert!(lost.to_string().contains("the local device refuses"), "{lost}");
        assert!(soft.take_posted().is_empty());
    });
}

#[test]
fn a_doubtful_probe_counts_as_posted() {
    for taken in [false, true] {
        on_both_interfaces(|soft, mode| {
            let pd = soft.pd();
            let (mut a, mut b) = ends(soft, &pd, mode, if taken { limit(soft) } else { short(soft) });
            soft.doubt_send(mode, taken);
            if !taken {
                // There is no completion, so the peer seems gone.
                let lost = next(&mut a).connection_lost().expect("the report");
                assert_eq!(lost.status, WcStatus::RESP_TIMEOUT_ERR);
                return;
            }
            b.receive(pd.allocate(8).unwrap()).unwrap();
            await_probe(soft, &mut a);
            await_probe(soft, &mut a);
            a.send(filled(&pd, b"alive")).unwrap();
            assert_eq!(done(&mut a).operation, Operation::Send);
        });
    }
}

#[test]
fn a_lost_completion_of_a_probe_does_not_affect_later_work() {
    on_both_interfaces(|soft, mode| {
        let pd = soft.pd();
        let (mut a, mut b) = ends(soft, &pd, mode, limit(soft));
        b.receive(pd.allocate(8).unwrap()).unwrap();
        soft.change_completions(|wc| if wc.wr_id == PROBE | 1 { vec![] } else { vec![wc] });
        await_probe(soft, &mut a);
        a.send(filled(&pd, b"later")).unwrap();
        assert_eq!(done(&mut a).operation, Operation::Send);
        await_probe(soft, &mut a);
        await_probe(soft, &mut a);
    });
}

#[test]
fn a_completion_of_a_probe_that_is_not_in_flight_is_an_error() {
    on_both_interfaces(|soft, mode| {
        let pd = soft.pd();
        let (mut a, _b) = ends(soft, &pd, mode, limit(soft));
        let number = a.queue_pair().number();
        soft.inject(cq_of(a.queue_pair()), ibv_wc { wr_id: PROBE | 99, qp_num: number, ..ibv_wc::zeroed() });
        let error = within_deadline("an error", || a.poll().err());
        assert!(matches!(error, PollError::NotInFlight { wr_id } if wr_id == PROBE | 99), "{error}");
        assert_eq!(a.send_inline(b"refused"), Err(PostError::EndpointFailed));
    });
}

#[test]
fn a_queue_pair_that_the_device_fails_is_reported_although_nothing_is_flushed() {
    on_both_interfaces(|soft, mode| {
        let pd = soft.pd();
        let mut pool = ReceivePool::new(&pd, 4).unwrap();
        pool.receive(pd.allocate(8).unwrap()).unwrap();
        let mut a = builder(soft, &pd, mode).receive_pool(&pool).keepalive(short(soft)).build().unwrap();
        let mut b = builder(soft, &pd, mode).build().unwrap();
        connect(&mut a, &mut b);
        // SAFETY: this thread alone uses the queue pair.
        unsafe { soft.break_qp(a.queue_pair().number()) };
        let lost = next(&mut a).connection_lost().expect("the report");
        assert_eq!(lost.status, WcStatus::WR_FLUSH_ERR);
        assert!(lost.to_string().contains("asynchronous events"), "{lost}");
        drop(a);
        pool.close().unwrap();
    });
}

#[test]
fn a_pause_of_the_program_is_not_a_silence_of_the_peer() {
    on_both_interfaces(|soft, mode| {
        if cfg!(miri) {
            // The clock does not advance during a pause.
            return;
        }
        let pd = soft.pd();
        let (mut a, _b) = ends(soft, &pd, mode, limit(soft));
        await_probe(soft, &mut a);
        // The ACK waits in the network meanwhile, for the device of this process.
        std::thread::sleep(limit(soft));
        await_probe(soft, &mut a);
        await_probe(soft, &mut a);
    });
}
