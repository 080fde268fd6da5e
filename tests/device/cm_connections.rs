//! Connections by address through `Connector` and `Listener`.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rdma_safe::cm::{Cause, CmError, ConnectError, Connection, Connector, Listener, RejectReason, Step};
use rdma_safe::{Endpoint, Error, WcStatus, soft};

use crate::allocation::live;
use crate::cm::address;
use crate::support::child::{allocated, in_own_process, open_files};
use crate::support::{DEADLINE, device, error_of, filled, pattern, within_deadline};

pub(crate) fn listener(address: Ipv4Addr) -> (Listener, SocketAddr) {
    let listener = Listener::bind((address, 0)).unwrap();
    let local = listener.local_address().ip().unwrap();
    (listener, local)
}

/// The connecting and the accepting end of a connection, each with a posted receive.
pub(crate) fn connected(connector: &Connector, listener: &mut Listener) -> (Connection, Connection) {
    let local = listener.local_address();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.next(DEADLINE).unwrap().expect("a request in time");
            let pd = request.pd().unwrap();
            let mut prepared = request.prepare(Endpoint::builder(&pd)).unwrap();
            prepared.receive(pd.allocate(4096).unwrap()).unwrap();
            prepared.accept(b"welcome").unwrap()
        });
        let route = connector.resolve(local).unwrap();
        let pd = route.pd().clone();
        let mut prepared = route.prepare(Endpoint::builder(&pd)).unwrap();
        prepared.receive(pd.allocate(4096).unwrap()).unwrap();
        let connection = prepared.connect(b"hello").unwrap();
        (connection, accepting.join().unwrap())
    })
}

#[track_caller]
pub(crate) fn failure(error: Error) -> ConnectError {
    match error {
        Error::Cm(CmError::Connect(error)) => *error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_end_uses_its_own_ack_timeout() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let timeout = |end: &Connection| end.queue_pair().query().unwrap().timeout().unwrap();
    let (listener, _) = listener(address);
    let mut listener = listener.ack_timeout(13);
    let (a, b) = connected(&Connector::new().ack_timeout(12), &mut listener);
    assert_eq!((timeout(&a), timeout(&b)), (12, 13));
    drop((a, b));
    let error = error_of(Connector::new().ack_timeout(32).resolve(listener.local_address()));
    assert!(error.to_string().contains("rdma_set_option"), "{error}");
}

#[test]
fn endpoints_connect_by_address_and_exchange_data() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, local) = listener(address);
    let (mut a, mut b) = connected(&Connector::new(), &mut listener);
    assert!(a.private_data().starts_with(b"welcome\0") && b.private_data().starts_with(b"hello\0"));
    assert_eq!(a.peer_address().unwrap().ip(), Some(local));
    assert_eq!(a.local_address(), b.peer_address());
    let message = pattern(1, 4096);
    let outbox = filled(a.pd(), &message);
    a.send(outbox).unwrap();
    let done = b.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!(done.buffer.as_deref(), Some(&message[..]));
    let _ = a.wait(DEADLINE).unwrap().ok().unwrap();
    assert!(a.is_connected().unwrap() && b.is_connected().unwrap());
    // A disconnect waits for the peer's, so both ends disconnect concurrently.
    thread::scope(|scope| {
        let other = scope.spawn(move || {
            let start = Instant::now();
            while b.is_connected().unwrap() {
                assert!(start.elapsed() < DEADLINE);
                thread::yield_now();
            }
            // Its posted work is flushed.
            let flushed = b.wait(DEADLINE);
            (flushed.is_err(), b.disconnect().unwrap())
        });
        assert_eq!(a.disconnect().unwrap().len(), 1, "the unused receive");
        let (nothing_left, buffers) = other.join().unwrap();
        assert!(nothing_left && buffers.is_empty(), "its only receive has completed");
    });
}

