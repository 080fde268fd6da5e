//! Handshakes that one thread advances by the readiness of their descriptors.

mod ends;

use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use rdma_safe::cm::{
    Cause, Connection, Connector, DatagramListener, Disconnected, GroupMember, Handshake, Listener, SetConnection,
    SetDisconnected, Step,
};
use rdma_safe::{Endpoint, EndpointSet, LinkLayer, Operation, ReceivePool, Result};

pub(crate) use self::ends::wait_for_event;
use self::ends::{advance_all, ends, error, exchange, finish, finish_with, pending, sleep};
use crate::cm_connections::{failure, kernel_objects};
use crate::support::child::{in_own_process, open_files};
use crate::support::{DEADLINE, filled, pattern, within_deadline};

/// A deadline that a test waits for.
const SHORT: Duration = Duration::from_millis(300);

#[track_caller]
fn expect_disconnected(connection: &mut Connection) {
    within_deadline("the disconnect", || (!connection.is_connected().unwrap()).then_some(()));
}

/// Checks that the client's connection fails, or is disconnected soon.
///
/// The server sends a REJ. A client that confirms before it handles the REJ is connected for a moment. If the REJ is lost, the
/// server sends DREQs until the client confirms one.
#[track_caller]
fn expect_withdrawn(client: Handshake<Connection>) {
    let [client] = finish([client]);
    match client {
        Ok(mut connection) => expect_disconnected(&mut connection),
        Err(error) => {
            let failed = failure(error);
            assert_eq!(failed.step, Step::Connect, "{failed}");
            assert!(
                matches!(failed.cause, Cause::Rejected { .. } | Cause::Failed(_) | Cause::Disconnected),
                "{failed}"
            );
        }
    }
}

#[test]
fn one_thread_connects_accepts_and_disconnects_many() {
    const CLIENTS: usize = 8;
    let mut ends = ends!();
    let mut resolving: Vec<_> = (0..CLIENTS).map(|_| ends.connector.start_resolve(ends.address()).unwrap()).collect();
    let mut connecting: Vec<Handshake<Connection>> = Vec::new();
    let mut accepting: Vec<Handshake<Connection>> = Vec::new();
    let (mut clients, mut servers) = (Vec::new(), Vec::new());
    loop {
        while let Some(request) = ends.listener.next(Duration::ZERO).unwrap() {
            assert!(request.private_data().starts_with(b"hello"));
            accepting.push(ends.prepared(request).unwrap().start_accept(b"welcome").unwrap());
        }
        for route in advance_all(&mut resolving) {
            let mut prepared = route.prepare(Endpoint::builder(&ends.pd)).unwrap();
            prepared.receive(ends.pd.allocate(512).unwrap()).unwrap();
            connecting.push(prepared.start_connect(b"hello").unwrap());
        }
        clients.extend(advance_all(&mut connecting));
        servers.extend(advance_all(&mut accepting));
        if clients.len() + servers.len() == 2 * CLIENTS {
            break;
        }
        let both = connecting.iter().chain(&accepting);
        let deadlines = resolving.iter().map(Handshake::deadline).chain(both.clone().map(Handshake::deadline));
        let fds = resolving.iter().map(AsFd::as_fd).chain(both.map(AsFd::as_fd));
        sleep(fds.chain([ends.listener.as_fd()]), deadlines);
    }
    for (client, seed) in clients.iter_mut().zip(0..) {
        let server = servers.iter_mut().find(|server| server.peer_address() == client.local_address()).unwrap();
        assert!(client.private_data().starts_with(b"welcome\0") && server.private_data().starts_with(b"hello\0"));
        exchange(client, server, seed);
        exchange(server, client, seed + 100);
    }
    let ended: [Connection; 2 * CLIENTS] = clients.into_iter().chain(servers).collect::<Vec<_>>().try_into().unwrap();
    let ended: [_; 2 * CLIENTS] = finish(ended.map(|end| end.start_disconnect().unwrap()));
    assert!(ended.iter().all(|ended| ended.as_ref().is_ok_and(|ended| ended.buffers.is_empty())), "{ended:?}");
}

