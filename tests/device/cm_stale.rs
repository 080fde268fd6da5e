//! Ids that are used twice, late, or after their peer has gone: told by an errno that says so, and harmless.

use std::thread;

use rdma_safe::cm::{
    CmError, ConnectParameters, Connector, EventChannel, EventKind, Id, Listener, PortSpace, RejectReason,
};
use rdma_safe::{Errno, Error, QueuePairState};

use crate::channel::is_readable;
use crate::cm::{RESOLVE, address, listener, next, request, resolved};
use crate::cm_connections::connected;
use crate::support::{DEADLINE, device_with_cm, error_of, within_deadline};

#[track_caller]
fn fails(result: Result<(), Error>, call: &str, errno: i32) {
    match error_of(result) {
        Error::Cm(CmError::Call { call: found, errno: Errno(number) }) => assert_eq!((found, number), (call, errno)),
        other => panic!("{other:?}"),
    }
}

/// Parameters of a queue pair that nobody else names: the kernel takes two requests of one number for one connection.
fn parameters(number: u32) -> ConnectParameters {
    ConnectParameters::new(0x0020_0000 | number)
}

/// Both ends of a connection without queue pairs.
struct Ends {
    active: Id,
    passive: Id,
}

impl Ends {
    fn connect(channels: [&EventChannel; 2], numbers: [u32; 2], address: std::net::Ipv4Addr) -> Ends {
        let (server, local) = listener(channels[1], address);
        let mut active = resolved(channels[0], local);
        active.connect(&parameters(numbers[0])).unwrap();
        let (mut passive, _) = request(channels[1], &server);
        passive.accept(&parameters(numbers[1])).unwrap();
        assert!(matches!(next(channels[0], active.id()), EventKind::ConnectResponse(_)));
        active.establish().unwrap();
        assert!(matches!(next(channels[1], passive.id()), EventKind::Established(_)));
        Ends { active, passive }
    }
}

/// Everything but ending it, of an id that has been connected.
#[track_caller]
fn is_of_no_further_use(id: &mut Id) {
    let there = id.peer_address().unwrap();
    fails(id.connect(&parameters(1)), "rdma_connect", libc::EINVAL);
    fails(id.accept(&parameters(1)), "rdma_accept", libc::EINVAL);
    fails(id.establish(), "rdma_establish", libc::EINVAL);
    fails(id.reject(b"late"), "rdma_reject", libc::EINVAL);
    fails(id.listen(1), "rdma_listen", libc::EINVAL);
    fails(id.bind(id.local_address().unwrap()), "rdma_bind_addr", libc::EINVAL);
    fails(id.resolve_address(None, there, RESOLVE), "rdma_resolve_addr", libc::EINVAL);
    fails(id.resolve_route(RESOLVE), "rdma_resolve_route", libc::EINVAL);
    assert_eq!(id.peer_address(), Some(there));
}

#[test]
fn an_id_connects_once() {
    let Some(rdma) = device_with_cm() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    let (server, local) = listener(&channels[1], address);
    let mut active = resolved(&channels[0], local);
    active.connect(&parameters(0x10)).unwrap();
    fails(active.connect(&parameters(0x11)), "rdma_connect", libc::EINVAL);
    // The first goes on.
    let (mut passive, asked) = request(&channels[1], &server);
    assert_eq!(crate::cm::peer(&asked).qp_num, 0x20_0010);
    passive.accept(&parameters(0x12)).unwrap();
    fails(passive.accept(&parameters(0x13)), "rdma_accept", libc::EINVAL);
    fails(passive.reject(b"after all"), "rdma_reject", libc::EINVAL);
    assert!(matches!(next(&channels[0], active.id()), EventKind::ConnectResponse(_)));
    active.establish().unwrap();
    assert!(matches!(next(&channels[1], passive.id()), EventKind::Established(_)));
    for id in [&mut active, &mut passive] {
        is_of_no_further_use(id);
    }
    for channel in &channels {
        assert!(channel.try_event().unwrap().is_none(), "a refused call has no event");
    }
    // Who is connected still is.
    active.disconnect().unwrap();
    assert!(matches!(next(&channels[1], passive.id()), EventKind::Disconnected));
}

