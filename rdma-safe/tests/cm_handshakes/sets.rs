//! Handshakes of endpoints in sets.

use std::fmt::Debug;
use std::time::Instant;

use rdma_safe::cm::{Cause, Handshake, Outcome, Progress, SetConnection};
use rdma_safe::{Buffer, EndpointBuilder, EndpointSet, Error, Operation, ReceivePool};

use crate::{DEADLINE, Endpoint, Ends, expect_objects, failure, network, ready};

/// A completion queue for several members.
fn set(ends: &Ends) -> EndpointSet {
    EndpointSet::builder(&ends.context, 128).build().unwrap()
}

fn small(ends: &Ends) -> EndpointBuilder<'_> {
    Endpoint::builder(&ends.pd).send_depth(8).recv_depth(8)
}

/// A builder for an endpoint that needs the whole queue.
fn large<'a>(ends: &'a Ends, set: &EndpointSet) -> EndpointBuilder<'a> {
    Endpoint::builder(&ends.pd).send_depth(set.capacity() - 8).recv_depth(8)
}

fn connecting(ends: &Ends, builder: EndpointBuilder<'_>, set: &mut EndpointSet) -> Handshake<SetConnection> {
    let route = ends.connector.resolve(ends.address()).unwrap();
    route.start_connect_in(builder, set, b"hello").unwrap()
}

#[track_caller]
fn pending_in<T: Outcome<Context = EndpointSet, Error: Debug> + Debug>(
    handshake: Handshake<T>,
    set: &mut EndpointSet,
) -> Handshake<T> {
    match handshake.advance_in(set).unwrap() {
        Progress::Pending(handshake) => handshake,
        Progress::Ready(result) => panic!("{result:?}"),
    }
}

#[track_caller]
fn ready_in<T: Outcome<Context = EndpointSet, Error: Debug>>(handshake: Handshake<T>, set: &mut EndpointSet) -> T {
    match handshake.advance_in(set).unwrap() {
        Progress::Ready(result) => result,
        Progress::Pending(handshake) => panic!("{handshake:?}"),
    }
}

/// Polls until a message arrives, and returns it.
#[track_caller]
fn message(set: &mut EndpointSet) -> (rdma_safe::EndpointKey, Buffer) {
    loop {
        let (key, done) = set.wait(DEADLINE).unwrap();
        let done = done.ok().unwrap();
        if done.operation == Operation::Receive {
            return (key, done.buffer.unwrap());
        }
    }
}

#[test]
fn both_ends_connect_in_sets_and_a_message_may_come_before_the_confirmation() {
    let mut ends = Ends::new();
    let [mut clients, mut servers] = [set(&ends), set(&ends)];
    let mut pool = ReceivePool::new(&ends.pd, 8).unwrap();
    pool.receive(ends.pd.allocate(64).unwrap()).unwrap();
    let connecting = pending_in(connecting(&ends, small(&ends), &mut clients), &mut clients);
    // The peer cannot send before its reply is handled, so this receive is in time.
    let inbox = ends.pd.allocate(64).unwrap();
    clients.endpoint(connecting.key()).unwrap().receive(inbox).unwrap();
    let request = ends.request();
    let builder = Endpoint::builder(&ends.pd).send_depth(8).receive_pool(&pool);
    let accepting = request.start_accept_in(builder, &mut servers, b"welcome").unwrap();
    let key = accepting.key();
    let accepting = pending_in(accepting, &mut servers);
    let client = ready_in(connecting, &mut clients);
    assert_eq!(client.private_data(), b"welcome");

    // The confirmation has not been handled yet.
    clients.endpoint(client.key()).unwrap().send(ends.filled(b"early")).unwrap();
    let (from, text) = message(&mut servers);
    assert_eq!((from, &*text), (key, &b"early"[..]));
    let server = ready_in(accepting, &mut servers);
    assert_eq!((server.key(), server.private_data()), (key, &b"hello"[..]));
    servers.endpoint(key).unwrap().send(text).unwrap();
    assert_eq!(*message(&mut clients).1, *b"early");

    // A finished handshake has made a permanent member.
    drop((client, server));
    assert_eq!((clients.len(), servers.len()), (1, 1));
}

