//! Peers that are killed at each step of a connection by address. The surviving end gets an error and serves the next peer.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Instant;

use rdma_safe::cm::{
    Address, Cause, CmError, ConnectError, ConnectParameters, Connection, Connector, EventChannel, EventKind, Id,
    Listener, PortSpace, PreparedRequest, RejectReason, Step,
};
use rdma_safe::error::Verb;
use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Device, Endpoint, Errno, Error, ExposedRegion, Operation, ProtectionDomain, QueuePair, QueuePairState,
    RemoteMemory, Result, WcStatus,
};

use crate::channel::is_readable;
use crate::cm::{address, next, request, resolved, transition};
use crate::cm_connections::{connected, failure, listener};
use crate::cm_handshakes::wait_for_event;
use crate::support::peer::{self, Peer};
use crate::support::{DEADLINE, device, error_of, filled};

/// The device under test and its IPv4 address. Returns from the test if it is skipped.
macro_rules! require {
    () => {{
        let Some(rdma) = device() else { return };
        let Some(address) = address(&rdma) else { return };
        (rdma, address)
    }};
}

/// A queue pair in INIT on the device of `id`.
fn queue_pair(id: &Id) -> QueuePair {
    let context = Device::by_name(&id.device_name().unwrap()).unwrap().open().unwrap();
    let cq = context.completion_queue(16).build().unwrap();
    let mut qp = context.alloc_pd().unwrap().queue_pair(&cq, &cq).build().unwrap();
    transition(id, &mut qp, QueuePairState::INIT);
    qp
}

/// A client that has sent a connection request to `server`.
fn requesting_client(channel: &EventChannel, server: SocketAddr) -> (Id, QueuePair) {
    let mut id = resolved(channel, server);
    let qp = queue_pair(&id);
    id.connect(&ConnectParameters::new(qp.number())).unwrap();
    (id, qp)
}

/// A client that `server` has accepted, and that has not sent its RTU.
fn accepted_client(channel: &EventChannel, server: SocketAddr) -> (Id, QueuePair) {
    let (id, qp) = requesting_client(channel, server);
    let event = next(channel, id.id());
    assert!(matches!(event, EventKind::ConnectResponse(_)), "{event:?}");
    (id, qp)
}

/// A server that reports its address, and the first request it receives.
fn server_with_request(channel: &EventChannel, address: Ipv4Addr) -> (Id, Id) {
    let mut server = Id::new(channel, PortSpace::TCP).unwrap();
    server.bind((address, 0)).unwrap();
    server.listen(8).unwrap();
    peer::report(server.local_address().unwrap());
    let (id, _) = request(channel, &server);
    (server, id)
}

/// A server that accepts the first request and does not wait for the RTU.
fn accepting_server(channel: &EventChannel, address: Ipv4Addr) -> (Id, Id, QueuePair) {
    let (server, mut id) = server_with_request(channel, address);
    let mut qp = queue_pair(&id);
    for state in [QueuePairState::RTR, QueuePairState::RTS] {
        transition(&id, &mut qp, state);
    }
    id.accept(&ConnectParameters::new(qp.number())).unwrap();
    (server, id, qp)
}

/// Reports `done` and holds `what` until the process is killed.
fn hold<T>(what: T, done: &str) -> ! {
    let _what = what;
    peer::report(done);
    peer::wait_to_be_killed();
}

/// The next request, prepared with an endpoint that has a posted receive.
fn prepared(listener: &mut Listener) -> Result<PreparedRequest> {
    let request = listener.next(DEADLINE).unwrap().expect("a request in time");
    let pd = request.pd().unwrap();
    let mut prepared = request.prepare(Endpoint::builder(&pd))?;
    prepared.receive(pd.allocate(64)?)?;
    Ok(prepared)
}

/// Checks that the listener still serves a new client.
#[track_caller]
fn serves_another_client(listener: &mut Listener) {
    let (mut client, mut server) = connected(&Connector::new(), listener);
    let outbox = filled(client.pd(), b"still there?");
    client.send(outbox).unwrap();
    let done = server.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!(done.buffer.as_deref(), Some(&b"still there?"[..]));
}

