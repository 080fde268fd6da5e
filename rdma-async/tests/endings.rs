//! Drivers that stop while tasks wait for them.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use rdma_async::{Connector, Driver, Error, Listener, Threads};

/// Counts how often it is woken.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn the_end_of_the_driver_ends_handshakes() {
    rdma_safe::soft::install().unwrap();
    let (driver, mut runner) = Driver::builder().build::<Threads>().unwrap();
    let [listener, idle] =
        [(); 2].map(|()| runner.block_on(Listener::builder().driver(&driver).bind("127.0.0.1:0")).unwrap());
    let connector = Connector::with_driver(&driver);
    let [accepts, resolves, connects] = [(); 3].map(|()| Arc::new(Count::default()));
    let wakers = [&accepts, &resolves, &connects].map(|count| Waker::from(count.clone()));
    let [mut accept, mut resolve, mut connect] = wakers.each_ref().map(Context::from_waker);
    let (mut accepting, mut resolving) = (pin!(idle.accept()), pin!(connector.connect(listener.local_address())));
    let mut connecting = pin!(connector.connect(listener.local_address()));
    assert!(accepting.as_mut().poll(&mut accept).is_pending());
    // Nobody accepts, so this handshake gets as far as its request.
    while driver.statistics().connections == 0 {
        assert!(connecting.as_mut().poll(&mut connect).is_pending());
        let _ = runner.turn();
    }
    assert!(connecting.as_mut().poll(&mut connect).is_pending());
    assert!(resolving.as_mut().poll(&mut resolve).is_pending());
    for count in [&accepts, &resolves, &connects] {
        count.0.store(0, Ordering::SeqCst);
    }
    drop(runner);
    for count in [&accepts, &resolves, &connects] {
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
    }
    assert!(matches!(accepting.as_mut().poll(&mut accept), Poll::Ready(Err(Error::DriverStopped))));
    assert!(matches!(resolving.as_mut().poll(&mut resolve), Poll::Ready(Err(Error::DriverStopped))));
    assert!(matches!(connecting.as_mut().poll(&mut connect), Poll::Ready(Err(Error::DriverStopped))));
}
