//! DREQ, DREP, release and timewait.

use std::time::Duration;

use rdma_soft::cm::{CallError, Ended, Event, Phase};
use rdma_soft::wire::cm::{AdditionalInfo, Apr, Drep, Dreq, Lap, Message, Path};

use crate::harness::{Host, Pair, QPNS, deliver};
use crate::support::peer;

const DISCONNECTED: Option<Phase> = Some(Phase::Timewait(Ended::Disconnected));

fn ended(id: u32) -> Event {
    Event::Disconnected { id, is_confirmed: true }
}

#[test]
fn a_connection_ends_when_the_peer_confirms_it() {
    let (mut pair, dreq) = Pair::dreq_sent();
    assert!(matches!(&dreq, Message::Dreq(dreq) if dreq.remote_qpn == QPNS.1));
    pair.b.receive(0, dreq.clone());
    assert_eq!(pair.b.events(), [ended(pair.at_b)]);
    assert_eq!(pair.b.sent(), [], "the program confirms it");
    pair.b.receive(0, dreq.clone());
    assert_eq!((pair.b.events(), pair.b.sent()), (vec![], vec![]), "also after a retransmission");
    pair.b.manager.disconnect(pair.b.now, pair.at_b).unwrap();
    deliver(&mut pair.b, &mut pair.a);
    assert_eq!(pair.a.events(), [ended(pair.at_a)]);
    assert_eq!(pair.b.manager.phase(pair.at_b), DISCONNECTED);
    assert_eq!(pair.a.manager.phase(pair.at_a), DISCONNECTED);
    pair.b.receive(0, dreq);
    assert!(matches!(pair.b.sent_one(), Message::Drep(_)), "in timewait, too");
    assert_eq!(pair.b.events(), []);
}

#[test]
fn an_unanswered_dreq_is_retransmitted_until_the_peer_counts_as_unreachable() {
    let (mut pair, dreq) = Pair::dreq_sent();
    for _ in 0..10 {
        pair.a.wait_for_timer();
        assert_eq!(pair.a.sent_one(), dreq);
    }
    pair.a.wait_for_timer();
    assert_eq!(pair.a.sent(), []);
    assert_eq!(pair.a.events(), [Event::Disconnected { id: pair.at_a, is_confirmed: false }]);
    assert_eq!(pair.a.manager.phase(pair.at_a), DISCONNECTED);
}

#[test]
fn both_sides_may_end_a_connection_at_the_same_time() {
    let mut pair = Pair::established();
    pair.a.manager.disconnect(pair.a.now, pair.at_a).unwrap();
    pair.b.manager.disconnect(pair.b.now, pair.at_b).unwrap();
    let (from_a, from_b) = (pair.a.sent_one(), pair.b.sent_one());
    pair.a.receive(1, from_b);
    pair.b.receive(0, from_a);
    assert_eq!(pair.a.events(), [ended(pair.at_a)]);
    assert_eq!(pair.b.events(), [ended(pair.at_b)]);
    pair.settle();
    assert_eq!((pair.a.events(), pair.b.events()), (vec![], vec![]));
    assert_eq!((pair.a.manager.phase(pair.at_a), pair.b.manager.phase(pair.at_b)), (DISCONNECTED, DISCONNECTED));
}

#[test]
fn a_dreq_for_an_unknown_connection_is_confirmed() {
    let mut b = Host::new(1);
    let dreq = Dreq { local_id: 5, remote_id: 6, remote_qpn: 7, private_data: [0; 220] };
    b.receive(0, Message::Dreq(dreq));
    assert_eq!(b.sent_one(), Message::Drep(Drep { local_id: 6, remote_id: 5, private_data: [0; 224] }));
}

#[test]
fn a_dreq_with_a_wrong_queue_pair_or_address_ends_nothing() {
    let (mut pair, dreq) = Pair::dreq_sent();
    let Message::Dreq(right) = dreq.clone() else { panic!("{dreq:?}") };
    pair.b.receive(0, Message::Dreq(Dreq { remote_qpn: QPNS.1 + 1, ..right.clone() }));
    pair.b.receive(2, dreq);
    pair.b.receive(0, Message::Dreq(Dreq { local_id: right.local_id + 1, ..right }));
    assert_eq!(pair.b.events(), []);
    assert_eq!(pair.b.manager.phase(pair.at_b), Some(Phase::Established));
}

