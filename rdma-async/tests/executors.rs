//! Drivers as tasks of several executors. Each test echoes messages.

mod support;

use std::cell::Cell;
use std::future::Future;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use compio::driver::op::{Interest, PollOnce};
use compio::driver::{DriverType, ProactorBuilder, SharedFd};
use rdma_async::{Connector, Driver, Error, Idle, Listener, Local, Runner, Turn};
use rustix::time::{ClockId, clock_gettime};

use support::{ask, echo, soft0, soon};

const MESSAGES: u32 = 100;

/// Timers that expire while messages are exchanged.
const TICKS: u32 = 5;

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

/// A task of an executor of one thread.
type Task = Pin<Box<dyn Future<Output = ()>>>;

/// How long nothing happens.
const IDLE: Duration = Duration::from_millis(300);

/// A driver that polls uses all of the time.
const USED: Duration = IDLE.checked_div(50).unwrap();

/// The driver may be woken by a timer that was set for a handshake.
const SLEEPS: u64 = 10;

/// Processor time of this thread.
fn used() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap()
}

/// Exchanges messages with a task that `spawn` starts, while another task waits for timers. Then the thread sleeps.
async fn exchange(driver: Driver<Local>, spawn: impl Fn(Task), sleep: impl AsyncFn(Duration) + Clone + 'static) {
    let listener = Listener::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_address();
    spawn(Box::pin(async move { echo(listener.accept().await.unwrap()).await }));
    let connection = Connector::with_driver(&driver).connect(address).await.unwrap();

    let ticks = Rc::new(Cell::new(0));
    let (ticked, timer) = (ticks.clone(), sleep.clone());
    spawn(Box::pin(async move {
        for tick in 1..=TICKS {
            timer(Duration::from_millis(1)).await;
            ticked.set(tick);
        }
    }));
    let mut asked = 0;
    while asked < MESSAGES || ticks.get() < TICKS {
        ask(&connection, asked).await;
        asked += 1;
    }

    let before = (driver.statistics().sleeps, used());
    sleep(IDLE).await;
    let (sleeps, used) = (driver.statistics().sleeps - before.0, used() - before.1);
    assert!(sleeps <= SLEEPS && used <= USED, "{sleeps} sleeps, {used:?}");
    connection.close().await;
}

#[cfg(feature = "tokio")]
#[tokio::test]
async fn a_local_set_of_tokio_runs_a_driver_without_locks() {
    let _watchdog = soft0();
    let (driver, runner) = Driver::builder().build::<Local>().unwrap();
    let tasks = tokio::task::LocalSet::new();
    let running = tasks.spawn_local(runner.run_tokio());
    let work = async {
        exchange(driver, |task| drop(tokio::task::spawn_local(task)), tokio::time::sleep).await;
        running.await.unwrap().unwrap();
    };
    soon(tasks.run_until(work)).await;
}

/// Connections of a driver whose queues have room for one end each. Later queues are added while it sleeps, and without keepalives
/// only their events wake it.
#[cfg(feature = "tokio")]
async fn use_several_queues() {
    const QUEUE: u32 = 8;
    let driver = Driver::builder().completions(2 * QUEUE).idle(Idle::Sleep).tokio().unwrap();
    let listener = Listener::builder().driver(&driver).sends(QUEUE).receives(QUEUE).keepalive(None);
    let listener = listener.bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::with_driver(&driver).sends(QUEUE).receives(QUEUE).keepalive(None);
    let mut connections = Vec::new();
    for round in 0..3 {
        let (connection, end) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
        tokio::spawn(echo(end.unwrap()));
        connections.push(connection.unwrap());
        for number in 0..MESSAGES / 10 {
            for connection in &connections {
                ask(connection, round * MESSAGES + number).await;
            }
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(driver.statistics().sleeps > 0);
}

#[cfg(feature = "tokio")]
#[test]
fn each_queue_of_a_driver_on_tokio_wakes_it() {
    let _watchdog = soft0();
    for workers in [1, 2] {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(workers).enable_all().build().unwrap();
        runtime.block_on(async { soon(tokio::spawn(use_several_queues())).await.unwrap() });
    }
}

/// Runs a driver on a runtime of compio: the example of [`Runner::run_with`].
async fn run_on_compio(runner: Runner<Local>) -> rdma_async::Result<()> {
    let descriptor = SharedFd::new(runner.as_fd().try_clone_to_owned()?);
    let poll = || PollOnce::new(descriptor.clone(), Interest::Readable);
    runner.run_with(|| async { compio::runtime::submit(poll()).await.0.map(drop) }).await
}

/// With io_uring where it is permitted, and with epoll.
#[test]
fn compio_runs_a_driver_without_locks() {
    let _watchdog = soft0();
    let (any, mut epoll) = (ProactorBuilder::new(), ProactorBuilder::new());
    epoll.driver_type(DriverType::Poll);
    for proactor in [any, epoll] {
        let runtime = compio::runtime::RuntimeBuilder::new().with_proactor(proactor).build().unwrap();
        let (driver, runner) = Driver::builder().build::<Local>().unwrap();
        runtime.block_on(async {
            let running = compio::runtime::spawn(run_on_compio(runner));
            exchange(driver, |task| compio::runtime::spawn(task).detach(), compio::time::sleep).await;
            running.await.unwrap().unwrap();
        });
    }
}

/// Runs a driver on a runtime of monoio: the example of [`Runner::run_with`].
async fn run_on_monoio(runner: Runner<Local>) -> rdma_async::Result<()> {
    let descriptor = monoio::net::UnixStream::from_std(runner.as_fd().try_clone_to_owned()?.into())?;
    runner.run_with(|| descriptor.readable(false)).await
}

async fn exchange_on_monoio() {
    let (driver, runner) = Driver::builder().build::<Local>().unwrap();
    let running = monoio::spawn(run_on_monoio(runner));
    exchange(driver, |task| drop(monoio::spawn(task)), monoio::time::sleep).await;
    running.await.unwrap();
}

/// With io_uring where it is permitted, and with epoll.
#[test]
fn monoio_runs_a_driver_without_locks() {
    let _watchdog = soft0();
    let mut any = monoio::RuntimeBuilder::<monoio::FusionDriver>::new().enable_timer().build().unwrap();
    any.block_on(exchange_on_monoio());
    let mut epoll = monoio::RuntimeBuilder::<monoio::LegacyDriver>::new().enable_timer().build().unwrap();
    epoll.block_on(exchange_on_monoio());
}

#[tokio::test]
async fn a_driver_that_cannot_wait_stops() {
    let _watchdog = soft0();
    let (driver, runner) = Driver::builder().idle(Idle::Sleep).build::<Local>().unwrap();
    let error = runner.run_with(async || Err(std::io::ErrorKind::NotConnected.into())).await.unwrap_err();
    assert!(matches!(&error, Error::Driver(error) if error.kind() == std::io::ErrorKind::NotConnected), "{error}");
    let error = Connector::with_driver(&driver).connect("127.0.0.1:1").await.unwrap_err();
    assert!(matches!(error, Error::DriverStopped), "{error}");
}

/// A driver turn by turn.
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
    let (driver, runner) = Driver::builder().idle(Idle::Sleep).build::<Local>().unwrap();
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
        let counts = driver.statistics();
        // The driver may be asleep again.
        assert!(counts.wakes > 0 && counts.sleeps - counts.wakes <= 1, "{counts:?}");
        drop((driver, connection));
        running.await;
    };
    smol::block_on(executor.run(work));
}
