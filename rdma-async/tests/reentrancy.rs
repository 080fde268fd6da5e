//! Code of wakers that uses the driver whose work it waits for.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::ptr::null;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Wake, Waker};

use rdma_async::{Connection, Connector, Driver, Listener, Local};
use rdma_pool::Budget;
use rdma_safe::mr::ReadOnly;

thread_local! {
    static CONNECTION: RefCell<Option<Connection<Local>>> = const { RefCell::new(None) };
    static CALLS: Cell<u32> = const { Cell::new(0) };
}

/// Takes all locks of the driver.
fn intrude() {
    CALLS.set(CALLS.get() + 1);
    CONNECTION.with_borrow(|connection| {
        let Some(connection) = connection else { return };
        let _ = connection.driver().statistics();
        let _ = connection.messages_kept();
        let connector = Connector::with_driver(connection.driver());
        let mut connect = pin!(connector.connect("127.0.0.1:1"));
        let _ = connect.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    });
}

static INTRUDERS: RawWakerVTable = RawWakerVTable::new(
    |_| {
        intrude();
        RawWaker::new(null(), &INTRUDERS)
    },
    |_| intrude(),
    |_| intrude(),
    |_| intrude(),
);

/// Wakers that are different from each other.
static OTHER_INTRUDERS: RawWakerVTable = RawWakerVTable::new(
    |_| {
        intrude();
        RawWaker::new(null(), &OTHER_INTRUDERS)
    },
    |_| intrude(),
    |_| intrude(),
    |_| intrude(),
);

fn intruders() -> [Waker; 2] {
    // SAFETY: the functions ignore the data, so all threads may call them in any order.
    [&INTRUDERS, &OTHER_INTRUDERS].map(|table| unsafe { Waker::from_raw(RawWaker::new(null(), table)) })
}

/// Polls with each waker.
fn poll<F: Future + ?Sized>(mut future: Pin<&mut F>, wakers: &[Waker; 2]) -> Option<F::Output> {
    wakers.iter().find_map(|waker| match future.as_mut().poll(&mut Context::from_waker(waker)) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    })
}

#[test]
fn wakers_may_use_the_driver() {
    rdma_safe::soft::install().unwrap();
    let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
    let listener = runner.block_on(Listener::builder().driver(&driver).bind("127.0.0.1:0")).unwrap();
    let connector = Connector::with_driver(&driver).sends(1);
    let wakers = intruders();
    let mut complete = |mut future: Pin<&mut dyn Future<Output = ()>>| {
        while poll(future.as_mut(), &wakers).is_none() {
            let _ = runner.turn();
        }
    };
    let (mut client, mut server) = (None, None);
    complete(pin!(async {
        let connected = async { client = Some(connector.connect(listener.local_address()).await.unwrap()) };
        let accepted = async { server = Some(listener.accept().await.unwrap()) };
        tokio::join!(connected, accepted);
    }));
    let (client, server) = (client.unwrap(), server.unwrap());
    CONNECTION.set(Some(client.clone()));

    let before = CALLS.get();
    complete(pin!(async {
        let receive = async { assert_eq!(*server.receive().await.unwrap().unwrap(), *b"one") };
        let send = async {
            let [one, two] = [client.buffer_of(b"one").await.unwrap(), client.buffer_of(b"two").await.unwrap()];
            // The second one waits for room.
            let (one, two) = tokio::join!(client.send(one), client.send(two).posted());
            one.unwrap();
            two.unwrap();
        };
        tokio::join!(receive, send);
    }));
    {
        // Dropped while they are in flight, wait for room and wait for a message.
        let buffers = [(); 2].map(|()| client.pool().try_get(Budget::Sends, 3).unwrap());
        let [one, two] = buffers.map(|buffer| client.send(buffer));
        let (mut one, mut two, mut receive) = (Box::pin(one), Box::pin(two), Box::pin(client.receive()));
        assert!(poll(one.as_mut(), &wakers).is_none());
        assert!(poll(two.as_mut(), &wakers).is_none());
        assert!(poll(receive.as_mut(), &wakers).is_none());
        drop((receive, two, one));
    }
    let mut connecting = Box::pin(connector.connect(listener.local_address()));
    assert!(poll(connecting.as_mut(), &wakers).is_none());
    drop(connecting);
    CONNECTION.with_borrow(|connection| assert!(connection.is_some()));
    complete(pin!(async {
        tokio::join!(client.close(), server.close());
    }));
    assert!(CALLS.get() > before + 10);
    CONNECTION.take();
}

