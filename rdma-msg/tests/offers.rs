//! Memory that a receiver offers for messages. One test, since it counts the regions of the process.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

mod pairs;

use bytes::Bytes;
use pairs::{connect, received};
use rdma_msg::{Channel, Connector, Error, Listener, Payload};
use rdma_pool::Budget;
use rdma_safe::soft;
use support::{begin, soft0, soon, until};

#[tokio::test]
async fn a_message_is_written_to_memory_that_was_offered_for_it() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::new().unwrap();
    let [sender, receiver] = connect(&connector, &listener).await;
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
        soon(receiver.offer(memory)).await.unwrap();
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
    soon(receiver.offer(vec![0; 10])).await.unwrap();
    for _ in 0..3 {
        soon(receiver.offer(vec![0; 100_000])).await.unwrap();
    }
    until("the offers have arrived", || sender.statistics().offers_received == 10).await;
    let send = async {
        sender.send("before").await.unwrap();
        sender.send(whole.slice(..90_000)).await.unwrap();
        sender.send("between").await.unwrap();
        sender.send(whole.clone()).await.unwrap();
        sender.send(vec![whole.slice(..6_250); 16]).await.unwrap();
        sender.send(vec![whole.slice(..5_000); 17]).await.unwrap();
        sender.send(&whole[..80_000]).await.unwrap();
        sender.send(whole.slice(5..100_005)).await.unwrap();
    };
    let receive = async {
        for (expected, is_written) in [
            (b"before".to_vec(), false),
            (whole[..90_000].to_vec(), true),
            (b"between".to_vec(), false),
            (whole.to_vec(), false),
            (whole[..6_250].repeat(16), true),
            (whole[..5_000].repeat(17), false),
            (whole[..80_000].to_vec(), false),
            (whole[5..100_005].to_vec(), true),
        ] {
            let message = received(&receiver).await;
            assert!(*message == *expected, "{} bytes", expected.len());
            assert_eq!(message.into_offered().is_ok(), is_written, "{} bytes", expected.len());
        }
    };
    soon(async { tokio::join!(send, receive) }).await;
    assert_eq!(written(), 9);

    // A message that is given up before it was written leaves the memory for the next one.
    soon(receiver.offer(vec![0; 100_000])).await.unwrap();
    until("the offer has arrived", || sender.statistics().offers_received == 11).await;
    soon(sender.send(vec![7; 400_000])).await.unwrap();
    let bytes = [0; 400_000];
    let mut without_room = Box::pin(sender.send(&bytes));
    begin(without_room.as_mut()).await;
    let mut given_up = Box::pin(sender.send(whole.slice(..90_000)));
    begin(given_up.as_mut()).await;
    drop(given_up);
    let receive = async { (received(&receiver).await.len(), received(&receiver).await.len()) };
    let (sent, lens) = soon(async { tokio::join!(without_room, receive) }).await;
    assert_eq!((sent.is_ok(), lens), (true, (400_000, 400_000)));
    soon(sender.send(whole.slice(1..90_001))).await.unwrap();
    assert!(*received(&receiver).await == whole[1..90_001]);
    assert_eq!(written(), 10);

    // A buffer of another domain can be read, but not be written from.
    let other = rdma_safe::Device::first().unwrap().open().unwrap().alloc_pd().unwrap();
    soon(receiver.offer(vec![0; 100_000])).await.unwrap();
    until("the offer has arrived", || sender.statistics().offers_received == 12).await;
    for _ in 0..2 {
        let foreign = other.register(vec![7; 90_000]).unwrap();
        let (sent, message) = soon(async { tokio::join!(sender.send(foreign), received(&receiver)) }).await;
        sent.unwrap();
        assert!(message.into_offered().is_err_and(|message| *message == [7; 90_000]));
    }
    assert_eq!(written(), 10);

    // Further offers wait until the receiver has taken a message.
    for _ in 0..14 {
        soon(receiver.offer(vec![0; 100_000])).await.unwrap();
    }
    let mut waits = Box::pin(receiver.offer(vec![0; 100_000]));
    begin(waits.as_mut()).await;
    until("the offers have arrived", || sender.statistics().offers_received == 26).await;
    soon(sender.send(whole.slice(1..90_001))).await.unwrap();
    assert!(*received(&receiver).await == whole[1..90_001]);
    soon(waits).await.unwrap();

    // Longer than what one write has.
    let long = Bytes::from(whole.repeat(20));
    for _ in 0..14 {
        soon(sender.send(whole.slice(2..90_002))).await.unwrap();
        assert!(received(&receiver).await.into_offered().is_ok());
    }
    soon(receiver.offer(vec![0; 12_100_000])).await.unwrap();
    until("the offer has arrived", || sender.statistics().offers_received == 28).await;
    let parts = vec![whole.slice(..1), long.clone(), whole.slice(5..6), whole.slice(..40_000), long.slice(7..)];
    let (sent, message) = soon(async { tokio::join!(sender.send(parts), received(&receiver)) }).await;
    sent.unwrap();
    assert!(*message == [&whole[..1], &long, &whole[5..6], &whole[..40_000], &long[7..]].concat());
    assert!(message.into_offered().is_ok());

    // Messages that were written before the end arrive.
    soon(sender.send(whole.slice(2..90_002))).await.unwrap();
    soon(sender.close()).await.unwrap();
    drop(sender);
    soon(async { while receiver.send("anything").await.is_ok() {} }).await;
    let message = received(&receiver).await;
    assert!(*message == whole[2..90_002]);
    assert!(soon(receiver.receive()).await.unwrap().is_none());
    // It has said that it sends no more, so it needs no memory. That is no error in a loop that offers memory again.
    let open = regions();
    for _ in 0..20 {
        assert!(!soon(receiver.offer(vec![0; 100_000])).await.unwrap());
    }
    assert_eq!(regions(), open);
    drop(receiver);
    until("the regions are deregistered", || regions() <= before).await;
    assert_eq!(message.into_vec(), whole[2..90_002]);

    // An end that has left lets the peer write as long as its own messages are on their way. Its driver runs on this thread.
    let [sender, receiver] = connect(&connector, &listener).await;
    let before = regions();
    soon(receiver.offer(vec![0; 100_000])).await.unwrap();
    until("the offer has arrived", || sender.statistics().offers_received == 1).await;
    soon(receiver.send("last words")).await.unwrap();
    drop(receiver);
    assert_eq!(regions(), before + 1);
    until("the region is deregistered", || regions() == before).await;
    assert_eq!(*received(&sender).await, *b"last words");
    assert!(soon(sender.receive()).await.unwrap().is_none());

    // A task that waits with a further offer learns that the peer needs none, also if messages are kept.
    let [sender, receiver] = connect(&connector, &listener).await;
    for _ in 0..16 {
        assert!(soon(receiver.offer(vec![0; 100_000])).await.unwrap());
    }
    let waits = receiver.offer(vec![0; 100_000]);
    let receive = async {
        sender.send("kept").await.unwrap();
        sender.finish().await.unwrap();
        let kept = received(&receiver).await;
        assert!(receiver.receive().await.unwrap().is_none());
        kept
    };
    let (needed, kept) = soon(async { tokio::join!(waits, receive) }).await;
    assert!(!needed.unwrap() && *kept == *b"kept");
    drop((sender, receiver, kept));

    // A sender that ends without its last message leaves an error.
    let [sender, receiver] = connect(&connector, &listener).await;
    sender.abort(7, "on purpose");
    let error = soon(async {
        loop {
            if let Err(error) = receiver.offer(vec![0; 100_000]).await {
                break error;
            }
        }
    })
    .await;
    assert!(matches!(error, Error::Aborted { code: 7, .. }), "{error}");

    // Offers do not wait behind messages, which may wait until this end receives.
    let ends = connect(&connector, &listener).await;
    let bytes = vec![7; 1_000_000];
    let exchange = async |end: &Channel| {
        let receive = async {
            end.offer(vec![0; 1_000_000]).await.unwrap();
            received(end).await.len()
        };
        let (sent, len) = tokio::join!(end.send(&bytes), receive);
        sent.unwrap();
        assert_eq!(len, 1_000_000);
    };
    soon(async { tokio::join!(exchange(&ends[0]), exchange(&ends[1])) }).await;

    let [sender, receiver] = connect(&connector, &listener).await;
    assert!(matches!(soon(receiver.offer(Vec::new())).await.unwrap_err(), Error::Connection(_)));
    soon(receiver.finish()).await.unwrap();
    assert!(matches!(soon(receiver.offer(vec![0; 10])).await.unwrap_err(), Error::Closed));
    drop(sender);
}
