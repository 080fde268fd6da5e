//! SIDR_REQ and SIDR_REP.

use std::time::Duration;

use rdma_soft::cm::{CallError, ConnectionId, Event};
use rdma_soft::wire::cm::{Message, SidrStatus};

use crate::harness::{Host, deliver};
use crate::support::{DATAGRAMS, address, lookup, lookup_reply, peer};

fn look_up(from: &mut Host, to: u8) -> (ConnectionId, Message) {
    let id = from.manager.look_up(from.now, peer(to), lookup(address(from.number), address(to))).unwrap();
    (id, from.sent_one())
}

fn asked(host: &mut Host) -> ConnectionId {
    match &host.events()[..] {
        [Event::Lookup { id, .. }] => *id,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lookup_gets_the_queue_pair_of_the_service() {
    let (mut a, mut b) = (Host::new(0), Host::new(1));
    let (id, request) = look_up(&mut a, 1);
    b.receive(0, request);
    let at_b = asked(&mut b);
    b.manager.take_request(at_b);
    b.manager.reply_lookup(b.now, at_b, lookup_reply(77)).unwrap();
    assert_eq!(b.manager.reply_lookup(b.now, at_b, lookup_reply(78)), Err(CallError::State));
    deliver(&mut b, &mut a);
    let [Event::LookupReply { id: answered, reply }] = &a.events()[..] else { panic!("no reply") };
    assert_eq!((*answered, reply.qpn, reply.status, reply.service), (id, 77, SidrStatus::SUCCESS, DATAGRAMS));
    assert_eq!((a.manager.lookup_counts(), a.manager.wake_at()), ((0, 0), None));
}

#[test]
fn a_duplicate_lookup_gets_the_same_answer_until_it_is_forgotten() {
    let (mut a, mut b) = (Host::new(0), Host::new(1));
    let (_, request) = look_up(&mut a, 1);
    b.receive(0, request.clone());
    let id = asked(&mut b);
    b.receive(0, request.clone());
    assert_eq!((b.events(), b.sent()), (vec![], vec![]), "the program has not answered yet");
    b.manager.reply_lookup(b.now, id, lookup_reply(77)).unwrap();
    let answer = b.sent_one();
    b.receive(0, request.clone());
    assert_eq!(b.sent_one(), answer);
    b.wait(Duration::from_secs(7));
    assert_eq!(b.manager.lookup_counts(), (1, 0));
    b.wait(Duration::from_secs(2));
    assert_eq!(b.manager.lookup_counts(), (0, 0));
    b.receive(0, request);
    assert_ne!(asked(&mut b), id);
}

#[test]
fn an_unanswered_lookup_is_retransmitted_and_then_given_up() {
    let mut a = Host::new(0);
    let (id, request) = look_up(&mut a, 1);
    let mut took = Duration::ZERO;
    for _ in 0..6 {
        took += a.wait_for_timer();
        assert_eq!(a.sent_one(), request);
    }
    took += a.wait_for_timer();
    assert_eq!(a.events(), [Event::LookupUnreachable { id }]);
    assert_eq!((took.as_millis(), a.sent(), a.manager.wake_at()), (23_552, vec![], None));
}

#[test]
fn a_lookup_of_an_unknown_service_is_unsupported() {
    let (mut a, mut b) = (Host::new(0), Host::new(1));
    let listener = b.lookup_listener;
    b.manager.close_listener(listener);
    let (_, request) = look_up(&mut a, 1);
    b.receive(0, request);
    deliver(&mut b, &mut a);
    assert!(matches!(&a.events()[..], [Event::LookupReply { reply, .. }] if reply.status == SidrStatus::UNSUPPORTED));
    assert_eq!(b.manager.lookup_counts(), (0, 0));
}

#[test]
fn a_lookup_without_a_right_header_is_unsupported() {
    let (mut a, mut b) = (Host::new(0), Host::new(1));
    let (_, request) = look_up(&mut a, 1);
    let Message::SidrReq(mut wrong) = request.clone() else { panic!("{request:?}") };
    wrong.private_data[0] = 1;
    b.receive(0, Message::SidrReq(wrong));
    b.receive(2, request);
    let sent = b.sent();
    let [(0, Message::SidrRep(first)), (2, Message::SidrRep(second))] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((first.status, second.status), (SidrStatus::UNSUPPORTED, SidrStatus::UNSUPPORTED));
    assert_eq!(b.events(), []);
}

#[test]
fn a_released_lookup_of_a_peer_is_refused() {
    let (mut a, mut b) = (Host::new(0), Host::new(1));
    let (_, request) = look_up(&mut a, 1);
    b.receive(0, request);
    let id = asked(&mut b);
    b.manager.release_lookup(b.now, id);
    b.manager.release_lookup(b.now, id);
    deliver(&mut b, &mut a);
    assert!(matches!(&a.events()[..], [Event::LookupReply { reply, .. }] if reply.status == SidrStatus::REJECT));
}

#[test]
fn a_released_lookup_of_this_side_reports_nothing() {
    let (mut a, mut b) = (Host::new(0), Host::new(1));
    let (id, request) = look_up(&mut a, 1);
    a.manager.release_lookup(a.now, id);
    assert_eq!(a.manager.wake_at(), None);
    b.receive(0, request);
    let at_b = asked(&mut b);
    b.manager.reply_lookup(b.now, at_b, lookup_reply(7)).unwrap();
    deliver(&mut b, &mut a);
    assert_eq!((a.events(), a.sent()), (vec![], vec![]));
}

#[test]
fn a_reply_from_another_address_is_ignored() {
    let (mut a, mut b) = (Host::new(0), Host::new(1));
    let (_, request) = look_up(&mut a, 1);
    b.receive(0, request);
    let id = asked(&mut b);
    b.manager.reply_lookup(b.now, id, lookup_reply(7)).unwrap();
    let answer = b.sent_one();
    a.receive(2, answer.clone());
    assert_eq!(a.events(), []);
    a.receive(1, answer.clone());
    assert_eq!(a.events().len(), 1);
    a.receive(1, answer);
    assert_eq!(a.events(), []);
}

#[test]
fn lookups_share_the_backlog_and_give_up_their_places() {
    let mut b = Host::new(1);
    let mut sources: Vec<Host> = (2..=6).map(Host::new).collect();
    for _ in 0..4 {
        let (_, request) = look_up(&mut sources[0], 1);
        b.receive(2, request);
    }
    let Some(Event::Lookup { id: newest, .. }) = b.events().pop() else { panic!("no lookup") };
    let (_, request) = look_up(&mut sources[1], 1);
    b.receive(3, request);
    let events = b.events();
    let [Event::Withdrawn { id }, Event::Lookup { id: new, .. }] = &events[..] else { panic!("{events:?}") };
    assert_eq!((*id, b.manager.lookup_counts()), (newest, (0, 4)));
    let listener = b.lookup_listener;
    let rest = b.manager.close_listener(listener);
    assert_eq!((rest.len(), rest.last()), (4, Some(new)));
    rest.into_iter().for_each(|id| b.manager.release_lookup(b.now, id));
    assert_eq!((b.sent().len(), b.manager.lookup_counts()), (4, (4, 0)));
    b.manager.assert_consistent();
}

#[test]
fn the_oldest_answers_are_forgotten_beyond_the_limit() {
    let mut b = Host::with(1, |config| config.max_timewait = 2);
    let mut a = Host::new(0);
    let mut requests = Vec::new();
    for _ in 0..3 {
        let (_, request) = look_up(&mut a, 1);
        b.receive(0, request.clone());
        let id = asked(&mut b);
        b.manager.release_lookup(b.now, id);
        b.wait(Duration::from_millis(1));
        b.sent();
        requests.push(request);
    }
    assert_eq!(b.manager.lookup_counts(), (2, 0));
    b.receive(0, requests[2].clone());
    b.receive(0, requests[1].clone());
    assert_eq!((b.sent().len(), b.events().len()), (2, 0));
    b.receive(0, requests[0].clone());
    assert_eq!((b.sent().len(), b.events().len()), (0, 1), "it is new");
}
