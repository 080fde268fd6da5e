//! Connections of rdma-async, which its own tests use on soft0 only.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_async::{Connection, Connector, Driver, Error, Idle, Listener, Local, Sharing, Unconnected};
use rdma_pool::Pool;
use rdma_safe::cm::{Cause, CmError, RejectReason};
use rdma_safe::{Access, Errno, PostError};
use tokio::time::timeout;

use crate::cm::address;
use crate::support::interposer::interposed;
use crate::support::{DEADLINE, device};

/// Sends each message back until the peer leaves, which it does after the last answer. If the network loses the ACK of that answer,
/// its send ends with the connection.
async fn echo<S: Sharing>(connection: Connection<S>) {
    while let Some(message) = connection.receive().await.unwrap() {
        match connection.send(connection.buffer_of(&message).await.unwrap()).await {
            Ok(_) => {}
            Err(failed) if failed.error.is_disconnected() => break,
            Err(failed) => panic!("{failed}"),
        }
    }
    connection.close().await;
}

/// Sends messages of several sizes, and expects them back.
async fn use_and_close<S: Sharing>(connection: Connection<S>) {
    for number in 0..100 {
        let request = vec![number as u8; number * 41];
        connection.send(connection.buffer_of(&request).await.unwrap()).await.unwrap();
        assert_eq!(*connection.receive().await.unwrap().unwrap(), *request);
    }
    connection.close().await;
    let Err(failed) = connection.send(connection.buffer(1).await.unwrap()).await else { panic!("it is closed") };
    assert!(matches!(failed.error, Error::Closed) && failed.buffer.is_some(), "{failed}");
}

/// Connects to this process, and echoes messages. Nothing is left.
async fn connect_and_echo<S: Sharing>(listener: Listener<S>, connector: Connector<S>) {
    let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
    let (client, server) = (client.unwrap(), server.unwrap());
    assert_eq!(client.peer_address(), Some(listener.local_address()));
    let pool = client.pool().clone();
    tokio::join!(use_and_close(client), echo(server));
    everything_returns(connector.driver(), &pool).await;
    assert_eq!(connector.driver().statistics().received, 200);
}

/// Waits until nothing is left. The driver returns memory just after it has woken a task that closes a connection.
async fn everything_returns<S: Sharing>(driver: &Driver<S>, pool: &Pool) {
    let left = || {
        let now = driver.statistics();
        (now.connections, now.operations, pool.statistics().used())
    };
    let start = Instant::now();
    while left() != (0, 0, 0) {
        assert!(start.elapsed() < DEADLINE, "{:?} are left", left());
        tokio::task::yield_now().await;
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn tokio_echoes_messages() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let echoing = async {
        let listener = Listener::bind((address, 0)).await.unwrap();
        connect_and_echo(listener, Connector::new().unwrap()).await;
    };
    runtime().block_on(async { timeout(DEADLINE, echoing).await.unwrap() });
}

#[test]
fn one_thread_that_sleeps_echoes_messages() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (driver, mut runner) = Driver::builder().idle(Idle::Sleep).build::<Local>().unwrap();
    runner.block_on(async {
        let listener = Listener::builder().driver(&driver).bind((address, 0)).await.unwrap();
        connect_and_echo(listener, Connector::with_driver(&driver)).await;
    });
    let now = driver.statistics();
    assert!(now.sleeps > 0 && now.spins == 0, "{now:?}");
}

#[test]
fn memory_of_the_peer_is_written_and_read() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let work = async {
        let listener = Listener::bind((address, 0)).await.unwrap();
        let connector = Connector::new().unwrap();
        let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
        let (client, server) = (client.unwrap(), server.unwrap());
        let region = server.pd().expose(vec![0; 4096].into_boxed_slice(), Access::REMOTE).unwrap();
        client.write(client.buffer_of(b"written").await.unwrap(), region.remote()).await.unwrap();
        let read = client.read(client.buffer(7).await.unwrap(), region.remote()).await.unwrap();
        assert_eq!(*read, *b"written");
        drop(read);
        let outside = rdma_safe::RemoteMemory { len: 8192, ..region.remote() };
        let Err(failed) = client.read(client.buffer(8192).await.unwrap(), outside).await else { panic!("not exposed") };
        assert!(matches!(failed.error, Error::Failed(_)) && failed.buffer.is_some(), "{failed}");
        assert!(server.receive().await.is_err());
        tokio::join!(client.close(), server.close());
    };
    runtime().block_on(async { timeout(DEADLINE, work).await.unwrap() });
}

