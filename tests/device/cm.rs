//! Connections by address through `Id`, its events, and queue pairs of the user.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use rdma_safe::async_event::AsyncEventType;
use rdma_safe::cm::{
    CmError, CmId, ConnectParameters, Event, EventChannel, EventKind, Id, Parameters, PeerParameters, PortSpace,
    RejectReason,
};
use rdma_safe::error::Verb;
use rdma_safe::qp::Ece;
use rdma_safe::{Access, Errno, Error, QueuePair, QueuePairState};

use crate::support::lab::{Data, Lab, Mode, Op, Wr};
use crate::support::{DEADLINE, Rdma, device, error_of};

/// Time limit for resolving addresses and routes.
pub(crate) const RESOLVE: Duration = Duration::from_secs(2);

/// The device's IPv4 address, or `None` after printing why the test is skipped.
pub(crate) fn address(rdma: &Rdma) -> Option<Ipv4Addr> {
    let address = rdma.gid.gid.ipv4();
    if address.is_none() {
        println!("skipped: the GID of the tests is not an IPv4 address");
    }
    address
}

/// Waits for the next event, which must be of `id`.
#[track_caller]
pub(crate) fn next(channel: &EventChannel, id: CmId) -> EventKind {
    let event: Event = channel.wait(DEADLINE).unwrap().expect("an event in time");
    assert_eq!(event.id, id, "{:?}", event.kind);
    event.kind
}

#[track_caller]
pub(crate) fn peer_parameters(parameters: &Parameters) -> &PeerParameters {
    match parameters {
        Parameters::Connected(peer) => peer,
        other => panic!("{other:?}"),
    }
}

/// Moves a queue pair to `state` with the attributes that the id supplies.
pub(crate) fn transition(id: &Id, qp: &mut QueuePair, state: QueuePairState) {
    let mut attributes = id.attributes(state).unwrap();
    match state {
        QueuePairState::INIT => attributes = attributes.set_access(Access::REMOTE),
        QueuePairState::RTR => attributes = attributes.set_min_rnr_timer(12),
        _ => {}
    }
    qp.modify(&attributes).unwrap();
}

/// An id that listens at `address` and a free port.
pub(crate) fn listener(channel: &EventChannel, address: impl Into<IpAddr>) -> (Id, SocketAddr) {
    let mut id = Id::new(channel, PortSpace::TCP).unwrap();
    id.bind((address, 0)).unwrap();
    id.listen(8).unwrap();
    let local = id.local_address().unwrap().ip().unwrap();
    assert_ne!(local.port(), 0);
    (id, local)
}

/// An id that has resolved `address` and the route to it.
pub(crate) fn resolved(channel: &EventChannel, address: SocketAddr) -> Id {
    let mut id = Id::new(channel, PortSpace::TCP).unwrap();
    id.resolve_address(None, address, RESOLVE).unwrap();
    assert!(matches!(next(channel, id.id()), EventKind::AddressResolved));
    id.resolve_route(RESOLVE).unwrap();
    assert!(matches!(next(channel, id.id()), EventKind::RouteResolved));
    id
}

#[track_caller]
pub(crate) fn request(channel: &EventChannel, listener: &Id) -> (Id, Parameters) {
    match next(channel, listener.id()) {
        EventKind::ConnectRequest(id, parameters) => (id, parameters),
        other => panic!("{other:?}"),
    }
}

/// Both ends of a connection with their queue pairs.
struct Connection {
    lab: Lab,
    active: Id,
    passive: Id,
}