#[test]
fn a_dreq_ends_a_connection_whose_rtu_was_lost() {
    let (mut pair, _lost) = Pair::rtu_sent();
    pair.a.manager.disconnect(pair.a.now, pair.at_a).unwrap();
    pair.settle();
    assert_eq!(pair.b.events(), [Event::Established { id: pair.at_b }, ended(pair.at_b)]);
}

#[test]
fn a_dreq_that_overtakes_the_rep_fails_the_request() {
    let (mut pair, late_rep) = Pair::rep_sent();
    pair.b.manager.release(pair.b.now, pair.at_b);
    let Some(_lost_rej) = pair.b.manager.poll_transmit() else { panic!("no REJ") };
    deliver(&mut pair.b, &mut pair.a);
    assert!(matches!(&pair.a.events()[..], [Event::Failed { id, .. }] if *id == pair.at_a));
    assert!(matches!(pair.a.sent_one(), Message::Drep(_)));
    pair.a.receive(1, late_rep);
    assert!(matches!(pair.a.sent_one(), Message::Rej(_)));
    assert_eq!(pair.a.events(), []);
}

#[test]
fn a_dreq_ends_a_connection_that_the_program_has_not_established_yet() {
    let mut pair = Pair::rep_received();
    pair.b.manager.release(pair.b.now, pair.at_b);
    let Some(_lost_rej) = pair.b.manager.poll_transmit() else { panic!("no REJ") };
    deliver(&mut pair.b, &mut pair.a);
    assert_eq!(pair.a.events(), [ended(pair.at_a)]);
    assert_eq!(pair.a.manager.establish(pair.at_a), Err(CallError::State));
    pair.a.manager.disconnect(pair.a.now, pair.at_a).unwrap();
    assert!(matches!(pair.a.sent_one(), Message::Drep(_)));
}

#[test]
fn a_drep_is_taken_only_for_a_dreq_of_this_side() {
    let mut pair = Pair::established();
    let drep = |local_id, remote_id| Message::Drep(Drep { local_id, remote_id, private_data: [0; 224] });
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.a.receive(1, drep(at_b, at_a));
    assert_eq!(pair.a.manager.phase(at_a), Some(Phase::Established));
    pair.a.manager.disconnect(pair.a.now, at_a).unwrap();
    pair.a.receive(2, drep(at_b, at_a));
    pair.a.receive(1, drep(at_b + 1, at_a));
    pair.a.receive(1, drep(at_b, at_a + 1));
    assert_eq!(pair.a.events(), []);
    pair.a.receive(1, drep(at_b, at_a));
    assert_eq!(pair.a.events(), [ended(at_a)]);
    pair.a.receive(1, drep(at_b, at_a));
    assert_eq!(pair.a.events(), []);
}

/// A pair in each state, and the side that releases the connection.
fn phases() -> Vec<(&'static str, Pair, bool)> {
    let (disconnected, dreq) = Pair::dreq_sent();
    let mut received = Pair::dreq_sent().0;
    received.b.receive(0, dreq);
    let mut timewait = Pair::dreq_sent().0;
    timewait.a.wait(Duration::from_secs(30));
    vec![
        ("REQ sent", Pair::req_sent().0, true),
        ("REQ received", Pair::req_received(), false),
        ("REP sent", Pair::rep_sent().0, false),
        ("REP received", Pair::rep_received(), true),
        ("RTU sent", Pair::rtu_sent().0, true),
        ("established", Pair::established(), false),
        ("DREQ sent", disconnected, true),
        ("DREQ received", received, false),
        ("timewait", timewait, true),
    ]
}

#[test]
fn a_released_connection_ends_at_both_sides_without_further_events() {
    for (phase, mut pair, is_active) in phases() {
        pair.a.events();
        pair.b.events();
        let (released, id) = if is_active { (&mut pair.a, pair.at_a) } else { (&mut pair.b, pair.at_b) };
        released.manager.release(released.now, id);
        released.manager.release(released.now, id);
        pair.settle();
        let (other, id) = if is_active { (&mut pair.b, pair.at_b) } else { (&mut pair.a, pair.at_a) };
        other.events();
        other.manager.release(other.now, id);
        pair.settle();
        for host in [&mut pair.a, &mut pair.b] {
            host.wait_for_end();
            assert_eq!(host.events(), [], "{phase}");
            assert_eq!(host.manager.counts(), (0, 0), "{phase}");
            assert!(!host.manager.uses_qpn(QPNS.0) && !host.manager.uses_qpn(QPNS.1), "{phase}");
        }
    }
}

