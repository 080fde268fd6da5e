//! Tasks whose operations never wait let other tasks run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rdma_async::{Connector, Driver, Listener, connect};
use tokio::task::JoinHandle;

/// More messages than the operations of a task between two yields.
const MESSAGES: u32 = 1000;

/// Starts a task that is always ready. Returns the number of its turns.
fn count_turns() -> (Arc<AtomicU32>, JoinHandle<()>) {
    let turns = Arc::new(AtomicU32::new(0));
    let count = turns.clone();
    let task = tokio::spawn(async move {
        loop {
            count.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
        }
    });
    (turns, task)
}

#[tokio::test]
async fn a_task_that_finds_messages_lets_others_run() {
    rdma_safe::soft::install().unwrap();
    let listener = Listener::builder().receives(MESSAGES).message_size(64).bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::new().unwrap().sends(MESSAGES);
    let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
    let (client, server) = (client.unwrap(), server.unwrap());

    let (turns, other) = count_turns();
    let before = turns.load(Ordering::Relaxed);
    for _ in 0..MESSAGES {
        client.send(client.buffer_of(b"a").await.unwrap()).posted().await.unwrap();
    }
    assert!(turns.load(Ordering::Relaxed) > before, "no other task ran while messages were posted");

    while client.driver().statistics().received < u64::from(MESSAGES) {
        tokio::task::yield_now().await;
    }
    let before = turns.load(Ordering::Relaxed);
    for _ in 0..MESSAGES {
        drop(server.receive().await.unwrap().unwrap());
    }
    assert!(turns.load(Ordering::Relaxed) > before, "no other task ran while messages were received");
    other.abort();
}

#[tokio::test]
async fn a_task_that_finds_its_completions_lets_others_run() {
    rdma_safe::soft::install().unwrap();
    // Looks find the completions of this end first, because the other end has another queue.
    let of_peer = Driver::thread().unwrap();
    let listener = Listener::builder().driver(&of_peer).bind("127.0.0.1:0").await.unwrap();
    let (client, server) = tokio::join!(connect(listener.local_address()), listener.accept());
    let (client, server) = (client.unwrap(), server.unwrap());
    let (turns, other) = count_turns();
    let receives = tokio::spawn(async move { while let Ok(Some(_)) = server.receive().await {} });
    let start = Instant::now();
    let mut sends = 0;
    // On soft0, a send can be complete as soon as it is posted.
    while sends < MESSAGES || client.driver().statistics().found == 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "no task has found the completion of its send");
        client.send(client.buffer_of(b"a").await.unwrap()).await.unwrap();
        sends += 1;
    }
    assert!(turns.load(Ordering::Relaxed) > sends / 200, "no other task ran while sends were awaited");
    other.abort();
    client.close().await;
    receives.await.unwrap();
}
