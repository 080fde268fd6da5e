//! Connections over soft0 in this process.

mod support;

use std::pin::Pin;
use std::time::Duration;

use rdma_async::{Connection, Connector, Driver, Error, Listener, Local, Threads, connect};
use rdma_safe::Access;
use tokio::time::timeout;

use support::{ask, begin, echo, pair, soft0, soon, until};

/// Two ends of a connection.
async fn connected(connector: Connector) -> (Connection, Connection) {
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    pair(&connector, &listener).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_echoed() {
    let _watchdog = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_address();
    let server = tokio::spawn(async move { echo(listener.accept().await.unwrap()).await });
    let connection = connect(address).await.unwrap();
    for number in 0..1000 {
        ask(&connection, number).await;
    }
    let driver = connection.driver().clone();
    connection.close().await;
    soon(server).await.unwrap();
    assert_eq!((driver.statistics().connections, driver.statistics().operations), (0, 0));
    // The driver, on the other thread, may be about to drop the memory.
    let returned = async {
        while connection.pool().statistics().used() != 0 {
            tokio::task::yield_now().await;
        }
    };
    soon(returned).await;
}

#[test]
fn one_thread_needs_no_runtime() {
    let _watchdog = soft0();
    let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
    runner.block_on(async {
        let listener = Listener::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
        let connector = Connector::with_driver(&driver);
        let client = async {
            let connection = connector.connect(listener.local_address()).await.unwrap();
            for number in 0..100 {
                ask(&connection, number).await;
            }
            connection.close().await;
        };
        let server = async { echo(listener.accept().await.unwrap()).await };
        tokio::join!(client, server);
    });
}

#[test]
fn a_driver_on_a_thread_serves_any_executor() {
    let _watchdog = soft0();
    let driver = Driver::thread().unwrap();
    let (_, mut executor) = Driver::builder().build::<Threads>().unwrap();
    executor.block_on(async {
        let listener = Listener::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
        let connector = Connector::with_driver(&driver);
        let client = async {
            let connection = connector.connect(listener.local_address()).await.unwrap();
            ask(&connection, 7).await;
            connection.close().await;
        };
        let server = async { echo(listener.accept().await.unwrap()).await };
        tokio::join!(client, server);
    });
}

#[tokio::test]
async fn remote_memory_is_read_written_and_changed() {
    let _watchdog = soft0();
    let (client, server) = connected(Connector::new().unwrap()).await;
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let region = server.pd().expose(vec![0; 4096].into_boxed_slice(), rights).unwrap();
    let remote = region.remote();

    client.write(client.buffer_of(b"written").await.unwrap(), remote).await.unwrap();
    let read = client.read(client.buffer(7).await.unwrap(), remote).await.unwrap();
    assert_eq!(*read, *b"written");

    let word = remote;
    let old = client.fetch_add(word, 1).await.unwrap();
    assert_eq!(client.compare_swap(word, old + 1, 5).await.unwrap(), old + 1);
    assert_eq!(client.fetch_add(word, 0).await.unwrap(), 5);

    client.write_with_immediate(client.buffer_of(b"told").await.unwrap(), remote, 9).await.unwrap();
    let told = server.receive().await.unwrap().unwrap();
    assert_eq!((told.immediate(), told.bytes_written(), told.len()), (Some(9), Some(4), 0));
    drop(region);
}

#[tokio::test]
async fn addresses_are_exchanged_without_a_connection_manager() {
    let _watchdog = soft0();
    let pd = rdma_safe::Device::first().unwrap().open().unwrap().alloc_pd().unwrap();
    let connector = Connector::new().unwrap();
    let (one, other) = (connector.prepare(&pd).await.unwrap(), connector.prepare(&pd).await.unwrap());
    let addresses = (one.address(), other.address());
    let (one, other) = (one.connect(&addresses.1).unwrap(), other.connect(&addresses.0).unwrap());
    one.send(one.buffer_of(b"hello").await.unwrap()).await.unwrap();
    assert_eq!(*other.receive().await.unwrap().unwrap(), *b"hello");
    drop(connector.prepare(&pd).await.unwrap());
    tokio::join!(one.close(), other.close());
    let pool = one.pool().clone();
    drop((one, other));
    assert_eq!((connector.driver().statistics().connections, pool.statistics().used()), (0, 0));
}

#[tokio::test]
async fn a_full_queue_makes_operations_wait_in_order() {
    let _watchdog = soft0();
    let (client, server) = connected(Connector::new().unwrap().sends(2)).await;
    let sender = tokio::spawn(async move {
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..200u32 {
            let client = client.clone();
            tasks.spawn(async move {
                client.send(client.buffer_of(&number.to_be_bytes()).await.unwrap()).await.unwrap();
            });
        }
        while tasks.join_next().await.is_some() {}
        client
    });
    for number in 0..200u32 {
        assert_eq!(*server.receive().await.unwrap().unwrap(), number.to_be_bytes());
    }
    let client = sender.await.unwrap();
    assert!(client.driver().statistics().waited > 0);
}

#[tokio::test]
async fn dropped_futures_leave_their_operations_to_the_device() {
    let _watchdog = soft0();
    let (client, server) = connected(Connector::new().unwrap()).await;
    for number in 0..64u32 {
        // An operation that borrows the connection could find its completion at once.
        let mut send = Box::pin(client.send_owned(client.buffer_of(&number.to_be_bytes()).await.unwrap()));
        begin(send.as_mut()).await;
    }
    let mut next = 0u32;
    while next < 64 {
        // A receive that is dropped takes no message.
        if let Ok(message) = timeout(Duration::ZERO, server.receive()).await {
            assert_eq!(*message.unwrap().unwrap(), next.to_be_bytes());
            next += 1;
        }
    }
    tokio::join!(client.close(), server.close());
    let driver = client.driver().statistics();
    assert_eq!((driver.connections, driver.operations, client.pool().statistics().used()), (0, 0, 0));
    let error = client.send(client.buffer(1).await.unwrap()).await.unwrap_err();
    assert!(matches!(error.error, Error::Closed) && error.buffer.is_some());
}

#[tokio::test]
async fn an_operation_in_flight_needs_no_more_waiting() {
    let _watchdog = soft0();
    let (client, server) = connected(Connector::new().unwrap()).await;
    let mut send = Box::pin(client.send(client.buffer_of(b"sent").await.unwrap()));
    begin(send.as_mut()).await;
    soon(Pin::into_inner(send).posted()).await.unwrap();
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"sent");
    soon(until("its slot returns", || client.driver().statistics().operations == 0)).await;
}

