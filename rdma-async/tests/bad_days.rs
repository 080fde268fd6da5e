//! Bad days: peers die, devices are removed, drivers and runtimes end, while work is pending. Each future ends in bounded time
//! with an error that says why, and all memory returns.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rdma_async::{Connection, Connector, Driver, Error, Failed, Listener, Result, Threads, connect};
use rdma_pool::Budget;
use rdma_safe::cm::{Cause, CmError, RejectReason, Step};
use rdma_safe::{Access, Buffer, ExposedRegion, RemoteMemory, WcStatus, soft};
use tokio::task::{JoinError, JoinSet};

use support::child::in_own_process;
use support::peer::{self, Peer};
use support::{SOON, begin, everything_returns, pair, soft0, soon, until};

/// How an operation or a receive has ended.
type End = Result<&'static str>;

/// Operations that are pending on a connection.
#[derive(Default)]
struct Pending {
    tasks: JoinSet<End>,
    started: Arc<AtomicUsize>,
}

impl Pending {
    /// Starts operations: sends, reads, and receives.
    fn start(connection: &Connection, operations: usize, remote: RemoteMemory) -> Self {
        let mut pending = Pending::default();
        for number in 0..operations {
            let (connection, started) = (connection.clone(), pending.started.clone());
            pending.tasks.spawn(async move {
                let buffer = connection.buffer(8).await?;
                started.fetch_add(1, Ordering::Relaxed);
                match number % 4 {
                    0 => {
                        drop(buffer);
                        connection.receive().await.map(|message| if message.is_some() { "message" } else { "end" })
                    }
                    1 => with_memory(connection.read(buffer, remote).await).map(|()| "read"),
                    _ => with_memory(connection.send(buffer).await).map(|()| "sent"),
                }
            });
        }
        pending
    }

    /// Waits until all tasks have started, and the send queue is full.
    async fn fill(&self, driver: &Driver) {
        let is_full =
            || self.started.load(Ordering::Relaxed) >= self.tasks.len() && driver.statistics().operations == 64;
        until("all operations pend", is_full).await;
    }

    /// Waits for the ends of all tasks, each of which must be as `is_expected` says.
    async fn end(mut self, is_expected: impl Fn(&End) -> bool) {
        while let Some(end) = soon(self.tasks.join_next()).await {
            let end = end.unwrap();
            assert!(is_expected(&end), "{end:?}");
        }
    }

    /// Waits for the ends of all tasks, which have ended with their runtime. Some have completed before.
    async fn are_cancelled(mut self) {
        while let Some(end) = soon(self.tasks.join_next()).await {
            assert!(end.as_ref().map_or_else(JoinError::is_cancelled, Result::is_ok), "{end:?}");
        }
    }
}

/// The error of an operation. It has given its memory back, unless its endpoint was removed.
fn with_memory(result: Result<Buffer, Failed>) -> Result<()> {
    result.map(drop).map_err(|failed| {
        assert!(failed.buffer.is_some() || matches!(failed.error, Error::DriverStopped), "{}", failed.error);
        failed.error
    })
}

/// Memory that the peer may read.
fn exposed(connection: &Connection) -> ExposedRegion {
    connection.pd().expose(vec![0; 8].into_boxed_slice(), Access::REMOTE).unwrap()
}

#[tokio::test]
async fn a_killed_peer_ends_a_thousand_operations() {
    let _watchdog = soft0();
    if peer::role().is_some() {
        serve_until_killed().await;
    }
    // The kernel of a killed process ends its connections, and soft0 does the same.
    let is_expected = |end: &End| matches!(end, Ok("end") | Err(Error::Disconnected));
    expect_the_end("a_killed_peer_ends_a_thousand_operations", Peer::kill, is_expected).await;
}

#[tokio::test]
async fn a_silent_peer_fails_a_thousand_operations() {
    let _watchdog = soft0();
    if peer::role().is_some() {
        serve_until_killed().await;
    }
    let mut silent = None;
    let is_expected = |end: &End| matches!(end, Err(Error::Failed(_)));
    expect_the_end("a_silent_peer_fails_a_thousand_operations", |peer| silent = Some(peer), is_expected).await;
}

