//! Peers that are killed at each step of a connection by address: who is left is told, and serves the next.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Instant;

use rdma_safe::cm::{
    Address, Cause, CmError, ConnectError, ConnectParameters, Connection, Connector, EventChannel, EventKind, Id,
    Listener, PortSpace, PreparedRequest, RejectReason, Step,
};
use rdma_safe::{
    Access, Device, Endpoint, Errno, Error, ExposedRegion, Operation, Pages, ProtectionDomain, QueuePair,
    QueuePairState, RemoteMemory, Result, WcStatus,
};

use crate::channel::is_readable;
use crate::cm::{address, bring, next, request, resolved};
use crate::cm_connections::{connected, failure, filled, listener};
use crate::support::peer::{self, Peer};
use crate::support::{DEADLINE, device_with_cm, error_of};

/// The address of the device under test, which no other process of these tests changes.
macro_rules! require {
    () => {{
        let Some(rdma) = device_with_cm() else { return };
        let Some(address) = address(&rdma) else { return };
        (rdma, address)
    }};
}

/// A queue pair in INIT on the device of `id`.
fn queue_pair(id: &Id) -> QueuePair {
    let context = Device::by_name(&id.device_name().unwrap()).unwrap().open().unwrap();
    let cq = context.completion_queue(16).build().unwrap();
    let mut qp = context.alloc_pd().unwrap().queue_pair(&cq, &cq).build().unwrap();
    bring(id, &mut qp, QueuePairState::INIT);
    qp
}

/// A client that has asked `server` for a connection.
fn asking(channel: &EventChannel, server: SocketAddr) -> (Id, QueuePair) {
    let mut id = resolved(channel, server);
    let qp = queue_pair(&id);
    id.connect(&ConnectParameters::new(qp.number())).unwrap();
    (id, qp)
}

/// A client that was accepted by `server`, and has not said that it knows.
fn answered(channel: &EventChannel, server: SocketAddr) -> (Id, QueuePair) {
    let (id, qp) = asking(channel, server);
    let event = next(channel, id.id());
    assert!(matches!(event, EventKind::ConnectResponse(_)), "{event:?}");
    (id, qp)
}

/// A server that says where it listens, and the first request that it gets.
fn asked(channel: &EventChannel, address: Ipv4Addr) -> (Id, Id) {
    let mut server = Id::new(channel, PortSpace::TCP).unwrap();
    server.bind((address, 0)).unwrap();
    server.listen(8).unwrap();
    peer::say(server.local_address().unwrap());
    let (id, _) = request(channel, &server);
    (server, id)
}

/// A server that accepts the first who asks, and does not wait until that knows.
fn accepting(channel: &EventChannel, address: Ipv4Addr) -> (Id, Id, QueuePair) {
    let (server, mut id) = asked(channel, address);
    let mut qp = queue_pair(&id);
    for state in [QueuePairState::RTR, QueuePairState::RTS] {
        bring(&id, &mut qp, state);
    }
    id.accept(&ConnectParameters::new(qp.number())).unwrap();
    (server, id, qp)
}

/// Says `done`, and holds `what` until it is killed.
fn hold<T>(what: T, done: &str) -> ! {
    let _what = what;
    peer::say(done);
    peer::wait_for_the_end();
}

/// The next request, with an endpoint that has a receive.
fn prepared(listener: &mut Listener) -> Result<PreparedRequest> {
    let request = listener.next(DEADLINE).unwrap().expect("a request in time");
    let pd = request.pd().unwrap();
    let mut prepared = request.prepare(Endpoint::builder(&pd))?;
    prepared.receive(pd.allocate(64)?)?;
    Ok(prepared)
}

/// What went before disturbs nobody who comes after.
#[track_caller]
fn serves_the_next(listener: &mut Listener) {
    let (mut client, mut server) = connected(&Connector::new(), listener);
    let outbox = filled(client.pd(), b"still there?");
    client.send(outbox).unwrap();
    let done = server.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!(done.buffer.as_deref(), Some(&b"still there?"[..]));
}

