//! The keepalive of connections by address, which is on by default.

use std::thread;
use std::time::{Duration, Instant};

use rdma_safe::cm::{Connection, Connector, Listener};
use rdma_safe::{Access, Endpoint, EndpointSet, Error, WcStatus, soft};

use crate::cm::address;
use crate::cm_connections::{connected, listener};
use crate::keepalive::{limit, periods, short};
use crate::support::child::in_own_process;
use crate::support::program::{Program, free_port};
use crate::support::{DEADLINE, device, error_of, within_deadline};

/// Connects two ends whose endpoints have these keepalives.
fn with_keepalives(listener: &mut Listener, ends: [Option<Duration>; 2]) -> (Connection, Connection) {
    let local = listener.local_address();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.next(DEADLINE).unwrap().expect("a request in time");
            let pd = request.pd().unwrap();
            request.prepare(Endpoint::builder(&pd).keepalive(ends[1])).unwrap().accept(b"").unwrap()
        });
        let route = Connector::new().resolve(local).unwrap();
        let pd = route.pd().clone();
        let mut connecting = route.prepare(Endpoint::builder(&pd).events(true).keepalive(ends[0])).unwrap();
        connecting.receive(pd.allocate(8).unwrap()).unwrap();
        (connecting.connect(b"").unwrap(), accepting.join().unwrap())
    })
}

#[test]
fn connections_by_address_have_a_keepalive_of_ten_seconds() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, _) = listener(address);
    let (a, b) = connected(&Connector::new(), &mut listener);
    for end in [&a, &b] {
        assert_eq!(end.keepalive(), Some(Duration::from_secs(10)));
        assert!(end.keepalive_due().is_some());
        let attributes = end.queue_pair().query().unwrap();
        // All retries fit into the limit. Without a keepalive, the kernel's timeout of 2.1 s would take longer.
        let timeouts = u32::from(attributes.retry_count().unwrap()) + 1;
        let total = Duration::from_nanos(4096 << attributes.timeout().unwrap()) * timeouts;
        assert!(total <= Duration::from_secs(10), "{total:?}");
        assert!(end.address().remote_write);
    }
}

#[test]
fn an_end_without_a_keepalive_answers_that_of_its_peer() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, _) = listener(address);
    let within = limit(&rdma);
    let (mut a, b) = with_keepalives(&mut listener, [Some(within), None]);
    assert_eq!((a.keepalive(), b.keepalive()), (Some(within), None));
    assert!(b.queue_pair().query().unwrap().access().unwrap().contains(Access::REMOTE_WRITE));
    let idle = error_of(a.wait(periods(&rdma)));
    assert!(matches!(idle, Error::Timeout { .. }), "{idle}");
    assert!(a.is_connected().unwrap());
}

#[test]
fn a_connection_whose_peer_vanishes_without_a_disconnect_is_reported() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, _) = listener(address);
    let (mut a, b) = with_keepalives(&mut listener, [Some(short(&rdma)), None]);
    // The kernel does not disconnect, because the id remains.
    let (endpoint, id) = b.into_parts();
    drop(endpoint);
    let lost = a.wait(DEADLINE).unwrap().connection_lost().expect("a report");
    assert!([WcStatus::RESP_TIMEOUT_ERR, WcStatus::RETRY_EXC_ERR].contains(&lost.status), "{lost}");
    let flushed = a.wait(DEADLINE).unwrap();
    assert_eq!((flushed.status, flushed.buffer.is_some()), (WcStatus::WR_FLUSH_ERR, true));
    drop(id);
}

#[test]
fn an_endpoint_of_a_set_has_the_keepalive_of_connections_by_address() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, local) = listener(address);
    let (client, mut set, member) = thread::scope(|scope| {
        let connecting = scope.spawn(move || {
            let route = Connector::new().resolve(local).unwrap();
            let pd = route.pd().clone();
            route.prepare(Endpoint::builder(&pd).keepalive(None)).unwrap().connect(b"").unwrap()
        });
        let request = listener.next(DEADLINE).unwrap().expect("a request in time");
        let pd = request.pd().unwrap();
        // No entries are counted for keepalives.
        let mut set = EndpointSet::builder(pd.context(), 2 * 8).build().unwrap();
        let member = request.accept_in(Endpoint::builder(&pd).send_depth(8).recv_depth(8), &mut set, b"").unwrap();
        (connecting.join().unwrap(), set, member)
    });
    assert_eq!(set.endpoint(member.key()).unwrap().keepalive(), Some(Duration::from_secs(10)));
    assert!(set.keepalive_due().is_some());
    drop(client);
}

#[test]
fn a_program_in_c_answers_keepalives() {
    // The counters include the packets of all tests in a process.
    in_own_process("cm_keepalive::a_program_in_c_answers_keepalives", answered_by_a_program_in_c);
}

fn answered_by_a_program_in_c() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some(program)) = (address(&rdma), Program::of_rdma_core("rping", "rdmacm-utils")) else {
        return;
    };
    let port = free_port();
    let text = (address.to_string(), port.to_string());
    let server = program.start_with(&["-s", "-d", "-a", &text.0, "-p", &text.1]);
    // It waits for a first message that never comes.
    let mut connection = within_deadline("a server that listens", || {
        let route = Connector::new().resolve((address, port)).ok()?;
        let pd = route.pd().clone();
        route.prepare(Endpoint::builder(&pd).events(true)).ok()?.connect(b"").ok()
    });
    let within = connection.keepalive().expect("the default");
    if rdma.is_soft() {
        // The ACKs of two probes.
        let before = soft::counters().received_packets;
        within_deadline("two ACKs", || {
            let idle = error_of(connection.wait(within / 100));
            assert!(matches!(idle, Error::Timeout { .. }), "{idle}");
            (soft::counters().received_packets >= before + 2).then_some(())
        });
    } else {
        let idle = error_of(connection.wait(within * 5 / 4));
        assert!(matches!(idle, Error::Timeout { .. }), "{idle}");
    }
    assert!(connection.is_connected().unwrap());
    drop((connection, server));
}

#[test]
fn a_client_that_handles_the_reply_late_is_not_lost() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, local) = listener(address);
    let within = short(&rdma);
    let route = Connector::new().resolve(local).unwrap();
    let pd = route.pd().clone();
    let connecting = route.prepare(Endpoint::builder(&pd).keepalive(None)).unwrap().start_connect(b"").unwrap();
    let request = listener.next(DEADLINE).unwrap().expect("a request in time");
    let pd = request.pd().unwrap();
    let mut set = EndpointSet::builder(pd.context(), 32).build().unwrap();
    let builder = Endpoint::builder(&pd).send_depth(8).recv_depth(8).keepalive(within);
    let accepting = request.start_accept_in(builder, &mut set, b"").unwrap();
    // The client's queue pair answers nothing meanwhile.
    let start = Instant::now();
    while start.elapsed() < 2 * within {
        assert!(set.poll().unwrap().is_none(), "the keepalive starts with the connection");
    }
    let client = connecting.wait().unwrap();
    let server = accepting.wait_in(&mut set).unwrap();
    // From now on it is watched: without the queue pair, but with the id, nothing else tells that it is gone.
    let (endpoint, _id) = client.into_parts();
    drop(endpoint);
    let (key, lost) = within_deadline("the report", || set.poll().unwrap());
    assert!(key == server.key() && lost.connection_lost().is_some(), "{:?}", lost.status);
}
