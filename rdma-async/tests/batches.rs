//! Batches of operations.

mod support;

use std::pin::pin;

use rdma_async::{Connection, Connector, Driver, Error, Listener, Local};
use rdma_pool::Budget;
use rdma_safe::{Access, Buffer, Device, PostError, RemoteMemory};

use support::{begin, everything_returns, pair, soft0, soon, until};

async fn connected(sends: u32) -> (Connection, Connection) {
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    pair(&Connector::new().unwrap().sends(sends), &listener).await
}

async fn numbered(connection: &Connection, number: u32) -> Buffer {
    connection.buffer_of(&number.to_be_bytes()).await.unwrap()
}

fn numbers(buffers: &[Buffer]) -> Vec<u32> {
    buffers.iter().map(|buffer| u32::from_be_bytes(buffer[..4].try_into().unwrap())).collect()
}

#[tokio::test]
async fn operations_of_a_batch_are_posted_in_order_and_return_their_buffers() {
    let _watchdog = soft0();
    let (client, server) = connected(64).await;
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let remote = server.pd().expose(vec![0; 64].into_boxed_slice(), rights).unwrap();
    let place = |index: u64| remote.remote().slice(index * 4, 4).unwrap();
    let batch = client
        .batch()
        .write(numbered(&client, 7).await, place(0))
        .write_with_immediate(numbered(&client, 8).await, place(1), 9)
        .send(numbered(&client, 1).await)
        .send_with_immediate(numbered(&client, 2).await, 3)
        .read(client.buffer(8).await.unwrap(), remote.remote().slice(0, 8).unwrap());
    assert_eq!((batch.len(), batch.is_empty()), (5, false));
    let buffers = soon(batch).await.unwrap();
    assert_eq!(numbers(&buffers), [7, 8, 1, 2, 7]);
    assert_eq!(*buffers[4], [0, 0, 0, 7, 0, 0, 0, 8]);
    let mut messages = Vec::new();
    for _ in 0..3 {
        let message = soon(server.receive()).await.unwrap().unwrap();
        messages.push((message.to_vec(), message.immediate()));
    }
    assert_eq!(messages, [(vec![], Some(9)), (vec![0, 0, 0, 1], None), (vec![0, 0, 0, 2], Some(3))]);
    assert!(soon(client.batch()).await.unwrap().is_empty());
}

#[test]
fn a_batch_that_is_longer_than_the_queue_waits_for_room() {
    let _watchdog = soft0();
    let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
    runner.block_on(async {
        let listener = Listener::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
        let connector = Connector::with_driver(&driver).sends(4);
        let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
        let (client, server) = (client.unwrap(), server.unwrap());
        let buffer = |number: u32| {
            let mut buffer = client.pool().try_get(Budget::Sends, 4).unwrap();
            buffer.copy_from_slice(&number.to_be_bytes());
            buffer
        };
        let batch = (0..50).fold(client.batch(), |batch, number| batch.send(buffer(number)));
        let other = (100..150).fold(client.batch(), |batch, number| batch.send(buffer(number)));
        let read = async {
            let mut numbers = Vec::new();
            while numbers.len() < 101 {
                let message = server.receive().await.unwrap().unwrap();
                numbers.push(u32::from_be_bytes((*message).try_into().unwrap()));
            }
            numbers
        };
        let (sent, others, single, numbers) = tokio::join!(batch, other, client.send(buffer(200)), read);
        assert_eq!((sent.unwrap().len(), others.unwrap().len(), single.unwrap().len()), (50, 50, 4));
        // Each batch is in order. All who wait take turns.
        let of = |range: std::ops::Range<u32>| numbers.iter().copied().filter(move |number| range.contains(number));
        assert!(of(0..50).eq(0..50) && of(100..150).eq(100..150));
        assert!(numbers.iter().position(|number| *number == 200).unwrap() < 20, "{numbers:?}");
    });
}

