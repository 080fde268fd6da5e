//! Ids that are used twice, too late, or after their peer is gone. The calls fail with an errno and do no harm.

use std::thread;

use rdma_safe::cm::{
    CmError, ConnectParameters, Connector, EventChannel, EventKind, Id, Listener, PortSpace, RejectReason,
};
use rdma_safe::{Errno, Error, QueuePairState};

use crate::channel::is_readable;
use crate::cm::{RESOLVE, address, listener, next, request, resolved};
use crate::cm_connections::connected;
use crate::support::{DEADLINE, device, error_of, within_deadline};

#[track_caller]
fn expect_error(result: Result<(), Error>, call: &str, errno: i32) {
    match error_of(result) {
        Error::Cm(CmError::Call { verb, errno: Errno(number) }) => assert_eq!((verb.name(), number), (call, errno)),
        other => panic!("{other:?}"),
    }
}

/// Parameters with a queue pair number that no other test uses: the kernel takes two requests with one number for the same
/// connection.
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

/// Checks that an id that was connected refuses every call except to disconnect and destroy it.
#[track_caller]
fn expect_unusable(id: &mut Id) {
    let peer = id.peer_address().unwrap();
    expect_error(id.connect(&parameters(1)), "rdma_connect", libc::EINVAL);
    expect_error(id.accept(&parameters(1)), "rdma_accept", libc::EINVAL);
    expect_error(id.establish(), "rdma_establish", libc::EINVAL);
    expect_error(id.reject(b"late"), "rdma_reject", libc::EINVAL);
    expect_error(id.listen(1), "rdma_listen", libc::EINVAL);
    expect_error(id.bind(id.local_address().unwrap()), "rdma_bind_addr", libc::EINVAL);
    expect_error(id.resolve_address(None, peer, RESOLVE), "rdma_resolve_addr", libc::EINVAL);
    expect_error(id.resolve_route(RESOLVE), "rdma_resolve_route", libc::EINVAL);
    assert_eq!(id.peer_address(), Some(peer));
}

#[test]
fn an_id_connects_once() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    let (server, local) = listener(&channels[1], address);
    let mut active = resolved(&channels[0], local);
    active.connect(&parameters(0x10)).unwrap();
    expect_error(active.connect(&parameters(0x11)), "rdma_connect", libc::EINVAL);
    // The first request is still valid.
    let (mut passive, received) = request(&channels[1], &server);
    assert_eq!(crate::cm::peer_parameters(&received).qp_num, 0x20_0010);
    passive.accept(&parameters(0x12)).unwrap();
    expect_error(passive.accept(&parameters(0x13)), "rdma_accept", libc::EINVAL);
    expect_error(passive.reject(b"after all"), "rdma_reject", libc::EINVAL);
    assert!(matches!(next(&channels[0], active.id()), EventKind::ConnectResponse(_)));
    active.establish().unwrap();
    assert!(matches!(next(&channels[1], passive.id()), EventKind::Established(_)));
    for id in [&mut active, &mut passive] {
        expect_unusable(id);
    }
    for channel in &channels {
        assert!(channel.try_event().unwrap().is_none(), "a refused call causes no event");
    }
    // The connection is still established.
    active.disconnect().unwrap();
    assert!(matches!(next(&channels[1], passive.id()), EventKind::Disconnected));
}

#[test]
fn the_id_of_a_connection_cannot_connect_again() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let mut listener = Listener::bind((address, 0)).unwrap();
    let (a, mut b) = connected(&Connector::new(), &mut listener);
    let (endpoint, mut id) = a.into_parts();
    expect_unusable(&mut id);
    assert!(b.is_connected().unwrap());
    // Dropping the id ends the connection.
    drop(id);
    within_deadline("the disconnect", || (!b.is_connected().unwrap()).then_some(()));
    drop(endpoint);
}

#[test]
fn a_source_port_in_use_is_refused() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channel = EventChannel::new().unwrap();
    let (_server, local) = listener(&channel, address);
    let mut first = Id::new(&channel, PortSpace::TCP).unwrap();
    first.resolve_address(Some((address, 0).into()), local, RESOLVE).unwrap();
    assert!(matches!(next(&channel, first.id()), EventKind::AddressResolved));
    let own = first.local_address().unwrap();
    // The same source address, while the other id uses it.
    let mut second = Id::new(&channel, PortSpace::TCP).unwrap();
    expect_error(second.resolve_address(Some(own), local, RESOLVE), "rdma_resolve_addr", libc::EADDRINUSE);
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
fn two_ids_that_reuse_a_port_connect_from_it() {
    let Some(rdma) = device() else { return };
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
        let (incoming, from) = request(&channels[1], &server);
        assert_eq!((incoming.peer_address(), crate::cm::peer_parameters(&from).qp_num), (own, 0x20_0000 | number));
        pairs.push((id, incoming));
    }
    // The port alone does not identify a connection, so both can be established.
    for (number, (active, passive)) in (0x22_u32..).zip(&mut pairs) {
        passive.accept(&parameters(number)).unwrap();
        assert!(matches!(next(&channels[0], active.id()), EventKind::ConnectResponse(_)));
        active.establish().unwrap();
        assert!(matches!(next(&channels[1], passive.id()), EventKind::Established(_)));
    }
}

