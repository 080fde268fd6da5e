//! Sets report the endpoints whose peers are gone, and no others.

use std::collections::BTreeSet;
use std::time::Instant;

use rdma_safe::endpoint::Armed;
use rdma_safe::{
    Completion, Endpoint, EndpointKey, EndpointSet, Error, Operation, PostError, ProtectionDomain, ReceivePool,
    WcStatus,
};

use crate::keepalive::{limit, periods, sleep_until};
use crate::support::lab::Mode;
use crate::support::{DEADLINE, Rdma, device, device_without_faults, error_of, filled, rounds, within_deadline};

const MEMBERS: usize = rounds(8, 3) as usize;
const DEPTH: u32 = 4;

/// How the endpoints of a set receive.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Receives {
    Own,
    Pool,
    /// Endpoints take turns.
    Share,
}

struct Service {
    set: EndpointSet,
    pool: ReceivePool,
    members: Vec<(EndpointKey, Option<Endpoint>)>,
}

impl Service {
    /// A set of endpoints with a keepalive, each with a receive, and their peers.
    fn new(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, receives: Receives, members: usize, events: bool) -> Self {
        let mut pool = ReceivePool::new(pd, DEPTH).unwrap();
        pool.receive(pd.allocate(8).unwrap()).unwrap();
        // Probes need no entries.
        let entries = match receives {
            Receives::Own => 2 * DEPTH * members as u32,
            Receives::Pool | Receives::Share => DEPTH + DEPTH * members as u32,
        };
        let set = EndpointSet::builder(pd.context(), entries).events(events).classic_poll(mode.classic_cq);
        let mut service = Service { set: set.build().unwrap(), pool, members: Vec::new() };
        for _ in 0..members {
            let builder = rdma.endpoint(pd).send_depth(DEPTH).recv_depth(DEPTH).inline_data(8);
            let builder = builder.keepalive(limit(rdma)).classic_post(mode.classic_qp);
            let mut peer = builder.clone().build().unwrap();
            let member = match receives {
                Receives::Own => builder,
                Receives::Pool => builder.receive_pool(&service.pool),
                Receives::Share => builder.receive_pool(&service.pool).receive_share(DEPTH),
            };
            let key = member.build_in(&mut service.set).unwrap();
            let mut endpoint = service.set.endpoint(key).unwrap();
            assert_eq!(endpoint.keepalive(), Some(limit(rdma)));
            if receives == Receives::Own {
                endpoint.receive(pd.allocate(8).unwrap()).unwrap();
            }
            peer.connect(&endpoint.address()).unwrap();
            endpoint.connect(&peer.address()).unwrap();
            service.members.push((key, Some(peer)));
        }
        service
    }

    /// Drops the peer of a member.
    fn kill(&mut self, member: usize) -> EndpointKey {
        let (key, peer) = &mut self.members[member];
        *peer = None;
        *key
    }

    /// Polls the living peers, which serve their own keepalives.
    fn poll_peers(&mut self) {
        for peer in self.members.iter_mut().filter_map(|(_, peer)| peer.as_mut()) {
            _ = peer.poll().unwrap();
        }
    }
}

#[track_caller]
fn assert_lost(done: &Completion) {
    let lost = done.connection_lost().unwrap_or_else(|| panic!("{done:?}"));
    assert!([WcStatus::RESP_TIMEOUT_ERR, WcStatus::RETRY_EXC_ERR].contains(&lost.status), "{lost}");
}

#[test]
fn a_set_reports_the_one_whose_peer_vanishes() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    for (mode, receives) in Mode::each().zip([Receives::Own, Receives::Pool, Receives::Share]) {
        let pd = rdma.pd();
        let mut service = Service::new(&rdma, &pd, mode, receives, MEMBERS, false);
        assert!(service.set.keepalive_due().is_some());
        let dead = service.kill(MEMBERS / 2);
        let (key, done) = within_deadline("the report", || {
            service.poll_peers();
            service.set.poll().unwrap()
        });
        assert_eq!(key, dead, "{mode}, {receives:?}");
        assert_lost(&done);
        let refused = service.set.endpoint(dead).unwrap().send_inline(b"refused");
        assert_eq!(refused, Err(PostError::EndpointFailed));
        if receives == Receives::Own {
            let (key, done) = service.set.wait(DEADLINE).unwrap();
            assert_eq!((key, done.operation, done.status), (dead, Operation::Receive, WcStatus::WR_FLUSH_ERR));
        }
        assert!(service.set.remove(dead).unwrap().is_empty());
        // Nothing else is reported, and the others still carry messages.
        let start = Instant::now();
        while start.elapsed() < periods(&rdma) {
            service.poll_peers();
            let more = service.set.poll().unwrap();
            assert!(more.is_none(), "{mode}, {receives:?}: {more:?}");
        }
        let (alive, peer) = &mut service.members[0];
        peer.as_mut().unwrap().send_inline(b"hello").unwrap();
        let (key, done) = within_deadline("a message", || {
            _ = peer.as_mut().unwrap().poll().unwrap();
            service.set.poll().unwrap()
        });
        assert_eq!((key, done.ok().unwrap().buffer.as_deref()), (*alive, Some(&b"hello"[..])));
    }
}

#[test]
fn a_sleeping_set_wakes_for_its_keepalives() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    let pd = rdma.pd();
    let mut service = Service::new(&rdma, &pd, Mode::EXTENDED, Receives::Own, 2, true);
    // Nobody else polls: soft0 and the kernel answer for the peers.
    let idle = error_of(service.set.wait(periods(&rdma)));
    assert!(matches!(idle, Error::Timeout { .. }), "{idle}");
    let dead = service.kill(1);
    let (key, done) = service.set.wait(DEADLINE).unwrap();
    assert_eq!(key, dead);
    assert_lost(&done);
}

