//! Channels over soft0.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

mod pairs;

use std::io::IoSlice;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};

use pairs::{LONGEST_PACKET, PACKET, connect, default_pair, pair, pattern, received};
use rdma_msg::{Channel, Connector, Error, Listener};
use support::{begin, soft0, soon, until};

#[tokio::test]
async fn messages_of_any_size_arrive_in_order() {
    let _soft = soft0();
    let [client, server] = default_pair().await;
    let sizes = [0, 1, 63, 64, 65, 4000, PACKET - 1, PACKET, PACKET + 1, 50_000, 100_000, 0, 1_000_000, 3, 5_000_000];
    let sender = tokio::spawn(async move {
        for len in sizes {
            client.send(&pattern(len)[..]).await.unwrap();
        }
        client.close().await.unwrap();
    });
    for len in sizes {
        let message = soon(server.receive()).await.unwrap().expect("it was sent");
        assert!(*message == *pattern(len), "{len} bytes");
        // Between the two lengths, it depends on whether another packet was in flight.
        assert!(message.is_in_place() || len > PACKET);
        assert!(!message.is_in_place() || len <= LONGEST_PACKET);
    }
    assert!(soon(server.receive()).await.unwrap().is_none());
    assert!(soon(server.receive()).await.unwrap().is_none(), "the end is the end");
    soon(sender).await.unwrap();
}

#[tokio::test]
async fn a_message_of_64_kib_that_answers_another_has_one_packet() {
    let _soft = soft0();
    let ends = default_pair().await;
    // The last one needs two packets. With both on their way, the next message would not be sent at once.
    for (round, len) in (0..).zip([64 << 10, PACKET + 1, LONGEST_PACKET, 64 << 10, LONGEST_PACKET + 1]) {
        for [from, to] in [[0, 1], [1, 0]].map(|ends_of| ends_of.map(|end| &ends[end])) {
            let before = from.statistics().packets_sent;
            soon(from.send(&pattern(len)[..])).await.unwrap();
            let message = received(to).await;
            let is_whole = len <= LONGEST_PACKET;
            assert_eq!(message.is_in_place(), is_whole, "round {round}");
            assert!(*message == pattern(len), "round {round}");
            assert_eq!(from.statistics().packets_sent - before, if is_whole { 1 } else { 2 }, "round {round}");
        }
    }
}

#[tokio::test]
async fn lists_and_owned_memory_are_sent_as_one_message() {
    let _soft = soft0();
    let [client, server] = default_pair().await;
    let parts = [b"gathered ".as_slice(), b"from ", b"parts"].map(IoSlice::new);
    client.send(&parts[..]).await.unwrap();
    client.send(String::from("text")).await.unwrap();
    for expected in ["gathered from parts", "text"] {
        let message = soon(server.receive()).await.unwrap().unwrap();
        assert_eq!(message.into_vec(), expected.as_bytes());
    }
}

#[cfg(feature = "bytes")]
#[tokio::test]
async fn messages_become_bytes_without_a_further_copy() {
    let _soft = soft0();
    let [client, server] = default_pair().await;
    for len in [100, 30_000] {
        let sent = bytes::Bytes::from(pattern(len));
        client.send(sent.clone()).await.unwrap();
        let message = soon(server.receive()).await.unwrap().unwrap();
        let address = message.as_ptr();
        let received = bytes::Bytes::from(message);
        assert!(received == sent && received.as_ptr() == address);
    }
}

#[tokio::test]
async fn short_messages_share_packets_while_others_are_on_their_way() {
    let _soft = soft0();
    let [client, server] = default_pair().await;
    for number in 0..1000_u32 {
        client.send(&number.to_be_bytes()).await.unwrap();
    }
    for number in 0..1000_u32 {
        assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), number.to_be_bytes());
    }
    soon(client.flush()).await.unwrap();
    let sent = client.statistics();
    assert_eq!((sent.messages_sent, sent.messages_acknowledged), (1000, 1000));
    assert!(sent.packets_sent < 500, "{sent:?}");
    assert_eq!(server.statistics().packets_received, sent.packets_sent);
}

