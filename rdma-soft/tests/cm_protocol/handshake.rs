//! REQ, REP, RTU and MRA.

use std::time::Duration;

use rdma_soft::cm::{CallError, Event, Failure, Peer, Phase};
use rdma_soft::wire::cm::{Answered, Mad, Message, Mra, RejectReason, Rep, Rtu, timeout};

use crate::harness::{Host, Pair, QPNS, guid};
use crate::support::{peer, reply};

fn mra(local_id: u32, remote_id: u32, answers: Answered, timeout: u8) -> Message {
    Message::Mra(Mra { local_id, remote_id, answers, timeout, private_data: [0; 222] })
}

#[test]
fn both_sides_agree_on_the_properties_of_the_connection() {
    let pair = Pair::established();
    let (a, b) = (pair.a.manager.negotiated(pair.at_a).unwrap(), pair.b.manager.negotiated(pair.at_b).unwrap());
    assert_eq!((a.local_qpn, a.remote_qpn), QPNS);
    assert_eq!((b.remote_qpn, b.local_qpn), QPNS);
    // The starting PSN of a REQ or REP is the one that its sender expects.
    assert_eq!((a.send_psn, a.receive_psn), (101, 100));
    assert_eq!((b.send_psn, b.receive_psn), (100, 101));
    assert_eq!((a.responder_resources, a.initiator_depth), (4, 2));
    assert_eq!((b.initiator_depth, b.responder_resources), (4, 2));
    assert_eq!((a.mtu, a.ack_timeout, a.retry_count), (b.mtu, b.ack_timeout, b.retry_count));
    assert_eq!(a.traffic_class, b.traffic_class);
    // Each side uses the RNR retry count of the other.
    assert_eq!((a.rnr_retry_count, b.rnr_retry_count), (5, 6));
    assert_eq!(pair.a.manager.phase(pair.at_a), Some(Phase::Established));
    assert_eq!(pair.b.manager.phase(pair.at_b), Some(Phase::Established));
    assert_eq!((pair.a.manager.wake_at(), pair.b.manager.wake_at()), (None, None));
}

#[test]
fn the_manager_fills_in_the_ids_and_the_timeouts_of_a_request() {
    let (pair, req) = Pair::req_sent();
    let Message::Req(req) = req else { panic!("{req:?}") };
    assert_eq!((req.local_id, req.guid), (pair.at_a, guid(0)));
    // A peer retransmits an unanswered message after the time that the request allows for an answer.
    assert!(timeout(req.local_timeout) >= Duration::from_secs(1) && req.max_cm_retries == 15);
}

#[test]
fn an_unanswered_request_is_retransmitted_and_then_withdrawn() {
    let (mut pair, req) = Pair::req_sent();
    let mut intervals = Vec::new();
    for _ in 0..10 {
        intervals.push(pair.a.wait_for_timer().as_millis());
        assert_eq!(pair.a.sent_one(), req);
        assert_eq!(pair.a.events(), []);
    }
    assert_eq!(intervals, [64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096, 4096]);
    pair.a.wait_for_timer();
    assert_eq!(pair.a.events(), [Event::Failed { id: pair.at_a, failure: Failure::Unreachable }]);
    let Message::Rej(rej) = pair.a.sent_one() else { panic!("no REJ") };
    assert_eq!((rej.local_id, rej.remote_id, rej.reason), (pair.at_a, 0, RejectReason::TIMEOUT));
    assert_eq!(rej.info.as_slice(), guid(0).to_be_bytes());
}

#[test]
fn a_request_fails_when_the_peer_withdraws_it() {
    let mut pair = Pair::req_received();
    pair.a.manager.release(pair.a.now, pair.at_a);
    let rej = pair.a.sent_one();
    pair.b.receive(0, rej.clone());
    let [Event::Failed { id, failure: Failure::Rejected { reason, .. } }] = &pair.b.events()[..] else { panic!() };
    assert_eq!((*id, *reason), (pair.at_b, RejectReason::TIMEOUT));
    assert_eq!(pair.b.manager.accept(pair.b.now, pair.at_b, reply(3, 3)), Err(CallError::State));
    pair.b.receive(0, rej);
    assert_eq!(pair.b.events(), []);
}

