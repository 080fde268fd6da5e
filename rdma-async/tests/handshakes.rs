//! Handshakes that several tasks wait for, and tasks that stop to wait.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Barrier};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use rdma_async::{Connector, Driver, Listener, Threads};

const TASKS: usize = 4;

/// Time within which an accept has to notice a handshake. The deadline of the handshake would wake it later.
const SOON: Duration = Duration::from_secs(20);

#[test]
fn each_task_gets_a_connection_of_a_burst() {
    rdma_safe::soft::install().unwrap();
    let driver = Driver::thread().unwrap();
    let (_own, mut executor) = Driver::builder().build::<Threads>().unwrap();
    let builder = Listener::builder().driver(&driver).receives(1).sends(1).timeout(SOON * 3);
    let listener = Arc::new(executor.block_on(builder.bind("127.0.0.1:0")).unwrap());
    for round in 0..100 {
        let start = Arc::new(Barrier::new(2 * TASKS));
        let servers = [(); TASKS].map(|()| {
            let (listener, start) = (listener.clone(), start.clone());
            thread::spawn(move || {
                let (_own, mut executor) = Driver::builder().build::<Threads>().unwrap();
                start.wait();
                let before = Instant::now();
                let connection = executor.block_on(listener.accept()).unwrap();
                (connection, before.elapsed())
            })
        });
        let clients = [(); TASKS].map(|()| {
            let (connector, start) = (Connector::with_driver(&driver).receives(1).sends(1), start.clone());
            let address = listener.local_address();
            thread::spawn(move || {
                let (_own, mut executor) = Driver::builder().build::<Threads>().unwrap();
                start.wait();
                executor.block_on(connector.connect(address)).unwrap()
            })
        });
        let clients = clients.map(|client| client.join().unwrap());
        for server in servers {
            let (_connection, took) = server.join().unwrap();
            assert!(took < SOON, "round {round}: {took:?}");
        }
        drop(clients);
    }
}

struct Nothing;

impl Wake for Nothing {
    fn wake(self: Arc<Self>) {}
}

/// Polls with a new waker. Returns the task of the waker.
fn poll_once(future: Pin<&mut impl Future>) -> Arc<Nothing> {
    let task = Arc::new(Nothing);
    assert!(future.poll(&mut Context::from_waker(&Waker::from(task.clone()))).is_pending());
    task
}

#[test]
fn tasks_that_stop_to_wait_are_not_kept() {
    rdma_safe::soft::install().unwrap();
    let (driver, mut runner) = Driver::builder().build::<Threads>().unwrap();
    let listener = runner.block_on(Listener::builder().driver(&driver).bind("127.0.0.1:0")).unwrap();
    let mut accept = Box::pin(listener.accept());
    let [before, last] = [(); 2].map(|()| poll_once(accept.as_mut()));
    assert_eq!((Arc::strong_count(&before), Arc::strong_count(&last)), (1, 2));
    drop(accept);
    assert_eq!(Arc::strong_count(&last), 1);

    let connector = Connector::with_driver(&driver);
    let mut connect = pin!(connector.connect(listener.local_address()));
    let mut tasks = Vec::new();
    // Nobody accepts, so the handshake gets as far as its request.
    while driver.statistics().connections == 0 {
        tasks.push(poll_once(connect.as_mut()));
        let _ = runner.turn();
    }
    tasks.extend([(); 8].map(|()| poll_once(connect.as_mut())));
    let last = tasks.pop().unwrap();
    assert!(tasks.iter().all(|task| Arc::strong_count(task) == 1));
    assert!(Arc::strong_count(&last) > 1);
}

#[test]
fn connections_that_open_at_once_do_not_take_the_room_of_each_other() {
    rdma_safe::soft::install().unwrap();
    let (driver, runner) = Driver::builder().completions(4).build::<Threads>().unwrap();
    let running = thread::spawn(move || runner.run());
    let pd = rdma_safe::Device::first().unwrap().open().unwrap().alloc_pd().unwrap();
    let clients = [(); TASKS].map(|()| {
        // A queue has room for one connection.
        let connector = Connector::with_driver(&driver).sends(2).receives(2);
        let pd = pd.clone();
        thread::spawn(move || {
            let (_own, mut executor) = Driver::builder().build::<Threads>().unwrap();
            (0..200).try_for_each(|_| executor.block_on(connector.prepare(&pd)).map(drop))
        })
    });
    for client in clients {
        client.join().unwrap().unwrap();
    }
    drop(driver);
    running.join().unwrap();
}
