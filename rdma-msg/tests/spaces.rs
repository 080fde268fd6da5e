//! Memory that a receiver offers for messages. One test, since it counts the regions of the process.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

use bytes::Bytes;
use rdma_msg::{Channel, Connector, Error, Listener, Message, Payload};
use rdma_pool::Budget;
use rdma_safe::soft;
use support::{begin, soft0, soon, until};

async fn pair(connector: &Connector, listener: &Listener) -> [Channel; 2] {
    let (client, server) =
        soon(async { tokio::join!(connector.connect(listener.local_address()), listener.accept()) }).await;
    [client.unwrap(), server.unwrap()]
}

async fn received(channel: &Channel) -> Message {
    soon(channel.receive()).await.unwrap().expect("the peer has sent it")
}

#[tokio::test]
async fn a_message_is_written_to_memory_that_was_offered_for_it() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::new().unwrap();
    let [sender, receiver] = pair(&connector, &listener).await;
    let regions = || soft::objects().memory_regions;
    let written = || sender.statistics().messages_written;
    let whole = Bytes::from((0..300_000_u32).map(|number| number as u8).collect::<Vec<_>>());
    let buffer = |bytes: &[u8]| {
        let mut buffer = sender.pool().try_get(Budget::Sends, bytes.len()).unwrap();
        buffer.fill_from(bytes).unwrap();
        buffer
    };

    // Without a copy, from memory of any kind. The memory comes back, and can be offered again.
    let messages: [(Payload<'_>, Vec<u8>); 6] = [
        (whole.to_vec().into(), whole.to_vec()),
        (whole.slice(1..).into(), whole[1..].to_vec()),
        (buffer(&whole).into(), whole.to_vec()),
        (buffer(&whole).freeze().slice(7..).unwrap().into(), whole[7..].to_vec()),
        (
            vec![whole.slice(..9), Bytes::new(), whole.slice(3..99_999)].into(),
            [&whole[..9], &whole[3..99_999]].concat(),
        ),
        (vec![buffer(&whole[..70_000]), buffer(b"tail")].into(), [&whole[..70_000], b"tail"].concat()),
    ];
    let mut memory = vec![7; 310_000];
    let before = regions();
    for (message, expected) in messages {
        let address = memory.as_ptr();
        receiver.offer(memory).await.unwrap();
        until("the offer has arrived", || sender.statistics().offers_received == receiver.statistics().offers_sent)
            .await;
        soon(sender.send(message)).await.unwrap();
        let message = received(&receiver).await;
        assert!(*message == *expected && message.is_in_place(), "{} bytes", expected.len());
        memory = message.into_offered().unwrap();
        assert!(memory.as_ptr() == address && memory.len() == 310_000);
    }
    assert_eq!(written(), 6);
    assert_eq!([&sender, &receiver].map(|end| end.statistics().bytes_copied), [0, 0]);
    until("the regions are deregistered", || regions() == before).await;

    // The first memory with room is used, in the turn of the message. Other messages are read, or copied.
    receiver.offer(vec![0; 10]).await.unwrap();
    for _ in 0..2 {
        receiver.offer(vec![0; 100_000]).await.unwrap();
    }
    until("the offers have arrived", || sender.statistics().offers_received == 9).await;
    let send = async {
        sender.send("before").await.unwrap();
        sender.send(whole.slice(..90_000)).await.unwrap();
        sender.send("between").await.unwrap();
        sender.send(whole.clone()).await.unwrap();
        sender.send(vec![whole.slice(..20_000); 5]).await.unwrap();
        sender.send(&whole[..80_000]).await.unwrap();
        sender.send(whole.slice(5..100_005)).await.unwrap();
    };
    let receive = async {
        for (expected, is_written) in [
            (b"before".to_vec(), false),
            (whole[..90_000].to_vec(), true),
            (b"between".to_vec(), false),
            (whole.to_vec(), false),
            (whole[..20_000].repeat(5), false),
            (whole[..80_000].to_vec(), false),
            (whole[5..100_005].to_vec(), true),
        ] {
            let message = received(&receiver).await;
            assert!(*message == *expected, "{} bytes", expected.len());
            assert_eq!(message.into_offered().is_ok(), is_written, "{} bytes", expected.len());
        }
    };
    soon(async { tokio::join!(send, receive) }).await;
    assert_eq!(written(), 8);

    // A message that is not sent leaves the memory for the next one. Without offers that are used, further ones wait.
    for _ in 0..15 {
        receiver.offer(vec![0; 100_000]).await.unwrap();
    }
    let mut waits = Box::pin(receiver.offer(vec![0; 100_000]));
    begin(waits.as_mut()).await;
    until("the offers have arrived", || sender.statistics().offers_received == 24).await;
    drop(sender.send(whole.slice(..90_000)));
    soon(sender.send(whole.slice(1..90_001))).await.unwrap();
    assert!(*received(&receiver).await == whole[1..90_001]);
    soon(waits).await.unwrap();

    // What was written before the end is received after it.
    soon(sender.send(whole.slice(2..90_002))).await.unwrap();
    soon(sender.close()).await.unwrap();
    drop(sender);
    soon(async { while receiver.send("anything").await.is_ok() {} }).await;
    let message = received(&receiver).await;
    assert!(*message == whole[2..90_002]);
    assert!(soon(receiver.receive()).await.unwrap().is_none());
    let error = soon(async {
        loop {
            if let Err(error) = receiver.offer(vec![0; 100_000]).await {
                break error;
            }
        }
    })
    .await;
    assert!(matches!(error, Error::Disconnected), "{error}");
    drop(receiver);
    until("the regions are deregistered", || regions() <= before).await;
    assert_eq!(message.into_vec(), whole[2..90_002]);

    let [sender, receiver] = pair(&connector, &listener).await;
    assert!(matches!(soon(receiver.offer(Vec::new())).await.unwrap_err(), Error::Connection(_)));
    soon(receiver.finish()).await.unwrap();
    assert!(matches!(soon(receiver.offer(vec![0; 10])).await.unwrap_err(), Error::Closed));
    drop(sender);
}