/// Connects the queue pairs of a lab by `address`.
fn connected(rdma: &Rdma, active: &EventChannel, passive: &EventChannel, address: Ipv4Addr) -> Connection {
    let mut lab = Lab::builder(rdma, Mode::EXTENDED).connected(false).build();
    let (server, local) = listener(passive, address);
    let mut client = resolved(active, local);
    transition(&client, &mut lab.a.qp, QueuePairState::INIT);
    let requested = ConnectParameters::new(lab.a.qp.number()).responder_resources(3).initiator_depth(2);
    client.connect(&requested.private_data(b"from a").unwrap()).unwrap();

    let (mut accepted, parameters) = request(passive, &server);
    let from = peer_parameters(&parameters);
    assert!(from.private_data.starts_with(b"from a\0"), "{parameters:?}");
    // The peer's view swaps responder resources and initiator depth.
    assert_eq!((from.qp_num, from.responder_resources, from.initiator_depth), (lab.a.qp.number(), 2, 3));
    for state in [QueuePairState::INIT, QueuePairState::RTR, QueuePairState::RTS] {
        transition(&accepted, &mut lab.b.qp, state);
    }
    let granted = ConnectParameters::new(lab.b.qp.number()).responder_resources(2).initiator_depth(3);
    accepted.accept(&granted.private_data(b"from b").unwrap()).unwrap();

    match next(active, client.id()) {
        EventKind::ConnectResponse(parameters) => {
            assert!(parameters.private_data().starts_with(b"from b\0"), "{parameters:?}");
            assert_eq!(peer_parameters(&parameters).qp_num, lab.b.qp.number());
        }
        other => panic!("{other:?}"),
    }
    for state in [QueuePairState::RTR, QueuePairState::RTS] {
        transition(&client, &mut lab.a.qp, state);
    }
    client.establish().unwrap();
    assert!(matches!(next(passive, accepted.id()), EventKind::Established(_)));
    assert_eq!(client.peer_address().unwrap().ip(), Some(local));
    assert_eq!(accepted.peer_address(), client.local_address());
    assert_eq!(accepted.local_address().unwrap().ip(), Some(local));
    Connection { lab, active: client, passive: accepted }
}

impl Connection {
    /// Sends a message in each direction.
    fn exchange_messages(&mut self) {
        let Lab { a, b, .. } = &mut self.lab;
        let (mut from, mut to) = (a, b);
        for byte in [0x5a, 0xa5] {
            to.receive(1, 0..64).unwrap();
            from.memory.put(64, &[byte; 64]);
            from.post(&[Wr::new(2, Op::Send, Data::One(from.memory.sge(64..128)))]).unwrap();
            to.next_ok(1);
            from.next_ok(2);
            assert_eq!(to.memory.get(0..64), [byte; 64]);
            (from, to) = (to, from);
        }
    }
}

#[test]
fn ids_connect_by_address_and_disconnect() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
    let mut connection = connected(&rdma, &channels[0], &channels[1], address);
    for id in [&connection.active, &connection.passive] {
        assert_eq!((id.device_name().as_deref(), id.port()), (Some(rdma.device_name()), Some(rdma.port)));
        assert_eq!(id.device_guid(), Some(rdma.attributes().node_guid()));
        assert_eq!(id.gids(), (rdma.gid.gid, rdma.gid.gid));
    }
    connection.exchange_messages();
    connection.active.disconnect().unwrap();
    assert!(matches!(next(&channels[1], connection.passive.id()), EventKind::Disconnected));
    assert!(channels[0].try_event().unwrap().is_none(), "the peer has not answered");
    connection.passive.disconnect().unwrap();
    assert!(matches!(next(&channels[0], connection.active.id()), EventKind::Disconnected));
}

#[test]
fn an_accepted_id_outlives_its_listener_and_migrates_to_another_channel() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (active, passive) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let mut connection = connected(&rdma, &active, &passive, address);
    let own = EventChannel::new().unwrap();
    connection.passive.migrate(&own).unwrap();
    assert!(connection.passive.channel().is_same(&own));
    drop(passive);
    connection.exchange_messages();
    drop(connection.active);
    assert!(
        matches!(next(&own, connection.passive.id()), EventKind::Disconnected),
        "dropping an id disconnects the peer"
    );
    // Migrating to the current channel is allowed.
    connection.passive.migrate(&own).unwrap();
}

