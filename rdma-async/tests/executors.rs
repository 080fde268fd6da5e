//! Drivers as tasks of several executors. Each test echoes messages.

mod support;

use std::os::fd::AsFd;

use rdma_async::{Connector, Driver, Listener, Local, Runner, Turn};

use support::{ask, echo, soft0, soon};

const MESSAGES: u32 = 100;

#[cfg(feature = "async-io")]
#[test]
fn smol_runs_a_driver() {
    let _watchdog = soft0();
    let (driver, runner) = Driver::builder().build::<rdma_async::Threads>().unwrap();
    let running = smol::spawn(runner.run_async_io());
    smol::block_on(async {
        let listener = Listener::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_address();
        let server = smol::spawn(async move { echo(listener.accept().await.unwrap()).await });
        let connection = Connector::with_driver(&driver).connect(address).await.unwrap();
        for number in 0..MESSAGES {
            ask(&connection, number).await;
        }
        connection.close().await;
        server.await;
        // The driver ends with its last handle.
        drop((driver, connection));
        running.await.unwrap();
    });
}

#[cfg(feature = "tokio")]
#[tokio::test]
async fn a_local_set_of_tokio_runs_a_driver_without_locks() {
    let _watchdog = soft0();
    let (driver, runner) = Driver::builder().build::<Local>().unwrap();
    let tasks = tokio::task::LocalSet::new();
    let running = tasks.spawn_local(runner.run_tokio());
    let work = async {
        let listener = Listener::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_address();
        let server = tokio::task::spawn_local(async move { echo(listener.accept().await.unwrap()).await });
        let connection = Connector::with_driver(&driver).connect(address).await.unwrap();
        for number in 0..MESSAGES {
            ask(&connection, number).await;
        }
        connection.close().await;
        server.await.unwrap();
        drop((driver, connection));
        running.await.unwrap().unwrap();
    };
    soon(tasks.run_until(work)).await;
}

/// The loop in the documentation of [`Runner`].
async fn turn(mut runner: Runner<Local>) {
    let readable = smol::Async::new_nonblocking(runner.as_fd().try_clone_to_owned().unwrap()).unwrap();
    loop {
        match runner.turn() {
            Turn::Again => smol::future::yield_now().await,
            Turn::Sleep => readable.readable().await.unwrap(),
            Turn::Stopped => break,
        }
    }
}

#[test]
fn any_executor_runs_a_driver_turn_by_turn() {
    let _watchdog = soft0();
    let executor = smol::LocalExecutor::new();
    let (driver, runner) = Driver::builder().build::<Local>().unwrap();
    let running = executor.spawn(turn(runner));
    let work = async {
        let listener = Listener::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_address();
        let server = executor.spawn(async move { echo(listener.accept().await.unwrap()).await });
        let connection = Connector::with_driver(&driver).connect(address).await.unwrap();
        for number in 0..MESSAGES {
            ask(&connection, number).await;
        }
        connection.close().await;
        server.await;
        drop((driver, connection));
        running.await;
    };
    smol::block_on(executor.run(work));
}