/// The driver does not run here, so no packet is acknowledged before the end.
#[tokio::test]
async fn the_rest_of_a_long_message_is_sent_once_the_program_waits_for_an_answer() {
    let _soft = soft0();
    // A long message takes four packets.
    let sends = |connector: Connector| connector.packet_size(20 << 10).sends(16);
    let [client, server] = pair(sends, |listener| listener.window(16)).await;
    let context = &mut Context::from_waker(Waker::noop());
    let mut sent_when_it_waits = || {
        let before = client.statistics().packets_sent;
        assert!(pin!(client.receive()).poll(context).is_pending());
        [before, client.statistics().packets_sent]
    };
    let long = pattern(64 << 10);
    soon(client.send(&long)).await.unwrap();
    assert_eq!(sent_when_it_waits(), [3, 4]);
    // Short messages gather.
    soon(client.send(b"a question")).await.unwrap();
    assert_eq!(sent_when_it_waits(), [4, 4]);
    soon(client.send(&long)).await.unwrap();
    assert_eq!(sent_when_it_waits(), [7, 8]);
    // Half of the send queue is left for full packets.
    soon(client.send(&long)).await.unwrap();
    assert_eq!(sent_when_it_waits(), [11, 11]);
    for expected in [&long[..], b"a question", &long, &long] {
        assert!(*soon(server.receive()).await.unwrap().unwrap() == *expected);
    }
}

#[tokio::test]
async fn a_program_that_keeps_messages_holds_back_its_peer_only() {
    let _soft = soft0();
    let [client, server] = pair(|connector| connector.sends(2), |listener| listener.window(4).copy_budget(0)).await;
    let (mut sent, mut kept) = (0_u32, Vec::new());
    // Each message fills a packet. The fifth waits in the open packet.
    let full = pattern(PACKET);
    while sent < 5 {
        soon(client.send(&full)).await.unwrap();
        sent += 1;
    }
    {
        let mut waiting = pin!(client.send(&full));
        begin(waiting.as_mut()).await;
        for _ in 0..4 {
            kept.push(soon(server.receive()).await.unwrap().unwrap());
        }
        // The other direction goes on.
        for number in 0..100_u32 {
            server.send(&number.to_be_bytes()).await.unwrap();
            assert_eq!(*soon(client.receive()).await.unwrap().unwrap(), number.to_be_bytes());
        }
        begin(waiting.as_mut()).await;
        assert_eq!(server.statistics().starved, 0);
        begin(pin!(server.receive())).await;
        assert_ne!(server.statistics().starved, 0);
        drop(kept.pop());
        soon(waiting).await.unwrap();
    }
    kept.push(soon(server.receive()).await.unwrap().unwrap());
    kept.clear();
    assert_eq!(soon(server.receive()).await.unwrap().unwrap().len(), full.len());
    soon(client.close()).await.unwrap();
    assert!(soon(server.receive()).await.unwrap().is_none());
}

#[tokio::test]
async fn a_program_that_keeps_messages_gets_copies_within_a_budget() {
    let _soft = soft0();
    let [client, server] =
        pair(|connector| connector.sends(2), |listener| listener.window(4).copy_budget(5 * PACKET / 2)).await;
    // Each message fills a packet.
    let full = pattern(PACKET);
    for _ in 0..2 {
        let send = async {
            for _ in 0..6 {
                client.send(&full).await.unwrap();
            }
        };
        let receive = async {
            let mut kept = Vec::new();
            for _ in 0..6 {
                kept.push(server.receive().await.unwrap().unwrap());
            }
            kept
        };
        let ((), kept) = soon(async { tokio::join!(send, receive) }).await;
        // Two of the four packets are kept before any is copied, and two copies fit into the budget.
        let in_place: Vec<_> = kept.iter().map(|message| message.is_in_place()).collect();
        assert_eq!(in_place, [true, true, false, false, true, true]);
        assert!(kept.iter().all(|message| **message == *full));
        begin(pin!(server.receive())).await;
        // The peer cannot send now.
        soon(client.send(&full)).await.unwrap();
        begin(pin!(server.receive())).await;
        drop(kept);
        assert_eq!(soon(server.receive()).await.unwrap().unwrap().len(), full.len());
    }
    let received = server.statistics();
    assert_eq!((received.messages_copied, received.bytes_copied), (4, 4 * PACKET as u64));
    assert_ne!(received.starved, 0);
}

