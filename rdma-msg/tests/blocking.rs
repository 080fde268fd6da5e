//! Blocking channels over soft0.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

use std::time::Duration;

use rdma_msg::Error;
use rdma_msg::blocking::{Channel, Listener};
use support::{SOON, soft0};

#[test]
fn threads_exchange_messages_and_deadlines_lose_none() {
    let _soft = soft0();
    let listener = Listener::bind_with(rdma_msg::Listener::builder().max_message(100_000), "127.0.0.1:0").unwrap();
    let address = listener.local_address();
    let server = std::thread::spawn(move || {
        let channel = listener.accept(SOON).unwrap();
        while let Some(message) = channel.receive(SOON).unwrap() {
            channel.send(&message, SOON).unwrap();
        }
        channel.close(SOON).unwrap();
    });
    let channel = Channel::connect(address, SOON).unwrap();
    let short = Duration::from_millis(20);
    assert!(matches!(channel.receive(short).unwrap_err(), Error::Timeout(time) if time == short));
    for len in [0, 5, 100_000] {
        channel.send(&vec![7; len][..], SOON).unwrap();
        assert!(*channel.receive(SOON).unwrap().unwrap() == *vec![7; len]);
    }
    channel.send_many([&b"several"[..], b"at once"], SOON).unwrap();
    let mut received = Vec::new();
    while received.len() < 2 {
        received.extend(channel.receive_many(SOON).unwrap().unwrap().iter().map(<[u8]>::to_vec));
    }
    assert_eq!(received, [b"several", b"at once"]);
    let error = channel.send(&[0; 100_001][..], SOON).unwrap_err();
    assert!(matches!(error, Error::TooLong { .. }), "{error}");
    channel.finish(SOON).unwrap();
    assert!(channel.receive(SOON).unwrap().is_none());
    channel.close(SOON).unwrap();
    server.join().unwrap();
}

#[test]
fn a_send_to_a_full_peer_has_a_deadline() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_address();
    let (server, client) = std::thread::scope(|scope| {
        let server = scope.spawn(|| listener.accept(SOON).unwrap());
        let client = Channel::connect(address, SOON).unwrap();
        (server.join().unwrap(), client)
    });
    let message = vec![1; 30_000];
    let sent = (0..).take_while(|_| client.send(&message, Duration::from_millis(100)).is_ok()).count();
    assert!(sent > 1);
    for _ in 0..sent {
        assert_eq!(server.receive(SOON).unwrap().unwrap().len(), message.len());
    }
    client.send("after it", SOON).unwrap();
    assert_eq!(*server.receive(SOON).unwrap().unwrap(), *b"after it");
}
