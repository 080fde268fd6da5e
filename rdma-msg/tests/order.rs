//! Messages that share a packet, and tasks that wait, keep their order.
//!
//! Sends do not yield, so the driver takes no completion between them, and messages gather in the third packet.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

mod pairs;

use std::future::Future;
use std::pin::pin;

use pairs::{PACKET, default_pair, pair, pattern};
use rdma_msg::{Channel, Error};
use support::{begin, soft0, soon, until};

async fn send(channel: &Channel, messages: &[&str]) {
    for message in messages {
        channel.send(*message).await.unwrap();
    }
}

/// The messages of the first two packets.
const OWN_PACKETS: [&str; 2] = ["own packet"; 2];

#[track_caller]
fn expect_messages<'m>(channel: &'m Channel, messages: &'m [impl AsRef<[u8]>]) -> impl Future<Output = ()> + 'm {
    let caller = std::panic::Location::caller();
    async move {
        for expected in messages {
            let message = soon(channel.receive()).await.unwrap().expect("it was sent");
            assert!(*message == *expected.as_ref(), "{caller}: {} bytes", message.len());
        }
    }
}

#[tokio::test]
async fn a_message_that_is_read_comes_before_those_after_it_in_its_packet() {
    let _soft = soft0();
    let [client, server] = &default_pair().await;
    send(client, &OWN_PACKETS).await;
    send(client, &["a", "b"]).await;
    client.send(pattern(100_000)).await.unwrap();
    send(client, &["c", "d", "e"]).await;
    expect_messages(server, &OWN_PACKETS).await;
    expect_messages(server, &["a", "b"]).await;
    expect_messages(server, &[pattern(100_000)]).await;
    expect_messages(server, &["c", "d", "e"]).await;
}

#[tokio::test]
async fn tasks_receive_in_the_order_in_which_they_began_to_wait() {
    let _soft = soft0();
    let [client, server] = &default_pair().await;
    let mut waiting = [(); 4].map(|()| Box::pin(server.receive()));
    for waiting in &mut waiting {
        begin(waiting.as_mut()).await;
    }
    send(client, &OWN_PACKETS).await;
    send(client, &["a", "b", "c", "d"]).await;
    until("all have arrived", || server.statistics().packets_received == 3).await;
    for (waiting, expected) in waiting.iter_mut().zip(["own packet", "own packet", "a", "b"]) {
        begin(pin!(server.receive())).await;
        assert_eq!(*soon(waiting).await.unwrap().unwrap(), *expected.as_bytes());
    }
    expect_messages(server, &["c", "d"]).await;
}

#[tokio::test]
async fn a_short_message_waits_while_a_longer_one_waits() {
    let _soft = soft0();
    let [client, server] = pair(|connector| connector.sends(2), |listener| listener.window(2)).await;
    let full = pattern(PACKET);
    for message in [&full[..], &full[..], b"a"] {
        client.send(message).await.unwrap();
    }
    {
        let mut longer = pin!(client.send(&full));
        begin(longer.as_mut()).await;
        let mut shorter = pin!(client.send("b"));
        begin(shorter.as_mut()).await;
        expect_messages(&server, &[&full[..], &full[..], b"a"]).await;
        soon(longer).await.unwrap();
        soon(shorter).await.unwrap();
    }
    expect_messages(&server, &[&full[..], b"b"]).await;
}

#[tokio::test]
async fn no_message_joins_the_packet_that_ends_the_channel() {
    let _soft = soft0();
    let [client, server] = &default_pair().await;
    send(client, &OWN_PACKETS).await;
    send(client, &["a", "b"]).await;
    client.finish().await.unwrap();
    assert!(matches!(client.send("c").await, Err(Error::Closed)));
    expect_messages(server, &OWN_PACKETS).await;
    expect_messages(server, &["a", "b"]).await;
    assert!(soon(server.receive()).await.unwrap().is_none());
}