/// Time to notice a silent peer.
const QUICK: Duration = Duration::from_secs(3);

/// A peer with memory to read, which takes no message.
async fn serve_until_killed() {
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    peer::report(listener.local_address());
    let connection = soon(listener.accept()).await.unwrap();
    let region = exposed(&connection);
    let RemoteMemory { address, rkey, .. } = region.remote();
    peer::report(format_args!("{address} {rkey}"));
    peer::wait_to_be_killed();
}

/// Stops the peer of `test`, which then answers nothing. Starts operations, and expects their ends after `then`.
async fn expect_the_end(test: &str, then: impl FnOnce(Peer), is_expected: impl Fn(&End) -> bool) {
    let mut peer = Peer::start(test, "server");
    let address = peer.next_report();
    // A silent peer does not confirm the end either.
    let connector = Connector::new().unwrap().keepalive(QUICK).timeout(QUICK);
    let connection = soon(connector.connect(address)).await.unwrap();
    let (driver, pool) = (connection.driver().clone(), connection.pool().clone());
    let report = peer.next_report();
    let (address, rkey) = report.split_once(' ').unwrap();
    let remote = RemoteMemory { address: address.parse().unwrap(), len: 8, rkey: rkey.parse().unwrap() };

    peer.stop();
    let pending = Pending::start(&connection, 1000, remote);
    pending.fill(&driver).await;
    then(peer);
    pending.end(&is_expected).await;

    // Neither do later ones succeed.
    Pending::start(&connection, 100, remote).end(&is_expected).await;
    soon(connection.close()).await;
    everything_returns(&driver, &pool).await;
}

#[tokio::test]
async fn a_peer_that_dies_in_a_handshake_fails_it() {
    const NAME: &str = "a_peer_that_dies_in_a_handshake_fails_it";
    let _watchdog = soft0();
    if peer::role().is_some() {
        let listener = Listener::bind("127.0.0.1:0").await.unwrap();
        peer::report(listener.local_address());
        peer::wait_to_be_killed();
    }
    let mut peer = Peer::start(NAME, "server");
    let address = peer.next_report();
    let connector = Connector::new().unwrap().timeout(Duration::from_millis(500));
    let mut connecting = Box::pin(connector.connect(address));
    begin(connecting.as_mut()).await;
    peer.kill();
    let error = soon(connecting).await.unwrap_err();
    assert!(matches!(error, Error::Rdma(_)), "{error}");
    let driver = connector.driver().clone();
    until("no connection", move || driver.statistics().connections == 0).await;
}

#[test]
fn a_removed_device_ends_all_work() {
    in_own_process("a_removed_device_ends_all_work", || {
        let _watchdog = soft0();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = Listener::builder().receives(1).bind("127.0.0.1:0").await.unwrap();
            let connector = Connector::new().unwrap();
            let (client, server) = pair(&connector, &listener).await;
            let (driver, pool) = (client.driver().clone(), client.pool().clone());
            let region = exposed(&server);
            // The server takes one message and keeps it, so all further sends are in flight or wait for room.
            let pending = Pending::start(&client, 400, region.remote());
            let kept = soon(server.receive()).await.unwrap().unwrap();
            let mut receive = Box::pin(server.receive());
            begin(receive.as_mut()).await;
            let mut accept = Box::pin(listener.accept());
            begin(accept.as_mut()).await;
            let silent =
                rdma_safe::cm::Listener::bind(("127.0.0.1".parse::<std::net::Ipv4Addr>().unwrap(), 0)).unwrap();
            let mut connecting = Box::pin(connector.connect(silent.local_address()));
            begin(connecting.as_mut()).await;

            soft::remove();
            pending.end(|end| matches!(end, Ok(_) | Err(Error::Disconnected | Error::Failed(_)))).await;
            assert!(!matches!(soon(receive).await, Ok(Some(_))));
            let error = soon(accept).await.unwrap_err();
            assert!(matches!(error, Error::Rdma(_)), "{error}");
            let error = soon(connecting).await.unwrap_err();
            assert!(matches!(error, Error::Rdma(_)), "{error}");
            let error = soon(connector.connect(listener.local_address())).await.unwrap_err();
            assert!(matches!(error, Error::Rdma(_)), "{error}");
            let buffer = pool.try_get(Budget::Sends, 8).unwrap();
            assert!(soon(client.send(buffer)).await.is_err());

            soon(client.close()).await;
            drop((client, server, kept));
            everything_returns(&driver, &pool).await;
        });
    });
}