#[test]
fn an_unconfirmed_disconnect_returns_all_buffers_after_the_timeout_of_its_end() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let timeouts = [3, 4].map(Duration::from_secs);
    let (mut listener, _) = listener(address);
    for (end, timeout) in timeouts.into_iter().enumerate() {
        listener = listener.timeout(timeouts[1]);
        let (a, b) = connected(&Connector::new().timeout(timeouts[0]), &mut listener);
        let [leaving, other] = if end == 0 { [a, b] } else { [b, a] };
        let peer = leaving.peer_address();
        let unconfirmed = leaving.disconnect().expect_err("the other end does not disconnect");
        assert_eq!(unconfirmed.buffers.len(), 1, "the unused receive");
        let error = failure(unconfirmed.error);
        assert_eq!((error.step, error.cause, error.peer), (Step::Disconnect, Cause::Timeout(timeout), peer));
        assert!(error.to_string().contains("the connection has ended nevertheless"), "{error}");
        drop(other);
    }
}

#[test]
fn a_rejected_connection_reports_the_reason() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, local) = listener(address);
    let refused = thread::scope(|scope| {
        let refusing = scope.spawn(|| {
            listener.next(DEADLINE).unwrap().expect("a request").reject(b"not today").unwrap();
            drop(listener.next(DEADLINE).unwrap().expect("a request"));
        });
        let errors = [0, 1].map(|_| failure(error_of(Connector::new().connect(local))));
        refusing.join().unwrap();
        errors
    });
    for (error, expected) in refused.into_iter().zip([&b"not today\0"[..], b"\0"]) {
        assert_eq!((error.step, error.peer.and_then(|peer| peer.ip())), (Step::Connect, Some(local)));
        let Cause::Rejected { reason: RejectReason::CONSUMER_DEFINED, private_data } = error.cause else {
            panic!("{error}")
        };
        assert!(private_data.is_empty() && expected == b"\0" || private_data.starts_with(expected), "{private_data:?}");
    }
    drop(listener);
    let error = failure(error_of(Connector::new().connect(local)));
    assert!(
        matches!(error.cause, Cause::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. }),
        "no listener: {error}"
    );
    assert!(error.to_string().contains("start the peer first"), "{error}");
}

#[test]
fn unresolvable_names_are_errors() {
    let Some(_rdma) = device() else { return };
    let error = error_of(Connector::new().connect("no-such-host.invalid:7471"));
    assert!(matches!(error, Error::Cm(CmError::NoAddress { .. })), "{error}");
    let error = error_of(Connector::new().connect("10.0.0.2"));
    assert!(error.to_string().contains("a port is part of it"), "{error}");
    let error = error_of(Connector::new().connect(&[] as &[SocketAddr]));
    assert!(matches!(error, Error::Cm(CmError::NoAddress { .. })), "{error}");
}

#[test]
fn connecting_to_an_unresponsive_peer_times_out() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    // The listener reads no request. Requests after the first two exceed the backlog.
    let listener = Listener::bind_with((address, 0), 1).unwrap();
    let local = listener.local_address().ip().unwrap();
    let start = Instant::now();
    let waiting = [0; 4].map(|_| {
        let connector = Connector::new().timeout(Duration::from_millis(300));
        let route = connector.resolve(local).unwrap();
        let pd = route.pd().clone();
        route.prepare(Endpoint::builder(&pd)).unwrap().start_connect(b"").unwrap()
    });
    for handshake in waiting {
        let error = failure(error_of(handshake.wait()));
        assert_eq!((error.step, error.cause), (Step::Connect, Cause::Timeout(Duration::from_millis(300))));
        assert!(error.to_string().contains("its backlog is full"), "{error}");
    }
    assert!(start.elapsed() < DEADLINE);
    drop(listener);
}

#[test]
fn requests_beyond_a_full_backlog_are_retried() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let mut listener = Listener::bind_with((address, 0), 1).unwrap();
    let local = listener.local_address();
    let (ready, all_ready) = mpsc::channel();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                let ready = ready.clone();
                scope.spawn(move || {
                    let route = Connector::new().timeout(Duration::from_secs(60)).resolve(local).unwrap();
                    let pd = route.pd().clone();
                    let prepared = route.prepare(Endpoint::builder(&pd)).unwrap();
                    ready.send(()).unwrap();
                    prepared.connect(b"").map(drop)
                })
            })
            .collect();
        for _ in 0..4 {
            all_ready.recv_timeout(DEADLINE).unwrap();
        }
        let mut accepted = 0;
        while accepted < 4 {
            match listener.accept(Duration::from_secs(60)) {
                Ok(Some(_)) => accepted += 1,
                Ok(None) => panic!("{accepted} of 4"),
                // The client has waited too long.
                Err(error) => panic!("{error}"),
            }
        }
        for end in clients {
            end.join().unwrap().unwrap();
        }
    });
}

