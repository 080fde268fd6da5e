//! Helpers of the tests: soft0, deadlines, random numbers, and tests in separate processes.

#![allow(dead_code, reason = "no test uses all helpers")]

#[path = "../../../tests/device/support/child.rs"]
pub(crate) mod child;
#[path = "../../../tests/device/support/peer.rs"]
pub(crate) mod peer;
#[path = "../../src/core/random.rs"]
pub(crate) mod random;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::task::Poll;
use std::time::{Duration, Instant};

use rdma_async::{Connection, Connector, Driver, Listener, Sharing};
use rdma_pool::Pool;
use tokio::time::timeout;

/// Longest wait for something that must happen. Only a test that hangs reaches it.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// Aborts the process unless it is dropped in time, in case a test blocks its thread.
pub(crate) struct Watchdog(Sender<()>);

/// Installs soft0. Limits the time of the test.
pub(crate) fn soft0() -> Watchdog {
    rdma_safe::soft::install().unwrap();
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let (stop, stopped) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if stopped.recv_timeout(10 * SOON) == Err(RecvTimeoutError::Timeout) {
            eprintln!("{test} hangs; aborting all tests");
            std::process::abort();
        }
    });
    Watchdog(stop)
}

/// The output of `future`, which must be ready soon, without being polled for another reason than that it was woken.
#[track_caller]
pub(crate) fn soon<F: Future>(future: F) -> impl Future<Output = F::Output> {
    let caller = std::panic::Location::caller();
    async move {
        let start = Instant::now();
        // At the deadline, `timeout` polls the future once more.
        let output = timeout(SOON, future).await.ok().filter(|_| start.elapsed() < SOON);
        output.unwrap_or_else(|| panic!("{caller}: not within {SOON:?}"))
    }
}

/// Polls a future once. It must be pending.
pub(crate) async fn begin<F: Future>(mut future: Pin<&mut F>) {
    let is_pending = poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await;
    assert!(is_pending, "the future is ready at once");
}

/// Two ends of a connection.
pub(crate) async fn pair(connector: &Connector, listener: &Listener) -> (Connection, Connection) {
    let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
    (client.unwrap(), server.unwrap())
}

/// Waits until `is_so`, which no task can await.
#[track_caller]
pub(crate) fn until(what: &'static str, mut is_so: impl FnMut() -> bool) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < SOON, "{caller}: {what}: not within {SOON:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Waits until the driver has neither connections nor operations, and the memory is back in the pool.
#[track_caller]
pub(crate) fn everything_returns<S: Sharing>(driver: &Driver<S>, pool: &Pool) -> impl Future<Output = ()> {
    let (driver, pool) = (driver.clone(), pool.clone());
    until("connections, operations and memory return", move || {
        let now = driver.statistics();
        (now.connections, now.operations, pool.statistics().used()) == (0, 0, 0)
    })
}

/// Sends each message back.
pub(crate) async fn echo<S: Sharing>(connection: Connection<S>) {
    while let Some(message) = connection.receive().await.unwrap() {
        let reply = connection.buffer_of(&message).await.unwrap();
        connection.send(reply).await.unwrap();
    }
    connection.close().await;
}

/// Sends a number, and expects it back.
pub(crate) async fn ask<S: Sharing>(connection: &Connection<S>, number: u32) {
    let request = connection.buffer_of(&number.to_be_bytes()).await.unwrap();
    connection.send(request).await.unwrap();
    assert_eq!(*connection.receive().await.unwrap().unwrap(), number.to_be_bytes());
}
