//! Connections by address on soft0, where the devices of processes have different addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use rdma_safe::cm::{
    Cause, CmError, ConnectError, ConnectParameters, Connection, Connector, EventChannel, EventKind, Id, Listener,
    PortSpace, RejectReason, Step,
};
use rdma_safe::{Endpoint, Errno, Error, Operation, soft};

use crate::cm::{listener, next, request, resolved};
use crate::support::peer::{self, Peer};
use crate::support::{DEADLINE, Rdma, device, error_of, filled, within_deadline};

/// The device if it is soft0. Prints why the test is skipped otherwise.
pub(crate) fn soft_device() -> Option<Rdma> {
    let rdma = device()?;
    if !rdma.is_soft() {
        println!("skipped: {} has one address for all processes", rdma.device_name());
        return None;
    }
    Some(rdma)
}

/// Accepts a connection and returns the message that arrives.
fn serve(mut listener: Listener) -> String {
    let request = listener.next(DEADLINE).unwrap().expect("a request in time");
    let pd = request.pd().unwrap();
    let mut prepared = request.prepare(Endpoint::builder(&pd)).unwrap();
    prepared.receive(pd.allocate(64).unwrap()).unwrap();
    let mut connection = prepared.accept(b"").unwrap();
    let done = connection.wait(DEADLINE).unwrap().ok().unwrap();
    let text = String::from_utf8_lossy(&done.buffer.unwrap()).into_owned();
    assert!(connection.peer_address().is_some());
    text
}

/// An address of this host that is not a loopback address.
fn own_address() -> Option<IpAddr> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // Selects a route and sends nothing. The address is one for documentation.
    socket.connect(("203.0.113.1", 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[test]
fn addresses_of_this_host_reach_listeners_of_other_processes() {
    const NAME: &str = "cm_soft::addresses_of_this_host_reach_listeners_of_other_processes";
    let Some(_rdma) = soft_device() else { return };
    if let Some(at) = peer::role() {
        let listener = Listener::bind(at).unwrap();
        peer::report(listener.local_address());
        peer::report(serve(listener));
        return;
    }
    let loopback = [(Ipv4Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into())];
    let others: [(IpAddr, IpAddr); 3] = [
        (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(127, 9, 8, 7).into()),
        (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()),
        (Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
    ];
    let own = own_address().map(|address| (address, address));
    for (bound, reached) in loopback.into_iter().chain(others).chain(own) {
        let mut server = Peer::start(NAME, SocketAddr::new(bound, 0));
        let at: SocketAddr = server.next_report().parse().unwrap();
        let mut connection = Connector::new().connect((reached, at.port())).unwrap();
        let text = format!("{reached}");
        let outbox = filled(connection.pd(), text.as_bytes());
        connection.send(outbox).unwrap();
        let _ = connection.wait(DEADLINE).unwrap().ok().unwrap();
        assert_eq!(server.next_report(), text);
    }
}

#[test]
fn the_first_call_names_an_address_that_this_host_does_not_have() {
    const NAME: &str = "cm_soft::the_first_call_names_an_address_that_this_host_does_not_have";
    if peer::role().is_some() {
        assert!(soft::install_for(Some("soft0")));
        for error in [error_of(Listener::bind("127.0.0.1:0")), error_of(Connector::new().connect("127.0.0.1:7471"))] {
            let text = error.to_string();
            assert!(text.contains("192.0.2.9 is not an address of this machine"), "{text}");
            assert!(!text.contains("install_by_default"), "{text}");
        }
        return;
    }
    let Some(_rdma) = soft_device() else { return };
    // An address for documentation.
    Peer::start_with(NAME, "alone", &[("RDMA_SOFT_ADDR", "192.0.2.9")]).expect_success();
}

fn failure(error: Error) -> ConnectError {
    match error {
        Error::Cm(CmError::Connect(error)) => *error,
        other => panic!("{other}"),
    }
}

#[test]
fn a_port_without_a_listener_rejects_at_once() {
    let Some(_rdma) = soft_device() else { return };
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_address().ip().unwrap().port();
    // The port is free, and then it is in use at another address.
    for at in [SocketAddr::from((Ipv4Addr::LOCALHOST, 1)), SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2), port))] {
        let error = failure(error_of(Connector::new().connect(at)));
        assert!(matches!(error.cause, Cause::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. }), "{error}");
        assert!(error.to_string().contains("start the peer first, or look at the port"), "{error}");
    }
}

