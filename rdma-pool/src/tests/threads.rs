//! Tests with several threads, and of waiters.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use super::random::Random;
use super::*;

/// Whether a task has been woken.
#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Flag {
    fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// A pool of 64 KiB for all, all of it in use.
fn drained() -> (Ranged, Vec<Taken<Range>>) {
    let pool = super::pool(Ranges::new(usize::MAX), [0; BUDGETS], 64 << 10, 64 << 10);
    let thread = Thread::new(&pool);
    let blocks: Vec<_> = std::iter::from_fn(|| thread.get(SEND, 4096)).collect();
    drop(thread);
    assert_eq!(blocks.len(), 16);
    (pool, blocks)
}

#[test]
fn waiters_of_a_budget_are_served_in_order_of_arrival() {
    let (pool, mut blocks) = drained();
    let thread = Thread::new(&pool);
    let flags: Vec<Arc<Flag>> = (0..3).map(|_| Arc::default()).collect();
    // The first one needs most, and the others do not overtake it.
    let mut waiters: Vec<_> = [8192, 64, 64]
        .into_iter()
        .zip(&flags)
        .map(|(len, flag)| {
            let waker = Waker::from(Arc::clone(flag));
            pool.take_or_queue(None, SEND, class::of(len).unwrap(), Some(waker)).unwrap().err().unwrap()
        })
        .collect();
    assert_eq!(pool.statistics().2, 3);
    let woken = || flags.iter().map(|flag| flag.take()).collect::<Vec<_>>();
    // A block that is not adjacent to the next one to return.
    blocks.sort_by_key(|taken| taken.block.place());
    thread.put(blocks.remove(8));
    assert_eq!(woken(), [false; 3]);
    assert!(thread.get(SEND, 64).is_none(), "a caller that came later took a block");
    assert!(thread.get(RECEIVE, 64).is_some(), "waiters of another budget blocked this one");
    thread.put(blocks.remove(0));
    assert_eq!(woken(), [false; 3]);
    thread.put(blocks.remove(0));
    assert_eq!(woken(), [true; 3]);
    let context = Context::from_waker(Waker::noop());
    let found: Vec<_> = waiters.iter_mut().map(|waiter| waiter.poll(&context).unwrap()).collect();
    assert_eq!(found.iter().map(|taken| taken.block.capacity()).collect::<Vec<_>>(), [8192, 64, 64]);
    assert_eq!(pool.statistics().2, 0);
}

#[test]
fn a_waiter_that_gives_up_passes_on_its_turn_and_its_block() {
    let (pool, mut blocks) = drained();
    let thread = Thread::new(&pool);
    let queue = |len: usize| pool.take_or_queue(None, SEND, class::of(len).unwrap(), None).unwrap().err().unwrap();
    let (first, mut second, mut third) = (queue(8192), queue(4096), queue(4096));
    let context = Context::from_waker(Waker::noop());
    thread.put(blocks.pop().unwrap());
    assert!(second.poll(&context).is_none());
    drop(first);
    // The second one has been served. It gives up without having looked.
    drop(second);
    assert_eq!(third.poll(&context).unwrap().block.capacity(), 4096);
    assert_eq!(pool.statistics().2, 0);
}

#[test]
fn a_deadline_ends_a_wait() {
    let (pool, _blocks) = drained();
    let waiting = pool.take_or_queue(None, SEND, 0, None).unwrap().err().unwrap();
    assert!(waiting.wait(Some(Instant::now() + Duration::from_millis(1))).is_none());
    assert_eq!(pool.statistics().2, 0);
}

#[test]
fn a_thread_that_waits_gets_the_blocks_of_an_idle_thread() {
    let (pool, blocks) = drained();
    let (queued, is_queued) = mpsc::channel();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let waiting = pool.take_or_queue(None, RECEIVE, class::of(64 << 10).unwrap(), None).unwrap().err().unwrap();
            queued.send(()).unwrap();
            waiting.wait(None).unwrap().block.capacity()
        });
        is_queued.recv().unwrap();
        let thread = Thread::new(&pool);
        blocks.into_iter().for_each(|block| thread.put(block));
        // This thread keeps its cache while the other one waits.
        assert_eq!(waiter.join().unwrap(), 64 << 10);
        drop(thread);
    });
}

#[test]
fn a_waiter_makes_the_heap_grow_when_arenas_become_free() {
    let pool = super::pool(Ranges::new(usize::MAX), [0; BUDGETS], 64 << 10, 16 << 10);
    let thread = Thread::new(&pool);
    let blocks: Vec<_> = std::iter::from_fn(|| thread.get(SEND, 16 << 10)).collect();
    assert_eq!(blocks.len(), 4);
    let mut waiting = pool.take_or_queue(None, SEND, class::of(64 << 10).unwrap(), None).unwrap().err().unwrap();
    blocks.into_iter().for_each(|block| thread.put(block));
    let found = waiting.poll(&Context::from_waker(Waker::noop())).unwrap();
    assert_eq!(found.block.capacity(), 64 << 10);
}

#[test]
fn blocks_that_other_threads_return_are_used_again() {
    let rounds = if cfg!(miri) { 60 } else { 20_000 };
    let pool = super::pool(Ranges::new(usize::MAX), [0; BUDGETS], 256 << 10, 64 << 10);
    let (sender, receiver) = mpsc::sync_channel::<Taken<Range>>(64);
    thread::scope(|scope| {
        scope.spawn(|| {
            let thread = Thread::new(&pool);
            receiver.into_iter().for_each(|found| thread.put(found));
        });
        let thread = Thread::new(&pool);
        let mut random = Random(7);
        for _ in 0..rounds {
            let class = class::of(1 + random.below(8192)).unwrap();
            let found = take_cached(&thread.cache, SEND, class).unwrap_or_else(|| {
                match pool.take_or_queue(Some(&thread.cache), SEND, class, None).unwrap() {
                    Ok(found) => found,
                    Err(waiting) => waiting.wait(None).unwrap(),
                }
            });
            sender.send(found).unwrap();
        }
        drop(sender);
    });
    assert_eq!((used(&pool), pool.statistics().2), (0, 0));
    assert!(pool.is_whole());
}
