//! Connections with data, private data and rejections, through `Connector` and `Listener`.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_safe::cm::{Address, Cause, Connection, Listener, RejectReason, Request, Step};
use rdma_safe::{Endpoint, Operation};

use super::pair::{Pair, failure, pattern};
use crate::lab::{LIMIT, wait_until};

/// Greatest lengths of private data.
const REQUEST: usize = 56;
const REPLY: usize = 196;
const REJECTION: usize = 148;

const MESSAGE: usize = 3000;

/// Type of service of [`type_of_service`]: expedited forwarding.
pub(super) const TOS: u8 = 0xb8;

/// Which end disconnects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ender {
    Active,
    Passive,
    Both,
}

fn listen(_: &Pair, at: SocketAddr) -> Listener {
    Listener::bind(at).unwrap()
}

fn next(listener: &mut Listener) -> Request {
    listener.next(LIMIT).unwrap().expect("a request in time")
}

/// The next request from another address than `ended`, the peer of a request that either end has rejected.
///
/// Linux reports a retransmission of a rejected request as another one.
fn next_other(listener: &mut Listener, ended: Address) -> Request {
    loop {
        let request = next(listener);
        if request.peer_address().unwrap() != ended {
            return request;
        }
    }
}

/// Accepts a request, whose private data has the greatest length.
fn accept(pair: &Pair, request: Request) -> Connection {
    assert_eq!(request.private_data(), pattern::<REQUEST>(1));
    let addresses = [request.local_address(), request.peer_address()].map(|of| of.unwrap().ip().unwrap().ip());
    assert_eq!(addresses, [pair.own.ip(), pair.peer.ip()]);
    let pd = request.pd().unwrap();
    let mut prepared = request.prepare(Endpoint::builder(&pd).events(true)).unwrap();
    prepared.receive(pd.allocate(MESSAGE).unwrap()).unwrap();
    prepared.accept(&pattern::<REPLY>(2)).unwrap()
}

/// Connects with private data of the greatest length.
fn connect(pair: &Pair, to: SocketAddr) -> Connection {
    connect_by(&pair.connector, pair, to)
}

fn connect_by(connector: &rdma_safe::cm::Connector, pair: &Pair, to: SocketAddr) -> Connection {
    let route = connector.resolve(to).unwrap();
    let pd = route.pd().clone();
    let mut prepared = route.prepare(Endpoint::builder(&pd).events(true)).unwrap();
    prepared.receive(pd.allocate(MESSAGE).unwrap()).unwrap();
    let connection = prepared.connect(&pattern::<REQUEST>(1)).unwrap();
    assert_eq!(connection.private_data(), pattern::<REPLY>(2));
    assert_eq!(connection.local_address().unwrap().ip().unwrap().ip(), pair.own.ip());
    connection
}

/// Sends a message to the other end, and receives one.
fn exchange(connection: &mut Connection) {
    let message = pattern::<MESSAGE>(3);
    let mut outbox = connection.pd().allocate(MESSAGE).unwrap();
    outbox.fill_from(&message).unwrap();
    connection.send(outbox).unwrap();
    for _ in 0..2 {
        let done = connection.wait(LIMIT).unwrap().ok().unwrap();
        if done.operation == Operation::Receive {
            assert_eq!(done.buffer.as_deref(), Some(&message[..]));
        }
    }
    assert_eq!((connection.sends_in_flight(), connection.receives_in_flight()), (0, 0));
}

/// Ends a connection, or waits until the other end has.
fn end(pair: &mut Pair, mut connection: Connection, disconnects: bool) {
    pair.meet();
    if disconnects {
        assert!(connection.disconnect().unwrap().is_empty());
    } else {
        wait_until("the end of the connection", || (!connection.is_connected().unwrap()).then_some(()));
    }
}

