//! Pools of registered memory on soft0.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use rdma_pool::{Budget, Error, Pool, PoolBuilder};
use rdma_safe::mr::Piece;
use rdma_safe::{Device, Endpoint, ProtectionDomain};

/// Only a test that hangs waits for so long.
const DEADLINE: Duration = Duration::from_secs(60);

fn domain() -> ProtectionDomain {
    rdma_safe::soft::install().unwrap();
    Device::first().unwrap().open().unwrap().alloc_pd().unwrap()
}

fn builder(pd: &ProtectionDomain) -> PoolBuilder {
    Pool::builder(pd).common(64 << 10).step(64 << 10)
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn buffers_return_after_they_were_in_flight() {
    let pd = domain();
    let pool = builder(&pd).share(Budget::Receives, 64 << 10).build().unwrap();
    let mut client = Endpoint::builder(&pd).build().unwrap();
    let mut server = Endpoint::builder(&pd).build().unwrap();
    client.connect(&server.address()).unwrap();
    server.connect(&client.address()).unwrap();
    for _ in 0..4 {
        server.receive(pool.try_get(Budget::Receives, 4096).unwrap()).unwrap();
    }
    for number in 0..4_u8 {
        let mut message = pool.try_get(Budget::Sends, 100).unwrap();
        message.fill(number);
        client.send(message).unwrap();
        let received = server.wait(DEADLINE).unwrap().ok().unwrap();
        let received = received.buffer.unwrap();
        assert_eq!(*received, [number; 100]);
        let _sent = client.wait(DEADLINE).unwrap().ok().unwrap();
    }
    assert_eq!(pool.statistics().used(), 0);
    // Posted receives return with their queue pair.
    server.receive(pool.try_get(Budget::Receives, 4096).unwrap()).unwrap();
    assert_eq!(pool.statistics().share(Budget::Receives).used, 4096);
    drop((client, server));
    assert_eq!(pool.statistics().used(), 0);
}

#[test]
fn buffers_return_from_bytes_lists_and_shared_buffers() {
    let pd = domain();
    let pool = builder(&pd).build().unwrap();
    let mut client = Endpoint::builder(&pd).send_sges(2).build().unwrap();
    let mut server = Endpoint::builder(&pd).recv_sges(2).build().unwrap();
    client.connect(&server.address()).unwrap();
    server.connect(&client.address()).unwrap();
    let get = |bytes: &[u8]| {
        let mut buffer = pool.try_get(Budget::Sends, bytes.len()).unwrap();
        buffer.fill_from(bytes).unwrap();
        buffer
    };
    let payload = get(&[7; 1000]).freeze();
    for number in 0..2 {
        server.receive(pool.try_get(Budget::Receives, 4096).unwrap()).unwrap();
        client.send_list((get(&[number; 16]), payload.clone())).unwrap();
    }
    let messages: Vec<Bytes> =
        (0..2).map(|_| server.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap().into()).collect();
    thread::spawn(move || {
        for (number, message) in messages.iter().enumerate() {
            assert!(message[..16] == [number as u8; 16] && message.slice(16..) == [7; 1000][..]);
        }
    })
    .join()
    .unwrap();
    assert_eq!(pool.statistics().used(), 2 * 64 + 1024, "two headers and the payload are in flight");
    drop(client.wait(DEADLINE).unwrap());
    drop(payload);
    assert_eq!(pool.statistics().used(), 64 + 1024, "one header, and the payload of its message");
    let last = client.wait(DEADLINE).unwrap().list.unwrap();
    let shared = last.into_iter().filter_map(Piece::into_shared).next().unwrap();
    let mut again = shared.into_buffer().unwrap();
    again[0] = 8;
    server.receive_list((again, pool.try_get(Budget::Receives, 64).unwrap())).unwrap();
    assert_eq!(pool.statistics().used(), 64 + 1024);
    drop((client, server));
    assert_eq!(pool.statistics().used(), 0);
}

#[test]
fn a_receive_can_be_posted_again_after_sends_have_drained_the_pool() {
    let pd = domain();
    for (share, is_posted) in [(4096, true), (0, false)] {
        let pool = builder(&pd).share(Budget::Receives, share).build().unwrap();
        let mut endpoint = Endpoint::builder(&pd).build().unwrap();
        let receive = pool.try_get(Budget::Receives, 4096).unwrap();
        let mut sends: Vec<_> = std::iter::from_fn(|| pool.try_get(Budget::Sends, 4096).ok()).collect();
        drop(receive);
        // A message is handled by sending answers, which take all they can.
        sends.extend(std::iter::from_fn(|| pool.try_get(Budget::Sends, 4096).ok()));
        match pool.try_get(Budget::Receives, 4096) {
            Ok(receive) => drop(endpoint.receive(receive).unwrap()),
            Err(error) => assert!(matches!(error, Error::Exhausted { budget: Budget::Receives, len: 4096 }), "{error}"),
        }
        assert_eq!(pool.statistics().share(Budget::Receives).used > 0, is_posted);
    }
}

#[test]
fn a_future_is_woken_by_a_buffer_that_another_thread_drops() {
    let pool = builder(&domain()).build().unwrap();
    let whole = pool.try_get(Budget::Bulk, 64 << 10).unwrap();
    let wakes = Arc::new(Wakes::default());
    let waker = Waker::from(Arc::clone(&wakes));
    let mut context = Context::from_waker(&waker);
    let mut first = pin!(pool.get_async(Budget::Sends, 64 << 10));
    assert!(first.as_mut().poll(&mut context).is_pending());
    {
        let mut second = pin!(pool.get_async(Budget::Sends, 100));
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert_eq!(pool.statistics().waiting, 2);
    }
    assert_eq!(pool.statistics().waiting, 1);
    thread::spawn(move || drop(whole)).join().unwrap();
    assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
    let Poll::Ready(Ok(buffer)) = first.as_mut().poll(&mut context) else { panic!("the future was woken") };
    assert_eq!((buffer.len(), buffer.capacity()), (64 << 10, 64 << 10));
}

#[test]
fn a_get_waits_for_buffers_and_for_its_timeout() {
    let pool = builder(&domain()).build().unwrap();
    let whole = pool.try_get(Budget::Bulk, 64 << 10).unwrap();
    let error = pool.get(Budget::Sends, 64, Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error, Error::Exhausted { budget: Budget::Sends, len: 64 }), "{error}");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.get(Budget::Sends, 64, DEADLINE).map(|buffer| buffer.len()));
        while pool.statistics().waiting == 0 {
            thread::yield_now();
        }
        drop(whole);
        assert_eq!(waiter.join().unwrap().unwrap(), 64);
    });
    // The thread has ended and given back its cache.
    assert_eq!(pool.try_get(Budget::Bulk, 64 << 10).unwrap().len(), 64 << 10);
}

