//! Drivers that stop while tasks wait for them.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use rdma_async::{Connector, Driver, Error, Idle, Listener, Local, Threads};
use rdma_safe::Access;

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

#[test]
fn a_failed_connection_is_closed_without_its_peer() {
    rdma_safe::soft::install().unwrap();
    let build = || Driver::builder().idle(Idle::Sleep).build::<Local>().unwrap();
    let ((driver, mut runner), (of_peer, mut runner_of_peer)) = (build(), build());
    let listener = runner_of_peer.block_on(Listener::builder().driver(&of_peer).bind("127.0.0.1:0")).unwrap();
    // Longer than the test may take.
    let connector = Connector::with_driver(&driver).timeout(Duration::from_secs(1000));
    let (mut connect, mut accept) = (pin!(connector.connect(listener.local_address())), pin!(listener.accept()));
    let (mut client, mut server) = (None, None);
    let mut context = Context::from_waker(Waker::noop());
    while client.is_none() || server.is_none() {
        let _ = (runner.turn(), runner_of_peer.turn());
        if client.is_none() {
            client = ready(connect.as_mut().poll(&mut context));
        }
        if server.is_none() {
            server = ready(accept.as_mut().poll(&mut context));
        }
    }
    let (client, server) = (client.unwrap().unwrap(), server.unwrap().unwrap());

    // From now on the driver of the peer does not run, so nobody confirms the end.
    let region = server.pd().expose(vec![0; 8].into_boxed_slice(), Access::REMOTE_WRITE).unwrap();
    let gone = region.remote();
    drop(region);
    let failed = runner.block_on(async { client.write(client.buffer_of(b"nowhere").await.unwrap(), gone).await });
    assert!(matches!(failed.unwrap_err().error, Error::Failed(_)));
    let mut close = pin!(client.close());
    assert!(close.as_mut().poll(&mut context).is_pending());
    for _ in 0..100 {
        let _ = runner.turn();
    }
    assert!(close.poll(&mut context).is_ready());
    assert_eq!((driver.statistics().connections, of_peer.statistics().connections), (0, 1));
}

fn ready<T>(polled: Poll<T>) -> Option<T> {
    if let Poll::Ready(output) = polled { Some(output) } else { None }
}
