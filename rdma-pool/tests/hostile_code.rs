//! Code of the user that runs within the pool: wakers that drop buffers or panic, and owners that panic.
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use rdma_pool::{Budget, Pool};
use rdma_safe::{Buffer, Device, ProtectionDomain};

fn domain() -> ProtectionDomain {
    rdma_safe::soft::install().unwrap();
    Device::first().unwrap().open().unwrap().alloc_pd().unwrap()
}

fn pool() -> Pool {
    Pool::builder(&domain()).common(64 << 10).step(64 << 10).build().unwrap()
}

/// Runs `test` in a thread and fails if it hangs.
fn in_time(test: impl FnOnce() + Send + 'static) {
    let (done, wait) = mpsc::channel();
    let thread = thread::spawn(move || {
        test();
        done.send(()).unwrap();
    });
    match wait.recv_timeout(Duration::from_secs(20)) {
        Ok(()) => thread.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Disconnected) => thread.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the test hangs"),
    }
}

/// A task whose last reference is its waker, and which owns a buffer.
struct Task(#[allow(dead_code)] Mutex<Option<Buffer>>);

impl Wake for Task {
    fn wake(self: Arc<Self>) {}
}

struct Quiet;

impl Wake for Quiet {
    fn wake(self: Arc<Self>) {}
}

/// The former waker drops its task, the task its buffer, and the allocator serves the waiter with it.
#[test]
fn a_waker_that_is_replaced_may_drop_a_buffer() {
    in_time(|| {
        let pool = pool();
        let held = pool.try_get(Budget::Sends, 64 << 10).unwrap();
        let mut get = pin!(pool.get_async(Budget::Sends, 64 << 10));
        let task = Waker::from(Arc::new(Task(Mutex::new(Some(held)))));
        assert!(get.as_mut().poll(&mut Context::from_waker(&task)).is_pending());
        drop(task); // The waiter has the last reference.
        let other = Waker::from(Arc::new(Quiet));
        let _ = get.as_mut().poll(&mut Context::from_waker(&other));
    });
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker panics");
    }
}

#[derive(Default)]
struct Counts(AtomicUsize);

impl Wake for Counts {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_waker_that_panics_does_not_lose_the_wakes_of_others() {
    let pool = pool();
    let held = pool.try_get(Budget::Sends, 64 << 10).unwrap();
    let (mut first, mut second) = (pin!(pool.get_async(Budget::Sends, 64)), pin!(pool.get_async(Budget::Sends, 64)));
    let counts = Arc::new(Counts::default());
    let (panics, counting) = (Waker::from(Arc::new(Panics)), Waker::from(Arc::clone(&counts)));
    assert!(first.as_mut().poll(&mut Context::from_waker(&panics)).is_pending());
    assert!(second.as_mut().poll(&mut Context::from_waker(&counting)).is_pending());
    let _ = catch_unwind(AssertUnwindSafe(|| drop(held)));
    assert_eq!(counts.0.load(Ordering::Relaxed), 1, "the second task is served and not woken");
    let Poll::Ready(Ok(_)) = second.as_mut().poll(&mut Context::from_waker(&counting)) else { panic!("not served") };
}

#[cfg(feature = "bytes")]
#[test]
fn an_owner_that_panics_when_it_is_evicted_leaves_the_limit_as_it_was() {
    struct Owner(Vec<u8>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    impl Drop for Owner {
        fn drop(&mut self) {
            panic!("an owner panics");
        }
    }
    let pd = domain();
    let cache = rdma_pool::RegistrationCache::new(&pd, 4096);
    drop(cache.register(&Arc::new(bytes::Bytes::from_owner(Owner(vec![1; 4096])))).unwrap());
    let next = Arc::new(vec![2_u8; 4096]);
    assert!(catch_unwind(AssertUnwindSafe(|| cache.register(&next).is_ok())).is_err());
    assert_eq!((cache.statistics().regions, cache.statistics().bytes), (0, 0));
    assert!(cache.register(&next).is_ok());
}