#[test]
fn a_duplicate_request_gets_an_mra_until_the_program_answers() {
    let (mut pair, req) = Pair::req_sent();
    pair.b.receive(0, req.clone());
    let id = pair.b.requested();
    pair.b.receive(0, req.clone());
    assert_eq!(pair.b.sent_one(), mra(id, pair.at_a, Answered::Req, 24));
    assert_eq!(pair.b.events(), []);
    pair.b.manager.accept(pair.b.now, id, reply(7, 7)).unwrap();
    let rep = pair.b.sent_one();
    pair.b.receive(0, req);
    assert_eq!(pair.b.sent(), [], "the REP has its own timer");
    pair.b.wait_for_timer();
    assert_eq!(pair.b.sent_one(), rep);
}

#[test]
fn a_duplicate_of_the_request_of_an_ended_connection_is_stale() {
    let (mut pair, req) = Pair::req_sent();
    pair.b.receive(0, req.clone());
    pair.at_b = pair.b.accept(QPNS.1);
    pair.settle();
    pair.a.manager.establish(pair.at_a).unwrap();
    pair.a.manager.disconnect(pair.a.now, pair.at_a).unwrap();
    pair.settle();
    pair.b.manager.disconnect(pair.b.now, pair.at_b).unwrap();
    pair.settle();
    pair.b.events();
    pair.b.receive(0, req);
    let Message::Rej(rej) = pair.b.sent_one() else { panic!("no REJ") };
    assert_eq!((rej.answers, rej.reason), (Answered::Req, RejectReason::STALE_CONN));
    assert_eq!(pair.b.events(), []);
}

#[test]
fn a_duplicate_reply_gets_an_mra_until_the_program_establishes_and_then_an_rtu() {
    let (mut pair, rep) = Pair::rep_sent();
    pair.a.receive(1, rep.clone());
    assert_eq!(pair.a.sent(), []);
    pair.a.receive(1, rep.clone());
    assert_eq!(pair.a.sent_one(), mra(pair.at_a, pair.at_b, Answered::Rep, 24));
    pair.a.manager.establish(pair.at_a).unwrap();
    let rtu = pair.a.sent_one();
    pair.a.receive(1, rep);
    assert_eq!(pair.a.sent_one(), rtu);
    assert_eq!(pair.a.events().len(), 1, "one reply");
    assert_eq!(pair.a.manager.establish(pair.at_a), Err(CallError::State));
}

#[test]
fn an_unanswered_reply_is_retransmitted_and_then_withdrawn() {
    let (mut pair, rep) = Pair::rep_sent();
    for _ in 0..10 {
        pair.b.wait_for_timer();
        assert_eq!(pair.b.sent_one(), rep);
    }
    pair.b.wait_for_timer();
    assert_eq!(pair.b.events(), [Event::Failed { id: pair.at_b, failure: Failure::Unreachable }]);
    let sent = pair.b.sent();
    let [(0, Message::Rej(rej)), (0, dreq @ Message::Dreq(_))] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((rej.answers, rej.reason), (Answered::Other, RejectReason::TIMEOUT));
    // Linux looks up a rejected connection by the GUID for this reason.
    assert_eq!(rej.info.as_slice(), guid(1).to_be_bytes());
    pair.b.wait_for_timer();
    assert_eq!(pair.b.sent_one(), *dreq, "until the peer confirms it");
    pair.b.wait_for_end();
    assert_eq!(pair.b.events().len(), 1, "the exit from timewait");
    assert_eq!(pair.b.manager.counts(), (0, 0));
}

#[test]
fn a_withdrawn_reply_ends_the_connection_of_a_peer_that_has_established_it() {
    for is_rej_lost in [false, true] {
        let (mut pair, _lost_rtu) = Pair::rtu_sent();
        pair.b.manager.release(pair.b.now, pair.at_b);
        if is_rej_lost {
            assert!(matches!(pair.b.manager.poll_transmit(), Some(_rej)));
        }
        pair.settle();
        assert_eq!(pair.a.events(), [Event::Disconnected { id: pair.at_a, is_confirmed: true }]);
        pair.a.manager.disconnect(pair.a.now, pair.at_a).unwrap();
        pair.settle();
        pair.a.wait_for_end();
        pair.b.wait_for_end();
        assert_eq!((pair.a.manager.counts(), pair.b.manager.counts()), ((0, 0), (0, 0)));
    }
}