/// Waits until the connection reports that it has ended.
#[track_caller]
fn wait_for_disconnect(connection: &mut Connection) {
    let start = Instant::now();
    while connection.is_connected().unwrap() {
        assert!(start.elapsed() < DEADLINE, "the connection outlives its peer");
        thread::yield_now();
    }
}

#[track_caller]
fn expect_step(error: &ConnectError, step: Step, server: SocketAddr) {
    assert_eq!(error.step, step, "{error}");
    let end = if step == Step::Accept { error.local } else { error.peer };
    let other = if step == Step::Accept { error.peer } else { error.local };
    assert_eq!(end, Some(Address::from(server)), "{error}");
    assert!(other.is_some_and(|other| other.ip().is_some_and(|ip| ip.ip() == server.ip())), "{error}");
    let text = error.to_string();
    assert!(["is gone", "is most likely gone", "has ended"].iter().any(|words| text.contains(words)), "{text}");
}

#[test]
fn a_client_killed_before_it_is_accepted_is_an_error() {
    const NAME: &str = "cm_failures::a_client_killed_before_it_is_accepted_is_an_error";
    let (_rdma, address) = require!();
    if let Some(server) = peer::role() {
        let channel = EventChannel::new().unwrap();
        hold(requesting_client(&channel, server.parse().unwrap()), "requested");
    }
    let (mut listener, local) = listener(address);
    // Killed before its request is read, before it gets an endpoint, and after that.
    for killed_at in 0..3 {
        let mut client = Peer::start(NAME, local);
        assert_eq!(client.next_report(), "requested");
        let accepted = if killed_at == 0 {
            // The request has arrived.
            wait_for_event(listener.channel());
            client.kill();
            prepared(&mut listener).and_then(|prepared| prepared.accept(b""))
        } else if killed_at == 1 {
            let request = listener.next(DEADLINE).unwrap().expect("a request in time");
            assert!(request.peer_address().is_some_and(|peer| peer != request.local_address().unwrap()));
            client.kill();
            let pd = request.pd().unwrap();
            request.prepare(Endpoint::builder(&pd)).and_then(|prepared| prepared.accept(b""))
        } else {
            let prepared = prepared(&mut listener).unwrap();
            client.kill();
            prepared.accept(b"")
        };
        let error = failure(error_of(accepted));
        expect_step(&error, Step::Accept, local);
        // The cause depends on whether the kernel notices the death before the call to accept.
        assert!(matches!(error.cause, Cause::Failed(Errno(libc::EINVAL)) | Cause::Rejected { .. }), "{error}");
        serves_another_client(&mut listener);
    }
}

#[test]
fn a_client_killed_before_its_rtu_is_an_error() {
    const NAME: &str = "cm_failures::a_client_killed_before_its_rtu_is_an_error";
    let (_rdma, address) = require!();
    if let Some(server) = peer::role() {
        let channel = EventChannel::new().unwrap();
        hold(accepted_client(&channel, server.parse().unwrap()), "accepted by the server");
    }
    let (mut listener, local) = listener(address);
    let mut client = Peer::start(NAME, local);
    let prepared = prepared(&mut listener).unwrap();
    let accepted = thread::scope(|scope| {
        let accepting = scope.spawn(|| prepared.accept(b""));
        assert_eq!(client.next_report(), "accepted by the server");
        assert!(!accepting.is_finished(), "the peer has not sent its RTU");
        client.kill();
        accepting.join().unwrap()
    });
    let error = failure(error_of(accepted));
    expect_step(&error, Step::Accept, local);
    assert!(matches!(error.cause, Cause::Rejected { reason: RejectReason::CONSUMER_DEFINED, .. }), "{error}");
    serves_another_client(&mut listener);
}

#[test]
fn a_server_killed_before_its_reply_is_an_error() {
    const NAME: &str = "cm_failures::a_server_killed_before_its_reply_is_an_error";
    let (_rdma, address) = require!();
    match peer::role().as_deref() {
        Some("reads") => {
            let channel = EventChannel::new().unwrap();
            hold(server_with_request(&channel, address), "requested");
        }
        Some(_) => {
            let listener = Listener::bind((address, 0)).unwrap();
            peer::report(listener.local_address());
            assert!(is_readable(listener.channel(), DEADLINE), "a request in time");
            hold(listener, "requested");
        }
        None => {}
    }
    for part in ["reads", "does not read"] {
        let mut server = Peer::start(NAME, part);
        let at: SocketAddr = server.next_report().parse().unwrap();
        let refused = thread::scope(|scope| {
            let connecting = scope.spawn(|| Connector::new().connect(at));
            assert_eq!(server.next_report(), "requested");
            assert!(!connecting.is_finished());
            server.kill();
            connecting.join().unwrap()
        });
        let error = failure(error_of(refused));
        expect_step(&error, Step::Connect, at);
        assert!(matches!(error.cause, Cause::Rejected { .. }), "{error}");
    }
    serves_another_client(&mut listener(address).0);
}