#[tokio::test]
async fn a_message_whose_future_is_dropped_does_not_arrive() {
    let _soft = soft0();
    let [client, server] = pair(|connector| connector, |listener| listener.window(2)).await;
    {
        // Longer than the window, so it waits after its first parts.
        let bytes = pattern(1 << 20);
        let mut long = pin!(client.send(&bytes));
        begin(long.as_mut()).await;
        let mut second = pin!(client.send("never"));
        begin(second.as_mut()).await;
    }
    let follower = tokio::spawn(async move {
        client.send("after it").await.unwrap();
        client.close().await.unwrap();
    });
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"after it");
    assert!(soon(server.receive()).await.unwrap().is_none());
    soon(follower).await.unwrap();
}

#[tokio::test]
async fn both_directions_are_full_of_long_messages() {
    let _soft = soft0();
    let ends = pair(|connector| connector.window(1).sends(1), |listener| listener.window(2).sends(1)).await;
    let tasks = ends.map(|end| {
        tokio::spawn(async move {
            let send = async {
                for len in 0..30 {
                    end.send(&pattern(len * 5000)[..]).await.unwrap();
                }
                end.finish().await.unwrap();
            };
            let receive = async {
                for len in 0..30 {
                    let message = end.receive().await.unwrap().expect("it was sent");
                    assert!(*message == *pattern(len * 5000));
                }
                assert!(end.receive().await.unwrap().is_none());
            };
            tokio::join!(send, receive);
            end.flush().await.unwrap();
        })
    });
    for task in tasks {
        soon(task).await.unwrap();
    }
}

#[tokio::test]
async fn the_end_without_a_last_message_is_an_error() {
    let _soft = soft0();
    let [client, server] = pair(|connector| connector, |listener| listener.window(1)).await;
    client.send("one").await.unwrap();
    client.send("two").await.unwrap();
    // The peer has no room for the second message.
    drop(client);
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"one");
    let error = soon(server.receive()).await.unwrap_err();
    assert!(matches!(error, Error::Disconnected), "{error}");
    assert!(matches!(soon(server.send("three")).await.unwrap_err(), Error::Disconnected));
}

#[tokio::test]
async fn a_dropped_channel_ends_in_order_if_its_peer_has_room() {
    let _soft = soft0();
    let [client, server] = default_pair().await;
    client.send("one").await.unwrap();
    drop(client);
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"one");
    assert!(soon(server.receive()).await.unwrap().is_none());
}

#[tokio::test]
async fn an_abort_tells_the_peer_why_also_without_credit() {
    let _soft = soft0();
    // More messages than the peer has receives for, or parts of one.
    for (window, len) in [(1, 2000), (3, 2000), (3, 250_000)] {
        let [client, server] = pair(|connector| connector, |listener| listener.window(window)).await;
        let blocked = tokio::spawn({
            let client = client.clone();
            async move { while client.send(&pattern(len)[..]).await.is_ok() {} }
        });
        until("the window is full", || client.statistics().packets_sent == u64::from(window)).await;
        client.abort(7, "no space left on device");
        soon(blocked).await.unwrap();
        let mut received = 0;
        let error = loop {
            match soon(server.receive()).await {
                Ok(message) => {
                    assert!(*message.unwrap() == *pattern(len));
                    received += 1;
                }
                Err(error) => break error,
            }
        };
        assert!(if len == 2000 { received >= window } else { received == 0 }, "{received}");
        let is_aborted = matches!(&error, Error::Aborted { code: 7, reason } if **reason == *"no space left on device");
        assert!(is_aborted, "{window} {len}: {error}");
    }
}

#[tokio::test]
async fn an_abort_tells_the_peer_why() {
    let _soft = soft0();
    let [client, server] = default_pair().await;
    client.send("before").await.unwrap();
    client.abort(42, "the disk is full");
    assert!(matches!(client.send("after").await.unwrap_err(), Error::Closed));
    // Senders learn it although the program does not receive.
    let is_aborted =
        |error: &Error| matches!(error, Error::Aborted { code: 42, reason } if **reason == *"the disk is full");
    let error = soon(async {
        loop {
            if let Err(error) = server.send("anything").await {
                break error;
            }
        }
    });
    let error = error.await;
    assert!(is_aborted(&error), "{error}");
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"before");
    assert!(is_aborted(&soon(server.receive()).await.unwrap_err()));
}