#[tokio::test]
async fn an_operation_that_cannot_be_posted_ends_the_batch_and_not_the_connection() {
    let _watchdog = soft0();
    let (client, server) = connected(64).await;
    let foreign = Device::first().unwrap().open().unwrap().alloc_pd().unwrap();
    let mut batch = client.batch();
    for number in 0..5 {
        let buffer = match number {
            3 => foreign.allocate(4).unwrap(),
            _ => numbered(&client, number).await,
        };
        batch = batch.send(buffer);
    }
    let failed = soon(batch).await.unwrap_err();
    let Error::Rdma(reason) = &failed.error else { panic!("{failed}") };
    assert!(matches!(**reason, rdma_safe::Error::Post(PostError::ForeignBuffer)), "{reason}");
    assert_eq!((failed.succeeded, failed.buffers.len()), (3, 5), "{failed}");
    // The same without waiting for completions.
    let batch = (0..3).fold(client.batch(), |batch, _| batch.send(client.pool().try_get(Budget::Sends, 4).unwrap()));
    let late = batch.send(foreign.allocate(4).unwrap()).send(numbered(&client, 9).await);
    let unposted = soon(late.posted()).await.unwrap_err();
    assert_eq!((unposted.succeeded, unposted.buffers.len()), (3, 2), "{unposted}");
    for number in [0, 1, 2_u32] {
        assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), number.to_be_bytes());
    }
    for _ in 0..3 {
        soon(server.receive()).await.unwrap().unwrap();
    }
    let sent = soon(client.batch().send(numbered(&client, 5).await)).await.unwrap();
    assert_eq!(numbers(&sent), [5]);
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), 5_u32.to_be_bytes());
}

#[tokio::test]
async fn a_batch_ends_with_its_connection_and_returns_all_buffers() {
    let _watchdog = soft0();
    let (client, server) = connected(4).await;
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let region = server.pd().expose(vec![0; 8].into_boxed_slice(), rights).unwrap();
    let remote = region.remote();
    // The third exceeds the region, so the peer refuses it.
    let mut batch = client.batch();
    for index in [0, 1, 2, 1, 0, 1, 0] {
        let place = RemoteMemory { address: remote.address + index * 4, len: 4, ..remote };
        batch = batch.write(numbered(&client, index as u32).await, place);
    }
    let failed = soon(batch).await.unwrap_err();
    assert!(matches!(failed.error, Error::Failed(_)), "{failed}");
    assert_eq!(failed.succeeded, 2);
    assert_eq!(numbers(&failed.buffers), [0, 1, 2, 1, 0, 1, 0]);
    drop(failed);
    let late = soon(client.batch().send(numbered(&client, 1).await)).await.unwrap_err();
    assert_eq!((late.succeeded, late.buffers.len()), (0, 1));
}

#[tokio::test]
async fn a_dropped_batch_posts_no_more_and_returns_its_memory() {
    let _watchdog = soft0();
    let (client, server) = connected(4).await;
    let (driver, pool) = (client.driver().clone(), client.pool().clone());
    {
        // Four are posted, six wait for room.
        let mut batch = client.batch();
        for number in 0..10 {
            batch = batch.send(numbered(&client, number).await);
        }
        let mut batch = Box::pin(batch);
        begin(batch.as_mut()).await;
        let mut next = pin!(client.send(numbered(&client, 20).await));
        begin(next.as_mut()).await;
        drop(batch);
        soon(next).await.unwrap();
        // Never polled.
        drop(client.batch().send(numbered(&client, 30).await));
    }
    for expected in [0_u32, 1, 2, 3, 20] {
        assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), expected.to_be_bytes());
    }
    until("no operation is left", || driver.statistics().operations == 0).await;
    drop((client, server));
    everything_returns(&driver, &pool).await;
}

#[tokio::test]
async fn a_posted_batch_does_not_wait_for_its_completions() {
    let _watchdog = soft0();
    let (client, server) = connected(4).await;
    let (driver, pool) = (client.driver().clone(), client.pool().clone());
    assert!(server.try_receive().is_none());
    let mut batch = client.batch();
    for number in 0..10 {
        batch = batch.send(numbered(&client, number).await);
    }
    soon(batch.posted()).await.unwrap();
    let mut first = soon(server.receive()).await.unwrap().unwrap();
    for number in 0..10_u32 {
        assert_eq!(*first, number.to_be_bytes());
        if number < 9 {
            first = match server.try_receive() {
                Some(next) => next,
                None => soon(server.receive()).await.unwrap().unwrap(),
            };
        }
    }
    // Polled before `posted` is called: four are in flight and awaited.
    let mut batch = client.batch();
    for number in 0..6 {
        batch = batch.send(numbered(&client, number).await);
    }
    let mut batch = Box::pin(batch);
    begin(batch.as_mut()).await;
    soon(std::pin::Pin::into_inner(batch).posted()).await.unwrap();
    until("no operation is left", || driver.statistics().operations == 0).await;

    client.close().await;
    let late = soon(client.batch().send(numbered(&client, 1).await).posted()).await.unwrap_err();
    assert_eq!((late.succeeded, late.buffers.len()), (0, 1));
    drop((late, first, client, server));
    everything_returns(&driver, &pool).await;
}