#[test]
fn each_released_connection_is_forgotten_even_if_the_peer_has_vanished() {
    for (phase, mut pair, is_active) in phases() {
        let (host, id) = if is_active { (&mut pair.a, pair.at_a) } else { (&mut pair.b, pair.at_b) };
        host.events();
        host.manager.release(host.now, id);
        host.wait_for_end();
        assert_eq!(host.events(), [], "{phase}");
        assert_eq!(host.manager.counts(), (0, 0), "{phase}");
    }
}

#[test]
fn a_queue_pair_number_is_in_use_until_the_exit_from_timewait() {
    let (mut pair, dreq) = Pair::dreq_sent();
    pair.b.receive(0, dreq);
    pair.b.manager.disconnect(pair.b.now, pair.at_b).unwrap();
    pair.settle();
    pair.a.events();
    assert!(pair.a.manager.uses_qpn(QPNS.0) && pair.b.manager.uses_qpn(QPNS.1));
    assert!(!pair.a.manager.uses_qpn(QPNS.0 + 1) && !pair.a.manager.uses_qpn(QPNS.0 - 1));
    pair.a.wait(Duration::from_millis(999));
    assert!(pair.a.manager.uses_qpn(QPNS.0));
    pair.a.wait(Duration::from_millis(1));
    assert!(!pair.a.manager.uses_qpn(QPNS.0));
    assert_eq!(pair.a.events(), [Event::TimewaitExit { id: pair.at_a }]);
    assert_eq!((pair.a.manager.phase(pair.at_a), pair.a.manager.peer(pair.at_a)), (None, None));
    assert_eq!(pair.a.manager.disconnect(pair.a.now, pair.at_a), Err(CallError::State));
    pair.a.manager.release(pair.a.now, pair.at_a);
    assert_eq!(pair.a.sent(), []);
}

#[test]
fn a_failed_request_has_no_exit_from_timewait_but_keeps_its_queue_pair_number() {
    let (mut pair, _req) = Pair::req_sent();
    while pair.a.manager.phase(pair.at_a) == Some(Phase::ReqSent) {
        pair.a.wait_for_timer();
    }
    assert_eq!(pair.a.manager.phase(pair.at_a), Some(Phase::Timewait(Ended::Failed)));
    assert!(pair.a.manager.uses_qpn(QPNS.0));
    pair.a.events();
    pair.a.wait_for_timer();
    assert!(!pair.a.manager.uses_qpn(QPNS.0));
    assert_eq!(pair.a.events(), []);
}

#[test]
fn an_alternate_path_is_refused_for_an_established_connection_only() {
    let lap = |local_id, remote_id| {
        let (alternate, private_data) = (Path::default(), [0; 168]);
        Message::Lap(Lap { local_id, remote_id, qpn: 0, remote_timeout: 0, alternate, private_data })
    };
    let mut pair = Pair::established();
    pair.b.receive(0, lap(pair.at_a, pair.at_b));
    let apr = Apr {
        local_id: pair.at_b,
        remote_id: pair.at_a,
        status: Apr::UNSUPPORTED,
        info: AdditionalInfo::NONE,
        private_data: [0; 148],
    };
    assert_eq!(pair.b.sent_one(), Message::Apr(apr.clone()));
    pair.b.receive(2, lap(pair.at_a, pair.at_b));
    pair.b.receive(0, lap(pair.at_a, pair.at_b + 1));
    pair.b.receive(0, Message::Apr(apr));
    let (mut waiting, _) = Pair::rep_sent();
    waiting.b.receive(0, lap(waiting.at_a, waiting.at_b));
    assert_eq!((pair.b.sent(), waiting.b.sent(), pair.b.events()), (vec![], vec![], vec![]));
}

#[test]
fn malformed_mads_are_dropped() {
    let mut pair = Pair::established();
    let before = pair.b.manager.clone();
    for mad in [&[][..], &[0; 24], &[0; 256], &[0xff; 256], &[1; 300]] {
        pair.b.manager.handle(pair.b.now, peer(0), mad);
    }
    assert!(pair.b.manager == before);
}
