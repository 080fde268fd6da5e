//! Handshakes over a fake librdmacm, whose ids connect queue pairs of soft0.
//!
//! This is a separate test program, because the fake functions replace those of the library in the whole process.
#![cfg(not(miri))] // poll(2), eventfd(2)

mod disconnects;
mod drops;
mod network;
mod sets;
mod steps;

use std::fmt::Debug;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use rdma_safe::cm::{
    Address, Cause, CmError, ConnectError, Connection, Connector, Handshake, Listener, Outcome, PreparedRequest,
    PreparedRoute, Progress, Request, Step,
};
use rdma_safe::{Buffer, Context, Endpoint, Error, ProtectionDomain, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Ends a test that hangs.
const DEADLINE: Duration = Duration::from_secs(60);

/// A deadline that a test waits for.
const SHORT: Duration = Duration::from_millis(20);

/// Both ends, on one device.
struct Ends {
    connector: Connector,
    listener: Listener,
    pd: ProtectionDomain,
    context: Context,
    _guard: MutexGuard<'static, ()>,
}

impl Ends {
    fn new() -> Ends {
        let (guard, context) = network::install();
        let pd = context.alloc_pd().unwrap();
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().pd(&pd);
        Ends { connector: Connector::new().pd(&pd), listener, pd, context, _guard: guard }
    }

    fn address(&self) -> SocketAddr {
        self.listener.local_address().ip().unwrap()
    }

    /// A route to the listener, with an endpoint that has a posted receive.
    fn prepared(&self) -> PreparedRoute {
        let route = self.connector.resolve(self.address()).unwrap();
        let mut prepared = route.prepare(Endpoint::builder(&self.pd)).unwrap();
        prepared.receive(self.pd.allocate(64).unwrap()).unwrap();
        prepared
    }

    fn connecting(&self) -> Handshake<Connection> {
        self.prepared().start_connect(b"hello").unwrap()
    }

    fn request(&mut self) -> Request {
        self.listener.next(DEADLINE).unwrap().expect("a request in time")
    }

    /// The next request, with an endpoint that has a posted receive.
    fn requested(&mut self) -> PreparedRequest {
        let mut prepared = self.request().prepare(Endpoint::builder(&self.pd)).unwrap();
        prepared.receive(self.pd.allocate(64).unwrap()).unwrap();
        prepared
    }

    fn accepting(&mut self) -> Handshake<Connection> {
        self.requested().start_accept(b"welcome").unwrap()
    }

    /// Both ends of a connection, the connecting one first.
    fn connected(&mut self) -> [Connection; 2] {
        let connecting = self.connecting();
        let accepting = self.accepting();
        let connected = connecting.wait().unwrap();
        [connected, accepting.wait().unwrap()]
    }

    /// A buffer with these bytes.
    fn filled(&self, bytes: &[u8]) -> Buffer {
        let mut buffer = self.pd.allocate(bytes.len()).unwrap();
        buffer.copy_from_slice(bytes);
        buffer
    }

    /// Checks that a message arrives.
    #[track_caller]
    fn exchange(&self, from: &mut Connection, to: &mut Connection, text: &[u8]) {
        from.send(self.filled(text)).unwrap();
        assert_eq!(to.wait(DEADLINE).unwrap().ok().unwrap().buffer.as_deref(), Some(text));
        let _ = from.wait(DEADLINE).unwrap().ok().unwrap();
    }
}

/// Advances a handshake that has to stay pending.
#[track_caller]
fn pending<T: Outcome<Context = (), Error: Debug> + Debug>(handshake: Handshake<T>) -> Handshake<T> {
    match handshake.advance().unwrap() {
        Progress::Pending(handshake) => handshake,
        Progress::Ready(result) => panic!("{result:?}"),
    }
}

/// Advances a handshake whose event has arrived.
#[track_caller]
fn ready<T: Outcome<Context = (), Error: Debug>>(handshake: Handshake<T>) -> T {
    match handshake.advance().unwrap() {
        Progress::Ready(result) => result,
        Progress::Pending(handshake) => panic!("{handshake:?}"),
    }
}

/// The failed step of a handshake that was advanced.
#[track_caller]
fn failure<T: Debug>(result: Result<T>) -> ConnectError {
    match result.unwrap_err() {
        Error::Cm(CmError::Connect(error)) => *error,
        other => panic!("{other:?}"),
    }
}

/// Advances a handshake without events until it fails, which must not be before its deadline.
#[track_caller]
fn timeout<T: Outcome<Context = (), Error = Error> + Debug>(mut handshake: Handshake<T>) -> ConnectError {
    loop {
        let deadline = handshake.deadline();
        assert!(deadline < Instant::now() + DEADLINE);
        match handshake.advance() {
            Ok(Progress::Pending(next)) => handshake = next,
            failed => {
                assert!(Instant::now() >= deadline, "{failed:?}");
                return failure(failed);
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        assert_eq!(sleep([&handshake], Some(left)), 0, "no event arrives");
    }
}

/// Sleeps until a descriptor is readable, and returns the number of those that are.
fn sleep<'a>(fds: impl IntoIterator<Item = &'a (impl AsFd + 'a)>, timeout: Option<Duration>) -> usize {
    let mut polled: Vec<_> = fds.into_iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = Timespec::try_from(timeout.unwrap_or(DEADLINE)).unwrap();
    poll(&mut polled, Some(&timeout)).unwrap()
}

/// Checks that everything that was made since `before` was destroyed.
#[track_caller]
fn expect_objects(before: [usize; 4]) {
    assert_eq!(network::objects(), before, "channels, ids, queue pairs, completion queues");
}

#[test]
fn handshakes_are_sent_to_other_threads() {
    fn is_send<T: Send>() {}
    fn all<T: Outcome>() {
        is_send::<Handshake<T>>();
    }
    all::<Connection>();
    all::<rdma_safe::cm::SetConnection>();
    all::<rdma_safe::cm::GroupMember>();
    all::<rdma_safe::cm::DatagramService>();
}

#[test]
fn one_thread_interleaves_connects_and_accepts_by_readiness() {
    const CLIENTS: usize = 12;
    let mut ends = Ends::new();
    let mut resolving: Vec<_> = (0..CLIENTS).map(|_| ends.connector.start_resolve(ends.address()).unwrap()).collect();
    let (mut connecting, mut accepting) = (Vec::new(), Vec::new());
    let (mut clients, mut servers) = (Vec::new(), Vec::new());
    let start = Instant::now();
    while clients.len() + servers.len() < 2 * CLIENTS {
        assert!(start.elapsed() < DEADLINE);
        while let Some(request) = ends.listener.next(Duration::ZERO).unwrap() {
            assert!(request.private_data().starts_with(b"client "));
            let mut prepared = request.prepare(Endpoint::builder(&ends.pd)).unwrap();
            prepared.receive(ends.pd.allocate(64).unwrap()).unwrap();
            accepting.push(prepared.start_accept(b"welcome").unwrap());
        }
        for route in advance_all(&mut resolving) {
            let mut prepared = route.prepare(Endpoint::builder(&ends.pd)).unwrap();
            prepared.receive(ends.pd.allocate(64).unwrap()).unwrap();
            let name = format!("client {}", connecting.len() + clients.len());
            connecting.push(prepared.start_connect(name.as_bytes()).unwrap());
        }
        clients.extend(advance_all(&mut connecting));
        servers.extend(advance_all(&mut accepting));
        let idle = resolving.iter().map(AsFd::as_fd).chain(connecting.iter().map(AsFd::as_fd));
        let idle: Vec<_> = idle.chain(accepting.iter().map(AsFd::as_fd)).chain([ends.listener.as_fd()]).collect();
        if clients.len() + servers.len() < 2 * CLIENTS {
            assert!(sleep(&idle, None) > 0, "no event arrives");
        }
    }
    servers.sort_by_key(|server| server.private_data().to_vec());
    clients.sort_by_key(|client| client.local_address().unwrap().ip().unwrap().port());
    for client in &mut clients {
        assert_eq!((client.private_data(), client.peer_address()), (&b"welcome"[..], Some(ends.address().into())));
        let server = servers.iter_mut().find(|server| server.peer_address() == client.local_address()).unwrap();
        ends.exchange(client, server, b"over the wire");
        ends.exchange(server, client, b"and back");
    }
}

/// Advances all handshakes once. Keeps those in progress, and returns the results of the others.
fn advance_all<T: Outcome<Context = (), Error: Debug>>(handshakes: &mut Vec<Handshake<T>>) -> Vec<T> {
    let mut results = Vec::new();
    for handshake in std::mem::take(handshakes) {
        match handshake.advance().unwrap() {
            Progress::Ready(result) => results.push(result),
            Progress::Pending(handshake) => handshakes.push(handshake),
        }
    }
    results
}

#[test]
fn a_silent_peer_does_not_delay_another_one() {
    let mut ends = Ends::new();
    let silent = ends.connecting();
    let waiting = pending(ends.accepting());
    let [mut client, mut server] = ends.connected();
    ends.exchange(&mut client, &mut server, b"served meanwhile");
    // The first one continues where it was.
    let waiting = pending(waiting);
    let mut late = ready(silent);
    ends.exchange(&mut late, &mut ready(waiting), b"late");
}

#[test]
fn a_step_names_its_peer_and_its_addresses() {
    let mut ends = Ends::new();
    let address = Some(Address::from(ends.address()));
    let resolving = ends.connector.start_resolve(ends.address()).unwrap();
    assert_eq!((resolving.step(), resolving.peer_address()), (Step::ResolveAddress, address));
    let connecting = ends.connecting();
    assert_eq!((connecting.step(), connecting.peer_address()), (Step::Connect, address));
    let accepting = ends.accepting();
    assert_eq!((accepting.step(), accepting.local_address()), (Step::Accept, address));
    assert_eq!(accepting.peer_address(), connecting.local_address());
    let shown = format!("{accepting:?}");
    assert!(shown.contains("Accept") && shown.contains("deadline"), "{shown}");
    let clone = connecting.channel().clone();
    assert!(ready(connecting).id().channel().is_same(&clone), "the connection has the channel of its handshake");
}

#[test]
fn a_broken_request_does_not_block_the_next_one() {
    let mut ends = Ends::new();
    let [broken, gone, good] = [(); 3].map(|()| ends.connecting());
    network::script(|script| script.migration_errors = 1);
    assert_eq!(failure(ends.listener.next(Duration::ZERO)).cause, Cause::DeviceRemoved);
    assert!(matches!(failure(broken.advance()).cause, Cause::Rejected { .. }));
    drop(gone);
    let error = failure(ends.request().prepare(Endpoint::builder(&ends.pd)));
    assert_eq!(error.step, Step::Accept, "{error}");
    let accepting = ends.accepting();
    assert!(ends.listener.next(Duration::ZERO).unwrap().is_none());
    let _client = ready(good);
    assert!(ready(accepting).is_connected().unwrap());
}
