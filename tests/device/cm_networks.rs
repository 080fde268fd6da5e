//! Connections by address on soft0 to other hosts, which are network namespaces here.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use rdma_safe::cm::{Cause, Connector, Listener, Step};
use rdma_safe::{Device, Endpoint, Errno, Error, soft};

use crate::cm_connections::{connected, failure};
use crate::cm_soft::soft_device;
use crate::support::network::{self, enter_new, lay_cable, pass_end, plug_in};
use crate::support::peer::{self, Peer};
use crate::support::{DEADLINE, error_of, filled, pattern, within_deadline};

/// Addresses of both ends of the cable.
const ENDS: [&str; 2] = ["198.51.100.1", "198.51.100.2"];
/// An address of the same network that no host has.
const NOBODY: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 77);
const PORT: u16 = 7471;

/// An error of resolving the address of another host, with this cause and with these words.
#[track_caller]
fn expect_unresolved(peer: Ipv4Addr, errno: i32, words: &[&str]) {
    let error = failure(error_of(Connector::new().connect((peer, PORT))));
    assert_eq!((error.step, error.cause), (Step::ResolveAddress, Cause::Failed(Errno(errno))), "{error}");
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)) && !text.contains("rdma link"), "{text}");
}

#[test]
fn another_host_cannot_be_reached_without_a_route_or_an_address_of_its_network() {
    const NAME: &str = "cm_networks::another_host_cannot_be_reached_without_a_route_or_an_address_of_its_network";
    if peer::role().is_some() {
        enter_new();
        let Some(_rdma) = soft_device() else { return };
        expect_unresolved(NOBODY, libc::ENETUNREACH, &["no route", "`ip route get`"]);
        lay_cable();
        plug_in(0, ENDS[0]).unwrap();
        let advice = ["reaches only this host", "set RDMA_SOFT_ADDR to the address of the network interface"];
        expect_unresolved(NOBODY, libc::ENODEV, &advice);
        let error = error_of(Listener::bind((NOBODY, 0)));
        assert_eq!(error.errno(), Some(Errno(libc::EADDRNOTAVAIL)), "{error}");
        assert!(error.to_string().contains("with soft0 to any interface of this host"), "{error}");
        return;
    }
    if soft_device().is_some() && network::are_available() {
        Peer::start_with(NAME, "client", &[("RDMA_SOFT_ADDR", "")]).expect_success();
    }
}

#[test]
fn a_host_that_does_not_answer_is_a_timeout() {
    const NAME: &str = "cm_networks::a_host_that_does_not_answer_is_a_timeout";
    if peer::role().is_some() {
        enter_new();
        lay_cable();
        plug_in(0, ENDS[0]).unwrap();
        network::ip("link set end1 up");
        let Some(_rdma) = soft_device() else { return };
        let (start, timeout) = (Instant::now(), Duration::from_secs(1));
        let error = failure(error_of(Connector::new().timeout(timeout).connect((NOBODY, PORT))));
        assert_eq!((error.step, error.cause), (Step::Connect, Cause::Timeout(timeout)), "{error}");
        assert_eq!(error.peer, Some(SocketAddr::from((NOBODY, PORT)).into()));
        assert!((timeout..DEADLINE).contains(&start.elapsed()));
        let text = error.to_string();
        let advice = ["its host may be down", "UDP port 4791", "soft0 at the peer has no RDMA_SOFT_ADDR"];
        assert!(advice.iter().all(|words| text.contains(words)), "{text}");
        return;
    }
    if soft_device().is_some() && network::are_available() {
        Peer::start_with(NAME, "client", &[("RDMA_SOFT_ADDR", ENDS[0])]).expect_success();
    }
}

