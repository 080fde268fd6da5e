//! Messages that are read from the memory of the peer before the program asks for them.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

use rdma_msg::{Channel, Error, Listener};
use support::{soft0, soon};

/// Two ends of a channel with a window of two packets.
async fn pair() -> [Channel; 2] {
    let listener = Listener::builder().window(2).bind("127.0.0.1:0").await.unwrap();
    let (client, server) =
        soon(async { tokio::join!(rdma_msg::connect(listener.local_address()), listener.accept()) }).await;
    [client.unwrap(), server.unwrap()]
}

/// Bytes of which each differs from its neighbours.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index % 251) as u8).collect()
}

/// Waits until the device of the peer has acknowledged these many messages.
async fn until_acknowledged(channel: &Channel, messages: u64) {
    while channel.statistics().messages_acknowledged < messages {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn the_next_message_is_read_while_the_program_handles_one() {
    let _soft = soft0();
    let [client, server] = pair().await;
    let received = async || soon(server.receive()).await.unwrap().unwrap();
    soon(client.send("short")).await.unwrap();
    soon(client.send(pattern(1 << 20))).await.unwrap();
    drop(received().await);
    soon(until_acknowledged(&client, 2)).await;
    // Its packet is free again.
    for message in ["x", "y"] {
        soon(client.send(message)).await.unwrap();
        soon(client.flush()).await.unwrap();
    }
    assert!(*received().await == *pattern(1 << 20));
    assert_eq!([received().await.to_vec(), received().await.to_vec()], [b"x", b"y"]);
    // A longer one is read when a task asks for it.
    soon(client.send("short")).await.unwrap();
    soon(client.send(pattern((1 << 20) + 1))).await.unwrap();
    drop(received().await);
    soon(until_acknowledged(&client, 5)).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(client.statistics().messages_acknowledged, 5);
    assert!(*received().await == *pattern((1 << 20) + 1));
    // It is delivered also after the end of the connection.
    soon(client.send("short")).await.unwrap();
    soon(client.send(pattern(100_000))).await.unwrap();
    drop(received().await);
    soon(client.close()).await.unwrap();
    assert!(*received().await == *pattern(100_000));
    assert!(soon(server.receive()).await.unwrap().is_none());
}

#[tokio::test]
async fn no_message_is_delivered_after_one_that_cannot_be_read() {
    let _soft = soft0();
    let [client, server] = pair().await;
    client.send(pattern(100_000)).await.unwrap();
    client.send("after it").await.unwrap();
    client.finish().await.unwrap();
    soon(until_acknowledged(&client, 1)).await;
    // Nobody can read the offer any more.
    drop(client);
    let error = soon(server.receive()).await.unwrap_err();
    assert!(matches!(error, Error::Disconnected | Error::Connection(_)), "{error}");
    assert!(soon(server.receive()).await.is_err());
}