#[tokio::test]
async fn a_half_closed_channel_still_receives() {
    let _soft = soft0();
    let [client, server] = default_pair().await;
    client.send("question").await.unwrap();
    client.finish().await.unwrap();
    assert!(matches!(client.send("more").await.unwrap_err(), Error::Closed));
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"question");
    assert!(soon(server.receive()).await.unwrap().is_none());
    server.send("answer").await.unwrap();
    soon(server.close()).await.unwrap();
    assert_eq!(*soon(client.receive()).await.unwrap().unwrap(), *b"answer");
    assert!(soon(client.receive()).await.unwrap().is_none());
    soon(client.close()).await.unwrap();
}

#[tokio::test]
async fn a_message_that_the_peer_does_not_accept_is_refused() {
    let _soft = soft0();
    let [client, server] = pair(|connector| connector, |listener| listener.max_message(1000)).await;
    let error = client.send(pattern(1001)).await.unwrap_err();
    assert!(matches!(error, Error::TooLong { len: 1001, max: 1000 }), "{error}");
    client.send(pattern(1000)).await.unwrap();
    assert_eq!(soon(server.receive()).await.unwrap().unwrap().len(), 1000);
}

#[tokio::test]
async fn many_tasks_share_a_channel() {
    let _soft = soft0();
    let [client, server] = pair(|connector| connector.sends(2), |listener| listener.window(3)).await;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..20_u32 {
        let client = client.clone();
        tasks.spawn(async move {
            for number in 0..50_u32 {
                let mut message = pattern(number as usize * 331);
                message.splice(0..0, [task, number].map(u32::to_be_bytes).concat());
                client.send(message).await.unwrap();
            }
        });
    }
    let mut next = [0_u32; 20];
    for _ in 0..20 * 50 {
        let message = soon(server.receive()).await.unwrap().unwrap();
        let (header, rest) = message.split_at(8);
        let [task, number] = [&header[..4], &header[4..]].map(|word| u32::from_be_bytes(word.try_into().unwrap()));
        assert_eq!(next[task as usize], number, "the messages of a task keep their order");
        assert!(*rest == *pattern(number as usize * 331));
        next[task as usize] += 1;
    }
    soon(tasks.join_all()).await;
    assert_eq!(client.statistics().messages_sent, 1000);
}

#[tokio::test]
async fn a_channel_that_is_gone_leaves_no_memory_behind() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let driver = rdma_async::Driver::current().unwrap();
    let connector = Connector::new().unwrap();
    for round in 0..3 {
        let [client, server] = connect(&connector, &listener).await;
        client.send("kept").await.unwrap();
        let kept = soon(server.receive()).await.unwrap().unwrap();
        if round == 1 {
            soon(client.close()).await.unwrap();
        }
        drop((client, server));
        assert_eq!(*kept, *b"kept", "a message outlives its channel");
    }
    until("connections and operations end", || {
        let now = driver.statistics();
        (now.connections, now.operations) == (0, 0)
    })
    .await;
}

#[tokio::test]
async fn long_messages_in_owned_memory_are_read_where_they_are() {
    let _soft = soft0();
    let [client, server] = pair(|connector| connector.rendezvous_threshold(1000), |listener| listener.window(2)).await;
    let sizes = [1000, 70_000, 999, 1_000_000, 1000, 4 << 20, (4 << 20) + 1, 10_000_000, 5];
    let sender = tokio::spawn(async move {
        for len in sizes {
            client.send(pattern(len)).await.unwrap();
        }
        client.close().await.unwrap();
        client.statistics()
    });
    for len in sizes {
        let message = soon(server.receive()).await.unwrap().expect("it was sent");
        assert!(*message == *pattern(len), "{len} bytes");
        assert_eq!(message.is_in_place(), len <= 4 << 20, "{len} bytes");
    }
    assert!(soon(server.receive()).await.unwrap().is_none());
    let (sent, received) = (soon(sender).await.unwrap(), server.statistics());
    assert_eq!((sent.bytes_copied, sent.messages_acknowledged), (999 + 5, sizes.len() as u64));
    assert_eq!(received.bytes_copied, (4 << 20) + 1 + 10_000_000);
}

