//! A child of fork(2) drops what it has inherited, and the driver of its parent goes on.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::ptr::read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};
use std::thread;

use rdma_async::{Connection, Connector, Driver, Listener, Sharing, Threads};

/// Seconds after which a child that hangs is killed.
const DEADLINE: u32 = 20;

/// Runs `body` in a child, and waits for its success.
fn in_a_fork(body: impl FnOnce()) {
    // SAFETY: the child takes no lock that another thread may hold, which this tests, and ends after its deadline at the latest.
    // The C library prepares its allocator for a fork.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: the argument is a number.
        unsafe { libc::alarm(DEADLINE) };
        let code = i32::from(catch_unwind(AssertUnwindSafe(body)).is_err());
        // SAFETY: the argument is a number. No destructor of the parent's objects runs.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: the child is this process's, and the status is valid for writes.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child did not exit with status 0 within {DEADLINE} s");
}

async fn connected<S: Sharing>(connector: &Connector<S>, listener: &Listener<S>) -> [Connection<S>; 2] {
    let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
    [client.unwrap(), server.unwrap()]
}

async fn exchange<S: Sharing>([client, server]: &[Connection<S>; 2]) {
    for (from, to) in [(client, server), (server, client)] {
        from.send(from.buffer_of(b"hello").await.unwrap()).await.unwrap();
        assert_eq!(*to.receive().await.unwrap().unwrap(), *b"hello");
    }
}

fn poll_once<F: Future>(mut future: Pin<Box<F>>) -> Pin<Box<F>> {
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    future
}

#[test]
fn a_child_drops_what_it_has_inherited_and_leaves_the_driver_to_its_parent() {
    rdma_safe::soft::install().unwrap();
    let driver = Driver::current().unwrap();
    let (own, mut executor) = Driver::builder().build::<Threads>().unwrap();
    let listener = executor.block_on(Listener::builder().driver(&driver).bind("127.0.0.1:0")).unwrap();
    let connector = Connector::with_driver(&driver);
    let ends = executor.block_on(connected(&connector, &listener));
    let is_done = Arc::new(AtomicBool::new(false));
    // Often holds the locks at a fork.
    let holder = thread::spawn({
        let (driver, is_done) = (driver.clone(), is_done.clone());
        move || {
            while !is_done.load(Ordering::Relaxed) {
                let _ = driver.statistics();
            }
        }
    });
    for _ in 0..10 {
        executor.block_on(exchange(&ends));
        let [client, server] = &ends;
        let message = executor.block_on(async {
            client.send(client.buffer_of(b"kept").await.unwrap()).await.unwrap();
            server.receive().await.unwrap().unwrap()
        });
        let buffer = executor.block_on(client.buffer_of(b"pending")).unwrap();
        // An operation that borrows the connection could find its completion at once.
        let send = poll_once(Box::pin(client.send_owned(buffer)));
        let receive = poll_once(Box::pin(client.receive()));
        let accept = poll_once(Box::pin(listener.accept()));
        let connect = poll_once(Box::pin(connector.connect(listener.local_address())));
        in_a_fork(|| {
            // SAFETY: each value is read once, in the child, which ends before the originals are dropped there.
            unsafe {
                drop((read(&send), read(&receive), read(&accept), read(&connect)));
                drop((read(&message), read(&ends), read(&listener), read(&connector)));
                drop((read(&own), read(&executor), read(&driver)));
            }
        });
        drop((send, receive, accept, connect));
        assert_eq!(*executor.block_on(server.receive()).unwrap().unwrap(), *b"pending");
        drop(message);
    }
    is_done.store(true, Ordering::Relaxed);
    holder.join().unwrap();
    // The driver still hears of requests and of the end of connections. Nothing else wakes these tasks.
    let address = listener.local_address();
    let client = thread::spawn(move || {
        let (_own, mut executor) = Driver::builder().build::<Threads>().unwrap();
        executor.block_on(connector.connect(address)).unwrap()
    });
    let server = executor.block_on(listener.accept()).unwrap();
    drop(client.join().unwrap());
    assert!(executor.block_on(server.receive()).unwrap().is_none());

    in_a_fork(|| {
        let _own = Driver::current().unwrap();
        assert_eq!(std::fs::read_dir("/proc/self/task").unwrap().count(), 2, "the driver has a thread");
    });
}