#[test]
fn nobody_listens_at_the_port() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let connecting = async {
        let listener = Listener::bind((address, 0)).await.unwrap();
        let SocketAddr::V4(nobody) = listener.local_address().ip().unwrap() else { panic!("an IPv4 address") };
        drop(listener);
        let connector = Connector::new().unwrap().timeout(Duration::from_secs(30));
        let Err(Error::Rdma(error)) = connector.connect(SocketAddr::V4(nobody)).await else { panic!("it is refused") };
        let rdma_safe::Error::Cm(CmError::Connect(failed)) = &*error else { panic!("{error}") };
        assert!(matches!(failed.cause, Cause::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. }), "{error}");
        assert_eq!(connector.driver().statistics().connections, 0);
    };
    runtime().block_on(async { timeout(DEADLINE, connecting).await.unwrap() });
}

/// Makes `verb` fail while operations are pending. All have to end.
fn fails_all_work(verb: &'static str) {
    let Some(soft) = interposed() else { return };
    let work = async {
        let (connector, pd) = (Connector::new().unwrap().receives(1), soft.pd());
        let prepared = [connector.prepare(&pd).await.unwrap(), connector.prepare(&pd).await.unwrap()];
        let addresses = prepared.each_ref().map(Unconnected::address);
        let [one, other] = prepared;
        let (one, other) = (one.connect(&addresses[1]).unwrap(), other.connect(&addresses[0]).unwrap());
        let (driver, pool) = (connector.driver().clone(), one.pool().clone());
        let send = |_| {
            let one = one.clone();
            tokio::spawn(async move { one.send(one.buffer(8).await?).await.map(drop).map_err(Error::from) })
        };
        let sends: Vec<_> = (0..100).map(send).collect();
        // Nobody takes the first message, so the others wait.
        while driver.statistics().received < 1 || driver.statistics().operations < 64 {
            tokio::task::yield_now().await;
        }
        soft.fail(verb, libc::EIO);
        // Taking messages causes completions, in case the driver sleeps.
        let end = loop {
            match other.receive().await {
                Ok(Some(message)) => drop(message),
                end => break end,
            }
        };
        assert!(matches!(end, Err(Error::Failed(_))), "{end:?}");
        for task in sends {
            // Some have completed before.
            let end = task.await.unwrap();
            assert!(matches!(end, Ok(()) | Err(Error::Failed(_))), "{end:?}");
        }
        let Err(failed) = one.send(one.buffer(8).await.unwrap()).await else { panic!("the queue has failed") };
        assert!(matches!(failed.error, Error::Failed(_)), "{failed}");
        drop(failed);
        tokio::join!(one.close(), other.close());
        everything_returns(&driver, &pool).await;
        soft.heal(verb);
        drop(connector.prepare(&pd).await.expect("another queue"));
    };
    runtime().block_on(async { timeout(DEADLINE, work).await.unwrap() });
}

#[test]
fn a_queue_that_cannot_be_polled_fails_all_work() {
    fails_all_work("start_poll");
}

#[test]
fn a_queue_that_cannot_be_armed_fails_all_work() {
    fails_all_work("ibv_req_notify_cq");
}

#[test]
fn work_that_may_be_posted_ends_with_an_error_and_keeps_its_memory_until_the_end() {
    let Some(soft) = interposed() else { return };
    let work = async {
        let (connector, pd) = (Connector::new().unwrap().sends(8), soft.pd());
        for (taken, is_batch) in [(false, false), (false, true), (true, false), (true, true)] {
            let prepared = [connector.prepare(&pd).await.unwrap(), connector.prepare(&pd).await.unwrap()];
            let addresses = prepared.each_ref().map(Unconnected::address);
            let [one, other] = prepared;
            let (one, other) = (one.connect(&addresses[1]).unwrap(), other.connect(&addresses[0]).unwrap());
            let (driver, pool) = (connector.driver().clone(), one.pool().clone());
            let buffers = [one.buffer(8).await.unwrap(), one.buffer(8).await.unwrap()];
            soft.fail_wr_complete(libc::EINVAL, taken);
            let (error, returned) = match (is_batch, buffers) {
                (true, [first, second]) => {
                    let failed = one.batch().send(first).send(second).await.unwrap_err();
                    assert_eq!(failed.succeeded, 0);
                    (failed.error, failed.buffers.len())
                }
                (false, [buffer, _]) => match one.send(buffer).await {
                    Err(failed) => (failed.error, usize::from(failed.buffer.is_some())),
                    Ok(_) => panic!("it has failed"),
                },
            };
            let Error::Rdma(reason) = &error else { panic!("{error}") };
            let is_in_doubt = |error: &rdma_safe::Error| {
                matches!(error, rdma_safe::Error::Post(PostError::MaybePosted { errno: Errno(libc::EINVAL) }))
            };
            assert!(is_in_doubt(reason) && returned == 0, "{error}, {returned}");
            // The receives are flushed.
            assert!(matches!(one.receive().await, Err(Error::Failed(_))));
            tokio::join!(one.close(), other.close());
            drop((one, other));
            everything_returns(&driver, &pool).await;
        }
    };
    runtime().block_on(async { timeout(DEADLINE, work).await.unwrap() });
}