#[test]
fn a_rejection_has_a_reason_and_private_data() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channel = EventChannel::new().unwrap();
    let (server, local) = listener(&channel, address);
    let lab = Lab::builder(&rdma, Mode::EXTENDED).connected(false).build();
    let parameters = ConnectParameters::new(lab.a.qp.number());

    let mut client = resolved(&channel, local);
    client.connect(&parameters).unwrap();
    let (mut incoming, _) = request(&channel, &server);
    incoming.reject(b"not today").unwrap();
    match next(&channel, client.id()) {
        EventKind::Rejected(RejectReason::CONSUMER_DEFINED, parameters) => {
            assert!(parameters.private_data().starts_with(b"not today\0"), "{parameters:?}");
        }
        other => panic!("{other:?}"),
    }

    // Dropping a request rejects it.
    let mut client = resolved(&channel, local);
    client.connect(&parameters).unwrap();
    drop(request(&channel, &server));
    match next(&channel, client.id()) {
        EventKind::Rejected(RejectReason::CONSUMER_DEFINED, _) => {}
        other => panic!("{other:?}"),
    }

    // The listener is destroyed.
    let mut client = resolved(&channel, local);
    drop(server);
    client.connect(&parameters).unwrap();
    match next(&channel, client.id()) {
        EventKind::Rejected(RejectReason::INVALID_SERVICE_ID, _) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn calls_on_unresolved_ids_and_unusable_addresses_are_errors() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channel = EventChannel::new().unwrap();
    let mut id = Id::new(&channel, PortSpace::TCP).unwrap();
    assert_eq!((id.local_address(), id.device_name(), id.port()), (None, None, None));
    // In these calls librdmacm would dereference the missing device.
    let parameters = ConnectParameters::new(1);
    for (call, error) in [
        ("rdma_resolve_route", error_of(id.resolve_route(RESOLVE))),
        ("rdma_connect", error_of(id.connect(&parameters))),
        ("rdma_accept", error_of(id.accept(&parameters))),
        ("rdma_disconnect", error_of(id.disconnect())),
    ] {
        assert!(
            matches!(error, Error::Cm(CmError::Call { verb, errno: Errno(libc::EINVAL) }) if verb.name() == call),
            "{error}"
        );
    }
    for error in [error_of(id.establish()), error_of(id.reject(&[])), error_of(id.attributes(QueuePairState::INIT))] {
        assert!(matches!(error, Error::Cm(CmError::Call { errno: Errno(libc::EINVAL), .. })), "{error}");
    }
    // A documentation address (RFC 5737), which no device has.
    let error = error_of(id.bind((Ipv4Addr::new(192, 0, 2, 1), 0)));
    assert!(matches!(error, Error::Cm(CmError::Call { verb: Verb::RdmaBindAddr, .. })), "{error}");
    // An unused address of the device's network.
    let [a, b, c, d] = address.octets();
    let unused = Ipv4Addr::new(a, b, c, d ^ 0x80);
    id.resolve_address(Some((address, 0).into()), (unused, 7471), Duration::from_millis(200)).unwrap();
    match next(&channel, id.id()) {
        EventKind::AddressError(errno) => assert_ne!(errno, Errno(0)),
        // An interface without address resolution, such as the dummy below SoftRoCE, resolves every address.
        EventKind::AddressResolved => assert_eq!(id.device_name().as_deref(), Some(rdma.device_name())),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_port_in_use_cannot_be_bound() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channel = EventChannel::new().unwrap();
    let (server, local) = listener(&channel, address);
    let mut second = Id::new(&channel, PortSpace::TCP).unwrap();
    let error = error_of(second.bind(local));
    assert!(
        matches!(error, Error::Cm(CmError::Call { verb: Verb::RdmaBindAddr, errno: Errno(libc::EADDRINUSE) })),
        "{error}"
    );
    // The wildcard address conflicts as well. The kernel then reports EADDRNOTAVAIL.
    let wildcard = (Ipv4Addr::UNSPECIFIED, local.port());
    let error = error_of(second.bind(wildcard));
    assert!(
        matches!(error, Error::Cm(CmError::Call { verb: Verb::RdmaBindAddr, errno: Errno(libc::EADDRNOTAVAIL) })),
        "{error}"
    );
    assert!(error.to_string().contains("take another port"), "{error}");
    drop(server);
    second.bind(local).unwrap();
    second.listen(1).unwrap();
}

#[test]
fn too_much_private_data_is_refused_before_the_call() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channel = EventChannel::new().unwrap();
    let (_server, local) = listener(&channel, address);
    let mut client = resolved(&channel, local);
    let parameters = ConnectParameters::new(1);
    let error = error_of(client.connect(&parameters.private_data(&[1; 57]).unwrap()));
    assert!(matches!(error, Error::Cm(CmError::PrivateData { len: 57, max: 56 })), "{error}");
    let error = error_of(parameters.private_data(&[1; 197]));
    assert!(matches!(error, Error::Cm(CmError::PrivateData { len: 197, max: 196 })), "{error}");
    assert!(channel.try_event().unwrap().is_none());
}

