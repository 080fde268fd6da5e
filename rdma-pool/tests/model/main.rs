//! Explores the interleavings of threads that share an allocator, with loom.
//!
//! The modules of the allocator are compiled again here, over the primitives of the model checker. loom reports an execution in
//! which all threads wait, so a lost wake-up fails a test.

#[path = "../../src/allocator.rs"]
#[allow(dead_code, reason = "the library uses more of it")]
mod allocator;
#[path = "../../src/block.rs"]
mod block;
#[path = "../../src/cache.rs"]
#[allow(dead_code, reason = "the library uses more of it")]
mod cache;
#[path = "../../src/class.rs"]
#[allow(dead_code, reason = "the library uses more of it")]
mod class;
#[path = "../../src/heap.rs"]
#[allow(dead_code, reason = "the library uses more of it")]
mod heap;
#[path = "../../src/lock.rs"]
mod lock;
mod ranges;
mod sync;
#[path = "../../src/waiter.rs"]
#[allow(dead_code, reason = "the library uses more of it")]
mod waiter;

use std::sync::Arc;

use loom::thread;

use block::Taken;
use cache::{Cache, put_cached, take_cached};
use lock::SpinLock;
use ranges::{BLOCK, Range, Ranged, drained};

const SEND: usize = 2;

/// Explores all executions with at most `preemptions` preemptions. Few are enough to find most faults.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Returns a block as a thread with `cache` does.
fn free(pool: &Ranged, cache: &Cache<Range>, Taken { block, heap }: Taken<Range>) {
    if let Some(block) = put_cached(cache, heap, block) {
        pool.put(Some(cache), heap, block);
    }
}

/// Gets a block as a thread without a cache does, and waits for it.
fn get(pool: &Ranged) -> Taken<Range> {
    match pool.take_or_queue(None, SEND, class::of(BLOCK).unwrap(), None).unwrap() {
        Ok(found) => found,
        Err(waiting) => waiting.wait(None).expect("there is no deadline"),
    }
}

#[test]
fn one_thread_at_a_time_has_the_value_of_a_lock() {
    explore(3, || {
        let lock = Arc::new(SpinLock::new(0));
        let others = [(); 2].map(|()| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.try_lock().map(|mut value| *value += 1).is_some())
        });
        let own = lock.try_lock().map(|mut value| *value += 1).is_some();
        let locked =
            others.map(|other| other.join().unwrap()).into_iter().chain([own]).filter(|locked| *locked).count();
        assert!(locked >= 1, "the lock was free at first");
        assert_eq!(lock.try_lock().map(|value| *value), Some(locked));
    });
}

#[test]
fn a_block_that_an_idle_thread_has_cached_reaches_a_waiter() {
    explore(3, || {
        let (pool, cache, block) = drained();
        let other = Arc::clone(&pool);
        // The thread is idle after it has freed its block.
        let thread = thread::spawn(move || {
            free(&other, &cache, block);
            cache
        });
        assert_eq!(get(&pool).block.len(), BLOCK);
        thread.join().unwrap();
    });
}

#[test]
fn a_block_freed_by_another_thread_is_in_one_place() {
    explore(3, || {
        let (pool, cache, block) = drained();
        let (other, others) = (Arc::clone(&pool), Arc::clone(&cache));
        let thread = thread::spawn(move || free(&other, &others, block));
        let class = class::of(BLOCK).unwrap();
        let mut found = Vec::new();
        found.extend(take_cached(&cache, SEND, class));
        found.extend(pool.try_take(Some(&cache), SEND, class).ok());
        assert!(found.len() <= 1, "one block was handed out twice");
        thread.join().unwrap();
        if found.is_empty() {
            found.push(pool.try_take(None, SEND, class).expect("the block is free"));
        }
        for block in found {
            free(&pool, &cache, block);
        }
        pool.retire(&cache);
        assert!(pool.is_whole());
    });
}

#[test]
fn the_block_of_a_thread_that_ends_reaches_a_waiter() {
    explore(3, || {
        let (pool, cache, block) = drained();
        let other = Arc::clone(&pool);
        let thread = thread::spawn(move || {
            free(&other, &cache, block);
            other.retire(&cache);
        });
        assert_eq!(get(&pool).block.len(), BLOCK);
        thread.join().unwrap();
    });
}

#[test]
fn a_waiter_that_gives_up_passes_its_block_on() {
    explore(2, || {
        let (pool, cache, block) = drained();
        let (giver, quitter) = (Arc::clone(&pool), Arc::clone(&pool));
        let giver = thread::spawn(move || free(&giver, &cache, block));
        let quitter = thread::spawn(move || {
            let turn = quitter.take_or_queue(None, SEND, class::of(BLOCK).unwrap(), None).unwrap();
            // A place in the queue is given up by dropping it, before or after it was served.
            if let Ok(Taken { block, heap }) = turn {
                quitter.put(None, heap, block);
            }
        });
        let Taken { block, heap } = get(&pool);
        pool.put(None, heap, block);
        giver.join().unwrap();
        quitter.join().unwrap();
    });
}
