//! Servers whose clients are connected by address and share a receive pool or an endpoint set.

use std::time::Duration;

use rdma_safe::cm::{Connection, Connector, Listener, SetConnection};
use rdma_safe::{Endpoint, EndpointSet, Error, Operation, ProtectionDomain, ReceivePool};

use crate::channel::is_readable;
use crate::cm::address;
use crate::support::{DEADLINE, device, error_of, filled, pattern, within_deadline};

const CLIENTS: u64 = 24;
const LEN: usize = 300;
const DEPTH: u32 = 32;

/// Sends a request, answers it from the same buffer, and returns the buffer to the pool.
fn serve(client: &mut Connection, server: &mut Connection, pool: &mut ReceivePool, seed: u64) {
    let request = pattern(seed, LEN);
    let inbox = client.pd().allocate(LEN).unwrap();
    client.receive(inbox).unwrap();
    let outbox = filled(client.pd(), &request);
    client.send(outbox).unwrap();
    let arrived = server.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!(arrived.operation, Operation::Receive);
    let buffer = arrived.buffer.unwrap();
    assert!(*buffer == *request, "the request of another client");
    server.send(buffer).unwrap();
    pool.receive(server.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap()).unwrap();
    let done = [0, 1].map(|_| client.wait(DEADLINE).unwrap().ok().unwrap());
    let answer = done.into_iter().find(|done| done.operation == Operation::Receive).expect("an answer");
    assert!(*answer.buffer.unwrap() == *request);
}

/// A pool with the maximum number of posted receives.
fn full_pool(pd: &ProtectionDomain) -> ReceivePool {
    let mut pool = ReceivePool::new(pd, DEPTH).unwrap();
    for buffer in pd.allocate(DEPTH as usize * 512).unwrap().into_chunks(512).unwrap() {
        pool.receive(buffer).unwrap();
    }
    pool
}

#[test]
fn clients_connected_by_address_share_a_receive_pool() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let pd = rdma.pd();
    let mut pool = full_pool(&pd);
    let mut listener = Listener::bind((address, 0)).unwrap().pd(&pd);
    let (local, connector) = (listener.local_address(), Connector::new());
    let mut accept = |pool: &ReceivePool| {
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| connector.connect(local.ip().unwrap()).unwrap());
            let request = listener.next(DEADLINE).unwrap().expect("a request in time");
            assert!(!request.parameters().srq, "the client does not use a shared receive queue");
            let builder = Endpoint::builder(&pd).send_depth(4).recv_depth(8).receive_pool(pool);
            let server = request.prepare(builder).unwrap().accept(b"").unwrap();
            assert!(server.queue_pair().shared_receive_queue().is_some());
            (connecting.join().unwrap(), server)
        })
    };
    let mut ends: Vec<_> = (0..CLIENTS).map(|_| accept(&pool)).collect();
    for round in 0..3 {
        for (number, (client, server)) in (0..).zip(&mut ends) {
            serve(client, server, &mut pool, round * CLIENTS + number);
        }
    }
    // One client disconnects with an unread request. Its buffer is returned, and the others are still served.
    let (mut client, mut server) = ends.remove(5);
    let outbox = filled(client.pd(), b"last words");
    client.send(outbox).unwrap();
    let _ = client.wait(DEADLINE).unwrap().ok().unwrap();
    drop(client);
    within_deadline("the disconnect", || (!server.is_connected().unwrap()).then_some(()));
    let buffers = server.disconnect().unwrap();
    assert_eq!(buffers.iter().map(|buffer| &**buffer).collect::<Vec<_>>(), [b"last words"]);
    for buffer in buffers {
        pool.receive(buffer).unwrap();
    }
    ends.push(accept(&pool));
    for (number, (client, server)) in (100..).zip(&mut ends) {
        serve(client, server, &mut pool, number);
    }
    assert_eq!(pool.receives_in_flight(), DEPTH as usize);
}

#[test]
fn clients_connected_by_address_share_an_endpoint_set() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let pd = rdma.pd();
    let mut pool = full_pool(&pd);
    let room = pool.shared_receive_queue().max_wr() + 4 * 8;
    let mut set = EndpointSet::builder(pd.context(), room).build().unwrap();
    let mut listener = Listener::bind((address, 0)).unwrap().pd(&pd);
    let (local, connector) = (listener.local_address(), Connector::new());
    let mut accept = |set: &mut EndpointSet, pool: &ReceivePool| {
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| connector.connect(local.ip().unwrap()));
            let request = listener.next(DEADLINE).unwrap().expect("a request in time");
            let builder = Endpoint::builder(&pd).send_depth(8).receive_pool(pool);
            let member = request.accept_in(builder, set, b"");
            member.map(|member| (connecting.join().unwrap().unwrap(), member))
        })
    };
    let mut ends: Vec<(Connection, SetConnection)> = (0..4).map(|_| accept(&mut set, &pool).unwrap()).collect();
    // The completion queue may be longer than requested, so connect clients until one is refused. It leaves no member behind.
    let refused = loop {
        match accept(&mut set, &pool) {
            Ok(end) => ends.push(end),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, Error::EndpointSetFull { .. }), "{refused}");
    assert_eq!(set.len(), ends.len());
    let exchange = |ends: &mut [(Connection, SetConnection)], set: &mut EndpointSet, pool: &mut ReceivePool| {
        for (number, (client, _)) in (0..).zip(&mut *ends) {
            let outbox = filled(client.pd(), &pattern(number, LEN));
            client.send(outbox).unwrap();
        }
        for _ in 0..ends.len() {
            let (key, done) = set.wait(DEADLINE).unwrap();
            let buffer = done.ok().unwrap().buffer.unwrap();
            let number = ends.iter().position(|(_, member)| member.key() == key).expect("a member");
            assert!(*buffer == *pattern(number as u64, LEN));
            pool.receive(buffer).unwrap();
        }
        for (client, member) in ends {
            let _ = client.wait(DEADLINE).unwrap().ok().unwrap();
            assert!(member.is_connected(set).unwrap());
            assert_eq!(member.peer_address(), client.local_address());
        }
    };
    exchange(&mut ends, &mut set, &mut pool);
    // The first is disconnected by its peer, the second by this end. The others are not affected.
    let (client, mut member) = ends.remove(1);
    drop(client);
    within_deadline("the disconnect", || (!member.is_connected(&mut set).unwrap()).then_some(()));
    assert!(member.disconnect(&mut set).unwrap().is_empty());
    let (mut client, member) = ends.remove(0);
    std::thread::scope(|scope| {
        scope.spawn(|| within_deadline("the disconnect", || (!client.is_connected().unwrap()).then_some(())));
        assert!(member.disconnect(&mut set).unwrap().is_empty());
    });
    assert_eq!(set.len(), ends.len());
    ends.push(accept(&mut set, &pool).unwrap());
    exchange(&mut ends, &mut set, &mut pool);
    assert_eq!(pool.receives_in_flight(), DEPTH as usize);
    // An endpoint was removed from the set: its member can still be disconnected by the peer.
    let (client, mut member) = ends.remove(0);
    assert!(set.remove(member.key()).unwrap().is_empty());
    drop(client);
    within_deadline("the disconnect", || (!member.is_connected(&mut set).unwrap()).then_some(()));
    assert!(matches!(error_of(member.disconnect(&mut set)).error, Error::NoSuchEndpoint));
}

