//! Memory that a peer is offered to read. One test, since it counts the regions of the process.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

use bytes::Bytes;
use rdma_msg::{Connector, Error, Listener};
use rdma_pool::Budget;
use rdma_safe::soft;
use support::{begin, soft0, soon, until};

#[tokio::test]
async fn the_memory_of_an_offer_is_freed_when_it_is_read_or_the_channel_ends() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::new().unwrap();
    let (client, server) =
        soon(async { tokio::join!(connector.connect(listener.local_address()), listener.accept()) }).await;
    let (client, server) = (client.unwrap(), server.unwrap());
    let regions = || soft::objects().memory_regions;
    let before = regions();
    {
        // Dropped before the peer has read it.
        let mut dropped = std::pin::pin!(client.send(vec![7; 100_000]));
        begin(dropped.as_mut()).await;
    }
    assert_eq!(regions(), before + 1);
    assert!(*soon(server.receive()).await.unwrap().unwrap() == *vec![7; 100_000]);
    until("the region is deregistered", || regions() == before).await;
    let mut lost = Box::pin(client.send(vec![7; 100_000]));
    begin(lost.as_mut()).await;
    assert_eq!(regions(), before + 1);
    drop(server);
    assert!(matches!(soon(lost).await.unwrap_err(), Error::Disconnected));
    until("the region is deregistered", || regions() <= before).await;

    // Memory that others share is read where it is, and nothing is copied.
    let (client, server) =
        soon(async { tokio::join!(connector.connect(listener.local_address()), listener.accept()) }).await;
    let (client, server) = (client.unwrap(), server.unwrap());
    let before = regions();
    let whole = Bytes::from((0..300_000_u32).map(|number| number as u8).collect::<Vec<_>>());
    let part = whole.slice(1001..200_001);
    let mut buffer = client.pool().try_get(Budget::Sends, whole.len()).unwrap();
    buffer.fill_from(&whole).unwrap();
    let send = async {
        client.send(part.clone()).await.unwrap();
        client.send(buffer).await.unwrap();
        client.send(part.to_vec()).await.unwrap();
        client.send(part.clone()).await.unwrap();
    };
    let receive = async {
        let mut received = Vec::new();
        for _ in 0..4 {
            received.push(server.receive().await.unwrap().unwrap());
        }
        received
    };
    let ((), received) = soon(async { tokio::join!(send, receive) }).await;
    for (found, expected) in received.iter().zip([&part, &whole, &part, &part]) {
        assert!(**found == **expected, "{} bytes of {}", found.len(), expected.len());
    }
    assert_eq!(client.statistics().bytes_copied, 0);
    assert_eq!(server.statistics().bytes_copied, 0);
    drop(received);
    until("the regions are deregistered", || regions() == before).await;
}