#[test]
fn both_ends_disconnect_in_one_thread() {
    let mut ends = ends!();
    for order in [false, true] {
        let [client, server] = ends.connected();
        let [first, second] = if order { [client, server] } else { [server, client] };
        let first = first.start_disconnect().unwrap();
        let second = second.start_disconnect().unwrap();
        let ended: [Result<Disconnected, _>; 2] = finish([first, second]);
        assert_eq!(ended.map(|ended| ended.unwrap().buffers.len()), [1, 1], "the unused receives");
    }
    // One end is dropped in the middle of its disconnect, the other one afterwards.
    let [client, mut server] = ends.connected();
    drop(client.start_disconnect().unwrap());
    expect_disconnected(&mut server);
    let [ended] = finish([server.start_disconnect().unwrap()]);
    assert_eq!(ended.unwrap().buffers.len(), 1);
    ends.serves_another_client();
}

#[test]
fn a_silent_client_delays_no_other_one() {
    let mut ends = ends!();
    // It receives the reply and does not confirm yet.
    let silent = ends.connecting();
    let waiting = pending(ends.accepting());
    wait_for_event(silent.channel());
    ends.serves_another_client();
    let [client, server] = finish([silent, waiting]);
    exchange(&mut client.unwrap(), &mut server.unwrap(), 2);
}

#[test]
fn a_client_that_does_not_confirm_is_left_at_the_deadline() {
    let mut ends = ends!();
    ends.listener = Listener::bind((ends.address, 0)).unwrap().pd(&ends.pd).timeout(SHORT);
    let silent = ends.connecting();
    let waiting = ends.accepting();
    let deadline = waiting.deadline();
    wait_for_event(silent.channel());
    let failed = error(waiting);
    assert!(Instant::now() >= deadline);
    assert_eq!((failed.step, failed.cause), (Step::Accept, Cause::Timeout(SHORT)));
    if ends.rdma.is_soft() && !ends.rdma.loses_cm_messages() {
        let failed = error(silent);
        assert!(failed.step == Step::Connect && matches!(failed.cause, Cause::Rejected { .. }), "{failed}");
    } else {
        expect_withdrawn(silent);
    }
}

#[test]
fn a_silent_server_is_left_at_the_deadline() {
    let ends = ends!();
    let connecting = ends.connecting_with(&ends.connector.clone().timeout(SHORT));
    let deadline = connecting.deadline();
    let failed = error(connecting);
    assert!(Instant::now() >= deadline);
    assert_eq!((failed.step, failed.cause), (Step::Connect, Cause::Timeout(SHORT)));
    assert_eq!(failed.peer, Some(ends.address().into()));
}

#[test]
fn resolving_can_be_abandoned_and_fails_with_its_step() {
    let mut ends = ends!();
    drop(ends.connector.start_resolve(ends.address()).unwrap());
    // The first step may be complete already.
    drop(ends.connector.start_resolve(ends.address()).unwrap().advance().unwrap());
    // A documentation address (RFC 5737), which no device has.
    let connector = ends.connector.clone().source((Ipv4Addr::new(192, 0, 2, 1), 0)).resolve_timeout(SHORT, 1);
    let failed = match connector.start_resolve(ends.address()) {
        Ok(resolving) => error(resolving),
        Err(error) => failure(error),
    };
    assert_eq!((failed.step, failed.peer), (Step::ResolveAddress, Some(ends.address().into())), "{failed}");
    ends.serves_another_client();
}

