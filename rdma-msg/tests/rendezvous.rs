//! Long messages that the peer reads from the memory of their sender. One test, since it counts the regions of the process.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

mod pairs;

use bytes::Bytes;
use pairs::connect;
use rdma_msg::{Connector, Error, Listener, Payload};
use rdma_pool::Budget;
use rdma_safe::soft;
use support::{begin, soft0, soon, until};

#[tokio::test]
async fn the_memory_of_an_offer_is_freed_when_it_is_read_or_the_channel_ends() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::new().unwrap();
    let [client, server] = connect(&connector, &listener).await;
    let regions = || soft::objects().memory_regions;
    let before = regions();
    let acknowledged = || client.statistics().messages_acknowledged;
    for byte in 1..=2 {
        soon(client.send(vec![byte; 100_000])).await.unwrap();
    }
    assert_eq!((regions(), acknowledged()), (before + 2, 0));
    {
        // At most two messages wait to be read. The third is given up.
        let mut third = std::pin::pin!(client.send(vec![3; 100_000]));
        begin(third.as_mut()).await;
        assert_eq!(regions(), before + 3);
    }
    assert_eq!(regions(), before + 2);
    until("both have arrived", || server.statistics().packets_received == 2).await;
    assert!(*soon(server.receive()).await.unwrap().unwrap() == *vec![1; 100_000]);
    until("the second message is read while the program handles the first", || acknowledged() == 2).await;
    until("the regions are deregistered", || regions() == before).await;
    soon(client.send(vec![4; 100_000])).await.unwrap();
    for byte in [2, 4] {
        assert!(*soon(server.receive()).await.unwrap().unwrap() == *vec![byte; 100_000]);
    }
    until("the region is deregistered", || regions() == before).await;
    soon(client.send(vec![7; 100_000])).await.unwrap();
    assert_eq!(regions(), before + 1);
    drop(server);
    assert!(matches!(soon(client.flush()).await.unwrap_err(), Error::Disconnected));
    until("the region is deregistered", || regions() <= before).await;

    // Memory that others share is read where it is, and nothing is copied.
    let [client, server] = connect(&connector, &listener).await;
    let whole = Bytes::from((0..300_000_u32).map(|number| number as u8).collect::<Vec<_>>());
    let (part, long) = (whole.slice(1001..200_001), Bytes::from(whole.repeat(10)));
    let buffer = |bytes: &[u8]| {
        let mut buffer = client.pool().try_get(Budget::Sends, bytes.len()).unwrap();
        buffer.fill_from(bytes).unwrap();
        buffer
    };
    let shared = buffer(&whole).freeze();
    let messages = || -> [(Payload<'_>, Vec<u8>); 10] {
        [
            (part.clone().into(), part.to_vec()),
            (buffer(&whole).into(), whole.to_vec()),
            (part.to_vec().into(), part.to_vec()),
            (shared.clone().into(), whole.to_vec()),
            (
                vec![part.clone(), Bytes::new(), whole.clone(), part.slice(..1)].into(),
                [&part, &whole, &part[..1]].concat(),
            ),
            (vec![buffer(&whole[..70_000]), buffer(b"tail")].into(), [&whole[..70_000], b"tail"].concat()),
            (vec![shared.slice(1..).unwrap(), shared.clone()].into(), [&whole[1..], &whole].concat()),
            (vec![whole.slice(..20_000); 16].into(), whole[..20_000].repeat(16)),
            // Too long for one buffer, so the reader copies it.
            (vec![long.clone(), part.clone(), long.clone()].into(), [&long[..], &part, &long].concat()),
            // Too many parts for an offer, so both ends copy them.
            (vec![part.slice(..10_000); 17].into(), part[..10_000].repeat(17)),
        ]
    };
    // In the first round, the pool may register memory.
    let mut before = 0;
    for _ in 0..2 {
        before = regions();
        let copied = || [&client, &server].map(|end| end.statistics().bytes_copied);
        let [client_before, server_before] = copied();
        for (message, expected) in messages() {
            let (sent, found) = soon(async { tokio::join!(client.send(message), server.receive()) }).await;
            sent.unwrap();
            assert!(*found.unwrap().unwrap() == *expected, "{} bytes", expected.len());
        }
        let [client_after, server_after] = copied();
        let both = 17 * 10_000;
        let read_in_chunks = 2 * long.len() as u64 + part.len() as u64;
        assert_eq!([client_after - client_before, server_after - server_before], [both, both + read_in_chunks]);
    }
    until("the regions are deregistered", || regions() == before).await;
}