#[test]
fn what_can_never_be_given_is_an_error_of_its_own() {
    let pool = builder(&domain()).build().unwrap();
    for len in [(64 << 10) + 1, usize::MAX] {
        for error in
            [pool.try_get(Budget::Sends, len).unwrap_err(), pool.get(Budget::Sends, len, DEADLINE).unwrap_err()]
        {
            assert!(matches!(error, Error::TooLong { largest: 65536, .. }), "{error}");
        }
    }
}

#[test]
fn a_share_has_room_for_a_buffer_of_its_length() {
    let pd = domain();
    for (len, share) in [(1, 64), (100, 112), (4096, 4096), (5000, 5120), (3 << 20, 3 << 20)] {
        let pool = builder(&pd).share(Budget::Receives, len).common(0).build().unwrap();
        assert_eq!(pool.statistics().share(Budget::Receives).limit, share);
        let receive = pool.try_get(Budget::Receives, len).unwrap();
        assert_eq!((receive.len(), receive.capacity()), (len, share));
    }
    let pool = builder(&pd).share(Budget::Receives, 0).common(0).build().unwrap();
    assert_eq!(pool.statistics().share(Budget::Receives).registered, 0);
}

#[test]
fn the_longest_buffer_is_one_that_can_be_had() {
    let pd = domain();
    for (common, longest) in [(63, 0), (100, 96), (5000, 4096), (64 << 10, 64 << 10)] {
        let pool = builder(&pd).common(common).build().unwrap();
        for error in [
            pool.try_get(Budget::Sends, longest + 1).unwrap_err(),
            pool.get(Budget::Sends, longest + 1, DEADLINE).unwrap_err(),
        ] {
            assert!(matches!(error, Error::TooLong { largest, .. } if largest == longest), "{error}");
        }
        assert!(longest == 0 || pool.try_get(Budget::Sends, longest).is_ok());
    }
}

#[test]
fn free_arenas_are_deregistered_for_a_longer_one() {
    let pd = domain();
    for (huge_pages, step) in [(true, 2 << 20), (false, 1 << 20)] {
        let pool = builder(&pd).common(4 << 20).step(step).huge_pages(huge_pages).build().unwrap();
        let parts: Vec<_> = std::iter::from_fn(|| pool.try_get(Budget::Bulk, 1 << 20).ok()).collect();
        assert_eq!((parts.len(), pool.statistics().common().arenas), (4, (4 << 20) / step));
        drop(parts);
        let whole = pool.try_get(Budget::Bulk, 4 << 20).unwrap();
        let common = pool.statistics().common();
        assert_eq!((common.arenas, common.used, common.registered), (1, 4 << 20, 4 << 20));
        drop(whole);
    }
}

#[test]
fn buffers_outlive_their_pool_and_parts_of_them_come_back() {
    let pd = domain();
    let pool = builder(&pd).build().unwrap();
    for size in [1024, 1000, 4000] {
        // The remainder comes back first.
        let parts = pool.try_get(Budget::Sends, 4096).unwrap().into_chunks(size).unwrap();
        assert_eq!(pool.statistics().used(), 4096 / size * size);
        drop(parts);
        assert_eq!(pool.statistics().used(), 0);
    }
    let mut late = pool.try_get(Budget::Sends, 64 << 10).unwrap();
    drop(pool);
    late.fill(7);
    assert!(late.iter().all(|byte| *byte == 7));
    thread::spawn(move || drop(late)).join().unwrap();
}
