//! A driver sleeps while nothing happens, also when operations and handshakes wait.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use rdma_async::{Connection, Connector, Driver, Listener, Threads};
use rustix::time::{ClockId, clock_gettime};

/// How long nothing happens.
const TIME: Duration = Duration::from_secs(1);

/// The driver may be woken by a timer that was set for something that has happened before, and for a keepalive.
const WAKES: u64 = 10;

/// A driver that does not sleep sweeps about a million times.
const SPINS: u64 = 10_000;

/// A fiftieth of the time. A driver that polls would use all of it.
const USED: Duration = TIME.checked_div(50).unwrap();

/// Processor time of this process.
fn used() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap()
}

#[track_caller]
fn assert_sleeps(driver: &Driver) {
    let before = (driver.statistics(), used());
    std::thread::sleep(TIME);
    let (wakes, used) = (driver.statistics().wakes - before.0.wakes, used() - before.1);
    assert!(wakes <= WAKES && used <= USED, "{wakes} wakes, {used:?}");
}

/// The client, the server, and their listener. The server has one receive.
async fn connected(driver: &Driver) -> (Connection, Connection, Listener) {
    let listener = Listener::builder().driver(driver).receives(1).bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::with_driver(driver).linger(TIME * 20);
    let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
    let (client, server) = (client.unwrap(), server.unwrap());
    client.send(client.buffer_of(b"hello").await.unwrap()).await.unwrap();
    assert_eq!(*server.receive().await.unwrap().unwrap(), *b"hello");
    (client, server, listener)
}

// One test, since both parts measure the processor time of the process.
#[test]
fn an_idle_driver_sleeps() {
    rdma_safe::soft::install().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let driver = Driver::tokio().unwrap();
        let ends = connected(&driver).await;
        let before = (driver.statistics().wakes, used());
        tokio::time::sleep(TIME).await;
        let (wakes, used) = (driver.statistics().wakes - before.0, used() - before.1);
        assert!(wakes <= WAKES && used <= USED, "{wakes} wakes, {used:?}");
        drop(ends);
    });

    let driver = Driver::thread().unwrap();
    let (_own, mut executor) = Driver::builder().build::<Threads>().unwrap();
    let (client, server, listener) = executor.block_on(connected(&driver));
    assert_sleeps(&driver);

    // A receive, an accept, and a connection that nobody accepts.
    let mut context = Context::from_waker(Waker::noop());
    let other = executor.block_on(Listener::builder().driver(&driver).bind("127.0.0.1:0")).unwrap();
    let connector = Connector::with_driver(&driver);
    let (mut accept, mut receive) = (pin!(other.accept()), pin!(server.receive()));
    let mut connect = pin!(connector.connect(listener.local_address()));
    let is_pending = accept.as_mut().poll(&mut context).is_pending() & receive.as_mut().poll(&mut context).is_pending();
    while driver.statistics().connections < 3 {
        assert!(is_pending && connect.as_mut().poll(&mut context).is_pending());
    }
    assert_sleeps(&driver);

    // A connection that is being closed, with a message in flight for which the peer has no room.
    executor.block_on(async {
        for _ in 0..2 {
            client.send(client.buffer_of(b"hello").await.unwrap()).posted().await.unwrap();
        }
    });
    drop(client);
    // The processor time is not checked here, since soft0 sends the message again and again.
    let before = driver.statistics();
    std::thread::sleep(TIME);
    let after = driver.statistics();
    assert!(after.wakes - before.wakes <= WAKES && after.spins - before.spins <= SPINS, "{before:?} {after:?}");
    assert_eq!(after.connections, 3);
}
