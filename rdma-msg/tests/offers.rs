//! Memory that a peer is offered to read. One test, since it counts the regions of the process.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

use rdma_msg::{Connector, Error, Listener};
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
}
