//! Which listener a request is for, and the backlogs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rdma_soft::cm::{Event, ListenAddress, Peer, Phase};
use rdma_soft::wire::cm::{AdditionalInfo, Answered, Mad, Message, Rej, RejectReason, Req};

use crate::harness::{Host, guid};
use crate::support::{SERVICE, address, peer, request};

/// The request of a host with a number.
fn req(from: u8, local_id: u32) -> Req {
    Req { local_id, guid: guid(from), ..request(address(from), address(1), local_id, 1) }
}

fn send(to: &mut Host, from: Peer, req: Req) {
    let mad = Mad { transaction: 1, message: Message::Req(req) };
    to.manager.handle(to.now, from, &mad.encode());
    to.manager.assert_consistent();
}

/// The sources and peers' ids of requests that have arrived, and the ids of withdrawn ones.
fn arrived(host: &mut Host) -> (Vec<u32>, Vec<u32>) {
    let (mut arrived, mut withdrawn) = (Vec::new(), Vec::new());
    for event in host.events() {
        match event {
            Event::Request { id, request, .. } => {
                assert_eq!(host.manager.phase(id), Some(Phase::ReqReceived));
                arrived.push(request.local_id);
            }
            Event::Withdrawn { id } => {
                assert_eq!(host.manager.phase(id), None);
                withdrawn.push(id);
            }
            other => panic!("{other:?}"),
        }
    }
    (arrived, withdrawn)
}

