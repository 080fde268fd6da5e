//! Channels that tasks of several threads share.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

mod pairs;

use std::collections::VecDeque;

use pairs::{default_pair, pair, pattern};
use rdma_msg::Channel;
use support::{soft0, soon};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_messages_of_several_threads_do_not_mix() {
    let _soft = soft0();
    let [client, server] = pair(|connector| connector.sends(1), |listener| listener.window(1)).await;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..4_u8 {
        let client = client.clone();
        tasks.spawn(async move {
            for number in 0..30 {
                client.send(&vec![task; 50_000 + number][..]).await.unwrap();
            }
        });
    }
    for _ in 0..4 * 30 {
        let message = soon(server.receive()).await.unwrap().unwrap();
        assert!(message.iter().all(|byte| *byte == message[0]), "bytes of two messages");
    }
    soon(tasks.join_all()).await;
}

const SENDERS: u32 = 3;
const MESSAGES: u32 = 4000;

/// The length of a message without its header: mostly short, at times that of several packets, or long enough to be read.
fn len(number: u32) -> usize {
    match number % 100 {
        40 => 25_000,
        80 | 81 => 70_000,
        rest => rest as usize,
    }
}

async fn send(client: Channel, sender: u32) {
    for number in 0..MESSAGES {
        let mut message = [sender, number].map(u32::to_be_bytes).concat();
        message.extend(pattern(len(number)));
        let sent = if number % 2 == 0 { client.send(message).await } else { client.send(&message).await };
        sent.unwrap();
    }
}

/// Receives until the end, and keeps the last few messages meanwhile. Returns the numbers of each sender's messages.
async fn receive(server: Channel) -> Vec<Vec<u32>> {
    let mut numbers = vec![Vec::new(); SENDERS as usize];
    let mut kept = VecDeque::new();
    while let Some(message) = server.receive().await.unwrap() {
        let (header, rest) = message.split_at(8);
        let [sender, number] = [&header[..4], &header[4..]].map(|word| u32::from_be_bytes(word.try_into().unwrap()));
        assert!(*rest == *pattern(len(number)), "message {number} of sender {sender}");
        numbers[sender as usize].push(number);
        kept.push_back(message);
        if kept.len() > 5 {
            kept.pop_front();
        }
    }
    numbers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn short_messages_of_several_threads_arrive_once_and_in_order() {
    let _soft = soft0();
    let [client, server] = default_pair().await;
    let senders: Vec<_> = (0..SENDERS).map(|sender| tokio::spawn(send(client.clone(), sender))).collect();
    let receivers: Vec<_> = (0..3).map(|_| tokio::spawn(receive(server.clone()))).collect();
    for sender in senders {
        soon(sender).await.unwrap();
    }
    soon(client.finish()).await.unwrap();
    let mut all = vec![Vec::new(); SENDERS as usize];
    for receiver in receivers {
        for (all, numbers) in all.iter_mut().zip(soon(receiver).await.unwrap()) {
            assert!(numbers.is_sorted(), "a receiver gets the messages of a sender in order");
            all.extend(numbers);
        }
    }
    for mut numbers in all {
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..MESSAGES));
    }
    let (sent, received) = (client.statistics(), server.statistics());
    let total = u64::from(SENDERS * MESSAGES);
    assert_eq!((sent.messages_sent, received.messages_received), (total, total));
}