#[test]
fn a_request_of_a_destroyed_client_cannot_be_answered() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    let (server, local) = listener(&channels[1], address);
    let mut client = resolved(&channels[0], local);
    client.connect(&parameters(0x30)).unwrap();
    let (mut incoming, _) = request(&channels[1], &server);
    drop(client);
    if rdma.loses_cm_messages() && incoming.accept(&parameters(0x31)).is_ok() {
        // The withdrawal is late or lost. The client answers the reply with a rejection.
        let event = next(&channels[1], incoming.id());
        return assert!(matches!(event, EventKind::Rejected(..)), "{event:?}");
    }
    // The kernel notices it and reports no event.
    within_deadline("the end of the request", || incoming.attributes(QueuePairState::RTR).is_err().then_some(()));
    expect_error(incoming.accept(&parameters(0x31)), "rdma_accept", libc::EINVAL);
    expect_error(incoming.reject(b"too late"), "rdma_reject", libc::EINVAL);
    expect_error(incoming.establish(), "rdma_establish", libc::EINVAL);
    // Without a peer the kernel treats the disconnect as done.
    incoming.disconnect().unwrap();
    expect_error(incoming.attributes(QueuePairState::RTR).map(drop), "rdma_init_qp_attr", libc::EINVAL);
    assert!(channels[1].try_event().unwrap().is_none());
    incoming.destroy().unwrap();
    Ends::connect([&channels[0], &channels[1]], [0x32, 0x33], address);
}

#[test]
fn an_id_cannot_be_reused_after_its_connection() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    for (numbers, destroy_active) in [([0x40, 0x41], true), ([0x42, 0x43], false)] {
        let Ends { active, passive } = Ends::connect([&channels[0], &channels[1]], numbers, address);
        let (destroyed, mut remaining) = if destroy_active { (active, passive) } else { (passive, active) };
        destroyed.destroy().unwrap();
        let channel = remaining.channel().clone();
        assert!(matches!(next(&channel, remaining.id()), EventKind::Disconnected));
        expect_unusable(&mut remaining);
        for _ in 0..2 {
            remaining.disconnect().unwrap();
        }
        expect_unusable(&mut remaining);
        remaining.destroy().unwrap();
        assert!(channel.try_event().unwrap().is_none());
    }
}

#[test]
fn unread_events_are_destroyed_with_their_id() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    let (server, local) = listener(&channels[1], address);
    // An unread event of an address.
    let mut id = Id::new(&channels[0], PortSpace::TCP).unwrap();
    id.resolve_address(None, local, RESOLVE).unwrap();
    assert!(is_readable(&channels[0], DEADLINE), "an event in time");
    id.destroy().unwrap();
    assert!(channels[0].try_event().unwrap().is_none());
    // An unread connection request, which is rejected.
    let mut client = resolved(&channels[0], local);
    client.connect(&parameters(0x50)).unwrap();
    assert!(is_readable(&channels[1], DEADLINE), "an event in time");
    server.destroy().unwrap();
    assert!(channels[1].try_event().unwrap().is_none());
    let event = next(&channels[0], client.id());
    assert!(matches!(event, EventKind::Rejected(RejectReason::CONSUMER_DEFINED, _)), "{event:?}");
    // An event that was read is a copy.
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
fn a_repeated_queue_pair_number_is_a_stale_connection() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    let Ends { mut active, passive } = Ends::connect([&channels[0], &channels[1]], [0x60, 0x61], address);
    let (_server, local) = listener(&channels[1], address);
    // A restarted host may give the same number to a queue pair.
    let mut client = resolved(&channels[0], local);
    client.connect(&parameters(0x60)).unwrap();
    // This ends the first connection. A network that reorders packets may do so before the rejection arrives.
    let mut events = [0, 1].map(|_| channels[0].wait(DEADLINE).unwrap().expect("an event in time"));
    events.sort_by_key(|event| event.id != client.id());
    let [rejected, ended] = events;
    match rejected.kind {
        EventKind::Rejected(reason, _) => {
            assert_eq!(reason, RejectReason::STALE_CONNECTION);
            assert_eq!(reason.to_string(), "the peer still has such a connection");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(ended.id, active.id());
    assert!(matches!(ended.kind, EventKind::Disconnected), "{:?}", ended.kind);
    active.disconnect().unwrap();
    assert!(matches!(next(&channels[1], passive.id()), EventKind::Disconnected));
}

#[test]
fn simultaneous_disconnects_both_succeed() {
    let Some(rdma) = device() else { return };
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
