//! Connections by IPv6 and InfiniBand addresses, and from a chosen source address.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::Duration;

use rdma_safe::cm::{
    Address, Cause, CmError, ConnectParameters, Connector, EventChannel, EventKind, IbAddress, Id, Listener, PortSpace,
    Step,
};
use rdma_safe::error::Verb;
use rdma_safe::{Device, Errno, Error, Gid, Operation};

use crate::cm::{RESOLVE, listener, next, request};
use crate::cm_connections::{connected, failure};
use crate::support::own_device::OwnDevice;
use crate::support::peer::{self, Peer};
use crate::support::{DEADLINE, device, error_of, filled, network};

/// Role of a process that uses soft0.
const SOFT: &str = "soft";

/// Runs `body` with the name of the device in a separate process: librdmacm keeps the device open until its process ends, and
/// soft0 needs its addresses first.
fn with_own_device(test: &str, body: impl FnOnce(&str)) {
    let role = peer::role();
    if role.as_deref() == Some(SOFT) {
        OwnDevice::enter_network();
    }
    let Some(rdma) = device() else { return };
    if role.is_some() {
        return body(if rdma.is_soft() { rdma.device_name() } else { OwnDevice::NAME });
    }
    if rdma.is_soft() {
        if network::are_available() {
            Peer::start_with(test, SOFT, &[("RDMA_SOFT_ADDR", &OwnDevice::addresses())]).expect_success();
        }
        return;
    }
    let Some(_own) = OwnDevice::new(&rdma) else { return };
    Peer::start(test, "alone").expect_success();
}

/// The link-local address of the device's interface.
fn link_local(name: &str) -> SocketAddrV6 {
    let gids = Device::by_name(name).unwrap().open().unwrap().gids(1).unwrap();
    let mut addresses = gids.iter().map(|entry| Ipv6Addr::from(entry.gid));
    let own = addresses.find(Ipv6Addr::is_unicast_link_local).expect("a link-local address");
    SocketAddrV6::new(own, 0, 0, OwnDevice::interface_index())
}

/// Strips the scope of a link-local address, which the accepting end lacks.
fn without_scope(address: Option<Address>) -> Option<Address> {
    let ip = address?.ip()?;
    Some((ip.ip(), ip.port()).into())
}

/// Connects to a listener at `server`, from `source` if given, and sends a message in each direction.
fn check_connection(device: &str, server: SocketAddr, source: Option<SocketAddr>) {
    let mut listener = Listener::bind(server).unwrap();
    let local = listener.local_address().ip().unwrap();
    assert_eq!((local.ip(), local.port() != 0), (server.ip(), true));
    let connector = match source {
        Some(source) => Connector::new().source(source),
        None => Connector::new(),
    };
    let (mut a, mut b) = connected(&connector, &mut listener);
    assert_eq!(
        (a.peer_address(), without_scope(b.local_address())),
        (Some(local.into()), without_scope(Some(local.into())))
    );
    assert_eq!(without_scope(a.local_address()), b.peer_address());
    if let Some(source) = source {
        assert_eq!(a.local_address().unwrap().ip().unwrap().ip(), source.ip());
    }
    let gid = |address: Option<Address>| match address.unwrap().ip().unwrap().ip() {
        IpAddr::V4(ip) => Gid::from(ip.to_ipv6_mapped()),
        IpAddr::V6(ip) => Gid::from(ip),
    };
    assert_eq!(a.id().gids(), (gid(a.local_address()), gid(a.peer_address())));
    assert_eq!(a.id().device_name().as_deref(), Some(device));
    for text in [&b"by address"[..], b"and back"] {
        let outbox = filled(a.pd(), text);
        a.send(outbox).unwrap();
        let received = b.wait(DEADLINE).unwrap().ok().unwrap();
        assert_eq!(received.buffer.as_deref(), Some(text));
        assert_eq!(a.wait(DEADLINE).unwrap().ok().unwrap().operation, Operation::Send);
        (a, b) = (b, a);
    }
}

#[test]
fn endpoints_connect_by_ipv6() {
    with_own_device("cm_addresses::endpoints_connect_by_ipv6", |device| {
        let [one, two] = OwnDevice::IPV6_ADDRESSES.map(|ip| SocketAddr::from((ip, 0)));
        check_connection(device, one, None);
        check_connection(device, one, Some(two));
        check_connection(device, two, Some(one));
        check_connection(device, (OwnDevice::ADDRESS, 0).into(), Some((OwnDevice::ADDRESS, 0).into()));
    });
}

#[test]
fn endpoints_connect_by_link_local_addresses() {
    with_own_device("cm_addresses::endpoints_connect_by_link_local_addresses", |device| {
        let own = link_local(device);
        check_connection(device, own.into(), None);
        check_connection(device, own.into(), Some(own.into()));
        // Without a scope, a link-local address does not name its interface.
        let error = error_of(Listener::bind(SocketAddrV6::new(*own.ip(), 0, 0, 0)));
        let call = matches!(error, Error::Cm(CmError::Call { verb: Verb::RdmaBindAddr, errno: Errno(libc::EINVAL) }));
        assert!(call, "{error}");
    });
}