fn reason(host: &mut Host) -> RejectReason {
    match host.sent_one() {
        Message::Rej(rej) => rej.reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_for_a_service_without_a_listener_is_rejected() {
    let mut host = Host::new(1);
    send(&mut host, peer(0), Req { service: SERVICE + 1, ..req(0, 1) });
    assert_eq!(reason(&mut host), RejectReason::INVALID_SERVICE_ID);
    let listener = host.listener;
    assert_eq!(host.manager.close_listener(listener), []);
    send(&mut host, peer(0), req(0, 1));
    assert_eq!(reason(&mut host), RejectReason::INVALID_SERVICE_ID);
    assert_eq!((host.manager.counts(), host.events()), ((0, 0), vec![]));
}

#[test]
fn a_request_without_a_header_or_from_another_address_than_it_says_is_rejected() {
    let mut host = Host::new(1);
    let spoiled = |byte: usize, value| {
        let mut req = req(0, 1);
        req.private_data[byte] = value;
        req
    };
    // Version, IP version, and the last byte of the source.
    for req in [spoiled(0, 1), spoiled(1, 0x50), spoiled(19, 9)] {
        send(&mut host, peer(0), req);
        assert_eq!(reason(&mut host), RejectReason::INVALID_SERVICE_ID);
    }
    send(&mut host, peer(2), req(0, 1));
    assert_eq!(reason(&mut host), RejectReason::INVALID_SERVICE_ID);
    assert_eq!(host.events(), []);
}

#[test]
fn only_a_peer_of_this_host_may_name_a_loopback_address() {
    let mut host = Host::new(1);
    let loopback = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
    let req = |to| Req { local_id: 1, ..request(loopback, to, 1, 1) };
    let remote = Peer { address: loopback, ..peer(0) };
    send(&mut host, remote, req(loopback));
    assert_eq!(reason(&mut host), RejectReason::INVALID_SERVICE_ID);
    send(&mut host, Peer { is_local: true, ..peer(0) }, req(loopback));
    assert_eq!(arrived(&mut host), (vec![1], vec![]));
}

#[test]
fn the_listener_that_fits_the_address_best_gets_the_request() {
    let mut host = Host::new(1);
    let any = host.listener;
    let of = |event: Event| match event {
        Event::Request { listener, .. } => listener,
        other => panic!("{other:?}"),
    };
    send(&mut host, peer(0), req(0, 1));
    let v4 = host.manager.listen(SERVICE, ListenAddress::AnyV4, 4);
    let v6 = host.manager.listen(SERVICE, ListenAddress::AnyV6, 4);
    send(&mut host, peer(0), req(0, 2));
    let one = host.manager.listen(SERVICE, ListenAddress::One(address(1)), 4);
    let other = host.manager.listen(SERVICE, ListenAddress::One(address(3)), 4);
    send(&mut host, peer(0), req(0, 3));
    let (from, to) = (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::UNSPECIFIED.into());
    send(&mut host, Peer { address: from, ..peer(0) }, Req { local_id: 4, ..request(from, to, 4, 1) });
    let listeners: Vec<u32> = host.events().into_iter().map(of).collect();
    assert_eq!(listeners, [any, v4, one, v6]);
    assert_ne!(other, one);
}

#[test]
fn a_full_backlog_drops_requests_until_the_program_takes_one() {
    let mut host = Host::new(1);
    (1..=5).for_each(|id| send(&mut host, peer(0), req(0, id)));
    let first = match &host.events()[..] {
        events @ [Event::Request { id, .. }, ..] => {
            assert_eq!(events.len(), 4);
            *id
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(host.sent(), [], "the peer retransmits");
    host.manager.take_request(first);
    host.manager.take_request(first);
    send(&mut host, peer(0), req(0, 5));
    send(&mut host, peer(0), req(0, 6));
    assert_eq!(arrived(&mut host), (vec![5], vec![]));
}

#[test]
fn another_source_takes_the_place_of_the_newest_request_of_the_busiest_one() {
    let mut host = Host::new(1);
    (1..=4).for_each(|id| send(&mut host, peer(0), req(0, id)));
    let Some(Event::Request { id: newest, .. }) = host.events().pop() else { panic!("no request") };
    send(&mut host, peer(2), req(2, 20));
    assert_eq!(arrived(&mut host), (vec![20], vec![newest]));
    send(&mut host, peer(2), req(2, 21));
    assert_eq!(arrived(&mut host).0, [21]);
    send(&mut host, peer(2), req(2, 22));
    send(&mut host, peer(0), req(0, 5));
    assert_eq!(arrived(&mut host), (vec![], vec![]), "both have their share");
    // The withdrawn request is as if it had not arrived.
    assert_eq!(host.manager.counts(), (0, 4));
    assert_eq!(host.sent(), []);
}

#[test]
fn a_retransmission_takes_the_place_of_a_request_that_arrived_once() {
    let mut host = Host::new(1);
    (2..=5).for_each(|from| send(&mut host, peer(from), req(from, from.into())));
    arrived(&mut host);
    send(&mut host, peer(0), req(0, 1));
    assert_eq!(arrived(&mut host), (vec![], vec![]));
    send(&mut host, peer(4), req(4, 4));
    send(&mut host, peer(5), req(5, 5));
    assert_eq!(host.sent().len(), 2, "MRAs");
    send(&mut host, peer(0), req(0, 1));
    let (new, withdrawn) = arrived(&mut host);
    assert_eq!((new, withdrawn.len()), (vec![1], 1));
    send(&mut host, peer(3), req(3, 3));
    assert_eq!(arrived(&mut host).0, [], "it was the newest that had arrived once");
}

/// Ends a request as its peer does when it gives up.
fn give_up(host: &mut Host, from: u8, local_id: u32) {
    let (answers, info) = (Answered::Req, AdditionalInfo::new(&guid(from).to_be_bytes()));
    let reason = RejectReason::TIMEOUT;
    host.receive(from, Message::Rej(Rej { local_id, remote_id: 0, answers, reason, info, private_data: [0; 148] }));
}

#[test]
fn requests_that_have_ended_keep_their_places_until_others_need_them() {
    let mut host = Host::new(1);
    let mut unread = Vec::new();
    let learn = |host: &mut Host, unread: &mut Vec<u32>| {
        for event in host.events() {
            match event {
                Event::Request { id, .. } => unread.push(id),
                Event::Withdrawn { id } => unread.retain(|of| *of != id),
                // The program learns of it when it answers.
                Event::Failed { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    };
    for local_id in 1..=100 {
        send(&mut host, peer(0), req(0, local_id));
        give_up(&mut host, 0, local_id);
        learn(&mut host, &mut unread);
        assert_eq!(unread.len(), 4.min(local_id as usize), "the backlog has four places");
    }
    (101..=103).for_each(|local_id| send(&mut host, peer(0), req(0, local_id)));
    learn(&mut host, &mut unread);
    let is_live = |id: &&u32| host.manager.phase(**id) == Some(Phase::ReqReceived);
    assert_eq!((unread.len(), unread.iter().filter(is_live).count()), (4, 3));
    assert!(host.manager.reject(host.now, unread[0], RejectReason::CONSUMER_DEFINED, [0; 148]).is_err());
    give_up(&mut host, 0, 103);
    host.wait_for_end();
    learn(&mut host, &mut unread);
    assert_eq!((unread.len(), host.manager.counts()), (3, (0, 2)), "after timewait nothing is left of the ended one");
    host.manager.assert_consistent();
}

#[test]
fn a_backlog_is_not_longer_than_the_manager_allows() {
    let mut host = Host::with(1, |config| config.max_backlog = 2);
    let listener = host.listener;
    host.manager.close_listener(listener);
    host.manager.listen(SERVICE, ListenAddress::Any, usize::MAX);
    (1..=3).for_each(|id| send(&mut host, peer(0), req(0, id)));
    assert_eq!(arrived(&mut host).0, [1, 2]);
}

#[test]
fn a_listener_without_a_backlog_takes_no_requests() {
    let mut host = Host::new(1);
    host.manager.listen(SERVICE, ListenAddress::AnyV4, 0);
    (1..=2).for_each(|_| send(&mut host, peer(0), req(0, 1)));
    assert_eq!((arrived(&mut host), host.sent()), ((vec![], vec![]), vec![]));
}

#[test]
fn closing_a_listener_returns_the_requests_that_the_program_has_not_taken() {
    let mut host = Host::new(1);
    (1..=3).for_each(|id| send(&mut host, peer(0), req(0, id)));
    let ids: Vec<u32> = host.events().into_iter().map(|event| request_id(&event)).collect();
    host.manager.take_request(ids[1]);
    let listener = host.listener;
    let rest = host.manager.close_listener(listener);
    assert_eq!(rest, [ids[0], ids[2]]);
    rest.into_iter().for_each(|id| host.manager.release(host.now, id));
    assert_eq!(host.sent().len(), 2, "rejections");
    assert_eq!(host.manager.phase(ids[1]), Some(Phase::ReqReceived));
    assert_eq!(host.manager.close_listener(listener), []);
    host.manager.assert_consistent();
}

fn request_id(event: &Event) -> u32 {
    match event {
        Event::Request { id, .. } => *id,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rejected_request_leaves_the_backlog() {
    let mut host = Host::new(1);
    (1..=4).for_each(|id| send(&mut host, peer(0), req(0, id)));
    let ids: Vec<u32> = host.events().iter().map(request_id).collect();
    host.reject(ids[0]);
    host.manager.release(host.now, ids[1]);
    assert_eq!(host.sent().len(), 2);
    (5..=7).for_each(|id| send(&mut host, peer(0), req(0, id)));
    assert_eq!(arrived(&mut host).0, [5, 6]);
}