#[tokio::test]
async fn a_driver_that_stops_ends_all_work() {
    let _watchdog = soft0();
    let (driver, runner) = Driver::builder().build::<Threads>().unwrap();
    let running = tokio::spawn(runner.run_tokio());
    let listener = Listener::builder().driver(&driver).receives(1).bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::with_driver(&driver);
    let (client, server) = pair(&connector, &listener).await;
    let pool = client.pool().clone();
    let region = exposed(&server);
    let pending = Pending::start(&client, 400, region.remote());
    let kept = soon(server.receive()).await.unwrap().unwrap();
    let mut receive = Box::pin(server.receive());
    begin(receive.as_mut()).await;
    let mut accept = Box::pin(listener.accept());
    begin(accept.as_mut()).await;
    let silent = Listener::bind("127.0.0.1:0").await.unwrap();
    let mut connecting = Box::pin(connector.connect(silent.local_address()));
    begin(connecting.as_mut()).await;

    running.abort();
    assert!(soon(running).await.unwrap_err().is_cancelled());
    pending.end(|end| matches!(end, Ok("sent" | "read") | Err(Error::DriverStopped))).await;
    assert!(matches!(soon(receive).await, Err(Error::DriverStopped)));
    assert!(matches!(soon(accept).await, Err(Error::DriverStopped)));
    assert!(matches!(soon(connecting).await, Err(Error::DriverStopped)));
    assert!(matches!(soon(listener.accept()).await, Err(Error::DriverStopped)));
    assert!(matches!(soon(connector.connect(silent.local_address())).await, Err(Error::DriverStopped)));
    soon(client.close()).await;
    drop((client, server, kept));
    everything_returns(&driver, &pool).await;
}

#[test]
fn a_runtime_that_ends_drops_its_work_and_ends_that_of_others() {
    let _watchdog = soft0();
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (ending, other) = (runtime(), runtime());
    let (client, server, kept, region, own) = ending.block_on(async {
        let listener = Listener::builder().receives(1).bind("127.0.0.1:0").await.unwrap();
        let (client, server) = pair(&Connector::new().unwrap(), &listener).await;
        let region = exposed(&server);
        let own = Pending::start(&client, 200, region.remote());
        let kept = soon(server.receive()).await.unwrap().unwrap();
        own.fill(client.driver()).await;
        (client, server, kept, region, own)
    });
    let (driver, pool) = (client.driver().clone(), client.pool().clone());
    let others = other.block_on(async {
        let others = Pending::start(&client, 200, region.remote());
        others.fill(&driver).await;
        others
    });
    ending.shutdown_timeout(SOON);
    other.block_on(async {
        others.end(|end| matches!(end, Err(Error::DriverStopped))).await;
        own.are_cancelled().await;
        drop((client, server, kept));
        everything_returns(&driver, &pool).await;
        // A driver of another runtime works.
        let listener = Listener::bind("127.0.0.1:0").await.unwrap();
        let (client, server) = pair(&Connector::new().unwrap(), &listener).await;
        tokio::join!(soon(client.close()), soon(server.close()));
    });
}

#[tokio::test]
async fn nobody_listens() {
    let _watchdog = soft0();
    let address = Listener::bind("127.0.0.1:0").await.unwrap().local_address();
    let error = soon(connect(address)).await.unwrap_err();
    let Error::Rdma(cause) = &error else { panic!("{error}") };
    let rdma_safe::Error::Cm(CmError::Connect(failed)) = &**cause else { panic!("{error}") };
    assert_eq!(failed.step, Step::Connect);
    assert!(matches!(&failed.cause, Cause::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. }), "{error}");
    assert!(error.to_string().contains("listen"), "{error}");
    let driver = Driver::current().unwrap();
    assert_eq!((driver.statistics().connections, driver.statistics().operations), (0, 0));
}