/// Waits until the connection is known to have ended.
#[track_caller]
fn ends(connection: &mut Connection) {
    let start = Instant::now();
    while connection.is_connected().unwrap() {
        assert!(start.elapsed() < DEADLINE, "it goes on without its peer");
        thread::yield_now();
    }
}

#[track_caller]
fn is_of(error: &ConnectError, step: Step, server: SocketAddr) {
    assert_eq!(error.step, step, "{error}");
    let end = if step == Step::Accept { error.local } else { error.peer };
    let other = if step == Step::Accept { error.peer } else { error.local };
    assert_eq!(end, Some(Address::from(server)), "{error}");
    assert!(other.is_some_and(|other| other.ip().is_some_and(|ip| ip.ip() == server.ip())), "{error}");
}

#[test]
fn a_client_that_dies_before_it_is_accepted() {
    const NAME: &str = "cm_failures::a_client_that_dies_before_it_is_accepted";
    let (_rdma, address) = require!();
    if let Some(server) = peer::part() {
        let channel = EventChannel::new().unwrap();
        hold(asking(&channel, server.parse().unwrap()), "asked");
    }
    let (mut listener, local) = listener(address);
    // Before its request is read, before it has an endpoint, and after that.
    for killed_at in 0..3 {
        let mut client = Peer::start(NAME, local);
        assert_eq!(client.hear(), "asked");
        let accepted = if killed_at == 0 {
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
        is_of(&error, Step::Accept, local);
        // It is a matter of time whether the kernel knows before it is told to accept.
        assert!(matches!(error.cause, Cause::Failed(Errno(libc::EINVAL)) | Cause::Rejected { .. }), "{error}");
        serves_the_next(&mut listener);
    }
}

#[test]
fn a_client_that_dies_after_it_was_accepted_and_before_it_says_so() {
    const NAME: &str = "cm_failures::a_client_that_dies_after_it_was_accepted_and_before_it_says_so";
    let (_rdma, address) = require!();
    if let Some(server) = peer::part() {
        let channel = EventChannel::new().unwrap();
        hold(answered(&channel, server.parse().unwrap()), "answered");
    }
    let (mut listener, local) = listener(address);
    let mut client = Peer::start(NAME, local);
    let prepared = prepared(&mut listener).unwrap();
    let accepted = thread::scope(|scope| {
        let accepting = scope.spawn(|| prepared.accept(b""));
        assert_eq!(client.hear(), "answered");
        assert!(!accepting.is_finished(), "the peer has not said that it knows");
        client.kill();
        accepting.join().unwrap()
    });
    let error = failure(error_of(accepted));
    is_of(&error, Step::Accept, local);
    assert!(matches!(error.cause, Cause::Rejected { reason: RejectReason::CONSUMER_DEFINED, .. }), "{error}");
    serves_the_next(&mut listener);
}

#[test]
fn a_server_that_dies_before_it_answers() {
    const NAME: &str = "cm_failures::a_server_that_dies_before_it_answers";
    let (_rdma, address) = require!();
    match peer::part().as_deref() {
        Some("reads") => {
            let channel = EventChannel::new().unwrap();
            hold(asked(&channel, address), "asked");
        }
        Some(_) => {
            let listener = Listener::bind((address, 0)).unwrap();
            peer::say(listener.local_address());
            assert!(is_readable(listener.channel(), DEADLINE), "a request in time");
            hold(listener, "asked");
        }
        None => {}
    }
    for part in ["reads", "does not read"] {
        let mut server = Peer::start(NAME, part);
        let at: SocketAddr = server.hear().parse().unwrap();
        let refused = thread::scope(|scope| {
            let connecting = scope.spawn(|| Connector::new().connect(at));
            assert_eq!(server.hear(), "asked");
            assert!(!connecting.is_finished());
            server.kill();
            connecting.join().unwrap()
        });
        let error = failure(error_of(refused));
        is_of(&error, Step::Connect, at);
        assert!(matches!(error.cause, Cause::Rejected { .. }), "{error}");
    }
    serves_the_next(&mut listener(address).0);
}

#[test]
fn a_server_that_dies_after_it_has_accepted_and_before_its_client_says_so() {
    const NAME: &str = "cm_failures::a_server_that_dies_after_it_has_accepted_and_before_its_client_says_so";
    let (_rdma, address) = require!();
    match peer::part().as_deref() {
        Some("waits") => {
            let channel = EventChannel::new().unwrap();
            hold(accepting(&channel, address), "accepted");
        }
        Some(_) => {
            let channel = EventChannel::new().unwrap();
            let _accepted = accepting(&channel, address);
            // SAFETY: it is this very process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        None => {}
    }
    let mut server = Peer::start(NAME, "waits");
    let at: SocketAddr = server.hear().parse().unwrap();
    let channel = EventChannel::new().unwrap();
    let (mut id, _qp) = answered(&channel, at);
    assert_eq!(server.hear(), "accepted");
    server.kill();
    let event = next(&channel, id.id());
    assert!(matches!(event, EventKind::Rejected(RejectReason::CONSUMER_DEFINED, _)), "{event:?}");
    let error = error_of(id.establish());
    assert!(
        matches!(error, Error::Cm(CmError::Call { call: "rdma_establish", errno: Errno(libc::EINVAL) })),
        "{error}"
    );

    // A connector establishes at once, so who wins is open.
    for _ in 0..3 {
        let mut server = Peer::start(NAME, "dies");
        let at: SocketAddr = server.hear().parse().unwrap();
        match Connector::new().connect(at) {
            Ok(mut connection) => {
                server.killed();
                ends(&mut connection);
            }
            Err(error) => {
                server.killed();
                let error = failure(error);
                is_of(&error, Step::Connect, at);
            }
        }
    }
    serves_the_next(&mut listener(address).0);
}

const SEND: usize = 1000;
const WRITE: usize = 20_000;
/// Work that is in flight at a time.
const WORK: usize = 32;

/// Memory that the other end may write to, and what to tell it of that.
fn exposed(pd: &ProtectionDomain) -> (ExposedRegion, [u8; 20]) {
    let region = pd.expose(Pages::new(WRITE).unwrap(), Access::REMOTE_WRITE).unwrap();
    let remote = region.remote();
    let mut told = [0; 20];
    told[..8].copy_from_slice(&remote.address.to_be_bytes());
    told[8..16].copy_from_slice(&remote.len.to_be_bytes());
    told[16..].copy_from_slice(&remote.rkey.to_be_bytes());
    (region, told)
}

/// What it was told.
fn remote(told: &[u8]) -> RemoteMemory {
    let (address, len) = told[..16].split_at(8);
    RemoteMemory {
        address: u64::from_be_bytes(address.try_into().unwrap()),
        len: u64::from_be_bytes(len.try_into().unwrap()),
        rkey: u32::from_be_bytes(told[16..20].try_into().unwrap()),
    }
}

/// Messages that the peer takes before it is killed.
const TAKEN: usize = 3 * WORK;

/// Takes so many messages, and no more: what comes then stays in flight.
fn take(mut connection: Connection) -> ! {
    peer::say("connected");
    for _ in 0..TAKEN - WORK {
        let done = connection.wait(DEADLINE).unwrap().ok().unwrap();
        assert_eq!(done.operation, Operation::Receive);
        connection.receive(done.buffer.unwrap()).unwrap();
    }
    hold(connection, "no more");
}

fn post_receives(endpoint: &mut Endpoint) {
    for _ in 0..WORK {
        endpoint.receive(endpoint.pd().allocate(SEND).unwrap()).unwrap();
    }
}

/// Sends and writes while the peer is killed, after which all buffers come back.
fn work_until_killed(mut connection: Connection, peer: Peer) {
    let remote = remote(connection.private_data());
    let pd = connection.pd().clone();
    post_receives(&mut connection);
    let mut idle: Vec<_> =
        (0..WORK).map(|number| pd.allocate(if number % 2 == 0 { SEND } else { WRITE }).unwrap()).collect();
    let (mut sent, mut peer) = (0, Some(peer));
    let start = Instant::now();
    while connection.is_connected().unwrap() {
        assert!(start.elapsed() < 2 * DEADLINE, "it goes on without its peer");
        while let Some(buffer) = idle.pop() {
            match buffer.len() {
                SEND => connection.send(buffer).unwrap(),
                _ => connection.write(buffer, remote).unwrap(),
            };
        }
        if sent == TAKEN {
            peer.take().into_iter().for_each(Peer::kill);
        }
        // Without a peer nothing is done any more, and nothing fails for as long as it is tried again.
        let Some(done) = connection.poll().unwrap() else { continue };
        assert_eq!(done.status, WcStatus::SUCCESS);
        sent += usize::from(done.operation == Operation::Send);
        idle.extend(done.buffer);
    }
    assert_eq!(sent, TAKEN);
    let mut failed = [0; 2];
    while connection.sends_in_flight() > 0 || connection.receives_in_flight() > 0 {
        let done = connection.wait(DEADLINE).unwrap();
        failed[usize::from(done.operation == Operation::Receive)] += usize::from(done.status != WcStatus::SUCCESS);
        idle.extend(done.buffer);
    }
    // A write before the first send that found no receive may have been done.
    assert!(failed[0] >= WORK - 2 && failed[1] == WORK, "{failed:?}");
    assert_eq!(idle.len(), 2 * WORK);
    assert!(connection.disconnect().unwrap().is_empty());
}

#[test]
fn a_server_that_dies_amid_data() {
    const NAME: &str = "cm_failures::a_server_that_dies_amid_data";
    let (_rdma, address) = require!();
    if peer::part().is_some() {
        let mut listener = Listener::bind((address, 0)).unwrap();
        peer::say(listener.local_address());
        let request = listener.next(DEADLINE).unwrap().expect("a request in time");
        let pd = request.pd().unwrap();
        let (_region, told) = exposed(&pd);
        let mut prepared = request.prepare(Endpoint::builder(&pd).peer_access(Access::REMOTE_WRITE)).unwrap();
        post_receives(&mut prepared);
        take(prepared.accept(&told).unwrap());
    }
    let mut server = Peer::start(NAME, "server");
    let at: SocketAddr = server.hear().parse().unwrap();
    let connection = Connector::new().connect(at).unwrap();
    assert_eq!(server.hear(), "connected");
    work_until_killed(connection, server);
    let error = failure(error_of(Connector::new().connect(at)));
    assert!(
        matches!(error.cause, Cause::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. }),
        "its port went with it: {error}"
    );
    serves_the_next(&mut listener(address).0);
}

#[test]
fn a_client_that_dies_amid_data() {
    const NAME: &str = "cm_failures::a_client_that_dies_amid_data";
    let (_rdma, address) = require!();
    if let Some(server) = peer::part() {
        let route = Connector::new().resolve(server.parse::<SocketAddr>().unwrap()).unwrap();
        let pd = route.pd().clone();
        let (_region, told) = exposed(&pd);
        let mut prepared = route.prepare(Endpoint::builder(&pd).peer_access(Access::REMOTE_WRITE)).unwrap();
        post_receives(&mut prepared);
        take(prepared.connect(&told).unwrap());
    }
    let (mut listener, local) = listener(address);
    let mut client = Peer::start(NAME, local);
    let connection = listener.accept(DEADLINE).unwrap().expect("a request in time");
    assert_eq!(client.hear(), "connected");
    work_until_killed(connection, client);
    serves_the_next(&mut listener);
}