#[test]
fn the_descriptor_of_a_connection_becomes_readable_when_the_peer_disconnects() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let pd = rdma.pd();
    let mut pool = full_pool(&pd);
    let mut set = EndpointSet::builder(pd.context(), 256).build().unwrap();
    let mut listener = Listener::bind((address, 0)).unwrap().pd(&pd);
    let local = listener.local_address();
    let mut connected = |set: &mut EndpointSet, pool: &ReceivePool| {
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| Connector::new().connect(local.ip().unwrap()).unwrap());
            let request = listener.next(DEADLINE).unwrap().expect("a request in time");
            let member = request.accept_in(Endpoint::builder(&pd).send_depth(8).receive_pool(pool), set, b"").unwrap();
            (connecting.join().unwrap(), member)
        })
    };
    let (mut client, mut member) = connected(&mut set, &pool);
    let (mut other_client, other_member) = connected(&mut set, &pool);
    // A message does not make it readable.
    let outbox = filled(client.pd(), b"hello");
    client.send(outbox).unwrap();
    pool.receive(set.wait(DEADLINE).unwrap().1.ok().unwrap().buffer.unwrap()).unwrap();
    let _ = client.wait(DEADLINE).unwrap().ok().unwrap();
    assert!(!is_readable(&client, Duration::ZERO) && !is_readable(&member, Duration::ZERO));

    drop(client);
    assert!(is_readable(&member, DEADLINE));
    assert!(!member.is_connected(&mut set).unwrap());
    assert!(!is_readable(&other_member, Duration::ZERO), "the connections have separate descriptors");

    drop(other_member);
    assert!(is_readable(&other_client, DEADLINE));
    assert!(!other_client.is_connected().unwrap());
}

#[test]
fn both_ends_of_a_connection_can_be_in_sets() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let pd = rdma.pd();
    let mut sets = [(); 2].map(|()| EndpointSet::builder(pd.context(), 64).build().unwrap());
    let [server, client] = &mut sets;
    let mut pool = ReceivePool::new(&pd, 4).unwrap();
    pool.receive(pd.allocate(LEN).unwrap()).unwrap();
    let mut listener = Listener::bind((address, 0)).unwrap().pd(&pd);
    let connector = Connector::new().pd(&pd);
    let local = listener.local_address();
    let (accepted, connected) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.next(DEADLINE).unwrap().expect("a request in time");
            assert!(request.private_data().starts_with(b"hello\0"));
            let builder = Endpoint::builder(&pd).send_depth(8).receive_pool(&pool);
            request.accept_in(builder, server, b"welcome").unwrap()
        });
        let route = connector.resolve(local).unwrap();
        let builder = Endpoint::builder(&pd).send_depth(8).recv_depth(8);
        let connected = route.connect_in(builder, client, b"hello").unwrap();
        (accepting.join().unwrap(), connected)
    });
    assert!(connected.private_data().starts_with(b"welcome\0") && accepted.private_data().starts_with(b"hello\0"));
    let message = filled(&pd, &pattern(7, LEN));
    client.endpoint(connected.key()).unwrap().send(message).unwrap();
    let (key, done) = server.wait(DEADLINE).unwrap();
    assert_eq!(key, accepted.key());
    assert!(*done.ok().unwrap().buffer.unwrap() == *pattern(7, LEN));
    assert_eq!(client.wait(DEADLINE).unwrap().1.ok().unwrap().operation, Operation::Send);
    // Dropping a member disconnects it and leaves its endpoint in the set.
    drop(connected);
    let mut accepted = accepted;
    within_deadline("the disconnect", || (!accepted.is_connected(server).unwrap()).then_some(()));
    assert_eq!((server.len(), client.len()), (1, 1));
    // A refused connection leaves no member behind.
    let route = connector.resolve(local).unwrap();
    drop(listener);
    let error = error_of(route.connect_in(Endpoint::builder(&pd).send_depth(8).recv_depth(8), client, b""));
    assert!(error.to_string().contains("nobody listens"), "{error}");
    assert_eq!(client.len(), 1);
}