#[tokio::test]
async fn unknown_names_are_not_resolved() {
    let _watchdog = soft0();
    // No label of a name is as long, so no name server is asked.
    let name = format!("{}:7471", "x".repeat(64));
    for name in [name.as_str(), "a name without a port", "127.0.0.1"] {
        let error = soon(connect(name)).await.unwrap_err();
        assert!(matches!(error, Error::Name(_)), "{name}: {error}");
        let error = soon(Listener::bind(name)).await.unwrap_err();
        assert!(matches!(error, Error::Name(_)), "{name}: {error}");
    }
}

#[tokio::test]
async fn a_message_that_is_too_long_fails_both_ends() {
    let _watchdog = soft0();
    let listener = Listener::builder().message_size(100).bind("127.0.0.1:0").await.unwrap();
    let (client, server) = pair(&Connector::new().unwrap(), &listener).await;
    client.send(client.buffer_of(&[1; 100]).await.unwrap()).await.unwrap();
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), [1; 100]);

    // The pool has rounded the size up.
    let too_long = server.pool().try_get(Budget::Receives, 100).unwrap().capacity() + 1;
    let failed = soon(client.send(client.buffer(too_long).await.unwrap())).await.unwrap_err();
    assert_eq!(failed.buffer.as_deref().map(<[u8]>::len), Some(too_long));
    assert_eq!(status(&failed.error), WcStatus::REM_INV_REQ_ERR);
    let error = soon(server.receive()).await.unwrap_err();
    assert_eq!(status(&error), WcStatus::LOC_LEN_ERR);
    for end in [&client, &server] {
        let failed = soon(end.send(end.buffer(1).await.unwrap())).await.unwrap_err();
        assert!(matches!(failed.error, Error::Failed(_)), "{failed}");
    }
    let (driver, pool) = (client.driver().clone(), client.pool().clone());
    tokio::join!(soon(client.close()), soon(server.close()));
    drop(failed);
    everything_returns(&driver, &pool).await;
}

/// The status of the work that has failed.
#[track_caller]
fn status(error: &Error) -> WcStatus {
    let Error::Failed(cause) = error else { panic!("{error}") };
    match &**cause {
        rdma_safe::Error::Work(failed) => failed.status,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_connection_that_ends_leaves_the_operations_of_others_alone() {
    let _watchdog = soft0();
    let driver = Driver::current().unwrap();
    let listener = Listener::builder().receives(2).bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::with_driver(&driver).linger(Duration::ZERO);
    let (leaving, _its_peer) = pair(&connector, &listener).await;
    let (staying, peer) = pair(&connector, &listener).await;
    // The peers have fewer receives than that, and nobody takes the messages.
    let send = |connection: &Connection, number: u8| {
        let connection = connection.clone();
        tokio::spawn(async move {
            let buffer = connection.buffer_of(&[number]).await?;
            connection.send(buffer).await.map(drop).map_err(Error::from)
        })
    };
    let (mut ends, mut results) = (Vec::new(), Vec::new());
    for number in 0..8 {
        ends.push(send(&leaving, number));
        results.push(send(&staying, number));
    }
    until("sends are in flight", || driver.statistics().operations >= 8).await;
    soon(leaving.close()).await;
    let mut failed = 0;
    for end in ends {
        failed += usize::from(soon(end).await.unwrap().is_err());
    }
    assert!(failed >= 6, "{failed} sends have failed");
    assert!(results.iter().filter(|task| !task.is_finished()).count() >= 6, "they still wait for receives");
    // A new connection gets the number of the one that has ended.
    let (next, its_peer) = pair(&connector, &listener).await;
    results.push(send(&next, 99));
    assert_eq!(soon(its_peer.receive()).await.unwrap().unwrap()[..], [99]);
    for number in 0..8 {
        assert_eq!(soon(peer.receive()).await.unwrap().unwrap()[..], [number]);
    }
    for result in results {
        soon(result).await.unwrap().unwrap();
    }
    until("no operation is left", || driver.statistics().operations == 0).await;
}
