//! Disconnects without blocking.

use std::time::Instant;

use rdma_safe::cm::{Cause, Step};
use rdma_safe::{Operation, WcStatus};

use crate::{DEADLINE, Ends, failure, network, pending, ready};

#[test]
fn both_ends_disconnect_in_one_thread_and_get_their_buffers() {
    let mut ends = Ends::new();
    let [client, server] = ends.connected();
    let client = pending(client.start_disconnect().unwrap());
    assert_eq!(client.step(), Step::Disconnect);
    // The disconnect of the peer has arrived, so this end confirms and waits for nothing.
    let server = server.start_disconnect().unwrap();
    assert!(server.deadline() <= Instant::now());
    assert_eq!([ready(client), ready(server)].map(|ended| ended.buffers.len()), [1, 1], "the unused receives");
}

#[test]
fn disconnects_that_cross_confirm_each_other() {
    let mut ends = Ends::new();
    network::script(|script| script.crosses_disconnects = true);
    let [client, server] = ends.connected();
    let client = pending(client.start_disconnect().unwrap());
    let server = server.start_disconnect().unwrap();
    assert!(server.deadline() > Instant::now(), "the disconnect of the peer has not arrived");
    assert_eq!([ready(client), ready(server)].map(|ended| ended.buffers.len()), [1, 1]);
}

#[test]
fn a_peer_is_answered_until_it_has_received_the_disconnect() {
    let mut ends = Ends::new();
    let [client, mut server] = ends.connected();
    network::script(|script| script.loses_confirmations = true);
    let disconnecting = pending(client.start_disconnect().unwrap());
    server.send(ends.filled(b"late")).unwrap();
    let sent = server.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!(sent.operation, Operation::Send);
    drop(disconnecting);
}

#[test]
fn sends_in_flight_end_with_the_disconnect() {
    let mut ends = Ends::new();
    let [mut client, mut server] = ends.connected();
    network::script(|script| script.loses_confirmations = true);
    client.send(ends.filled(b"not polled")).unwrap();
    assert_eq!(server.wait(DEADLINE).unwrap().ok().unwrap().buffer.as_deref(), Some(&b"not polled"[..]));
    let _disconnecting = pending(client.start_disconnect().unwrap());
    server.send(ends.filled(b"late")).unwrap();
    assert_eq!(server.wait(DEADLINE).unwrap().status, WcStatus::RETRY_EXC_ERR);
}

#[test]
fn work_in_flight_comes_back_with_the_disconnect() {
    let mut ends = Ends::new();
    let [mut client, mut server] = ends.connected();
    ends.exchange(&mut client, &mut server, b"received");
    client.send(ends.filled(b"not polled")).unwrap();
    let disconnecting = client.start_disconnect().unwrap();
    while server.is_connected().unwrap() {}
    let buffers = ready(disconnecting).buffers;
    assert_eq!(buffers.len(), 2, "the send and the unused receive");
    assert!(buffers.iter().any(|buffer| **buffer == *b"not polled"));
}

#[test]
fn a_disconnect_is_confirmed_by_dropping_the_other_end() {
    let mut ends = Ends::new();
    let [client, server] = ends.connected();
    let disconnecting = pending(client.start_disconnect().unwrap());
    drop(server);
    assert_eq!(ready(disconnecting).buffers.len(), 1);
}

#[test]
fn the_removal_of_the_device_returns_the_buffers_with_the_error() {
    let mut ends = Ends::new();
    let [client, _server] = ends.connected();
    let disconnecting = client.start_disconnect().unwrap();
    network::remove_device(disconnecting.channel().as_raw());
    let unconfirmed = disconnecting.wait().unwrap_err();
    assert_eq!(unconfirmed.buffers.len(), 1);
    let error = failure::<()>(Err(unconfirmed.error));
    assert_eq!((error.step, error.cause), (Step::Disconnect, Cause::DeviceRemoved));
}