#[test]
fn a_member_leaves_the_set_when_its_handshake_is_dropped() {
    let ends = Ends::new();
    let mut set = set(&ends);
    let before = network::objects();
    for call in 0..6 {
        let handshake = connecting(&ends, large(&ends, &set), &mut set);
        let key = handshake.key();
        assert_eq!((set.len(), set.keys().collect::<Vec<_>>()), (1, vec![key]));
        assert!(set.endpoint(key).is_some() && set.backlog(key) == Some(0));
        match call {
            // On another thread.
            0 => std::thread::spawn(move || drop(handshake)).join().unwrap(),
            _ => drop(handshake),
        }
        assert!(set.is_empty() && set.keys().next().is_none() && set.backlog(key).is_none());
        match call {
            0 | 1 => assert!(set.endpoint(key).is_none()),
            2 => assert!(set.poll().unwrap().is_none()),
            3 => assert!(matches!(set.wait(crate::SHORT), Err(Error::Timeout { .. }))),
            4 => {
                // The next member needs the room.
                drop(connecting(&ends, large(&ends, &set), &mut set));
                assert!(set.poll().unwrap().is_none());
            }
            _ => assert!(set.remove(key).unwrap().is_empty()),
        }
        expect_objects(before);
        assert!(set.endpoint(key).is_none() && matches!(set.remove(key), Err(Error::NoSuchEndpoint)));
    }
}

#[test]
fn handshakes_of_several_members_are_dropped_one_after_the_other() {
    let ends = Ends::new();
    let mut set = set(&ends);
    let before = network::objects();
    let mut handshakes: Vec<_> = (0..3).map(|_| connecting(&ends, small(&ends), &mut set)).collect();
    while let Some(handshake) = handshakes.pop() {
        let key = handshake.key();
        drop(handshake);
        assert!(set.poll().unwrap().is_none() && set.endpoint(key).is_none());
        assert_eq!(
            set.keys().collect::<Vec<_>>(),
            handshakes.iter().map(|handshake| handshake.key()).collect::<Vec<_>>()
        );
    }
    expect_objects(before);
}

#[test]
fn arming_removes_a_member_whose_handshake_was_dropped() {
    let ends = Ends::new();
    let mut set = EndpointSet::builder(&ends.context, 64).events(true).build().unwrap();
    let before = network::objects();
    drop(connecting(&ends, small(&ends), &mut set));
    assert_eq!(set.arm().unwrap(), rdma_safe::endpoint::Armed::Wait);
    expect_objects(before);
}

#[test]
fn buffers_of_a_handshake_that_has_ended_can_be_taken_with_its_key() {
    let mut ends = Ends::new();
    let mut servers = set(&ends);
    let mut pool = ReceivePool::new(&ends.pd, 2).unwrap();
    let before = network::objects();
    for (has_failed, takes_buffers) in [(false, true), (false, false), (true, true), (true, false)] {
        while pool.receives_in_flight() < 2 {
            pool.receive(ends.pd.allocate(64).unwrap()).unwrap();
        }
        network::script(|script| script.loses_confirmations = has_failed);
        let connecting = ends.connecting();
        let request = ends.request();
        let builder = Endpoint::builder(&ends.pd).send_depth(8).receive_pool(&pool);
        let accepting = request.start_accept_in(builder, &mut servers, b"").unwrap();
        let key = accepting.key();
        let mut client = ready(connecting);
        client.send(ends.filled(b"arrived")).unwrap();
        let _ = client.wait(DEADLINE).unwrap().ok().unwrap();
        if has_failed {
            // The confirmation was lost, so the end of the connection ends the handshake.
            drop(client);
            let error = failure(accepting.advance_in(&mut servers));
            assert!(matches!(error.cause, Cause::Rejected { .. }), "{error}");
        } else {
            drop(accepting);
            assert!(!client.is_connected().unwrap());
            drop(client);
        }
        if takes_buffers {
            let buffers = servers.remove(key).unwrap();
            assert_eq!(buffers.iter().map(|buffer| &**buffer).collect::<Vec<_>>(), [b"arrived"]);
        } else {
            assert!(servers.poll().unwrap().is_none(), "messages of this endpoint are not handed out");
        }
        assert_eq!(pool.receives_in_flight(), 1, "the pool has room for another receive");
        expect_objects(before);
    }
}