#[test]
fn a_client_that_is_dropped_before_the_reply_is_an_error_at_the_server() {
    let mut ends = ends!();
    // Before the request is read, before it gets an endpoint, and after that.
    for dropped_at in 0..3 {
        let mut connecting = Some(pending(ends.connecting()));
        wait_for_event(ends.listener.channel());
        if dropped_at == 0 {
            connecting.take();
        }
        let request = ends.request();
        if dropped_at == 1 {
            connecting.take();
        }
        let accepting = ends.prepared(request).and_then(|prepared| {
            connecting.take();
            prepared.start_accept(b"")
        });
        // The message of the dropped client comes before the call, or after it.
        let failed = match accepting {
            Ok(accepting) => error(accepting),
            Err(error) => failure(error),
        };
        assert_eq!(failed.step, Step::Accept, "{failed}");
        ends.serves_another_client();
    }
}

#[test]
fn a_client_that_is_dropped_after_the_reply_is_an_error_at_the_server() {
    let mut ends = ends!();
    let connecting = ends.connecting();
    let accepting = pending(ends.accepting());
    wait_for_event(connecting.channel());
    drop(connecting);
    let failed = error(accepting);
    assert_eq!(failed.step, Step::Accept);
    assert!(matches!(failed.cause, Cause::Rejected { .. }), "{failed}");
    ends.serves_another_client();
}

#[test]
fn a_server_that_is_dropped_before_it_accepts_rejects() {
    let mut ends = ends!();
    for is_prepared in [false, true] {
        let connecting = ends.connecting();
        let request = ends.request();
        if is_prepared {
            drop(ends.prepared(request).unwrap());
        } else {
            drop(request);
        }
        let failed = error(connecting);
        assert_eq!(failed.step, Step::Connect);
        assert!(matches!(failed.cause, Cause::Rejected { .. }), "{failed}");
    }
    ends.serves_another_client();
}

#[test]
fn a_server_that_is_dropped_before_the_confirmation_ends_the_connection() {
    let mut ends = ends!();
    // The server is dropped before the client handles the reply.
    let connecting = ends.connecting();
    let accepting = ends.accepting();
    wait_for_event(connecting.channel());
    drop(accepting);
    expect_withdrawn(connecting);
    // Both happen at the same time.
    for _ in 0..16 {
        let connecting = ends.connecting();
        let accepting = ends.accepting();
        wait_for_event(connecting.channel());
        let both = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                both.wait();
                drop(accepting);
            });
            both.wait();
            expect_withdrawn(connecting);
        });
    }
    // The client has confirmed, and the server has not handled it.
    let connecting = ends.connecting();
    let accepting = pending(ends.accepting());
    let [connection] = finish([connecting]);
    let mut connection = connection.unwrap();
    wait_for_event(accepting.channel());
    drop(accepting);
    expect_disconnected(&mut connection);
    ends.serves_another_client();
}