#[test]
fn the_id_of_a_connection_connects_to_nobody_else() {
    let Some(rdma) = device_with_cm() else { return };
    let Some(address) = address(&rdma) else { return };
    let mut listener = Listener::bind((address, 0)).unwrap();
    let (a, mut b) = connected(&Connector::new(), &mut listener);
    let (endpoint, mut id) = a.into_parts();
    is_of_no_further_use(&mut id);
    assert!(b.is_connected().unwrap());
    // What is left of it ends the connection.
    drop(id);
    within_deadline("the end", || (!b.is_connected().unwrap()).then_some(()));
    drop(endpoint);
}

#[test]
fn a_port_is_connected_from_once() {
    let Some(rdma) = device_with_cm() else { return };
    let Some(address) = address(&rdma) else { return };
    let channel = EventChannel::new().unwrap();
    let (_server, local) = listener(&channel, address);
    let mut first = Id::new(&channel, PortSpace::TCP).unwrap();
    first.resolve_address(Some((address, 0).into()), local, RESOLVE).unwrap();
    assert!(matches!(next(&channel, first.id()), EventKind::AddressResolved));
    let own = first.local_address().unwrap();
    // The same source, while the other id has it.
    let mut second = Id::new(&channel, PortSpace::TCP).unwrap();
    fails(second.resolve_address(Some(own), local, RESOLVE), "rdma_resolve_addr", libc::EADDRINUSE);
    drop(second);
    let refused = error_of(Connector::new().source(own.ip().unwrap()).resolve(local));
    let error = crate::cm_connections::failure(refused);
    assert_eq!(error.cause, rdma_safe::cm::Cause::Failed(Errno(libc::EADDRINUSE)), "{error}");
    drop(first);
    let mut third = Id::new(&channel, PortSpace::TCP).unwrap();
    third.resolve_address(Some(own), local, RESOLVE).unwrap();
    assert!(matches!(next(&channel, third.id()), EventKind::AddressResolved));
    assert_eq!(third.local_address(), Some(own));
}

#[test]
fn two_that_share_a_port_connect_from_it() {
    let Some(rdma) = device_with_cm() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    let (server, local) = listener(&channels[1], address);
    let mut own = None;
    let mut pairs = Vec::new();
    for number in 0x20..0x22 {
        let mut id = Id::new(&channels[0], PortSpace::TCP).unwrap();
        id.set_reuse_address(true).unwrap();
        id.bind(own.unwrap_or((address, 0).into())).unwrap();
        id.resolve_address(None, local, RESOLVE).unwrap();
        assert!(matches!(next(&channels[0], id.id()), EventKind::AddressResolved));
        id.resolve_route(RESOLVE).unwrap();
        assert!(matches!(next(&channels[0], id.id()), EventKind::RouteResolved));
        own = id.local_address();
        id.connect(&parameters(number)).unwrap();
        let (asked, from) = request(&channels[1], &server);
        assert_eq!((asked.peer_address(), crate::cm::peer(&from).qp_num), (own, 0x20_0000 | number));
        pairs.push((id, asked));
    }
    // They have more than the port to be told apart by.
    for (number, (active, passive)) in (0x22_u32..).zip(&mut pairs) {
        passive.accept(&parameters(number)).unwrap();
        assert!(matches!(next(&channels[0], active.id()), EventKind::ConnectResponse(_)));
        active.establish().unwrap();
        assert!(matches!(next(&channels[1], passive.id()), EventKind::Established(_)));
    }
}

#[test]
fn a_request_whose_peer_has_gone_is_answered_in_vain() {
    let Some(rdma) = device_with_cm() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    let (server, local) = listener(&channels[1], address);
    let mut client = resolved(&channels[0], local);
    client.connect(&parameters(0x30)).unwrap();
    let (mut asked, _) = request(&channels[1], &server);
    drop(client);
    // The kernel knows of it, and tells nobody.
    within_deadline("the end of the request", || asked.attributes(QueuePairState::RTR).is_err().then_some(()));
    fails(asked.accept(&parameters(0x31)), "rdma_accept", libc::EINVAL);
    fails(asked.reject(b"too late"), "rdma_reject", libc::EINVAL);
    fails(asked.establish(), "rdma_establish", libc::EINVAL);
    // There is nobody to tell it to, which the kernel takes for done.
    asked.disconnect().unwrap();
    fails(asked.attributes(QueuePairState::RTR).map(drop), "rdma_init_qp_attr", libc::EINVAL);
    assert!(channels[1].try_event().unwrap().is_none());
    asked.destroy().unwrap();
    Ends::connect([&channels[0], &channels[1]], [0x32, 0x33], address);
}