#[test]
fn options_of_an_id_are_set_and_invalid_values_refused() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channel = EventChannel::new().unwrap();
    let mut id = Id::new(&channel, PortSpace::TCP).unwrap();
    id.set_type_of_service(0x20).unwrap();
    id.set_reuse_address(true).unwrap();
    id.set_ipv6_only(true).unwrap();
    id.set_ack_timeout(16).unwrap();
    let error = error_of(id.set_ack_timeout(32));
    assert!(
        matches!(error, Error::Cm(CmError::Call { verb: Verb::RdmaSetOption, errno: Errno(libc::EINVAL) })),
        "{error}"
    );
    id.bind((address, 0)).unwrap();
    // Two ids with this option share a port as long as neither listens.
    let mut other = Id::new(&channel, PortSpace::TCP).unwrap();
    other.set_reuse_address(true).unwrap();
    other.bind(id.local_address().unwrap()).unwrap();
    assert_eq!(other.local_address(), id.local_address());
}

#[test]
fn ece_options_are_offered_accepted_and_rejected() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channel = EventChannel::new().unwrap();
    let (server, local) = listener(&channel, address);
    let (offered, granted) = (Ece::new(0x1234, 0b101), Ece::new(0x5678, 0b100));
    // Numbers without queue pairs. They differ, because a repeated number is a stale connection.
    let parameters = [0x101, 0x102, 0x103].map(ConnectParameters::new);
    let mut client = resolved(&channel, local);
    client.set_local_ece(offered).unwrap();
    client.connect(&parameters[0]).unwrap();
    let (mut incoming, _) = request(&channel, &server);
    assert_eq!(incoming.remote_ece().unwrap(), offered);
    incoming.set_local_ece(granted).unwrap();
    incoming.accept(&parameters[1]).unwrap();
    let answer = next(&channel, client.id());
    assert!(matches!(answer, EventKind::ConnectResponse(_)), "{answer:?}");
    // librdmacm replies with the vendor of the request.
    assert_eq!(client.remote_ece().unwrap(), Ece::new(offered.vendor_id, granted.options));

    let mut client = resolved(&channel, local);
    client.set_local_ece(offered).unwrap();
    client.connect(&parameters[2]).unwrap();
    let (mut incoming, _) = request(&channel, &server);
    incoming.reject_ece(b"not these").unwrap();
    match next(&channel, client.id()) {
        EventKind::Rejected(RejectReason::UNSUPPORTED_OPTIONS, parameters) => {
            assert!(parameters.private_data().starts_with(b"not these\0"), "{parameters:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_message_before_the_rtu_establishes_the_connection() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (active, passive) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let (server, local) = listener(&passive, address);
    let mut client = resolved(&active, local);
    client.connect(&ConnectParameters::new(0x104)).unwrap();
    let (mut incoming, _) = request(&passive, &server);
    let error = error_of(incoming.notify(AsyncEventType::COMM_EST));
    assert!(
        matches!(error, Error::Cm(CmError::Call { verb: Verb::RdmaNotify, errno: Errno(libc::EINVAL) })),
        "no connection was accepted yet: {error}"
    );
    incoming.accept(&ConnectParameters::new(0x105)).unwrap();
    // The client has not sent its RTU.
    incoming.notify(AsyncEventType::COMM_EST).unwrap();
    let event = next(&passive, incoming.id());
    assert!(matches!(event, EventKind::Established(_)), "{event:?}");
}

/// An id for datagrams, bound to the device.
fn datagram_id(channel: &EventChannel, address: Ipv4Addr) -> Id {
    let mut id = Id::new(channel, PortSpace::UDP).unwrap();
    id.bind((address, 0)).unwrap();
    id
}

#[test]
fn a_datagram_service_is_resolved_by_address() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (active, passive) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let mut server = datagram_id(&passive, address);
    server.listen(1).unwrap();
    let mut client = Id::new(&active, PortSpace::UDP).unwrap();
    client.resolve_address(None, server.local_address().unwrap(), RESOLVE).unwrap();
    assert!(matches!(next(&active, client.id()), EventKind::AddressResolved));
    client.resolve_route(RESOLVE).unwrap();
    assert!(matches!(next(&active, client.id()), EventKind::RouteResolved));
    client.connect(&ConnectParameters::new(0x11).private_data(b"who is there?").unwrap()).unwrap();
    let (mut incoming, parameters) = request(&passive, &server);
    assert!(parameters.private_data().starts_with(b"who is there?"), "{parameters:?}");
    incoming.accept(&ConnectParameters::new(0x4711).private_data(b"it is me").unwrap()).unwrap();
    let EventKind::Established(Parameters::Datagrams(found)) = next(&active, client.id()) else { panic!() };
    // Peers of the UDP port space have this queue key, RDMA_UDP_QKEY.
    assert_eq!((found.qp_num, found.qkey), (0x4711, 0x0123_4567));
    assert!(found.private_data.starts_with(b"it is me"), "{found:?}");
    assert_eq!(found.address.route.map(|route| route.dgid), Some(rdma.gid.gid));
    let pd = rdma.pd();
    pd.address_handle(&found.address).unwrap();
}

#[test]
fn multicast_groups_are_joined_and_left() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let channel = EventChannel::new().unwrap();
    let group = (Ipv4Addr::new(239, 1, 2, 3), 0);
    let mut id = datagram_id(&channel, address);
    for _ in 0..2 {
        id.join_multicast(group).unwrap();
        let EventKind::MulticastJoined(joined) = next(&channel, id.id()) else { panic!() };
        assert_eq!((joined.qp_num, &joined.private_data[..]), (0xff_ffff, &[][..]));
        let gid = joined.address.route.map(|route| route.dgid).expect("groups have GIDs");
        assert_eq!(gid.ipv4(), Some(group.0), "{gid}");
        id.leave_multicast(group).unwrap();
        let error = error_of(id.leave_multicast(group));
        assert!(matches!(error, Error::Cm(CmError::Call { errno: Errno(libc::EADDRNOTAVAIL), .. })), "{error}");
    }
    // Send-only members get the same event.
    id.join_multicast_send_only(group).unwrap();
    let EventKind::MulticastJoined(joined) = next(&channel, id.id()) else { panic!() };
    assert_eq!(joined.address.route.and_then(|route| route.dgid.ipv4()), Some(group.0));
    id.leave_multicast(group).unwrap();
    // Dropped as a member of one group, and while it joins another.
    id.join_multicast(group).unwrap();
    let _ = next(&channel, id.id());
    id.join_multicast((Ipv4Addr::new(239, 1, 2, 4), 0)).unwrap();
    drop(id);
    assert!(channel.try_event().unwrap().is_none());
    for space in [PortSpace::TCP, PortSpace::UDP] {
        let mut id = Id::new(&channel, space).unwrap();
        let error = error_of(id.join_multicast(group));
        assert!(matches!(error, Error::Cm(CmError::Call { errno: Errno(libc::EINVAL), .. })), "{error}");
    }
}