#[test]
fn a_reply_for_an_unknown_connection_is_rejected() {
    let mut a = Host::new(0);
    a.receive(1, Message::Rep(Rep { local_id: 5, remote_id: 6, ..reply(1, 1) }));
    let Message::Rej(rej) = a.sent_one() else { panic!("no REJ") };
    assert_eq!((rej.local_id, rej.remote_id), (6, 5));
    assert_eq!((rej.answers, rej.reason), (Answered::Rep, RejectReason::INVALID_COMM_ID));
    assert_eq!(a.events(), []);
}

#[test]
fn a_reply_from_another_address_is_not_taken() {
    let (mut pair, rep) = Pair::rep_sent();
    pair.a.receive(2, rep.clone());
    assert_eq!(pair.a.events(), []);
    assert!(matches!(pair.a.sent()[..], [(2, Message::Rej(_))]));
    pair.a.receive(1, rep);
    assert!(matches!(pair.a.events()[..], [Event::Reply { .. }]));
}

#[test]
fn a_late_reply_to_a_failed_request_is_rejected() {
    let (mut pair, rep) = Pair::rep_sent();
    pair.a.manager.release(pair.a.now, pair.at_a);
    pair.a.sent();
    pair.a.receive(1, rep);
    let rej = pair.a.sent_one();
    assert!(matches!(&rej, Message::Rej(rej) if rej.reason == RejectReason::TIMEOUT));
    pair.b.receive(0, rej);
    assert!(matches!(pair.b.events()[..], [Event::Failed { .. }]));
}

#[test]
fn a_duplicate_of_a_rejected_reply_gets_the_same_rejection() {
    let (mut pair, rep) = Pair::rep_sent();
    pair.a.receive(1, rep.clone());
    pair.a.reject(pair.at_a);
    let rej = pair.a.sent_one();
    pair.a.receive(1, rep);
    assert_eq!(pair.a.sent_one(), rej);
    assert!(matches!(rej, Message::Rej(rej) if rej.reason == RejectReason::CONSUMER_DEFINED));
}

#[test]
fn a_reply_of_a_restarted_peer_does_not_change_an_established_connection() {
    let (mut pair, req) = Pair::req_sent();
    pair.b.receive(0, req.clone());
    pair.b.accept(QPNS.1);
    pair.settle();
    pair.a.manager.establish(pair.at_a).unwrap();
    pair.settle();
    pair.a.events();
    pair.b = Host::with(1, |config| (config.guid, config.seed) = (77, 77));
    pair.b.receive(0, req);
    let again = pair.b.accept(QPNS.1);
    pair.settle();
    assert_eq!(pair.a.manager.phase(pair.at_a), Some(Phase::Established));
    assert_eq!(pair.a.events(), []);
    let [Event::Failed { id, .. }] = &pair.b.events()[..] else { panic!("not failed") };
    assert_eq!(*id, again);
}

#[test]
fn an_rtu_for_an_unknown_connection_ends_it_at_the_peer() {
    let (mut pair, rtu) = Pair::rtu_sent();
    pair.b = Host::new(1);
    pair.b.receive(0, rtu);
    let rej = pair.b.sent_one();
    assert!(matches!(&rej, Message::Rej(rej) if rej.reason == RejectReason::INVALID_COMM_ID));
    pair.a.receive(1, rej);
    assert_eq!(pair.a.events(), [Event::Disconnected { id: pair.at_a, is_confirmed: true }]);
}

#[test]
fn a_late_rtu_for_an_ended_connection_gets_a_dreq() {
    let (mut pair, rtu) = Pair::rtu_sent();
    pair.b.manager.release(pair.b.now, pair.at_b);
    pair.b.wait_for_timer();
    while pair.b.manager.phase(pair.at_b) == Some(Phase::DreqSent) {
        pair.b.wait_for_timer();
    }
    pair.b.sent();
    pair.b.receive(0, rtu);
    let dreq = pair.b.sent_one();
    assert!(matches!(dreq, Message::Dreq(_)));
    pair.a.receive(1, dreq);
    assert_eq!(pair.a.events(), [Event::Disconnected { id: pair.at_a, is_confirmed: true }]);
}