#[tokio::test]
async fn readers_that_keep_messages_hold_the_sender_back() {
    let _watchdog = soft0();
    let listener = Listener::builder().receives(2).bind("127.0.0.1:0").await.unwrap();
    let (client, server) = tokio::join!(connect(listener.local_address()), listener.accept());
    let (client, server) = (client.unwrap(), server.unwrap());
    let sends: Vec<_> = (0..4u8)
        .map(|number| {
            let client = client.clone();
            tokio::spawn(async move { client.send(client.buffer_of(&[number]).await.unwrap()).await.map(drop) })
        })
        .collect();
    let kept = [server.receive().await.unwrap().unwrap(), server.receive().await.unwrap().unwrap()];
    assert_eq!(server.messages_kept(), 2);
    assert!(timeout(Duration::from_millis(50), server.receive()).await.is_err());
    assert!(server.driver().statistics().starved > 0);
    drop(kept);
    for _ in 0..2 {
        drop(soon(server.receive()).await.unwrap().unwrap());
    }
    for send in sends {
        send.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn the_memory_of_a_message_goes_back_to_its_connection_while_there_is_one() {
    let _watchdog = soft0();
    let (client, server) = connected(Connector::new().unwrap()).await;
    let mut messages = Vec::new();
    for text in [b"first", b"other"] {
        client.send(client.buffer_of(text).await.unwrap()).await.unwrap();
        messages.push(soon(server.receive()).await.unwrap().unwrap());
    }
    let [first, other] = messages.try_into().unwrap();
    assert!(first.repost().is_none());
    assert_eq!(server.messages_kept(), 1);
    soon(server.close()).await;
    assert_eq!(other.repost().as_deref(), Some(&b"other"[..]));
}

#[test]
fn the_end_of_the_runtime_ends_operations() {
    let _watchdog = soft0();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (client, server) = runtime.block_on(async { connected(Connector::new().unwrap()).await });
    let (_, mut executor) = Driver::builder().build::<Threads>().unwrap();
    let mut receive = Box::pin(client.receive());
    runtime.block_on(async {
        begin(receive.as_mut()).await;
    });
    drop(runtime);
    assert!(matches!(executor.block_on(receive), Err(Error::DriverStopped)));
    let buffer = client.pool().try_get(rdma_pool::Budget::Sends, 1).unwrap();
    assert!(matches!(executor.block_on(client.send(buffer)).unwrap_err().error, Error::DriverStopped | Error::Closed));
    drop(server);
}