#[test]
fn a_listener_that_has_accepted_a_connection_may_listen_again_before_the_next_one_is_rejected() {
    let Some(_rdma) = soft_device() else { return };
    let (active, passive) = (EventChannel::new().unwrap(), EventChannel::new().unwrap());
    let (server, at) = listener(&passive, Ipv4Addr::LOCALHOST);
    // The ids exchange no data, so the numbers of their queue pairs do not matter.
    let numbers = [0x100, 0x101, 0x102, 0x103].map(ConnectParameters::new);
    let mut first = resolved(&active, at);
    first.connect(&numbers[0]).unwrap();
    let (mut accepted, _) = request(&passive, &server);
    accepted.accept(&numbers[1]).unwrap();
    let replied = next(&active, first.id());
    assert!(matches!(replied, EventKind::ConnectResponse(_)), "{replied:?}");
    drop(server);

    let mut second = resolved(&active, at);
    second.connect(&numbers[2]).unwrap();
    let mut again = Id::new(&passive, PortSpace::TCP).unwrap();
    again.bind(at).unwrap();
    again.listen(1).unwrap();
    let (mut refused, _) = request(&passive, &again);
    refused.reject(b"").unwrap();
    let rejection = |kind| match kind {
        EventKind::Rejected(reason, _) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(rejection(next(&active, second.id())), RejectReason::CONSUMER_DEFINED);
    drop((again, second));

    let mut third = resolved(&active, at);
    third.connect(&numbers[3]).unwrap();
    assert_eq!(rejection(next(&active, third.id())), RejectReason::INVALID_SERVICE_ID);
}

#[test]
fn a_group_of_another_family_than_the_address_of_the_device_is_refused() {
    let Some(rdma) = soft_device() else { return };
    let v6 = SocketAddr::new(Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 0, 9).into(), 0);
    let v4 = SocketAddr::new(Ipv4Addr::new(239, 1, 2, 9).into(), 0);
    let is_v4 = rdma.gid.gid.ipv4().is_some();
    let (local, group): (IpAddr, _) =
        if is_v4 { (Ipv6Addr::LOCALHOST.into(), v6) } else { (Ipv4Addr::LOCALHOST.into(), v4) };
    let channel = EventChannel::new().unwrap();
    let mut id = Id::new(&channel, PortSpace::UDP).unwrap();
    id.bind((local, 0)).unwrap();
    let error = error_of(id.join_multicast(group));
    assert_eq!(error.errno(), Some(Errno(libc::ENODEV)), "{error}");
}

#[test]
fn a_port_that_another_process_uses_is_refused() {
    const NAME: &str = "cm_soft::a_port_that_another_process_uses_is_refused";
    let Some(_rdma) = soft_device() else { return };
    if peer::role().is_some() {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        peer::report(listener.local_address());
        peer::wait_to_be_killed();
    }
    let mut other = Peer::start(NAME, "listens");
    let at: SocketAddr = other.next_report().parse().unwrap();
    for (address, errno) in [(at.ip(), libc::EADDRINUSE), (Ipv4Addr::UNSPECIFIED.into(), libc::EADDRNOTAVAIL)] {
        let error = error_of(Listener::bind((address, at.port())));
        assert_eq!(error.errno().map(|errno| errno.0), Some(errno), "{error}");
    }
    other.kill();
    Listener::bind(at).unwrap();
}

#[test]
fn a_server_that_does_not_run_is_a_timeout() {
    const NAME: &str = "cm_soft::a_server_that_does_not_run_is_a_timeout";
    let Some(_rdma) = soft_device() else { return };
    if peer::role().is_some() {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        peer::report(listener.local_address());
        // SAFETY: the process stops itself, until its parent kills it.
        unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        // This thread may run on for a moment.
        peer::wait_to_be_killed();
    }
    let mut server = Peer::start(NAME, "stops");
    let at: SocketAddr = server.next_report().parse().unwrap();
    let connector = Connector::new().resolve_timeout(Duration::from_millis(100), 0).timeout(Duration::from_millis(500));
    let error = failure(error_of(connector.connect(at)));
    // The server stops before or after it has answered the lookup of its device.
    let is_expected = match error.step {
        Step::ResolveRoute => error.cause == Cause::Failed(Errno(libc::ETIMEDOUT)),
        step => step == Step::Connect && matches!(error.cause, Cause::Timeout(_)),
    };
    assert!(is_expected, "{error}");
    server.kill();
}