#[test]
fn programs_in_two_network_namespaces_connect_over_a_cable() {
    const NAME: &str = "cm_networks::programs_in_two_network_namespaces_connect_over_a_cable";
    const MESSAGE: usize = 100_000;
    match peer::role().as_deref() {
        Some("client") => {
            enter_new();
            lay_cable();
            plug_in(0, ENDS[0]).unwrap();
            let mut server = Peer::start_with(NAME, "server", &[("RDMA_SOFT_ADDR", ENDS[1])]);
            pass_end(&server.next_report());
            assert_eq!(server.next_report(), "listens");
            let Some(_rdma) = soft_device() else { return };
            let mut connection = Connector::new().connect((ENDS[1], PORT)).unwrap();
            let sent = pattern(7, MESSAGE);
            let inbox = connection.pd().allocate(MESSAGE).unwrap();
            connection.receive(inbox).unwrap();
            let outbox = filled(connection.pd(), &sent);
            connection.send(outbox).unwrap();
            // The send, and the reply with the same bytes.
            for _ in 0..2 {
                let done = connection.wait(DEADLINE).unwrap().ok().unwrap();
                assert!(done.buffer.as_deref() == Some(&sent[..]));
            }
            // The server ends the connection once its reply is acknowledged.
            within_deadline("the end of the connection", || (!connection.is_connected().unwrap()).then_some(()));
            server.expect_success();
        }
        Some(_) => {
            enter_new();
            peer::report(network::thread());
            within_deadline("the end of the cable", || plug_in(1, ENDS[1]).ok());
            let Some(_rdma) = soft_device() else { return };
            let mut listener = Listener::bind((ENDS[1], PORT)).unwrap();
            peer::report("listens");
            let request = listener.next(DEADLINE).unwrap().expect("a request in time");
            let pd = request.pd().unwrap();
            let mut prepared = request.prepare(Endpoint::builder(&pd)).unwrap();
            prepared.receive(pd.allocate(MESSAGE).unwrap()).unwrap();
            let mut connection = prepared.accept(b"").unwrap();
            assert!(connection.peer_address().unwrap().ip().is_some_and(|peer| peer.ip().to_string() == ENDS[0]));
            let received = connection.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap();
            connection.send(received).unwrap();
            let _ = connection.wait(DEADLINE).unwrap().ok().unwrap();
            assert!(soft::counters().received_bytes > MESSAGE as u64);
            connection.disconnect().unwrap();
        }
        None if soft_device().is_some() && network::are_available() => {
            Peer::start_with(NAME, "client", &[("RDMA_SOFT_ADDR", ENDS[0])]).expect_success();
        }
        None => {}
    }
}

#[test]
fn an_address_of_an_interface_has_one_device_and_other_processes_are_served_without_one() {
    const NAME: &str =
        "cm_networks::an_address_of_an_interface_has_one_device_and_other_processes_are_served_without_one";
    match peer::role().as_deref() {
        Some("owner") => {
            enter_new();
            lay_cable();
            plug_in(0, ENDS[0]).unwrap();
            let Some(_rdma) = soft_device() else { return };
            Peer::start(NAME, "second owner").expect_success();
            let mut other = Peer::start_with(NAME, "listener", &[("RDMA_SOFT_ADDR", "")]);
            assert_eq!(other.next_report(), "listens");
            // Both services are at one address, and at ports of their own.
            let mut listener = Listener::bind((ENDS[0], 0)).unwrap();
            let (mut client, _server) = connected(&Connector::new(), &mut listener);
            let second = Connector::new().connect((ENDS[0], PORT)).unwrap();
            assert!(client.is_connected().unwrap());
            second.disconnect().unwrap();
            other.expect_success();
        }
        Some("second owner") => {
            soft::install().unwrap();
            let error = error_of(Device::first().unwrap().open());
            assert!(matches!(&error, Error::OpenDevice { errno: Errno(libc::EADDRNOTAVAIL), .. }), "{error}");
            let advice = format!("UDP port 4791 of {} is in use: another process has a device there", ENDS[0]);
            assert!(error.to_string().contains(&advice), "{error}");
        }
        Some(_) => {
            let Some(_rdma) = soft_device() else { return };
            let mut listener = Listener::bind((ENDS[0], PORT)).unwrap();
            peer::report("listens");
            let mut connection = listener.accept(DEADLINE).unwrap().expect("a request in time");
            within_deadline("the end of the connection", || (!connection.is_connected().unwrap()).then_some(()));
        }
        None if soft_device().is_some() && network::are_available() => {
            Peer::start_with(NAME, "owner", &[("RDMA_SOFT_ADDR", ENDS[0])]).expect_success();
        }
        None => {}
    }
}

#[test]
fn a_listener_of_another_user_is_refused() {
    const NAME: &str = "cm_networks::a_listener_of_another_user_is_refused";
    /// `nobody` on most systems.
    const USER: libc::uid_t = 65_534;
    if peer::role().is_some() {
        // SAFETY: it only changes the user of this process.
        assert_eq!(unsafe { libc::setuid(USER) }, 0, "{}", std::io::Error::last_os_error());
        let Some(_rdma) = soft_device() else { return };
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        peer::report(listener.local_address());
        peer::wait_to_be_killed();
    }
    let Some(_rdma) = soft_device() else { return };
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return println!("skipped: only root can start a process of another user");
    }
    let mut other = Peer::start(NAME, "listens");
    let at: SocketAddr = other.next_report().parse().unwrap();
    let error = failure(error_of(Connector::new().connect(at)));
    assert_eq!((error.step, error.cause), (Step::Connect, Cause::Unreachable(Errno(libc::EACCES))), "{error}");
    assert!(error.to_string().contains("listeners of its own user and of root"), "{error}");
    let error = error_of(Listener::bind(at));
    assert_eq!(error.errno(), Some(Errno(libc::EADDRINUSE)), "{error}");
    other.kill();
}
