//! Addresses of names and services.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs};
use std::time::Duration;

use rdma_safe::cm::{Address, AddressFamily, AddressQuery, CmError, Connector, EventChannel, Id, Listener, PortSpace};
use rdma_safe::{Error, Gid, QueuePairType};

use crate::support::{Rdma, device_with_cm, error_of};

/// The device's address on the network; `None` after having said that it has none of IP.
fn address(rdma: &Rdma) -> Option<Ipv4Addr> {
    let address = rdma.gid.gid.ipv4();
    if address.is_none() {
        println!("skipped: the GID of the tests is of no IPv4 address");
    }
    address
}

#[test]
fn an_address_and_a_port_are_found_as_they_are() {
    let Some(rdma) = device_with_cm() else { return };
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
fn what_is_found_is_listened_at_and_connected_to() {
    let Some(rdma) = device_with_cm() else { return };
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
fn names_and_services_are_found_as_the_host_knows_them() {
    let Some(_rdma) = device_with_cm() else { return };
    let known = ("localhost", 7471).to_socket_addrs().map(Vec::from_iter).unwrap_or_default();
    let found = AddressQuery::new().node("localhost").service("7471").lookup();
    match known.is_empty() {
        true => println!("skipped: this host does not know its own name, localhost"),
        false => {
            let found = found.unwrap();
            let peer = found.last().and_then(|info| info.peer?.ip()).expect("an address of IP");
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
fn addresses_of_infiniband_are_written_as_gids() {
    let Some(_rdma) = device_with_cm() else { return };
    let gid: Ipv6Addr = "fe80::2:c903:0:1".parse().unwrap();
    let query = AddressQuery::new().node(gid.to_string()).service("7471").family(AddressFamily::Ib);
    let found = query.space(PortSpace::TCP).lookup().unwrap();
    let Some(Address::Ib(peer)) = found.last().and_then(|info| info.peer) else { panic!("{found:?}") };
    assert_eq!((peer.gid, peer.service_id, peer.pkey), (Gid::from(gid), 0x0106_1d2f, 0xffff));
    // A port that is named counts, and its space does.
    assert_eq!(peer.service_mask, !0);
}

#[test]
fn names_that_nobody_knows_are_told_in_words() {
    let Some(_rdma) = device_with_cm() else { return };
    let node = |node: &str| AddressQuery::new().node(node);
    for (query, said) in [
        (node("no-such-host.invalid"), ""),
        (node("not-an-address").numeric_host(), "Name or service not known"),
        (node("127.0.0.1").service("no-such-service"), "Servname not supported"),
        (node("127.0.0.1").family(AddressFamily::V6), "family"),
    ] {
        let error = error_of(query.lookup());
        let Error::Cm(CmError::NoAddress { reason }) = &error else { panic!("{query:?}: {error}") };
        assert!(!reason.is_empty() && reason.contains(said), "{query:?}: {error}");
    }
}

/// What came with rdma-core 60, which none of the tested releases is.
#[test]
fn what_an_older_library_lacks_is_named() {
    let Some(_rdma) = device_with_cm() else { return };
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
            Err(Error::Cm(CmError::OlderLibrary { call, since: 60 })) => {
                assert_eq!((call, is_newer), (name, false));
                println!("skipped: this librdmacm has no {call}");
            }
            // The kernel may be older still.
            other => assert!(is_newer, "{name}: {other:?}"),
        }
    }
    assert!(channel.wait(Duration::ZERO).unwrap().is_none() || is_newer);
}
