//! Tests of the keepalive without a device.

use super::*;
use crate::endpoint::ring::Kind;

const UNSIGNALED: Kind = Kind::unsignaled(Operation::Send);
const SIGNALED: Kind = Kind::signaled(Operation::Send);

/// A keepalive and the ring of its endpoint's sends.
struct Rig {
    keepalive: Keepalive,
    sends: Ring<Buffer>,
    completions: u64,
}

impl Rig {
    fn new() -> Self {
        let mut keepalive = Keepalive::new(CM_DEFAULT);
        keepalive.start(Instant::now());
        Rig { keepalive, sends: Ring::with_pending(4, 4, 0, SIGNALED), completions: 0 }
    }

    /// Checks as an endpoint does.
    fn check(&mut self) -> Check {
        let count = self.completions + self.sends.oldest() + self.keepalive.others;
        let check = self.keepalive.check(count, &mut self.sends);
        if check == Check::Probe {
            let next = self.sends.posted();
            let is_alone = !self.sends.has_posted();
            self.keepalive.probes += 1;
            let wr_id = PROBE | self.keepalive.probes;
            self.keepalive.probe = Some(Probe { wr_id, next, is_alone, waits: 0 });
        }
        check
    }

    fn checks<const N: usize>(&mut self) -> [Check; N] {
        std::array::from_fn(|_| self.check())
    }

    /// Completes the latest probe.
    fn complete(&mut self, status: WcStatus) -> bool {
        let wr_id = PROBE | self.keepalive.probes;
        self.keepalive.complete(wr_id, Outcome { status, ..Outcome::DONE }, &mut self.sends)
    }
}

#[test]
fn a_silent_peer_is_lost_after_four_checks() {
    let mut rig = Rig::new();
    assert_eq!(rig.checks(), [Check::Pass, Check::Probe, Check::Pass, Check::Lost]);
}

#[test]
fn four_checks_with_slack_take_the_time_limit() {
    for within in [LIMITS[0], CM_DEFAULT, LIMITS[1]] {
        let interval = Keepalive::new(within).interval();
        assert!(4 * (interval + slack(within)) <= within);
    }
}

#[test]
fn an_answered_probe_is_a_sign_of_life() {
    let mut rig = Rig::new();
    assert_eq!(rig.checks(), [Check::Pass, Check::Probe]);
    for _ in 0..10 {
        assert!(rig.complete(WcStatus::SUCCESS));
        assert!(!rig.complete(WcStatus::SUCCESS), "a repeated completion names nothing");
        assert_eq!(rig.checks(), [Check::Pass, Check::Probe]);
    }
}

#[test]
fn any_completion_is_a_sign_of_life() {
    let mut rig = Rig::new();
    assert_eq!(rig.checks(), [Check::Pass, Check::Probe, Check::Pass]);
    for _ in 0..10 {
        // The peer sends, and its ACK of the probe is late.
        rig.completions += 1;
        assert_eq!(rig.checks(), [Check::Pass, Check::Pass]);
    }
    assert_eq!(rig.check(), Check::Lost);
}

#[test]
fn signaled_work_in_flight_needs_no_probe() {
    let mut rig = Rig::new();
    rig.sends.push(None, UNSIGNALED);
    rig.sends.push(None, SIGNALED);
    assert_eq!(rig.checks(), [Check::Pass; 20]);
    assert!(rig.sends.complete(2, |_| Outcome::DONE));
    assert_eq!(rig.checks(), [Check::Pass, Check::Probe]);
}

#[test]
fn a_probe_behind_unsignaled_work_proves_nothing_and_releases_it() {
    let mut rig = Rig::new();
    rig.sends.push(None, UNSIGNALED);
    rig.sends.push(None, UNSIGNALED);
    assert_eq!(rig.checks(), [Check::Pass, Check::Probe]);
    assert_eq!(rig.checks(), [Check::Pass; 20]);
    rig.sends.push(None, UNSIGNALED);
    assert!(rig.complete(WcStatus::SUCCESS));
    assert_eq!((rig.sends.in_flight(), rig.sends.oldest()), (1, 3));
    assert_eq!(rig.sends.pop().map(|done| (done.sequence, done.outcome)), Some((1, Outcome::DONE)));
}

#[test]
fn pending_sends_are_posted_after_the_probe_and_not_released_by_it() {
    let mut rig = Rig::new();
    (0..4).for_each(|_| rig.sends.push(None, SIGNALED));
    rig.sends.add_pending(None, None, SIGNALED);
    (1..=4).for_each(|sequence| assert!(rig.sends.complete(sequence, |_| Outcome::DONE)));
    // In a set, completed sends that are not handed out yet keep the queue full.
    assert_eq!(rig.checks(), [Check::Pass, Check::Probe]);
    assert!(rig.sends.pop().is_some());
    assert_eq!(rig.sends.postable(), (1, 5));
    rig.sends.mark_posted(1);
    assert!(rig.complete(WcStatus::SUCCESS));
    assert_eq!((rig.sends.in_flight(), rig.sends.oldest()), (1, 5));
}