/// Connects the group member with `number` to every other member. A message and its answer go over each connection.
fn talk_to_all(number: u16, members: u16, at: impl Fn(u16) -> SocketAddr + Sync) -> Vec<Connection> {
    let mut listener = Listener::bind(at(number)).unwrap();
    let talk = |connection: &mut Connection, asks: bool| {
        if asks {
            let outbox = filled(connection.pd(), b"once");
            connection.send(outbox).unwrap();
        }
        // A send and a receive.
        for _ in 0..2 {
            let done = connection.wait(DEADLINE).unwrap().ok().unwrap();
            let buffer = done.buffer.unwrap();
            assert_eq!(&buffer[..], b"once");
            if !asks && done.operation == Operation::Receive {
                connection.send(buffer).unwrap();
            }
        }
    };
    thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let requests = (number + 1..members).map(|_| {
                let request = listener.next(DEADLINE).unwrap().expect("a request in time");
                let pd = request.pd().unwrap();
                let mut prepared = request.prepare(Endpoint::builder(&pd)).unwrap();
                prepared.receive(pd.allocate(4).unwrap()).unwrap();
                let mut connection = prepared.accept(b"").unwrap();
                talk(&mut connection, false);
                connection
            });
            requests.collect::<Vec<_>>()
        });
        let connector = Connector::new();
        let connect = |other| {
            let route = connector.resolve(at(other)).unwrap();
            let pd = route.pd().clone();
            let mut prepared = route.prepare(Endpoint::builder(&pd)).unwrap();
            prepared.receive(pd.allocate(4).unwrap()).unwrap();
            // The other process may not listen yet.
            prepared.connect(b"").ok()
        };
        let mut connections: Vec<Connection> = (0..number)
            .map(|other| {
                let mut connection = within_deadline("a listener", || connect(other));
                talk(&mut connection, true);
                connection
            })
            .collect();
        connections.extend(accepted.join().unwrap());
        connections
    })
}

/// Number of rings in shared memory from this process to others, and from others to it.
fn rings() -> usize {
    let mappings = std::fs::read_to_string("/proc/self/maps").unwrap();
    let rings = mappings.lines().filter(|line| line.contains("memfd:rdma-soft") && line.contains(" 00000000 "));
    // The process keeps one ring to itself, which it maps as sender and as receiver.
    rings.count().saturating_sub(2)
}

#[test]
fn processes_that_have_all_talked_to_each_other_leave_no_rings() {
    const NAME: &str = "cm_soft::processes_that_have_all_talked_to_each_other_leave_no_rings";
    const MEMBERS: u16 = 16;
    if let Some(role) = peer::role() {
        let Some(_rdma) = soft_device() else { return };
        let (address, number) = role.split_once(' ').unwrap();
        let (address, number): (Ipv4Addr, u16) = (address.parse().unwrap(), number.parse().unwrap());
        let connections = talk_to_all(number, MEMBERS, |member| (address, 7471 + member).into());
        peer::report(rings());
        peer::wait_for("close");
        drop(connections);
        // Rings are closed after 10 to 20 seconds without packets. The thread of the device does that.
        let start = Instant::now();
        while rings() > 0 {
            assert!(start.elapsed() < DEADLINE, "{} rings", rings());
            thread::sleep(Duration::from_millis(100));
        }
        peer::report("no rings");
        peer::wait_to_be_killed();
    }
    let Some(rdma) = soft_device() else { return };
    let [.., a, b] = std::process::id().to_be_bytes();
    let address = Ipv4Addr::new(127, 202, a, b);
    let mut members: Vec<Peer> = (0..MEMBERS).map(|number| Peer::start(NAME, format!("{address} {number}"))).collect();
    let used: Vec<usize> = members.iter_mut().map(|member| member.next_report().parse().unwrap()).collect();
    // One ring in each direction, which is closed early if a process has to wait for the others.
    assert!(used.iter().all(|rings| rdma.uses_udp() != (*rings > 0)), "{used:?}");
    members.iter_mut().for_each(|member| member.tell("close"));
    for member in &mut members {
        assert_eq!(member.next_report(), "no rings");
    }
    members.into_iter().for_each(Peer::kill);
}
