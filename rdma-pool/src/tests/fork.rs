//! A child of `fork(3)` drops what it has inherited, although another thread of its parent held all locks at the fork.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use rdma_safe::{Device, ProtectionDomain};

use crate::{Budget, Error, Pool, RegistrationCache, RegistrationError};

/// Seconds after which a child that hangs is killed.
const DEADLINE: u32 = 20;

fn domain() -> ProtectionDomain {
    rdma_safe::soft::install().unwrap();
    Device::first().unwrap().open().unwrap().alloc_pd().unwrap()
}

/// Forks while `hold` calls its argument in another thread. Runs `body` in the child, and waits for the child to succeed.
///
/// Both processes return. The child has to end the calling thread, which runs its destructors. It has no other thread, so it ends,
/// too, with status 0.
fn fork_while(hold: impl FnOnce(&dyn Fn()) + Send + 'static, body: impl FnOnce()) {
    let (held, is_held) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let holder = thread::spawn(move || {
        hold(&|| {
            held.send(()).unwrap();
            assert!(released.recv().is_err());
        });
    });
    is_held.recv().unwrap();
    // SAFETY: the child takes no lock that another thread may hold, which this tests, and ends after its deadline at the latest.
    // The C library prepares its allocator for a fork.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: the argument is a number.
        unsafe { libc::alarm(DEADLINE) };
        if catch_unwind(AssertUnwindSafe(body)).is_err() {
            // SAFETY: the argument is a number. No destructor runs.
            unsafe { libc::_exit(1) };
        }
        return;
    }
    let mut status = 0;
    // SAFETY: the child is this process's, and the status is valid for writes.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    drop(release);
    holder.join().unwrap();
    assert_eq!(status, 0, "the child did not exit with status 0 within {DEADLINE} s");
}

#[track_caller]
fn assert_inherited<T>(result: Result<T, Error>) {
    assert!(matches!(result, Err(Error::Inherited)));
}

#[test]
#[cfg_attr(miri, ignore = "Miri does not fork")]
fn a_child_drops_buffers_and_the_last_handle_of_their_pool() {
    let parent = thread::spawn(|| {
        let pool = Pool::builder(&domain()).share(Budget::Receives, 64 << 10).common(1 << 20).build().unwrap();
        let message = pool.try_get(Budget::Receives, 64).unwrap();
        // The cache of this thread has more of them.
        drop(pool.try_get(Budget::Receives, 64).unwrap());
        let large = pool.try_get(Budget::Bulk, 512 << 10).unwrap();
        let (left, right) = pool.try_get(Budget::Bulk, 4096).unwrap().into_split(1000).unwrap();
        // A handle of the other thread would keep the pool in the child.
        let shared = Arc::as_ptr(&pool.0);
        // SAFETY: `fork_while` joins the other thread before it drops `body`, which owns the pool.
        let shared = unsafe { &*shared };
        fork_while(
            |run| shared.allocator.locked(run),
            move || {
                assert_inherited(pool.try_get(Budget::Receives, 64));
                drop((large, left));
                drop(pool);
                drop((message, right));
            },
        );
    });
    parent.join().unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "Miri does not fork")]
fn a_child_gets_errors_and_ends_a_thread_that_has_a_cache() {
    let pool: &'static Pool = Box::leak(Box::new(Pool::builder(&domain()).common(64 << 10).build().unwrap()));
    let parent = thread::spawn(move || {
        let mut context = Context::from_waker(Waker::noop());
        let message = pool.try_get(Budget::Sends, 64).unwrap();
        drop(pool.try_get(Budget::Sends, 64).unwrap());
        let mut polled = Box::pin(pool.get_async(Budget::Sends, 64 << 10));
        let mut dropped = Box::pin(pool.get_async(Budget::Sends, 64 << 10));
        assert!(polled.as_mut().poll(&mut context).is_pending() && dropped.as_mut().poll(&mut context).is_pending());
        fork_while(
            |run| pool.0.allocator.locked(run),
            || {
                for len in [64, 4096, 65 << 20] {
                    assert_inherited(pool.try_get(Budget::Sends, len));
                    assert_inherited(pool.get(Budget::Sends, len, Duration::MAX));
                    let Poll::Ready(result) = pin!(pool.get_async(Budget::Sends, len)).poll(&mut context) else {
                        panic!("pending")
                    };
                    assert_inherited(result);
                }
                let Poll::Ready(result) = polled.as_mut().poll(&mut context) else { panic!("pending") };
                assert_inherited(result);
                assert_eq!(pool.statistics().used(), 0);
                assert!(format!("{pool:?}").contains("Pool"));
                drop((message, polled, dropped));
            },
        );
    });
    parent.join().unwrap();
    assert_eq!((pool.statistics().used(), pool.statistics().waiting), (0, 0), "the child has changed its parent");
    assert!(pool.try_get(Budget::Sends, 64 << 10).is_ok());
}

#[test]
#[cfg_attr(miri, ignore = "Miri does not fork")]
fn a_child_drops_registrations_and_the_last_handle_of_their_cache() {
    let parent = thread::spawn(|| {
        let cache = RegistrationCache::new(&domain(), 1 << 20);
        let payload: Arc<[u8]> = vec![7; 1000].into();
        let region = cache.register(&payload).unwrap();
        let idle: Arc<[u8]> = vec![8; 1000].into();
        drop(cache.register(&idle).unwrap());
        let inner = Arc::as_ptr(&cache.0);
        // SAFETY: as in the other test.
        let inner = unsafe { &*inner };
        fork_while(
            |run| inner.regions.locked(run),
            move || {
                let inherited = cache.register(&payload);
                assert!(matches!(
                    inherited,
                    Err(RegistrationError::Register(rdma_safe::Error::Inherited { object })) if object == "soft0"
                ));
                assert_eq!((cache.evict(&idle), cache.clear(), cache.statistics().bytes), (false, 0, 0));
                drop(cache);
                assert_eq!(region.owners(), 2, "another thread may be changing the entries");
                drop(region);
                assert_eq!([&payload, &idle].map(Arc::strong_count), [2, 2], "an owner of registered memory is gone");
            },
        );
    });
    parent.join().unwrap();
}

#[cfg(feature = "bytes")]
#[test]
#[cfg_attr(miri, ignore = "Miri does not fork")]
fn a_child_drops_registered_bytes() {
    let parent = thread::spawn(|| {
        let cache = RegistrationCache::new(&domain(), 1 << 20);
        let bytes = bytes::Bytes::from(vec![7; 1000]);
        let region = cache.register_bytes(bytes.clone()).unwrap();
        let holder = cache.clone();
        fork_while(
            move |run| holder.0.regions.locked(run),
            move || {
                assert!(matches!(cache.register_bytes(bytes.clone()), Err(RegistrationError::Register(_))));
                drop((region, bytes, cache));
            },
        );
    });
    parent.join().unwrap();
}