/// Memory that uses the driver when it is dropped.
struct Intrudes(Vec<u8>);

// SAFETY: the bytes are outside of the value, and are never changed.
unsafe impl ReadOnly for Intrudes {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Intrudes {
    fn drop(&mut self) {
        intrude();
    }
}

#[test]
fn memory_in_lists_of_a_removed_connection_may_use_the_driver() {
    rdma_safe::soft::install().unwrap();
    let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
    let (client, server) = runner.block_on(async {
        let listener = Listener::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
        let connector = Connector::with_driver(&driver);
        let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
        (client.unwrap(), server.unwrap())
    });
    CONNECTION.set(Some(client.clone()));
    let shared = client.pd().share(Intrudes(vec![7; 100])).unwrap();
    let mut send = Box::pin(client.send_list(shared));
    assert!(send.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let before = CALLS.get();
    // Nobody has taken the completion.
    drop(runner);
    assert_eq!(CALLS.get(), before + 1);
    CONNECTION.take();
    drop(server);
}

/// Counts its calls, and panics.
struct Panics(AtomicU32);

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        panic!("a waker panics");
    }
}

#[test]
fn a_waker_that_panics_stops_neither_the_driver_nor_other_tasks() {
    rdma_safe::soft::install().unwrap();
    let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
    runner.block_on(async {
        let listener = Listener::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
        let connector = Connector::with_driver(&driver);
        let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
        let (client, server) = (client.unwrap(), server.unwrap());

        // The end of the connection wakes both readers.
        let panics = Arc::new(Panics(AtomicU32::new(0)));
        let waker = Waker::from(panics.clone());
        let (mut first, second) = (pin!(server.receive()), pin!(server.receive()));
        assert!(first.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        let (_, message) = tokio::join!(client.close(), second);
        assert!(message.unwrap().is_none());
        assert_eq!(panics.0.load(Ordering::Relaxed), 1);
    });
}

static NO_CLONE: RawWakerVTable = RawWakerVTable::new(|_| panic!("a waker cannot be cloned"), |_| {}, |_| {}, |_| {});

#[test]
fn a_waker_whose_clone_panics_keeps_no_place_among_those_that_wait() {
    rdma_safe::soft::install().unwrap();
    let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
    // SAFETY: the functions ignore the data, so all threads may call them in any order.
    let waker = unsafe { Waker::from_raw(RawWaker::new(null(), &NO_CLONE)) };
    fn poll_with<F: Future>(waker: &Waker, future: Pin<&mut F>) {
        let poll = AssertUnwindSafe(|| future.poll(&mut Context::from_waker(waker)).is_pending());
        assert!(catch_unwind(poll).is_err());
    }
    runner.block_on(async {
        let listener = Listener::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
        let connector = Connector::with_driver(&driver).sends(1);
        let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
        let (client, server) = (client.unwrap(), server.unwrap());

        let mut receive = Box::pin(server.receive());
        assert!(receive.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        poll_with(&waker, receive.as_mut());
        drop(receive);

        let buffers = [(); 3].map(|()| client.pool().try_get(Budget::Sends, 3).unwrap());
        let [first, second, third] = buffers.map(|buffer| client.send(buffer));
        let (mut first, mut second) = (Box::pin(first), Box::pin(second));
        for send in [&mut first, &mut second] {
            assert!(send.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        poll_with(&waker, second.as_mut());
        drop(second);
        let (first, third, message) = tokio::join!(first, third, server.receive());
        assert!(first.is_ok() && third.is_ok() && message.unwrap().is_some());
    });
}