#[test]
fn a_service_that_sleeps_on_the_descriptor_wakes_when_a_keepalive_is_due() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    let pd = rdma.pd();
    let mut service = Service::new(&rdma, &pd, Mode::EXTENDED, Receives::Pool, 2, true);
    let dead = service.kill(0);
    let (key, done) = loop {
        if let Some(found) = service.set.poll().unwrap() {
            break found;
        }
        if service.set.arm().unwrap() == Armed::Poll {
            continue;
        }
        sleep_until(service.set.keepalive_due(), service.set.channel().unwrap());
    };
    assert_eq!(key, dead);
    assert_lost(&done);
}

#[test]
fn a_set_that_never_finds_its_queue_empty_reports_a_peer_that_vanishes() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    for mode in Mode::each() {
        let pd = rdma.pd();
        let mut service = Service::new(&rdma, &pd, mode, Receives::Own, 2, false);
        let dead = service.kill(1);
        let alive = service.members[0].0;
        let mut messages = 0_u64;
        let (key, done) = within_deadline("the report", || {
            // The set is polled only when there is a message.
            let peer = service.members[0].1.as_mut().unwrap();
            peer.send_inline(b"busy").unwrap();
            _ = within_deadline("an ACK", || peer.poll().unwrap());
            messages += 1;
            let (key, done) = within_deadline("a message", || service.set.poll().unwrap());
            if done.connection_lost().is_some() {
                return Some((key, done));
            }
            assert_eq!(key, alive, "{done:?}");
            service.set.endpoint(alive).unwrap().receive(done.ok().unwrap().buffer.unwrap()).unwrap();
            None
        });
        assert_eq!(key, dead, "{mode}");
        assert_lost(&done);
        assert!(messages > 1);
    }
}

#[test]
fn all_endpoints_whose_peers_vanish_together_are_reported_once() {
    let Some(rdma) = device() else { return };
    let members = rounds(300, 5) as usize;
    let pd = rdma.pd();
    let mut service = Service::new(&rdma, &pd, Mode::EXTENDED, Receives::Pool, members, false);
    let mut dead: BTreeSet<_> = (0..members).map(|member| service.kill(member).index()).collect();
    within_deadline("all reports", || {
        let (key, done) = service.set.poll().unwrap()?;
        assert_lost(&done);
        assert!(dead.remove(&key.index()), "reported twice");
        dead.is_empty().then_some(())
    });
    let keys: Vec<_> = service.set.keys().collect();
    for key in keys {
        service.set.remove(key).unwrap();
    }
    assert_eq!(service.set.keepalive_due(), None);
}

#[test]
fn endpoints_that_come_and_go_are_checked_under_their_own_keys() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    let pd = rdma.pd();
    let mut service = Service::new(&rdma, &pd, Mode::EXTENDED, Receives::Own, 2, false);
    let start = Instant::now();
    while start.elapsed() < periods(&rdma) {
        // The new endpoint takes the place of the removed one.
        let (key, _) = service.members.pop().unwrap();
        let mut returned = service.set.remove(key).unwrap();
        let builder = rdma.endpoint(&pd).send_depth(DEPTH).recv_depth(DEPTH).keepalive(limit(&rdma));
        let mut peer = builder.clone().build().unwrap();
        let key = builder.build_in(&mut service.set).unwrap();
        let mut endpoint = service.set.endpoint(key).unwrap();
        endpoint.receive(returned.pop().unwrap()).unwrap();
        peer.connect(&endpoint.address()).unwrap();
        endpoint.connect(&peer.address()).unwrap();
        service.members.push((key, Some(peer)));
        for _ in 0..200 {
            service.poll_peers();
            assert!(service.set.poll().unwrap().is_none());
        }
    }
    let dead = service.kill(1);
    let (key, done) = service.set.wait(DEADLINE).unwrap();
    assert_eq!(key, dead);
    assert_lost(&done);
}

#[test]
fn a_full_set_has_room_for_probes_and_refuses_another_endpoint() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    for receives in [Receives::Own, Receives::Pool] {
        let mut service = Service::new(&rdma, &pd, Mode::EXTENDED, receives, MEMBERS, false);
        let builder = rdma.endpoint(&pd).send_depth(1).recv_depth(0).keepalive(limit(&rdma));
        let error = error_of(builder.build_in(&mut service.set));
        assert!(matches!(error, Error::EndpointSetFull { .. }), "{error}");
        // Endpoints without a keepalive in the same set are not checked.
        let mut alone = EndpointSet::builder(pd.context(), 2 * DEPTH).build().unwrap();
        let builder = rdma.endpoint(&pd).send_depth(DEPTH).recv_depth(DEPTH);
        let key = builder.build_in(&mut alone).unwrap();
        assert_eq!((alone.endpoint(key).unwrap().keepalive(), alone.keepalive_due()), (None, None));
    }
}

#[test]
fn messages_that_arrived_before_the_loss_are_handed_out() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    let pd = rdma.pd();
    let mut service = Service::new(&rdma, &pd, Mode::EXTENDED, Receives::Share, 2, false);
    let (key, peer) = &mut service.members[0];
    let (key, peer) = (*key, peer.as_mut().unwrap());
    peer.send(filled(&pd, b"last")).unwrap();
    _ = within_deadline("an ACK", || peer.poll().unwrap());
    service.kill(0);
    let (first, message) = service.set.wait(DEADLINE).unwrap();
    assert_eq!((first, message.ok().unwrap().buffer.as_deref()), (key, Some(&b"last"[..])));
    let (second, report) = service.set.wait(DEADLINE).unwrap();
    assert_eq!(second, key);
    assert_lost(&report);
}
