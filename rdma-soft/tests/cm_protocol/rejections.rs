//! REJ: which connection it ends, and what it means in each state.

use rdma_soft::cm::{Ended, Event, Failure, Phase};
use rdma_soft::wire::cm::{AdditionalInfo, Answered, Message, Rej, RejectReason};

use crate::harness::{Host, PRIVATE, Pair, guid};
use crate::support::reply;

fn rej(local_id: u32, remote_id: u32, answers: Answered, reason: RejectReason) -> Message {
    Message::Rej(Rej { local_id, remote_id, answers, reason, info: AdditionalInfo::NONE, private_data: PRIVATE })
}

fn rejected(id: u32, reason: RejectReason) -> Event {
    Event::Failed { id, failure: Failure::Rejected { reason, private_data: Box::new(PRIVATE) } }
}

#[test]
fn a_rejected_request_fails_with_the_reason_and_the_private_data() {
    let mut pair = Pair::req_received();
    pair.b.reject(pair.at_b);
    pair.settle();
    assert_eq!(pair.a.events(), [rejected(pair.at_a, RejectReason::CONSUMER_DEFINED)]);
    assert_eq!(pair.b.events(), [], "the program knows it");
    for host in [&mut pair.a, &mut pair.b] {
        assert_eq!(host.manager.counts(), (1, 0));
        host.wait_for_end();
        assert_eq!((host.manager.counts(), host.events()), ((0, 0), vec![]));
    }
}

#[test]
fn a_duplicate_of_a_rejected_request_gets_the_same_rejection() {
    let (mut pair, req) = Pair::req_sent();
    pair.b.receive(0, req.clone());
    let id = pair.b.requested();
    pair.b.reject(id);
    let answer = pair.b.sent_one();
    assert_eq!(answer, rej(id, pair.at_a, Answered::Req, RejectReason::CONSUMER_DEFINED));
    pair.b.receive(0, req.clone());
    assert_eq!(pair.b.sent_one(), answer);
    pair.b.wait_for_end();
    pair.b.receive(0, req);
    assert_ne!(pair.b.requested(), id, "after timewait it is a new request");
}

#[test]
fn the_peer_may_try_again_with_the_queue_pair_of_a_rejected_request() {
    let mut pair = Pair::req_received();
    pair.b.reject(pair.at_b);
    pair.settle();
    pair.a.events();
    let again = pair.a.connect(1, crate::harness::QPNS.0);
    pair.settle();
    pair.b.accept(9);
    pair.settle();
    assert!(matches!(&pair.a.events()[..], [Event::Reply { id, .. }] if *id == again));
}

#[test]
fn a_rejected_reply_fails_at_the_passive_side() {
    let mut pair = Pair::rep_received();
    pair.a.reject(pair.at_a);
    pair.settle();
    assert_eq!(pair.b.events(), [rejected(pair.at_b, RejectReason::CONSUMER_DEFINED)]);
    assert_eq!(pair.a.events(), []);
}

#[test]
fn a_rejection_by_a_peer_that_has_no_id_for_the_request_is_taken() {
    for answers in [Answered::Req, Answered::Other] {
        let (mut pair, _) = Pair::req_sent();
        // Linux rejects with the local id 0 before its program has seen the request.
        pair.a.receive(1, rej(0, pair.at_a, answers, RejectReason::INVALID_SERVICE_ID));
        assert_eq!(pair.a.events(), [rejected(pair.at_a, RejectReason::INVALID_SERVICE_ID)]);
    }
}

#[test]
fn a_rejection_of_an_established_connection_ends_it() {
    let mut pair = Pair::established();
    pair.b.receive(0, rej(pair.at_a, pair.at_b, Answered::Other, RejectReason::INVALID_COMM_ID));
    assert_eq!(pair.b.events(), [Event::Disconnected { id: pair.at_b, is_confirmed: true }]);
    assert_eq!(pair.b.manager.phase(pair.at_b), Some(Phase::Timewait(Ended::Disconnected)));
}

#[test]
fn a_rejection_confirms_a_dreq() {
    let (mut pair, _) = Pair::dreq_sent();
    pair.a.receive(1, rej(pair.at_b, pair.at_a, Answered::Other, RejectReason::INVALID_COMM_ID));
    assert_eq!(pair.a.events(), [Event::Disconnected { id: pair.at_a, is_confirmed: true }]);
}

#[test]
fn a_rejection_of_an_ended_connection_changes_nothing() {
    let (mut pair, dreq) = Pair::dreq_sent();
    pair.b.receive(0, dreq);
    pair.b.events();
    pair.b.receive(0, rej(pair.at_a, pair.at_b, Answered::Other, RejectReason::CONSUMER_DEFINED));
    assert_eq!(pair.b.manager.phase(pair.at_b), Some(Phase::DreqReceived));
    pair.b.manager.disconnect(pair.b.now, pair.at_b).unwrap();
    pair.b.receive(0, rej(pair.at_a, pair.at_b, Answered::Other, RejectReason::CONSUMER_DEFINED));
    assert_eq!(pair.b.events(), []);
}

#[test]
fn a_rejection_from_another_address_or_for_another_id_is_ignored() {
    let mut pair = Pair::established();
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.b.receive(2, rej(at_a, at_b, Answered::Other, RejectReason::CONSUMER_DEFINED));
    pair.b.receive(0, rej(at_a + 1, at_b, Answered::Other, RejectReason::CONSUMER_DEFINED));
    pair.b.receive(0, rej(at_a, at_b + 1, Answered::Other, RejectReason::CONSUMER_DEFINED));
    pair.b.receive(0, rej(0, 0, Answered::Other, RejectReason::CONSUMER_DEFINED));
    assert_eq!(pair.b.events(), []);
    let (mut pair, _) = Pair::req_sent();
    pair.a.receive(2, rej(0, pair.at_a, Answered::Req, RejectReason::INVALID_SERVICE_ID));
    assert_eq!(pair.a.events(), []);
}

#[test]
fn a_rejection_by_timeout_names_the_connection_by_guid_and_id() {
    let by_timeout = |id, info: &[u8]| {
        let info = AdditionalInfo::new(info);
        let (answers, reason, private_data) = (Answered::Other, RejectReason::TIMEOUT, PRIVATE);
        Message::Rej(Rej { local_id: id, remote_id: 0, answers, reason, info, private_data })
    };
    let mut pair = Pair::req_received();
    pair.b.manager.accept(pair.b.now, pair.at_b, reply(3, 3)).unwrap();
    pair.b.sent();
    let guid = guid(0).to_be_bytes();
    pair.b.receive(0, by_timeout(pair.at_a, &[]));
    pair.b.receive(0, by_timeout(pair.at_a, &guid[1..]));
    pair.b.receive(0, by_timeout(pair.at_a, &[1; 8]));
    pair.b.receive(0, by_timeout(pair.at_a + 1, &guid));
    pair.b.receive(2, by_timeout(pair.at_a, &guid));
    assert_eq!(pair.b.events(), []);
    pair.b.receive(0, by_timeout(pair.at_a, &guid));
    assert_eq!(pair.b.events(), [rejected(pair.at_b, RejectReason::TIMEOUT)]);
}

#[test]
fn a_rejection_for_an_unknown_connection_is_ignored() {
    let mut host = Host::new(0);
    host.receive(1, rej(1, 2, Answered::Rep, RejectReason::CONSUMER_DEFINED));
    assert_eq!((host.events(), host.sent()), (vec![], vec![]));
}