#[test]
fn an_rtu_with_a_wrong_id_or_address_is_ignored() {
    let (mut pair, rtu) = Pair::rtu_sent();
    pair.b.receive(2, rtu.clone());
    pair.b.receive(0, Message::Rtu(Rtu { local_id: 1, remote_id: pair.at_b, private_data: [0; 224] }));
    assert_eq!((pair.b.events(), pair.b.sent()), (vec![], vec![]));
    pair.b.receive(0, rtu.clone());
    assert_eq!(pair.b.events(), [Event::Established { id: pair.at_b }]);
    pair.b.receive(0, rtu);
    assert_eq!(pair.b.events(), []);
}

#[test]
fn data_establishes_a_connection_whose_rtu_was_lost() {
    let (mut pair, _lost) = Pair::rtu_sent();
    pair.b.manager.establish_by_data(QPNS.1 + 1);
    assert_eq!(pair.b.events(), []);
    pair.b.manager.establish_by_data(QPNS.1);
    assert_eq!(pair.b.events(), [Event::Established { id: pair.at_b }]);
    assert_eq!(pair.b.manager.wake_at(), None, "the REP is not retransmitted");
    pair.b.manager.establish_by_data(QPNS.1);
    assert_eq!(pair.b.events(), []);
}

/// Retransmissions of a host until it gives up, with their intervals.
fn retransmissions(host: &mut Host) -> Vec<Duration> {
    let mut intervals = Vec::new();
    loop {
        let interval = host.wait_for_timer();
        if !host.events().is_empty() {
            return intervals;
        }
        host.sent_one();
        intervals.push(interval);
    }
}

#[test]
fn an_mra_permits_more_retransmissions_and_does_not_delay_them() {
    let (mut pair, _req) = Pair::req_sent();
    let intervals = retransmissions(&mut pair.a);
    assert_eq!((intervals.len(), intervals[0]), (10, Duration::from_millis(64)));
    // 8.2 s, and 65.5 s as in MRAs of Linux, also if the peer asks for more.
    for (timeout, extra) in [(21, 2), (24, 16), (31, 16)] {
        let (mut pair, _req) = Pair::req_sent();
        for _repeated in 0..3 {
            pair.a.receive(1, mra(5, pair.at_a, Answered::Req, timeout));
        }
        let delayed = retransmissions(&mut pair.a);
        assert_eq!((delayed.len(), &delayed[..10]), (10 + extra, &intervals[..]), "{timeout}");
    }
}

#[test]
fn an_mra_is_only_for_the_message_that_it_answers() {
    let (mut pair, _rep) = Pair::rep_sent();
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.b.receive(0, mra(at_a, at_b, Answered::Req, 24));
    pair.b.receive(2, mra(at_a, at_b, Answered::Rep, 24));
    pair.b.receive(0, mra(at_a + 1, at_b, Answered::Rep, 24));
    assert_eq!(retransmissions(&mut pair.b).len(), 10);
    let (mut pair, _rep) = Pair::rep_sent();
    pair.b.receive(0, mra(at_a, at_b, Answered::Rep, 21));
    assert_eq!(retransmissions(&mut pair.b).len(), 12);
    let mut pair = Pair::established();
    pair.b.receive(0, mra(pair.at_a, pair.at_b, Answered::Rep, 24));
    pair.b.receive(0, mra(pair.at_a, 12345, Answered::Rep, 24));
    assert_eq!(pair.b.manager.wake_at(), None);
}

#[test]
fn a_request_with_the_queue_pair_of_a_connection_ends_that_one() {
    let mut pair = Pair::established();
    // The peer was restarted, and its new queue pair has the number of the old one.
    pair.a = Host::with(0, |config| (config.guid, config.seed) = (77, 77));
    let new = pair.a.connect(1, QPNS.0);
    let req = pair.a.sent_one();
    pair.b.receive(0, req);
    assert_eq!(pair.b.events(), [Event::Disconnected { id: pair.at_b, is_confirmed: true }]);
    assert_eq!(pair.b.manager.disconnect(pair.b.now, pair.at_b), Ok(()), "it is ended already");
    pair.settle();
    let [Event::Failed { id, failure: Failure::Rejected { reason, .. } }] = &pair.a.events()[..] else { panic!() };
    assert_eq!((*id, *reason), (new, RejectReason::STALE_CONN));
    pair.b.wait_for_end();
    pair.a.connect(1, QPNS.0);
    pair.settle();
    assert!(matches!(pair.b.events()[..], [Event::TimewaitExit { .. }, Event::Request { .. }]));
}

