//! Several messages at once: the same messages in the same order as one at a time.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

mod pairs;

use std::pin::pin;

use pairs::{default_pair, pair, pattern};
use rdma_msg::{Channel, Error, Messages};
use support::{begin, soft0, soon, until};

/// Lengths of messages: short ones, empty ones, and now and then one of several packets.
fn lengths(count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(|number| if number % 97 == 96 { 100_000 + number } else { number * 37 % 150 })
}

/// All messages until the peer sends no more, taken one at a time or several at once. Also the largest number at once.
async fn receive_all(channel: &Channel) -> (Vec<Vec<u8>>, usize) {
    let (mut all, mut most) = (Vec::new(), 0);
    for turn in 0.. {
        if turn % 5 == 4 {
            let Some(message) = soon(channel.receive()).await.unwrap() else { break };
            all.push(message.to_vec());
            continue;
        }
        let Some(messages) = soon(channel.receive_many()).await.unwrap() else { break };
        assert_eq!(messages.iter().len(), messages.len());
        most = most.max(messages.len());
        all.extend(messages.iter().map(<[u8]>::to_vec));
    }
    (all, most)
}

#[tokio::test]
async fn they_are_the_same_messages_in_the_same_order() {
    let _soft = soft0();
    for at_once in [1, 7, 16, 1000] {
        let [client, server] = &default_pair().await;
        let sent: Vec<_> = lengths(2000).map(pattern).collect();
        let send = async {
            for messages in sent.chunks(at_once) {
                client.send_many(messages.iter().map(|message| &message[..])).await.unwrap();
                client.send("alone").await.unwrap();
            }
            client.finish().await.unwrap();
        };
        let ((), (received, most)) = tokio::join!(send, receive_all(server));
        let mut expected = Vec::new();
        for messages in sent.chunks(at_once) {
            expected.extend(messages.iter().map(|message| &message[..]).chain([&b"alone"[..]]));
        }
        assert!(received == expected, "{at_once} at once");
        assert!(most > 1, "short messages share packets");
        let (sent, taken) = (client.statistics(), server.statistics());
        assert_eq!((sent.messages_sent, taken.messages_received), (expected.len() as u64, expected.len() as u64));
    }
}

#[tokio::test]
async fn a_dropped_future_loses_nothing_and_keeps_what_was_sent() {
    let _soft = soft0();
    let [client, server] = &default_pair().await;
    {
        let mut waits = pin!(server.receive_many());
        begin(waits.as_mut()).await;
    }
    client.send_many([&b"a"[..], b"b", b"c"]).await.unwrap();
    let mut received = Vec::new();
    while received.len() < 3 {
        let messages = soon(server.receive_many()).await.unwrap().unwrap();
        received.extend(messages.iter().map(<[u8]>::to_vec));
    }
    assert_eq!(received, [b"a", b"b", b"c"]);
    // The second message is too long for the room that there is.
    let long = pattern(32_000_000);
    {
        let mut waits = pin!(client.send_many([&b"sent"[..], &long, b"not sent"]));
        begin(waits.as_mut()).await;
    }
    client.send_many([&b"after"[..]]).await.unwrap();
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"sent");
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"after");
}

#[tokio::test]
async fn messages_that_are_kept_hold_back_the_peer_until_they_are_dropped() {
    let _soft = soft0();
    let [client, server] = pair(|connector| connector.window(4), |listener| listener.window(4).copy_budget(0)).await;
    let sender = tokio::spawn(async move {
        let message = [7; 100];
        for _ in 0..100 {
            client.send_many([&message[..]; 100]).await.unwrap();
        }
        client.finish().await.unwrap();
        client.flush().await.unwrap();
    });
    let mut kept = Vec::<Messages>::new();
    let mut count = 0;
    while !sender.is_finished() {
        let messages = tokio::time::timeout(std::time::Duration::from_millis(5), server.receive_many()).await;
        match messages.map(Result::unwrap) {
            Ok(Some(messages)) => kept.push(messages),
            Ok(None) => break,
            Err(_) => count += kept.drain(..).map(|messages| check(&messages)).sum::<usize>(),
        }
    }
    while let Some(messages) = soon(server.receive_many()).await.unwrap() {
        kept.push(messages);
    }
    count += kept.iter().map(check).sum::<usize>();
    assert_eq!(count, 10_000);
    soon(sender).await.unwrap();
    assert!(server.statistics().starved > 0, "the peer could not send while all packets were kept");
}

/// The number of messages, which must be right.
fn check(messages: &Messages) -> usize {
    assert!(messages.into_iter().all(|message| message == [7; 100]));
    messages.len()
}

#[tokio::test]
async fn errors_come_after_the_messages_before_them() {
    let _soft = soft0();
    let [client, server] = &default_pair().await;
    let too_long = vec![0; 65 << 20];
    let result = client.send_many([&b"first"[..], b"second", &too_long, b"never"]).await;
    assert!(matches!(result, Err(Error::TooLong { .. })), "{result:?}");
    client.flush().await.unwrap();
    client.abort(1, "on purpose");
    let mut received = Vec::new();
    let error = loop {
        match soon(server.receive_many()).await {
            Ok(messages) => received.extend(messages.unwrap().iter().map(<[u8]>::to_vec)),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Aborted { .. }), "{error}");
    assert_eq!(received, [&b"first"[..], b"second"]);
    assert!(soon(server.send_many(["late"])).await.is_err());
}

#[tokio::test]
async fn a_message_that_came_alone_can_be_taken_out() {
    let _soft = soft0();
    let [client, server] = &default_pair().await;
    assert!(server.offer(vec![0; 100_000]).await.unwrap());
    until("the offer has arrived", || client.statistics().offers_received == 1).await;
    client.send(pattern(90_000)).await.unwrap();
    let message = soon(server.receive_many()).await.unwrap().unwrap().into_message().unwrap();
    assert!(*message == pattern(90_000) && message.into_offered().is_ok());
}

#[tokio::test]
async fn tasks_that_send_and_receive_several_or_one_get_each_message_once() {
    let _soft = soft0();
    let [client, server] = default_pair().await;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..4_u16 {
        let client = client.clone();
        tasks.spawn(async move {
            for number in (0..1000_u16).step_by(10) {
                let messages: Vec<_> =
                    (number..number + 10).map(|number| [task.to_be_bytes(), number.to_be_bytes()].concat()).collect();
                if number % 50 == 0 {
                    for message in &messages {
                        client.send(&message[..]).await.unwrap();
                    }
                } else {
                    client.send_many(&messages).await.unwrap();
                }
            }
        });
    }
    let mut readers = tokio::task::JoinSet::new();
    for task in 0..3 {
        let server = server.clone();
        readers.spawn(async move {
            let mut all = Vec::new();
            loop {
                if task == 0 {
                    let Some(message) = server.receive().await.unwrap() else { return all };
                    all.push(message.to_vec());
                } else {
                    let Some(messages) = server.receive_many().await.unwrap() else { return all };
                    all.extend(messages.iter().map(<[u8]>::to_vec));
                }
            }
        });
    }
    while soon(tasks.join_next()).await.is_some() {}
    client.finish().await.unwrap();
    let mut all = Vec::new();
    while let Some(received) = soon(readers.join_next()).await {
        let received = received.unwrap();
        // The messages of a task reach each reader in order.
        for task in 0..4_u8 {
            let of_task = received.iter().filter(|message| message[1] == task);
            assert!(of_task.is_sorted());
        }
        all.extend(received);
    }
    all.sort();
    assert_eq!(all.len(), 4000);
    all.dedup();
    assert_eq!(all.len(), 4000);
}