#[test]
fn endpoints_of_sets_connect_and_disconnect_in_one_thread() {
    const CLIENTS: usize = 3;
    let mut ends = ends!();
    let mut sets = [(); 2].map(|()| EndpointSet::builder(ends.pd.context(), 128).build().unwrap());
    let mut pool = ReceivePool::new(&ends.pd, 8).unwrap();
    for _ in 0..8 {
        pool.receive(ends.pd.allocate(512).unwrap()).unwrap();
    }
    let mut handshakes: Vec<(usize, Handshake<SetConnection>)> = Vec::new();
    for _ in 0..CLIENTS {
        let route = ends.connector.resolve(ends.address()).unwrap();
        let builder = Endpoint::builder(&ends.pd).send_depth(8).recv_depth(8);
        let connecting = route.start_connect_in(builder, &mut sets[0], b"hello").unwrap();
        // The peer cannot send before its reply is handled.
        let inbox = ends.pd.allocate(512).unwrap();
        sets[0].endpoint(connecting.key()).unwrap().receive(inbox).unwrap();
        let request = ends.request();
        let builder = Endpoint::builder(&ends.pd).send_depth(8).receive_pool(&pool);
        let accepting = request.start_accept_in(builder, &mut sets[1], b"welcome").unwrap();
        handshakes.extend([(0, connecting), (1, accepting)]);
    }
    let handshakes: [_; 2 * CLIENTS] = handshakes.try_into().unwrap();
    let which = handshakes.each_ref().map(|(set, _)| *set);
    let handshakes = handshakes.map(|(_, handshake)| handshake);
    let members = finish_with(handshakes, |number, handshake| handshake.advance_in(&mut sets[which[number]]));
    let members = members.map(Result::unwrap);
    assert_eq!(sets.each_ref().map(EndpointSet::len), [CLIENTS; 2]);

    // Each client sends, and each server replies from the same buffer.
    let clients = members.iter().zip(which).filter(|(_, set)| *set == 0).map(|(member, _)| member);
    for (client, seed) in clients.zip(0..) {
        sets[0].endpoint(client.key()).unwrap().send(filled(&ends.pd, &pattern(seed, 300))).unwrap();
        let (server, done) = sets[1].wait(DEADLINE).unwrap();
        let request = done.ok().unwrap().buffer.unwrap();
        let from = members.iter().find(|member| member.key() == server).expect("a member");
        assert!(from.peer_address() == client.local_address() && *request == *pattern(seed, 300));
        sets[1].endpoint(server).unwrap().send(request).unwrap();
        pool.receive(sets[1].wait(DEADLINE).unwrap().1.ok().unwrap().buffer.unwrap()).unwrap();
        let done = [0, 1].map(|_| sets[0].wait(DEADLINE).unwrap().1.ok().unwrap());
        let reply = done.into_iter().find(|done| done.operation == Operation::Receive).expect("a reply");
        assert!(*reply.buffer.unwrap() == *pattern(seed, 300));
    }

    let mut number = 0;
    let leaving: [Handshake<SetDisconnected>; 2 * CLIENTS] = members.map(|member| {
        number += 1;
        member.start_disconnect(&mut sets[which[number - 1]]).unwrap()
    });
    let ended = finish_with(leaving, |number, handshake| handshake.advance_in(&mut sets[which[number]]));
    assert!(ended.iter().all(|ended| ended.as_ref().is_ok_and(|ended| ended.buffers.is_empty())), "{ended:?}");
    assert!(sets.iter().all(EndpointSet::is_empty));
}

#[test]
fn a_member_of_a_set_is_dropped_on_either_side() {
    let mut ends = ends!();
    let mut set = EndpointSet::builder(ends.pd.context(), 64).build().unwrap();
    // Each endpoint needs the whole queue, so the previous one must be gone.
    let depth = set.capacity() - 8;
    let pd = ends.pd.clone();
    for is_server in [false, true, false] {
        let builder = Endpoint::builder(&pd).send_depth(depth).recv_depth(8);
        let (member, other) = if is_server {
            let connecting = ends.connecting();
            (ends.request().start_accept_in(builder, &mut set, b"").unwrap(), connecting)
        } else {
            let route = ends.connector.resolve(ends.address()).unwrap();
            (route.start_connect_in(builder, &mut set, b"").unwrap(), ends.accepting())
        };
        let key = member.key();
        assert!(set.endpoint(key).is_some());
        wait_for_event(if is_server { other.channel() } else { member.channel() });
        drop(member);
        assert!(set.is_empty() && set.endpoint(key).is_none() && set.poll().unwrap().is_none());
        match finish([other]) {
            // It has handled the reply before that was withdrawn.
            [Ok(mut connection)] => expect_disconnected(&mut connection),
            [Err(error)] => {
                let failed = failure(error);
                assert_eq!(failed.step, if is_server { Step::Connect } else { Step::Accept }, "{failed}");
            }
        }
    }
    ends.serves_another_client();
}