#[test]
fn a_server_killed_before_the_rtu_is_an_error() {
    const NAME: &str = "cm_failures::a_server_killed_before_the_rtu_is_an_error";
    let (_rdma, address) = require!();
    match peer::role().as_deref() {
        Some("waits") => {
            let channel = EventChannel::new().unwrap();
            hold(accepting_server(&channel, address), "accepted");
        }
        Some(_) => {
            let channel = EventChannel::new().unwrap();
            let _accepted = accepting_server(&channel, address);
            // SAFETY: the process kills itself.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        None => {}
    }
    let mut server = Peer::start(NAME, "waits");
    let at: SocketAddr = server.next_report().parse().unwrap();
    let channel = EventChannel::new().unwrap();
    let (mut id, _qp) = accepted_client(&channel, at);
    assert_eq!(server.next_report(), "accepted");
    server.kill();
    let event = next(&channel, id.id());
    assert!(matches!(event, EventKind::Rejected(RejectReason::CONSUMER_DEFINED, _)), "{event:?}");
    let error = error_of(id.establish());
    assert!(
        matches!(error, Error::Cm(CmError::Call { verb: Verb::RdmaEstablish, errno: Errno(libc::EINVAL) })),
        "{error}"
    );

    // A connector sends the RTU at once, so either the RTU or the death comes first.
    for _ in 0..3 {
        let mut server = Peer::start(NAME, "dies");
        let at: SocketAddr = server.next_report().parse().unwrap();
        match Connector::new().connect(at) {
            Ok(mut connection) => {
                server.expect_killed();
                wait_for_disconnect(&mut connection);
            }
            Err(error) => {
                server.expect_killed();
                let error = failure(error);
                expect_step(&error, Step::Connect, at);
            }
        }
    }
    serves_another_client(&mut listener(address).0);
}

const SEND: usize = 1000;
const WRITE: usize = 20_000;
/// Number of sends and writes in flight.
const WORK: usize = 32;

/// Memory that the peer may write to, and its serialised `RemoteMemory`.
fn exposed(pd: &ProtectionDomain) -> (ExposedRegion, [u8; 20]) {
    let region = pd.expose(Pages::new(WRITE).unwrap(), Access::REMOTE_WRITE).unwrap();
    let remote = region.remote();
    let mut encoded = [0; 20];
    encoded[..8].copy_from_slice(&remote.address.to_be_bytes());
    encoded[8..16].copy_from_slice(&remote.len.to_be_bytes());
    encoded[16..].copy_from_slice(&remote.rkey.to_be_bytes());
    (region, encoded)
}

/// The inverse of the serialisation in [`exposed`].
fn remote(encoded: &[u8]) -> RemoteMemory {
    let (address, len) = encoded[..16].split_at(8);
    RemoteMemory {
        address: u64::from_be_bytes(address.try_into().unwrap()),
        len: u64::from_be_bytes(len.try_into().unwrap()),
        rkey: u32::from_be_bytes(encoded[16..20].try_into().unwrap()),
    }
}

/// Messages that the peer receives before it is killed.
const RECEIVED: usize = 3 * WORK;

/// Posts receives for `RECEIVED` messages in total. Later messages stay in flight.
fn receive_until_killed(mut connection: Connection) -> ! {
    peer::report("connected");
    for _ in 0..RECEIVED - WORK {
        let done = connection.wait(DEADLINE).unwrap().ok().unwrap();
        assert_eq!(done.operation, Operation::Receive);
        connection.receive(done.buffer.unwrap()).unwrap();
    }
    hold(connection, "stopped");
}

fn post_receives(endpoint: &mut Endpoint) {
    for _ in 0..WORK {
        endpoint.receive(endpoint.pd().allocate(SEND).unwrap()).unwrap();
    }
}

/// Sends and writes until the peer is killed. All buffers must then be returned.
fn work_until_killed(mut connection: Connection, peer: Peer) {
    let remote = remote(connection.private_data());
    let pd = connection.pd().clone();
    post_receives(&mut connection);
    let mut idle: Vec<_> =
        (0..WORK).map(|number| pd.allocate(if number % 2 == 0 { SEND } else { WRITE }).unwrap()).collect();
    let (mut sent, mut peer) = (0, Some(peer));
    let start = Instant::now();
    while connection.is_connected().unwrap() {
        assert!(start.elapsed() < 2 * DEADLINE, "the connection outlives its peer");
        while let Some(buffer) = idle.pop() {
            match buffer.len() {
                SEND => connection.send(buffer).unwrap(),
                _ => connection.write(buffer, remote).unwrap(),
            };
        }
        if sent == RECEIVED {
            peer.take().into_iter().for_each(Peer::kill);
        }
        // Without a peer no work completes, and none fails before the retries are exhausted.
        let Some(done) = connection.poll().unwrap() else { continue };
        assert_eq!(done.status, WcStatus::SUCCESS);
        sent += usize::from(done.operation == Operation::Send);
        idle.extend(done.buffer);
    }
    assert_eq!(sent, RECEIVED);
    let mut failed = [0; 2];
    while connection.sends_in_flight() > 0 || connection.receives_in_flight() > 0 {
        let done = connection.wait(DEADLINE).unwrap();
        failed[usize::from(done.operation == Operation::Receive)] += usize::from(done.status != WcStatus::SUCCESS);
        idle.extend(done.buffer);
    }
    // A write before the first send without a receive may have completed.
    assert!(failed[0] >= WORK - 2 && failed[1] == WORK, "{failed:?}");
    assert_eq!(idle.len(), 2 * WORK);
    assert!(connection.disconnect().unwrap().is_empty());
}

#[test]
fn a_server_killed_during_transfers_ends_the_connection() {
    const NAME: &str = "cm_failures::a_server_killed_during_transfers_ends_the_connection";
    let (_rdma, address) = require!();
    if peer::role().is_some() {
        let mut listener = Listener::bind((address, 0)).unwrap();
        peer::report(listener.local_address());
        let request = listener.next(DEADLINE).unwrap().expect("a request in time");
        let pd = request.pd().unwrap();
        let (_region, encoded) = exposed(&pd);
        let mut prepared = request.prepare(Endpoint::builder(&pd).peer_access(Access::REMOTE_WRITE)).unwrap();
        post_receives(&mut prepared);
        receive_until_killed(prepared.accept(&encoded).unwrap());
    }
    let mut server = Peer::start(NAME, "server");
    let at: SocketAddr = server.next_report().parse().unwrap();
    let connection = Connector::new().connect(at).unwrap();
    assert_eq!(server.next_report(), "connected");
    work_until_killed(connection, server);
    let error = failure(error_of(Connector::new().connect(at)));
    assert!(
        matches!(error.cause, Cause::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. }),
        "the port is closed with its process: {error}"
    );
    serves_another_client(&mut listener(address).0);
}

#[test]
fn a_client_killed_during_transfers_ends_the_connection() {
    const NAME: &str = "cm_failures::a_client_killed_during_transfers_ends_the_connection";
    let (_rdma, address) = require!();
    if let Some(server) = peer::role() {
        let route = Connector::new().resolve(server.parse::<SocketAddr>().unwrap()).unwrap();
        let pd = route.pd().clone();
        let (_region, encoded) = exposed(&pd);
        let mut prepared = route.prepare(Endpoint::builder(&pd).peer_access(Access::REMOTE_WRITE)).unwrap();
        post_receives(&mut prepared);
        receive_until_killed(prepared.connect(&encoded).unwrap());
    }
    let (mut listener, local) = listener(address);
    let mut client = Peer::start(NAME, local);
    let connection = listener.accept(DEADLINE).unwrap().expect("a request in time");
    assert_eq!(client.next_report(), "connected");
    work_until_killed(connection, client);
    serves_another_client(&mut listener);
}
