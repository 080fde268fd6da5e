//! Resolution of names and services: `AddressQuery`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs};
use std::time::Duration;

use rdma_safe::cm::{Address, AddressFamily, AddressQuery, CmError, Connector, EventChannel, Id, Listener, PortSpace};
use rdma_safe::{Error, Gid, QueuePairType};

use crate::support::{Rdma, device, error_of};

/// The device's IPv4 address, or `None` after printing why the test is skipped.
fn address(rdma: &Rdma) -> Option<Ipv4Addr> {
    let address = rdma.gid.gid.ipv4();
    if address.is_none() {
        println!("skipped: the GID of the tests is not an IPv4 address");
    }
    address
}

#[test]
fn numeric_addresses_and_ports_are_resolved_unchanged() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let query = AddressQuery::new().node(address.to_string()).service("7471").numeric_host();
    let found = query.clone().lookup().unwrap();
    let info = found.last().expect("an address");
    assert_eq!(info.peer, Some((address, 7471).into()));
    assert_eq!((info.space, info.qp_type, info.passive), (PortSpace::TCP, QueuePairType::RC, false));
    let found = query.space(PortSpace::UDP).source((address, 0)).lookup().unwrap();
    let info = found.last().expect("an address");
    assert_eq!((info.space, info.qp_type), (PortSpace::UDP, QueuePairType::UD));
    assert_eq!((info.local, info.peer), (Some((address, 0).into()), Some((address, 7471).into())));
    let found = AddressQuery::new().destination((address, 7471)).no_route().lookup().unwrap();
    assert_eq!(found.last().and_then(|info| info.peer), Some((address, 7471).into()));
}

#[test]
fn resolved_addresses_can_be_bound_and_connected() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let own = AddressQuery::new().service("0").passive().family(AddressFamily::V4).lookup().unwrap();
    let info = own.last().expect("an address");
    assert_eq!((info.passive, info.peer, info.local), (true, None, Some((Ipv4Addr::UNSPECIFIED, 0).into())));
    let mut listener = Listener::bind_with(info.local.unwrap(), 8).unwrap();
    let port = listener.local_address().ip().unwrap().port();
    let found = AddressQuery::new().node(address.to_string()).service(port.to_string()).lookup().unwrap();
    let peer = found.last().and_then(|info| info.peer).expect("the peer's address");
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept(crate::support::DEADLINE).unwrap().expect("a request"));
        let connection = Connector::new().connect(peer.ip().unwrap()).unwrap();
        assert_eq!(connection.peer_address(), Some(peer));
        drop(accepting.join().unwrap());
    });
}

#[test]
fn names_and_services_resolve_as_the_host_resolves_them() {
    let Some(_rdma) = device() else { return };
    let known = ("localhost", 7471).to_socket_addrs().map(Vec::from_iter).unwrap_or_default();
    let found = AddressQuery::new().node("localhost").service("7471").lookup();
    match known.is_empty() {
        true => println!("skipped: this host does not resolve localhost"),
        false => {
            let found = found.unwrap();
            let peer = found.last().and_then(|info| info.peer?.ip()).expect("an IP address");
            assert!(known.contains(&peer), "{peer} of {known:?}");
            assert!(peer.ip() == IpAddr::from(Ipv4Addr::LOCALHOST) || peer.ip() == IpAddr::from(Ipv6Addr::LOCALHOST));
        }
    }
    let query = AddressQuery::new().node("127.0.0.1").service("ssh").lookup();
    match std::fs::read_to_string("/etc/services").is_ok_and(|text| text.contains("\nssh\t")) {
        true => assert_eq!(query.unwrap()[0].peer, Some((Ipv4Addr::LOCALHOST, 22).into())),
        false => {
            let error = error_of(query);
            assert!(matches!(error, Error::Cm(CmError::NoAddress { .. })), "{error}");
        }
    }
}

#[test]
fn infiniband_addresses_are_written_as_gids() {
    let Some(_rdma) = device() else { return };
    let gid: Ipv6Addr = "fe80::2:c903:0:1".parse().unwrap();
    let query = AddressQuery::new().node(gid.to_string()).service("7471").family(AddressFamily::Ib);
    let found = query.space(PortSpace::TCP).lookup().unwrap();
    let Some(Address::Ib(peer)) = found.last().and_then(|info| info.peer) else { panic!("{found:?}") };
    assert_eq!((peer.gid, peer.service_id, peer.pkey), (Gid::from(gid), 0x0106_1d2f, 0xffff));
    // The query names a port and its space, so the mask covers the whole service id.
    assert_eq!(peer.service_mask, !0);
}

#[test]
fn unknown_names_are_errors_with_a_reason() {
    let Some(_rdma) = device() else { return };
    let node = |node: &str| AddressQuery::new().node(node);
    for (query, expected) in [
        (node("no-such-host.invalid"), ""),
        (node("not-an-address").numeric_host(), "Name or service not known"),
        (node("127.0.0.1").service("no-such-service"), "Servname not supported"),
        (node("127.0.0.1").family(AddressFamily::V6), "family"),
    ] {
        let error = error_of(query.lookup());
        let Error::Cm(CmError::NoAddress { reason }) = &error else { panic!("{query:?}: {error}") };
        assert!(!reason.is_empty() && reason.contains(expected), "{query:?}: {error}");
    }
}

/// Functions of rdma-core 60, which is newer than all tested releases.
#[test]
fn functions_missing_in_an_older_library_are_named() {
    let Some(_rdma) = device() else { return };
    let channel = EventChannel::new().unwrap();
    let mut id = Id::new(&channel, PortSpace::TCP).unwrap();
    let query = AddressQuery::new().node("127.0.0.1");
    let outcomes = [
        ("rdma_resolve_addrinfo", id.resolve_address_info(&query)),
        ("rdma_query_addrinfo", id.address_info().map(drop)),
        ("rdma_write_cm_event", id.write_event(0, 1)),
    ];
    let is_newer = rdma_safe::sys::rdmacm().unwrap().rdma_resolve_addrinfo.is_some();
    for (name, outcome) in outcomes {
        match outcome {
            Err(Error::Cm(CmError::OlderLibrary { verb, since: 60 })) => {
                assert_eq!((verb.name(), is_newer), (name, false));
                println!("skipped: this librdmacm has no {verb}");
            }
            // The library has the function, but the kernel may lack it.
            other => assert!(is_newer, "{name}: {other:?}"),
        }
    }
    assert!(channel.wait(Duration::ZERO).unwrap().is_none() || is_newer);
}