#[test]
fn an_id_whose_connection_has_ended_is_done_with() {
    let Some(rdma) = device_with_cm() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    for (numbers, active_goes) in [([0x40, 0x41], true), ([0x42, 0x43], false)] {
        let Ends { active, passive } = Ends::connect([&channels[0], &channels[1]], numbers, address);
        let (goes, mut stays) = if active_goes { (active, passive) } else { (passive, active) };
        goes.destroy().unwrap();
        let channel = stays.channel().clone();
        assert!(matches!(next(&channel, stays.id()), EventKind::Disconnected));
        is_of_no_further_use(&mut stays);
        for _ in 0..2 {
            stays.disconnect().unwrap();
        }
        is_of_no_further_use(&mut stays);
        stays.destroy().unwrap();
        assert!(channel.try_event().unwrap().is_none());
    }
}

#[test]
fn events_of_an_id_go_with_it() {
    let Some(rdma) = device_with_cm() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    let (server, local) = listener(&channels[1], address);
    // Of an address, not read.
    let mut id = Id::new(&channels[0], PortSpace::TCP).unwrap();
    id.resolve_address(None, local, RESOLVE).unwrap();
    assert!(is_readable(&channels[0], DEADLINE), "an event in time");
    id.destroy().unwrap();
    assert!(channels[0].try_event().unwrap().is_none());
    // Of a request, not read: who asked is refused.
    let mut client = resolved(&channels[0], local);
    client.connect(&parameters(0x50)).unwrap();
    assert!(is_readable(&channels[1], DEADLINE), "an event in time");
    server.destroy().unwrap();
    assert!(channels[1].try_event().unwrap().is_none());
    let event = next(&channels[0], client.id());
    assert!(matches!(event, EventKind::Rejected(RejectReason::CONSUMER_DEFINED, _)), "{event:?}");
    // Of one that was read, it is a copy.
    let (server, local) = listener(&channels[1], address);
    let mut client = resolved(&channels[0], local);
    client.connect(&parameters(0x51)).unwrap();
    let event = channels[1].wait(DEADLINE).unwrap().expect("a request in time");
    let name = server.id();
    server.destroy().unwrap();
    client.destroy().unwrap();
    assert_eq!(event.id, name);
    assert!(matches!(&event.kind, EventKind::ConnectRequest(id, _) if id.peer_address().is_some()), "{event:?}");
    drop(channels);
    drop(event);
}

#[test]
fn a_connection_that_the_peer_still_has_is_stale() {
    let Some(rdma) = device_with_cm() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    let Ends { mut active, passive } = Ends::connect([&channels[0], &channels[1]], [0x60, 0x61], address);
    let (_server, local) = listener(&channels[1], address);
    // As of a host that has started anew, and gives the same number to a queue pair.
    let mut client = resolved(&channels[0], local);
    client.connect(&parameters(0x60)).unwrap();
    let event = next(&channels[0], client.id());
    match event {
        EventKind::Rejected(reason, _) => {
            assert_eq!(reason, RejectReason::STALE_CONNECTION);
            assert_eq!(reason.to_string(), "the peer still has such a connection");
        }
        other => panic!("{other:?}"),
    }
    // The former ends by that.
    assert!(matches!(next(&channels[0], active.id()), EventKind::Disconnected));
    active.disconnect().unwrap();
    assert!(matches!(next(&channels[1], passive.id()), EventKind::Disconnected));
}

#[test]
fn an_end_that_both_declare_at_once_is_one() {
    let Some(rdma) = device_with_cm() else { return };
    let Some(address) = address(&rdma) else { return };
    let mut listener = Listener::bind((address, 0)).unwrap();
    let connector = Connector::new();
    for _ in 0..10 {
        let (a, b) = connected(&connector, &mut listener);
        let buffers = thread::scope(|scope| {
            let other = scope.spawn(move || b.disconnect());
            [a.disconnect(), other.join().unwrap()].map(|buffers| buffers.unwrap().len())
        });
        assert_eq!(buffers, [1, 1]);
    }
}