#[tokio::test]
async fn several_tasks_offer_messages_in_both_directions() {
    let _soft = soft0();
    let ends = pair(
        |connector| connector.rendezvous_threshold(0).window(1),
        |listener| listener.rendezvous_threshold(0).window(1),
    )
    .await;
    let mut tasks = tokio::task::JoinSet::new();
    for end in ends {
        let mut senders = tokio::task::JoinSet::new();
        for task in 0..6_usize {
            let end = end.clone();
            senders.spawn(async move {
                for number in 0..20 {
                    end.send(pattern(task * 1000 + number + 1)).await.unwrap();
                }
            });
        }
        tasks.spawn(async move {
            let mut total = 0;
            for _ in 0..6 * 20 {
                let message = end.receive().await.unwrap().unwrap();
                assert!(*message == *pattern(message.len()));
                total += message.len();
            }
            assert_eq!(total, (0..6).map(|task| (1..=20).map(|number| task * 1000 + number).sum::<usize>()).sum());
            senders.join_all().await;
            end.flush().await.unwrap();
        });
    }
    soon(tasks.join_all()).await;
}

/// Counts how often it is woken.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_sender_that_waits_is_not_woken_without_a_reason() {
    let _soft = soft0();
    let [client, server] = pair(|connector| connector, |listener| listener.window(1)).await;
    // One message is on its way, and two do not fill the open packet.
    let message = pattern(25_000);
    for _ in 0..3 {
        soon(client.send(&message)).await.unwrap();
    }
    soon(until_acknowledged(&client, 1)).await;
    let count = Arc::new(Count::default());
    let waker = Waker::from(count.clone());
    let mut waiting = pin!(client.send(&message));
    let mut offers = Vec::new();
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(count.0.load(Ordering::SeqCst), 0);
    assert_eq!(soon(server.receive()).await.unwrap().unwrap().len(), message.len());
    soon(waiting).await.unwrap();
    for _ in 0..3 {
        soon(server.receive()).await.unwrap().unwrap();
    }
    // At most two messages wait to be read. The third waits for an answer.
    for waits in [false, false, true] {
        let mut offer = Box::pin(client.send(pattern(100_000)));
        assert_eq!(offer.as_mut().poll(&mut Context::from_waker(&waker)).is_pending(), waits);
        offers.push(offer);
    }
    let before = count.0.load(Ordering::SeqCst);
    let mut third = offers.pop().unwrap();
    for _ in 0..100 {
        tokio::task::yield_now().await;
        assert!(third.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    let woken = count.0.load(Ordering::SeqCst) - before;
    assert!(woken <= 2, "once for each packet that completes: {woken}");
}

/// Waits until the device of the peer has acknowledged these many messages.
async fn until_acknowledged(channel: &Channel, messages: u64) {
    while channel.statistics().messages_acknowledged < messages {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn no_memory_of_others_is_sent_as_padding() {
    let _soft = soft0();
    let [windows, packet, rest] = [8_u32, 4096, 0].map(u32::to_be_bytes);
    let hello = [&b"RMSG\x01\x01\0\0"[..], &windows, &packet, &9999_u64.to_be_bytes(), &windows, &rest].concat();
    let listener = rdma_async::Listener::builder().message_size(32 << 10).private_data(hello);
    let listener = listener.bind("127.0.0.1:0").await.unwrap();
    let (client, raw) =
        soon(async { tokio::join!(rdma_msg::connect(listener.local_address()), listener.accept()) }).await;
    let (client, raw) = (client.unwrap(), raw.unwrap());
    // Fills the memory of a packet before it is used again.
    client.send(&[0xee; 4000]).await.unwrap();
    soon(client.flush()).await.unwrap();
    for _ in 0..6 {
        client.send("x").await.unwrap();
        soon(client.flush()).await.unwrap();
    }
    drop(soon(raw.receive()).await.unwrap());
    for _ in 0..6 {
        let packet = soon(raw.receive()).await.unwrap().unwrap();
        assert!(!packet.contains(&0xee), "{packet:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_whose_clients_leave_first_closes_in_order() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::new().unwrap();
    for _ in 0..100 {
        let [client, server] = connect(&connector, &listener).await;
        let serving = tokio::spawn(async move {
            while let Some(message) = server.receive().await? {
                assert_eq!(*message, *b"the only message");
            }
            server.close().await
        });
        client.send("the only message").await.unwrap();
        soon(client.close()).await.unwrap();
        soon(serving).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_flush_after_an_abort_does_not_count_discarded_messages() {
    let _soft = soft0();
    let [client, _server] = pair(|connector| connector, |listener| listener.window(1)).await;
    client.send("sent").await.unwrap();
    client.send("discarded").await.unwrap();
    client.finish().await.unwrap();
    client.abort(1, "no reason");
    assert!(soon(client.flush()).await.is_err());
    assert!(soon(client.close()).await.is_err());
}