#[test]
fn a_request_from_this_host_with_another_guid_ends_no_connection() {
    let mut pair = Pair::established();
    // Every user of a host can send from the address of a device.
    let mut forger = Host::with(0, |config| (config.guid, config.seed) = (77, 77));
    forger.connect(1, QPNS.0);
    let Message::Req(req) = forger.sent_one() else { panic!("no request") };
    let mad = Mad { transaction: 1, message: Message::Req(req) }.encode();
    pair.b.manager.handle(pair.b.now, Peer { is_local: true, ..peer(0) }, &mad);
    assert!(matches!(pair.b.sent_one(), Message::Rej(rej) if rej.reason == RejectReason::STALE_CONN));
    assert_eq!((pair.b.manager.phase(pair.at_b), pair.b.events()), (Some(Phase::Established), vec![]));
}

#[test]
fn a_reply_with_the_queue_pair_of_a_connection_ends_that_one_and_fails() {
    let mut pair = Pair::established();
    pair.b = Host::with(1, |config| (config.guid, config.seed) = (77, 77));
    let new = pair.a.connect(1, QPNS.0 + 1);
    pair.settle();
    let at_b = pair.b.accept(QPNS.1);
    pair.settle();
    let events = pair.a.events();
    assert!(
        matches!(&events[..], [Event::Failed { id, .. }, Event::Disconnected { id: old, .. }]
        if (*id, *old) == (new, pair.at_a)),
        "{events:?}"
    );
    assert!(matches!(&pair.b.events()[..], [Event::Failed { id, .. }] if *id == at_b));
}

#[test]
fn a_stale_request_fails_before_and_after_its_acceptance() {
    for is_accepted in [false, true] {
        let mut pair = Pair::req_received();
        if is_accepted {
            pair.b.manager.accept(pair.b.now, pair.at_b, reply(QPNS.1, 101)).unwrap();
        }
        pair.a = Host::with(0, |config| (config.guid, config.seed) = (77, 77));
        pair.a.connect(1, QPNS.0);
        pair.settle();
        let [Event::Failed { id, failure: Failure::Rejected { reason, .. } }] = &pair.b.events()[..] else { panic!() };
        assert_eq!((*id, *reason), (pair.at_b, RejectReason::STALE_CONN));
        assert_eq!(pair.b.manager.counts(), (1, 0), "accepted: {is_accepted}");
    }
}

#[test]
fn the_same_queue_pair_number_of_another_address_is_not_stale() {
    let mut pair = Pair::established();
    let mut c = Host::new(2);
    c.connect(1, QPNS.0);
    let req = c.sent_one();
    pair.b.receive(2, req);
    assert!(matches!(pair.b.events()[..], [Event::Request { .. }]));
    assert_eq!(pair.b.manager.phase(pair.at_b), Some(Phase::Established));
}

#[test]
fn a_reply_with_the_id_of_another_connection_of_the_peer_is_rejected() {
    let mut pair = Pair::established();
    let second = pair.a.connect(1, QPNS.0 + 1);
    pair.a.sent();
    pair.a.receive(1, Message::Rep(Rep { local_id: pair.at_b, remote_id: second, guid: guid(1), ..reply(9, 9) }));
    assert!(matches!(pair.a.sent()[..], [(1, Message::Rej(_))]));
    assert!(matches!(&pair.a.events()[..], [Event::Failed { id, .. }] if *id == second));
    assert_eq!(pair.a.manager.phase(pair.at_a), Some(Phase::Established));
}

#[test]
fn calls_in_the_wrong_state_are_refused() {
    let mut pair = Pair::established();
    let (a, now, id) = (&mut pair.a.manager, pair.a.now, pair.at_a);
    assert_eq!(a.accept(now, id, reply(1, 1)), Err(CallError::State));
    assert_eq!(a.establish(id), Err(CallError::State));
    assert_eq!(a.reject(now, id, RejectReason::CONSUMER_DEFINED, [0; 148]), Err(CallError::State));
    assert_eq!(a.disconnect(now, 999), Err(CallError::State));
    let (mut pair, _) = Pair::req_sent();
    assert_eq!(pair.a.manager.disconnect(pair.a.now, pair.at_a), Err(CallError::State));
    let mut pair = Pair::req_received();
    assert_eq!(pair.b.manager.establish(pair.at_b), Err(CallError::State));
    assert_eq!(pair.b.manager.disconnect(pair.b.now, pair.at_b), Err(CallError::State));
}