#[test]
fn datagram_services_are_looked_up_in_the_thread_that_serves_them() {
    let ends = ends!();
    let mut listener = DatagramListener::bind((ends.address, 0)).unwrap().pd(&ends.pd);
    let local = listener.local_address();
    let [route] = finish([ends.connector.start_resolve_datagrams(local).unwrap()]);
    let route = route.unwrap();
    let mut endpoint = route.endpoint(Endpoint::builder(&ends.pd).inline_data(32)).unwrap();
    let finding = pending(route.start_find(&endpoint, b"question").unwrap());
    sleep([listener.as_fd()], []);
    let request = listener.next(Duration::ZERO).unwrap().expect("a request");
    let mut serving = request.endpoint(Endpoint::builder(&ends.pd)).unwrap();
    serving.receive(ends.pd.allocate(64).unwrap()).unwrap();
    request.accept(&serving, b"answer").unwrap();
    let [service] = finish([finding]);
    let service = service.unwrap();
    assert!(service.private_data.starts_with(b"answer\0"), "{service:?}");
    // A datagram that the network drops is lost.
    if !ends.rdma.loses_packets() {
        endpoint.send_inline(b"found", &service.peer).unwrap();
        let done = serving.wait(DEADLINE).unwrap().ok().unwrap();
        assert_eq!(done.work.buffer.as_deref(), Some(&b"found"[..]));
    }

    // A lookup that is dropped, and one that is never answered.
    let find = |connector: &Connector| {
        let route = connector.resolve_datagrams(local).unwrap();
        route.start_find(&endpoint, b"").unwrap()
    };
    drop(find(&ends.connector));
    let failed = error(find(&ends.connector.clone().timeout(SHORT)));
    assert_eq!((failed.step, failed.cause), (Step::FindService, Cause::Timeout(SHORT)));
}

#[test]
fn two_members_join_a_group_in_one_thread() {
    let ends = ends!();
    if ends.rdma.query_port(ends.rdma.port).unwrap().link_layer() != LinkLayer::ETHERNET {
        return println!("skipped: the subnet manager creates the groups");
    }
    let group = (Ipv4Addr::new(239, 1, 2, 12), 0);
    let connector = ends.connector.clone().source((ends.address, 0));
    let join = || {
        let [route] = finish([connector.start_resolve_group(group).unwrap()]);
        route.unwrap().start_join(Endpoint::builder(&ends.pd).inline_data(32)).unwrap()
    };
    drop(join());
    let members: [Result<GroupMember>; 2] = finish([join(), join()]);
    let [mut speaker, mut member] = members.map(Result::unwrap);
    if ends.rdma.loses_packets() {
        return println!("skipped: the network may drop the datagram");
    }
    member.endpoint.receive(ends.pd.allocate(64).unwrap()).unwrap();
    speaker.endpoint.send_inline(b"for all", &speaker.peer).unwrap();
    let done = member.endpoint.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!(done.work.buffer.as_deref(), Some(&b"for all"[..]));
}

#[test]
fn dropped_handshakes_leak_nothing() {
    in_own_process("cm_handshakes::dropped_handshakes_leak_nothing", || {
        let mut ends = ends!();
        let mut set = EndpointSet::builder(ends.pd.context(), 64).build().unwrap();
        let mut before = None;
        for round in 0..20 {
            drop(ends.connector.start_resolve(ends.address()).unwrap());
            let connecting = ends.connecting();
            wait_for_event(ends.listener.channel());
            drop(connecting);
            drop(ends.request());
            let connecting = ends.connecting();
            let accepting = ends.accepting();
            // The order alternates.
            if round % 2 == 0 {
                drop(accepting);
                drop(connecting);
            } else {
                drop(connecting);
                drop(accepting);
            }
            let builder = Endpoint::builder(&ends.pd).send_depth(8).recv_depth(8);
            let route = ends.connector.resolve(ends.address()).unwrap();
            let member = route.start_connect_in(builder, &mut set, b"").unwrap();
            wait_for_event(ends.listener.channel());
            drop(member);
            drop(ends.request());
            assert!(set.poll().unwrap().is_none());
            let [client, server] = ends.connected();
            drop((client.start_disconnect().unwrap(), server));
            // The first connection opens the device in librdmacm.
            if round == 1 {
                before = Some((open_files(), kernel_objects()));
            }
        }
        assert_eq!(Some((open_files(), kernel_objects())), before);
    });
}