#[test]
fn a_killed_peer_ends_the_connection() {
    const NAME: &str = "cm_connections::a_killed_peer_ends_the_connection";
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    if let Ok(server) = std::env::var("RDMA_TEST_CM_SERVER") {
        let _connection = Connector::new().connect(server).unwrap();
        // SAFETY: the process kills itself.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    let (mut listener, local) = listener(address);
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env("RDMA_TEST_CM_SERVER", local.to_string())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let request = listener.next(DEADLINE).unwrap().expect("a request in time");
    let pd = request.pd().unwrap();
    let mut prepared = request.prepare(Endpoint::builder(&pd)).unwrap();
    prepared.receive(pd.allocate(64).unwrap()).unwrap();
    let mut connection = match prepared.accept(b"") {
        Ok(connection) => connection,
        // The peer was killed before its RTU arrived.
        Err(error) => {
            let cause = failure(error).cause;
            // Where the RTU was lost, the server cannot know that the client was connected.
            let is_undecided = rdma.loses_cm_messages() && matches!(cause, Cause::Rejected { .. });
            assert!(cause == Cause::Disconnected || is_undecided, "{cause:?}");
            child.wait().unwrap();
            return;
        }
    };
    let start = Instant::now();
    while connection.is_connected().unwrap() {
        assert!(start.elapsed() < DEADLINE);
        thread::yield_now();
    }
    let flushed = connection.wait(DEADLINE).unwrap();
    assert!(flushed.status == WcStatus::WR_FLUSH_ERR && flushed.is_disconnected(), "{flushed:?}");
    let failed = flushed.ok().expect_err("flushed work has failed");
    assert!(failed.to_string().contains("the peer has ended the connection"), "{failed}");
    assert_eq!(rdma_safe::Error::from(failed).connect_cause(), Some(&Cause::Disconnected));
    let error = failure(error_of(connection.wait(DEADLINE)));
    assert_eq!((error.step, error.cause), (Step::Transfer, Cause::Disconnected));
    assert!(error.to_string().ends_with("the peer has ended the connection; connect again to continue"), "{error}");
    assert!(!child.wait().unwrap().success());
}

/// Numbers of queue pairs and ids in the kernel, of all processes. `None` without the tool `rdma`.
pub(crate) fn kernel_objects() -> Option<[usize; 2]> {
    let count = |kind| {
        let output = std::process::Command::new("rdma").args(["resource", "show", kind]).output().ok()?;
        Some(output.stdout.iter().filter(|byte| **byte == b'\n').count())
    };
    Some([count("qp")?, count("cm_id")?])
}

#[test]
fn two_hundred_connections_leak_nothing() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    in_own_process("cm_connections::two_hundred_connections_leak_nothing", || {
        let (mut listener, _) = listener(address);
        let connector = Connector::new();
        let mut before = None;
        let mut memory = Vec::with_capacity(200);
        for round in 0..200 {
            let (a, b) = connected(&connector, &mut listener);
            drop(a);
            drop(b);
            // The first connection opens the device, here and in librdmacm.
            if round == 1 {
                before = Some((open_files(), kernel_objects()));
            }
            // soft0 holds ended connections in timewait, in memory of this process.
            if rdma.is_soft() && [99, 199].contains(&round) {
                within_deadline("the end of timewait", || (soft::objects().connections == 0).then_some(()));
            }
            // The C library counts memory that a thread of soft0 has freed as allocated, until that thread uses it again.
            memory.push(if rdma.is_soft() { live() } else { allocated() });
        }
        assert_eq!(Some((open_files(), kernel_objects())), before);
        // The first rounds grow the heap, since the allocator keeps freed memory. Later rounds would show a leak of even the
        // smallest allocation, 32 bytes each.
        assert!(memory[199] < memory[99] + 100 * 16, "{memory:?}");
    });
}