#[test]
fn an_unsuitable_source_address_is_refused() {
    with_own_device("cm_addresses::an_unsuitable_source_address_is_refused", |_| {
        let server = Listener::bind((OwnDevice::IPV6_ADDRESSES[0], 0)).unwrap();
        // An IPv4 source for an IPv6 peer, an address that no interface has, and the loopback address.
        for source in ["10.9.10.1:0", "[2001:db8::1]:0", "127.0.0.1:0"] {
            let source: SocketAddr = source.parse().unwrap();
            let connector = Connector::new().source(source).resolve_timeout(Duration::from_millis(300), 0);
            let error = failure(error_of(connector.resolve(server.local_address())));
            assert_eq!(error.step, Step::ResolveAddress, "{source}: {error}");
            assert!(matches!(error.cause, Cause::Failed(_)), "{source}: {error}");
        }
    });
}

#[test]
fn ids_connect_by_ipv6_and_ipv6_only_listeners_reject_ipv4() {
    with_own_device("cm_addresses::ids_connect_by_ipv6_and_ipv6_only_listeners_reject_ipv4", |_| {
        let channels = [EventChannel::new().unwrap(), EventChannel::new().unwrap()];
        let [there, here] = OwnDevice::IPV6_ADDRESSES;
        let (server, local) = listener(&channels[1], there);
        let mut client = Id::new(&channels[0], PortSpace::TCP).unwrap();
        client.resolve_address(Some((here, 0).into()), local, RESOLVE).unwrap();
        assert!(matches!(next(&channels[0], client.id()), EventKind::AddressResolved));
        assert_eq!(client.gids(), (Gid::from(here), Gid::from(there)));
        assert_eq!(client.local_address().unwrap().ip().unwrap().ip(), IpAddr::from(here));
        client.resolve_route(RESOLVE).unwrap();
        assert!(matches!(next(&channels[0], client.id()), EventKind::RouteResolved));
        client.connect(&ConnectParameters::new(0x40_0001)).unwrap();
        let (incoming, _) = request(&channels[1], &server);
        assert_eq!(incoming.peer_address(), client.local_address());
        assert_eq!(incoming.gids(), (Gid::from(there), Gid::from(here)));
        drop((incoming, client, server));

        for (only, numbers) in [(false, 0x40_0002), (true, 0x40_0003)] {
            let mut server = Id::new(&channels[1], PortSpace::TCP).unwrap();
            server.set_ipv6_only(only).unwrap();
            server.bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap();
            server.listen(4).unwrap();
            let port = server.local_address().unwrap().ip().unwrap().port();
            let channel = EventChannel::new().unwrap();
            let mut client = crate::cm::resolved(&channel, (OwnDevice::ADDRESS, port).into());
            client.connect(&ConnectParameters::new(numbers)).unwrap();
            if only {
                let event = next(&channel, client.id());
                assert!(matches!(event, EventKind::Rejected(..)), "{event:?}");
            } else {
                let (incoming, _) = request(&channels[1], &server);
                assert_eq!(incoming.peer_address(), client.local_address());
            }
        }
    });
}

#[test]
fn infiniband_addresses_are_refused_by_other_devices() {
    let Some(rdma) = device() else { return };
    if !rdma.is_rxe() && !rdma.is_soft() {
        return println!("skipped: {} may be InfiniBand", rdma.device_name());
    }
    // The upper bits are the TCP port space.
    let there = IbAddress::new(rdma.gid.gid, 0x0106_0000 | 7471);
    let error = failure(error_of(Connector::new().resolve(there)));
    assert_eq!((error.step, error.peer), (Step::ResolveAddress, Some(there.into())));
    assert_eq!(error.cause, Cause::Failed(Errno(libc::ENODEV)));
    assert!(error.to_string().contains("connect to an IP address"), "{error}");
    let error = error_of(Listener::bind_with(there, 1));
    assert!(
        matches!(error, Error::Cm(CmError::Call { verb: Verb::RdmaBindAddr, errno: Errno(libc::ENODEV) })),
        "{error}"
    );
    assert!(error.to_string().contains("GID of an InfiniBand port"), "{error}");
    let channel = EventChannel::new().unwrap();
    // soft0 refuses ids of InfiniBand ports.
    for space in [PortSpace::IB, PortSpace::TCP].into_iter().skip(usize::from(rdma.is_soft())) {
        let mut id = Id::new(&channel, space).unwrap();
        let refused = [id.bind(there), id.resolve_address(None, there, RESOLVE)];
        for error in refused.map(error_of) {
            assert!(matches!(error, Error::Cm(CmError::Call { errno: Errno(libc::ENODEV), .. })), "{error}");
        }
    }
}
