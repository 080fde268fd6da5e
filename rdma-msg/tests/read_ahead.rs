//! Messages that are read from the memory of the peer before the program asks for them.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

mod pairs;

use pairs::{pair, pattern, received};
use rdma_msg::{Channel, Error};
use support::{soft0, soon, until};

/// Two ends of a channel with a window of two packets.
async fn two_packets() -> [Channel; 2] {
    pair(|connector| connector, |listener| listener.window(2)).await
}

/// Sends a short message and one of `len` bytes, and receives the short one when both have arrived.
async fn receive_first([client, server]: &[Channel; 2], len: usize) {
    soon(client.send("short")).await.unwrap();
    soon(client.send(pattern(len))).await.unwrap();
    until("both have arrived", || server.statistics().packets_received == 2).await;
    assert_eq!(*received(server).await, *b"short");
}

#[tokio::test]
async fn the_next_message_is_read_while_the_program_handles_one() {
    let _soft = soft0();
    let channels = two_packets().await;
    receive_first(&channels, 1 << 20).await;
    let [client, server] = &channels;
    until("it was read", || client.statistics().messages_acknowledged == 2).await;
    // Its packet is free again.
    for message in ["x", "y"] {
        soon(client.send(message)).await.unwrap();
        soon(client.flush()).await.unwrap();
    }
    assert!(*received(server).await == *pattern(1 << 20));
    for message in ["x", "y"] {
        assert_eq!(*received(server).await, *message.as_bytes());
    }
}

#[tokio::test]
async fn a_message_that_was_read_ahead_comes_after_the_end_of_the_connection() {
    let _soft = soft0();
    let channels = two_packets().await;
    receive_first(&channels, 100_000).await;
    let [client, server] = &channels;
    soon(client.close()).await.unwrap();
    assert!(*received(server).await == *pattern(100_000));
    assert!(soon(server.receive()).await.unwrap().is_none());
}

#[tokio::test]
async fn a_message_of_more_than_1_mib_is_read_when_a_task_asks_for_it() {
    let _soft = soft0();
    let channels = two_packets().await;
    receive_first(&channels, (1 << 20) + 1).await;
    let [client, server] = &channels;
    until("the short one is acknowledged", || client.statistics().messages_acknowledged >= 1).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(client.statistics().messages_acknowledged, 1);
    assert!(*received(server).await == *pattern((1 << 20) + 1));
}

#[tokio::test]
async fn no_message_is_delivered_after_one_that_cannot_be_read() {
    let _soft = soft0();
    let [client, server] = two_packets().await;
    client.send(pattern(100_000)).await.unwrap();
    client.send("after it").await.unwrap();
    client.finish().await.unwrap();
    until("a message is acknowledged", || client.statistics().messages_acknowledged == 1).await;
    // Nobody can read the offer any more.
    drop(client);
    let error = soon(server.receive()).await.unwrap_err();
    assert!(matches!(error, Error::Disconnected | Error::Connection(_)), "{error}");
    assert!(soon(server.receive()).await.is_err());
}