#[test]
fn a_probe_that_overtook_signaled_work_is_refused() {
    let mut rig = Rig::new();
    rig.check();
    assert_eq!(rig.check(), Check::Probe);
    // The provider completes the wrong probe.
    rig.keepalive.probe = rig.keepalive.probe.map(|probe| Probe { next: 2, ..probe });
    rig.sends.push(None, SIGNALED);
    assert!(!rig.complete(WcStatus::SUCCESS));
    assert_eq!(rig.sends.in_flight(), 1);
}

#[test]
fn a_probe_whose_completion_was_lost_is_forgotten_after_a_later_one() {
    let mut rig = Rig::new();
    assert_eq!(rig.checks(), [Check::Pass, Check::Probe]);
    rig.sends.push(None, SIGNALED);
    assert!(rig.sends.complete(1, |_| Outcome::DONE));
    assert_eq!(rig.checks(), [Check::Pass, Check::Probe], "the next one is posted");
    assert!(rig.complete(WcStatus::SUCCESS));
}

#[test]
fn a_failed_probe_is_reported_once_and_ends_the_keepalive() {
    let mut rig = Rig::new();
    rig.keepalive.set_peer(0x12);
    assert_eq!(rig.checks(), [Check::Pass, Check::Probe]);
    assert!(rig.complete(WcStatus::RETRY_EXC_ERR));
    assert_eq!(rig.checks(), [Check::Pass; 5]);
    let report = rig.keepalive.take_report().unwrap();
    let lost = report.connection_lost().unwrap();
    assert_eq!((lost.qp_num, lost.within, lost.status), (0x12, CM_DEFAULT, WcStatus::RETRY_EXC_ERR));
    assert_eq!((report.operation, report.buffer.is_none()), (Operation::Keepalive, true));
    assert_eq!(rig.keepalive.lost(), Some(lost));
    assert!(rig.keepalive.take_report().is_none());
}

#[test]
fn a_probe_that_is_flushed_with_other_work_is_not_reported() {
    let mut rig = Rig::new();
    rig.sends.push(None, UNSIGNALED);
    assert_eq!(rig.checks(), [Check::Pass, Check::Probe]);
    rig.keepalive.end();
    assert!(rig.complete(WcStatus::WR_FLUSH_ERR));
    assert!(!rig.keepalive.has_report());
    let flushed = rig.sends.pop().unwrap();
    assert_eq!(flushed.outcome.status, WcStatus::WR_FLUSH_ERR, "it is unknown whether it was done");
}

#[test]
fn the_retries_of_the_transport_end_within_the_time_limit() {
    for retries in 0..=7 {
        for within in [LIMITS[0], Duration::from_millis(200), CM_DEFAULT, LIMITS[1]] {
            for stretch in [1, 4] {
                let exponent = ack_timeout(within, retries, stretch == 4);
                let total = |exponent: u8| Duration::from_nanos(4096 << exponent) * stretch * (u32::from(retries) + 1);
                assert!(total(exponent) <= within, "{within:?}: {exponent}");
                assert!(exponent == 31 || total(exponent + 1) > within, "{within:?}: {exponent}");
            }
        }
    }
    // The ACK timeout of connections by address is 19 otherwise, 2.1 s.
    assert_eq!(ack_timeout(CM_DEFAULT, 6, true), 16);
}

#[test]
fn spinning_polls_seldom_read_the_clock_and_rare_polls_always_do() {
    let (start, target) = (Instant::now(), Duration::from_secs(1));
    let (mut pace, mut countdown, mut readings) = (Pace::new(start, target), Countdown::NOW, 0);
    for poll in 0..64_000 {
        if countdown.count() {
            readings += 1;
            countdown = pace.read(start + Duration::from_micros(poll));
        }
    }
    assert!((1000..1100).contains(&readings), "{readings}");
    let (mut pace, mut countdown) = (Pace::new(start, target), Countdown::NOW);
    for poll in 1..100 {
        assert!(countdown.count(), "{poll}");
        countdown = pace.read(start + poll * target);
    }
    let mut off = Countdown::OFF;
    assert!((0..1000).all(|_| !off.count()));
}

#[test]
fn errors_name_the_peer_the_time_and_what_to_do() {
    let lost = |status| ConnectionLost { qp_num: 0x12, within: CM_DEFAULT, status }.to_string();
    let gone = lost(WcStatus::RESP_TIMEOUT_ERR);
    for part in ["the peer is gone", "0x000012", "10s", "Endpoint::close", "make another"] {
        assert!(gone.contains(part), "{part}: {gone}");
    }
    assert!(lost(WcStatus::REM_INV_REQ_ERR).contains("IBV_ACCESS_REMOTE_WRITE"));
    assert!(lost(WcStatus::WR_FLUSH_ERR).contains("asynchronous events"));
    let range = KeepaliveError::OutOfRange { within: Duration::from_millis(1) }.to_string();
    assert!(range.contains("1ms") && range.contains("10ms") && range.contains("86400s"), "{range}");
}