/// Both ends exchange private data and messages, and either one disconnects, or both at the same time.
pub(super) fn data_and_disconnects(pair: &mut Pair) {
    for ender in [Ender::Active, Ender::Passive, Ender::Both] {
        pair.in_both_roles(
            &format!("private data, messages, and a disconnect by {ender:?}"),
            listen,
            |pair, mut listener| {
                let mut connection = accept(pair, next(&mut listener));
                exchange(&mut connection);
                end(pair, connection, ender != Ender::Active);
            },
            |pair, to| {
                let mut connection = connect(pair, to);
                exchange(&mut connection);
                end(pair, connection, ender != Ender::Passive);
            },
        );
    }
}

/// Connections follow each other at once, while the earlier ones are in timewait.
pub(super) fn connections_in_a_row(pair: &mut Pair) {
    const COUNT: usize = 5;
    pair.in_both_roles(
        "connections in a row",
        listen,
        |pair, mut listener| {
            for number in 0..COUNT {
                let mut connection = accept(pair, next(&mut listener));
                match number % 2 {
                    0 => drop(connection),
                    _ => wait_until("a disconnect", || (!connection.is_connected().unwrap()).then_some(())),
                }
            }
        },
        |pair, to| {
            for number in 0..COUNT {
                let mut connection = connect(pair, to);
                match number % 2 {
                    0 => wait_until("a disconnect", || (!connection.is_connected().unwrap()).then_some(())),
                    _ => drop(connection),
                }
            }
        },
    );
}

/// A program rejects with private data, or without any by dropping the request.
pub(super) fn rejections(pair: &mut Pair) {
    pair.in_both_roles(
        "rejections",
        listen,
        |_, mut listener| {
            let first = next(&mut listener);
            let ended = first.peer_address().unwrap();
            first.reject(&pattern::<REJECTION>(4)).unwrap();
            drop(next_other(&mut listener, ended));
        },
        |pair, to| {
            for expected in [pattern(4), [0; REJECTION]] {
                let error = failure(pair.connector.connect(to));
                assert_eq!(error.step, Step::Connect);
                let Cause::Rejected { reason: RejectReason::CONSUMER_DEFINED, private_data } = error.cause else {
                    panic!("{error}")
                };
                assert_eq!(*private_data, expected);
            }
        },
    );
}

/// Nobody listens at a port.
pub(super) fn missing_listeners(pair: &mut Pair) {
    pair.in_both_roles(
        "a port without a listener",
        |_, _| (),
        |_, ()| (),
        |pair, to| {
            let error = failure(pair.connector.connect(to));
            assert!(matches!(error.cause, Cause::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. }), "{error}");
        },
    );
}

/// A program that does not answer its request is a timeout, and accepts the next one.
pub(super) fn unanswered_requests(pair: &mut Pair) {
    pair.in_both_roles(
        "an unanswered request",
        listen,
        |pair, mut listener| {
            let unanswered = next(&mut listener);
            let ended = unanswered.peer_address().unwrap();
            pair.meet();
            drop(unanswered);
            let mut connection = accept(pair, next_other(&mut listener, ended));
            exchange(&mut connection);
            end(pair, connection, false);
        },
        |pair, to| {
            let limit = Duration::from_millis(200);
            let error = failure(pair.connector.clone().timeout(limit).connect(to));
            assert_eq!((error.step, error.cause), (Step::Connect, Cause::Timeout(limit)));
            pair.meet();
            let mut connection = connect(pair, to);
            exchange(&mut connection);
            end(pair, connection, true);
        },
    );
}

/// The type of service of the active end holds in both directions. The captured packets show it.
pub(super) fn type_of_service(pair: &mut Pair) {
    pair.in_both_roles(
        "a type of service",
        listen,
        |pair, mut listener| {
            let mut connection = accept(pair, next(&mut listener));
            exchange(&mut connection);
            end(pair, connection, false);
        },
        |pair, to| {
            let connector = pair.connector.clone().type_of_service(TOS);
            let mut connection = connect_by(&connector, pair, to);
            exchange(&mut connection);
            end(pair, connection, true);
        },
    );
}