#[test]
fn a_failed_handshake_removes_its_member() {
    let mut ends = Ends::new();
    let [mut clients, mut others] = [set(&ends), set(&ends)];
    let before = network::objects();
    // Rejected by the peer.
    let handshake = pending_in(connecting(&ends, small(&ends), &mut clients), &mut clients);
    drop(ends.request());
    let error = failure(handshake.advance_in(&mut clients));
    assert!(matches!(error.cause, Cause::Rejected { .. }), "{error}");
    assert!(clients.is_empty() && clients.poll().unwrap().is_none());
    expect_objects(before);

    // The blocking call removes it at once.
    network::script(|script| script.loses_requests = true);
    let route = ends.connector.clone().timeout(crate::SHORT).resolve(ends.address()).unwrap();
    let error = failure(route.connect_in(small(&ends), &mut clients, b""));
    assert_eq!(error.cause, Cause::Timeout(crate::SHORT));
    expect_objects(before);
    network::script(|script| script.loses_requests = false);

    // Advanced with another set.
    let handshake = connecting(&ends, small(&ends), &mut clients);
    let accepting = ends.accepting();
    let error = handshake.wait_in(&mut others).unwrap_err();
    assert!(matches!(error, Error::NoSuchEndpoint), "{error}");
    assert!(clients.is_empty() && clients.poll().unwrap().is_none());
    assert!(matches!(failure(accepting.advance()).cause, Cause::Rejected { .. }));
    expect_objects(before);

    // Its endpoint was removed.
    let handshake = connecting(&ends, small(&ends), &mut clients);
    clients.remove(handshake.key()).unwrap();
    drop(ends.request());
    assert!(matches!(handshake.advance_in(&mut clients), Err(Error::NoSuchEndpoint)));
    assert!(clients.is_empty() && clients.poll().unwrap().is_none());

    // Not started: too much private data.
    let route = ends.connector.resolve(ends.address()).unwrap();
    let error = route.start_connect_in(small(&ends), &mut clients, &[0; 57]).unwrap_err();
    assert!(error.to_string().contains("57 bytes of private data"), "{error}");
    assert!(clients.is_empty());
    expect_objects(before);
}

#[test]
fn a_handshake_outlives_its_set() {
    let mut ends = Ends::new();
    let mut other = set(&ends);
    let before = network::objects();
    let mut clients = set(&ends);
    let handshake = connecting(&ends, small(&ends), &mut clients);
    drop(clients);
    let accepting = ends.accepting();
    assert!(matches!(handshake.advance_in(&mut other), Err(Error::NoSuchEndpoint)));
    assert!(matches!(failure(accepting.advance()).cause, Cause::Rejected { .. }));
    expect_objects(before);
}

#[test]
fn members_disconnect_without_blocking() {
    let mut ends = Ends::new();
    let [mut clients, mut servers] = [set(&ends), set(&ends)];
    let before = network::objects();
    for is_dropped in [false, true] {
        let connecting = connecting(&ends, small(&ends), &mut clients);
        let request = ends.request();
        let accepting = request.start_accept_in(small(&ends), &mut servers, b"").unwrap();
        let client = ready_in(connecting, &mut clients);
        let server = ready_in(accepting, &mut servers);
        let keys = [client.key(), server.key()];
        clients.endpoint(keys[0]).unwrap().receive(ends.pd.allocate(64).unwrap()).unwrap();

        let client = pending_in(client.start_disconnect(&mut clients).unwrap(), &mut clients);
        assert!(clients.endpoint(keys[0]).is_some(), "the endpoint leaves the set with the result");
        if is_dropped {
            drop(client);
            assert_eq!(clients.remove(keys[0]).unwrap().len(), 1, "the unused receive");
            assert!(server.disconnect(&mut servers).unwrap().is_empty());
        } else {
            let server = server.start_disconnect(&mut servers).unwrap();
            assert!(server.deadline() <= Instant::now(), "the peer has disconnected");
            assert_eq!((client.key(), server.key()), (keys[0], keys[1]));
            let ended = ready_in(client, &mut clients);
            assert_eq!((ended.key, ended.buffers.len()), (keys[0], 1));
            assert!(ready_in(server, &mut servers).buffers.is_empty());
        }
        expect_objects(before);
    }
}
