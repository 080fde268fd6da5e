//! Limits of memory, and what the manager does when it is full.

use std::time::Duration;

use rdma_soft::cm::{CallError, Event, Failure, Phase};
use rdma_soft::wire::cm::{Message, RejectReason};

use crate::harness::{Host, Pair, QPNS, deliver};
use crate::support::{address, lookup, peer, reply, request};

#[test]
fn connections_and_lookups_share_the_limit() {
    let mut a = Host::with(0, |config| config.max_connections = 2);
    a.connect(1, 1);
    a.manager.look_up(a.now, peer(1), lookup(address(0), address(1))).unwrap();
    let third = request(address(0), address(1), 2, 2);
    assert_eq!(a.manager.connect(a.now, peer(1), third.clone()), Err(CallError::Full));
    assert_eq!(a.manager.look_up(a.now, peer(1), lookup(address(0), address(1))), Err(CallError::Full));
    while a.manager.counts() != (1, 0) || a.manager.lookup_counts() != (0, 0) {
        a.wait_for_timer();
    }
    assert_eq!(a.events().len(), 2, "both have failed");
    assert!(a.manager.connect(a.now, peer(1), third).is_ok(), "timewait takes no room");
}

#[test]
fn a_request_to_a_full_manager_is_rejected() {
    let mut b = Host::with(1, |config| config.max_connections = 1);
    b.connect(2, 1);
    b.sent();
    let mut a = Host::new(0);
    a.connect(1, 1);
    deliver(&mut a, &mut b);
    let Message::Rej(rej) = b.sent_one() else { panic!("no REJ") };
    assert_eq!(rej.reason, RejectReason::NO_RESOURCES);
    assert_eq!((b.events(), b.manager.counts()), (vec![], (0, 1)));
}

#[test]
fn a_full_manager_gives_up_the_connection_that_has_waited_longest_for_an_rtu() {
    let mut b = Host::with(1, |config| config.max_connections = 2);
    let mut peers: Vec<Host> = [0, 2, 3].map(Host::new).into();
    let mut ids = Vec::new();
    for a in &mut peers[..2] {
        a.connect(1, 1);
        deliver(a, &mut b);
        ids.push(b.accept(QPNS.1 + ids.len() as u32));
        b.sent();
        b.wait(Duration::from_millis(10));
    }
    let last = &mut peers[2];
    last.connect(1, 1);
    deliver(last, &mut b);
    assert!(matches!(b.sent_one(), Message::Rej(rej) if rej.reason == RejectReason::NO_RESOURCES), "a peer needs time");
    b.wait(Duration::from_millis(200));
    b.sent();
    last.events();
    last.connect(1, 2);
    deliver(last, &mut b);
    let events = b.events();
    let [Event::Failed { id, failure: Failure::Unreachable }, Event::Request { .. }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(*id, ids[0]);
    // If the peer has established the connection after all, the DREQ ends it there.
    let sent = b.sent();
    assert!(matches!(&sent[..], [(0, Message::Dreq(_))]), "{sent:?}");
    assert_eq!((b.manager.counts(), b.manager.phase(ids[1])), ((1, 2), Some(Phase::RepSent)));
}

#[test]
fn an_established_connection_is_not_given_up_for_another() {
    let mut pair = Pair::established();
    let mut b = Host::with(1, |config| config.max_connections = 1);
    let mut a = Host::new(0);
    let at_a = a.connect(1, QPNS.0);
    deliver(&mut a, &mut b);
    let at_b = b.accept(QPNS.1);
    deliver(&mut b, &mut a);
    a.manager.establish(at_a).unwrap();
    deliver(&mut a, &mut b);
    b.wait(Duration::from_secs(60));
    pair.a.connect(1, 9);
    deliver(&mut pair.a, &mut b);
    assert!(matches!(b.sent_one(), Message::Rej(rej) if rej.reason == RejectReason::NO_RESOURCES));
    assert_eq!(b.manager.phase(at_b), Some(Phase::Established));
}

/// Ends `count` connections of a host one after the other, and returns the numbers of their queue pairs.
fn end_connections(b: &mut Host, count: u32) -> Vec<u32> {
    let mut a = Host::new(0);
    for qpn in 1..=count {
        let at_a = a.connect(1, qpn);
        deliver(&mut a, b);
        let at_b = b.accept(qpn + 100);
        deliver(b, &mut a);
        a.manager.establish(at_a).unwrap();
        a.manager.release(a.now, at_a);
        deliver(&mut a, b);
        b.manager.disconnect(b.now, at_b).unwrap();
        deliver(b, &mut a);
        b.events();
        b.wait(Duration::from_millis(1));
    }
    (101..=100 + count).filter(|qpn| b.manager.uses_qpn(*qpn)).collect()
}

#[test]
fn the_oldest_connections_leave_timewait_beyond_the_limit() {
    let mut b = Host::with(1, |config| config.max_timewait = 3);
    assert_eq!(end_connections(&mut b, 5), [103, 104, 105]);
    assert_eq!(b.manager.counts(), (3, 0));
}

#[test]
fn rejected_requests_do_not_push_connections_out_of_timewait() {
    let mut b = Host::with(1, |config| config.max_timewait = 3);
    let used = end_connections(&mut b, 3);
    let mut c = Host::new(2);
    for qpn in 1..=10 {
        c.connect(1, qpn);
        deliver(&mut c, &mut b);
        let id = b.requested();
        b.reject(id);
        b.sent();
    }
    assert_eq!(b.manager.counts(), (6, 0));
    assert!(used.iter().all(|qpn| b.manager.uses_qpn(*qpn)) && used.len() == 3);
}

#[test]
fn ids_are_not_zero_and_differ() {
    let mut a = Host::new(0);
    let ids: std::collections::BTreeSet<u32> = (1..=1000).map(|qpn| a.connect(1, qpn)).collect();
    assert_eq!((ids.len(), ids.contains(&0)), (1000, false));
    let mut again = Host::with(0, |config| config.seed = 99);
    assert!(!ids.contains(&again.connect(1, 1)), "another seed draws other ids");
}

#[test]
fn a_connection_to_the_own_manager_works() {
    let mut host = Host::new(0);
    let loopback = |host: &mut Host| {
        while let Some(transmit) = host.manager.poll_transmit() {
            host.manager.handle(host.now, peer(0), &transmit.mad[..]);
            host.manager.assert_consistent();
        }
    };
    let active = host.connect(0, 1);
    loopback(&mut host);
    let passive = host.requested();
    host.manager.accept(host.now, passive, reply(2, 2)).unwrap();
    loopback(&mut host);
    host.manager.establish(active).unwrap();
    loopback(&mut host);
    host.manager.release(host.now, active);
    loopback(&mut host);
    let events = host.events();
    assert!(
        matches!(&events[..], [Event::Reply { .. }, Event::Established { .. }, Event::Disconnected { .. }]),
        "{events:?}"
    );
    host.manager.release(host.now, passive);
    loopback(&mut host);
    host.wait_for_end();
    assert_eq!(host.manager.counts(), (0, 0));
}
