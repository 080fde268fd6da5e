//! Tests of the allocator with blocks that are only ranges.

mod fork;
mod random;
mod threads;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::allocator::{Allocator, BUDGETS, Shortage};
use crate::block::{Block, Place, Source, Taken};
use crate::cache::{COMMON, Cache, put_cached, take_cached};
use crate::class;

/// A range of an arena.
#[derive(Debug)]
pub(crate) struct Range {
    arena: usize,
    start: usize,
    len: usize,
    /// Bytes of all existing ranges.
    alive: Arc<AtomicUsize>,
}

impl Range {
    fn new(arena: usize, start: usize, len: usize, alive: Arc<AtomicUsize>) -> Self {
        alive.fetch_add(len, Ordering::Relaxed);
        Range { arena, start, len, alive }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        self.alive.fetch_sub(self.len, Ordering::Relaxed);
    }
}

impl Block for Range {
    fn place(&self) -> Place {
        (self.arena, self.start)
    }

    fn capacity(&self) -> usize {
        self.len
    }

    fn split(self, at: usize) -> (Self, Self) {
        assert!(at > 0 && at < self.len);
        let part = |start, len| Range::new(self.arena, start, len, Arc::clone(&self.alive));
        (part(self.start, at), part(self.start + at, self.len - at))
    }

    fn join(self, next: Self) -> Self {
        assert_eq!((self.arena, self.start + self.len), (next.arena, next.start));
        Range::new(self.arena, self.start, self.len + next.len, Arc::clone(&self.alive))
    }

    fn free(self) {}
}

/// Makes ranges, until a limit in bytes like that of locked memory.
#[derive(Clone, Debug)]
pub(crate) struct Ranges {
    made: Arc<AtomicUsize>,
    alive: Arc<AtomicUsize>,
    locked: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Locked;

impl Ranges {
    pub(crate) fn new(locked: usize) -> Self {
        Ranges { made: Arc::default(), alive: Arc::default(), locked }
    }
}

impl Source<Range> for Ranges {
    type Error = Locked;

    fn arena(&self, len: usize, _: usize) -> Result<Range, Locked> {
        if self.alive.load(Ordering::Relaxed) + len > self.locked {
            return Err(Locked);
        }
        let arena = self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Range::new(arena, 0, len, Arc::clone(&self.alive)))
    }

    fn is_inherited(&self) -> bool {
        false
    }

    fn is_limit(_: &Locked) -> bool {
        true
    }
}

pub(crate) type Ranged = Allocator<Range, Ranges>;

/// A pool with the given shares, common memory and step, in bytes.
pub(crate) fn pool(source: Ranges, shares: [usize; BUDGETS], common: usize, step: usize) -> Ranged {
    let pool = Ranged::new(source, shares, common, step);
    pool.reserve().unwrap();
    pool
}

pub(crate) const CONTROL: usize = 0;
pub(crate) const RECEIVE: usize = 1;
pub(crate) const SEND: usize = 2;

/// A thread's view of an allocator.
pub(crate) struct Thread<'a> {
    of: &'a Ranged,
    cache: Arc<Cache<Range>>,
}

impl<'a> Thread<'a> {
    pub(crate) fn new(of: &'a Ranged) -> Self {
        Thread { of, cache: of.cache() }
    }

    pub(crate) fn get(&self, budget: usize, len: usize) -> Option<Taken<Range>> {
        let class = class::of(len).unwrap();
        let found = take_cached(&self.cache, budget, class);
        let found = found.map_or_else(|| self.of.try_take(Some(&self.cache), budget, class), Ok);
        match found {
            Ok(found) => Some(found),
            Err(Shortage::Exhausted) => None,
            Err(Shortage::Source(Locked)) => panic!("a limit is exhaustion"),
        }
    }

    pub(crate) fn put(&self, Taken { block, heap }: Taken<Range>) {
        if let Some(block) = put_cached(&self.cache, heap, block) {
            self.of.put(Some(&self.cache), heap, block);
        }
    }
}

impl Drop for Thread<'_> {
    fn drop(&mut self) {
        self.of.retire(&self.cache);
    }
}

pub(crate) fn used(of: &Ranged) -> usize {
    of.statistics().0.iter().map(|usage| usage.used).sum()
}

#[test]
fn a_block_comes_back_to_the_thread_that_returned_it() {
    let pool = self::pool(Ranges::new(usize::MAX), [4096; BUDGETS], 0, 4096);
    let thread = Thread::new(&pool);
    let first = thread.get(SEND, 100).unwrap();
    assert_eq!((first.block.capacity(), first.heap), (112, SEND));
    let place = first.block.place();
    assert_eq!(used(&pool), 112);
    thread.put(first);
    assert_eq!(used(&pool), 0);
    assert_eq!(thread.get(SEND, 112).map(|taken| taken.block.place()), Some(place));
}

#[test]
fn sends_that_drain_the_pool_leave_the_receives_their_share() {
    // The same load with one budget for all stalls: `receives_stall_without_a_share_of_their_own`.
    let pool = self::pool(Ranges::new(usize::MAX), [0, 4 * 4096, 0, 0], 1 << 18, 1 << 16);
    let thread = Thread::new(&pool);
    // The sizes leave no common byte.
    let mut sends = Vec::new();
    for len in [4096, 64] {
        while let Some(send) = thread.get(SEND, len) {
            sends.push(send);
        }
    }
    assert_eq!(pool.statistics().0[COMMON].used, 1 << 18);
    for _ in 0..3 {
        let receives: Vec<_> = (0..4).map(|_| thread.get(RECEIVE, 4096).unwrap()).collect();
        assert!(thread.get(RECEIVE, 64).is_none());
        receives.into_iter().for_each(|receive| thread.put(receive));
    }
    sends.into_iter().for_each(|send| thread.put(send));
    assert_eq!(used(&pool), 0);
}

#[test]
fn receives_stall_without_a_share_of_their_own() {
    let pool = self::pool(Ranges::new(usize::MAX), [0; BUDGETS], 1 << 16, 1 << 16);
    let thread = Thread::new(&pool);
    let receive = thread.get(RECEIVE, 4096).unwrap();
    let mut sends: Vec<_> = std::iter::from_fn(|| thread.get(SEND, 4096)).collect();
    thread.put(receive);
    // The message is handled by sending an answer, which takes the memory of the next receive.
    sends.extend(thread.get(SEND, 4096));
    assert!(thread.get(RECEIVE, 4096).is_none());
    sends.into_iter().for_each(|send| thread.put(send));
}

#[test]
fn the_step_shrinks_near_the_limit_of_locked_memory() {
    let pool = self::pool(Ranges::new(200 << 10), [0; BUDGETS], 1 << 30, 128 << 10);
    let thread = Thread::new(&pool);
    let blocks: Vec<_> = std::iter::from_fn(|| thread.get(SEND, 8 << 10)).collect();
    assert_eq!(blocks.len(), 200 / 8);
    let (_, counts, _) = pool.statistics();
    assert!(counts.shortened > 0 && counts.grown > 1, "{counts:?}");
    blocks.into_iter().for_each(|block| thread.put(block));
}

#[test]
fn free_blocks_of_a_thread_serve_another_thread_and_other_sizes() {
    let pool = self::pool(Ranges::new(usize::MAX), [0; BUDGETS], 64 << 10, 64 << 10);
    let (idle, other) = (Thread::new(&pool), Thread::new(&pool));
    let blocks: Vec<_> = std::iter::from_fn(|| idle.get(CONTROL, 4096)).collect();
    assert_eq!(blocks.len(), 16);
    blocks.into_iter().for_each(|block| idle.put(block));
    let whole = other.get(SEND, 64 << 10).unwrap();
    assert!(idle.get(CONTROL, 64).is_none());
    other.put(whole);
    assert!(idle.get(CONTROL, 64).is_some());
}

#[test]
fn free_arenas_make_room_for_a_longer_one() {
    let source = Ranges::new(usize::MAX);
    let pool = self::pool(source.clone(), [0; BUDGETS], 1 << 20, 64 << 10);
    assert_eq!(pool.largest(SEND), 1 << 20);
    let thread = Thread::new(&pool);
    let blocks: Vec<_> = std::iter::from_fn(|| thread.get(SEND, 64 << 10)).collect();
    assert_eq!((blocks.len(), pool.statistics().0[COMMON].arenas), (16, 16));
    blocks.into_iter().for_each(|block| thread.put(block));
    let whole = thread.get(SEND, 1 << 20).unwrap();
    assert_eq!((whole.block.capacity(), pool.statistics().0[COMMON].arenas), (1 << 20, 1));
    assert_eq!(source.alive.load(Ordering::Relaxed), 1 << 20);
    thread.put(whole);
}

#[test]
fn parts_of_a_block_return_one_by_one() {
    let pool = self::pool(Ranges::new(usize::MAX), [0, 0, 4096, 0], 0, 4096);
    let thread = Thread::new(&pool);
    let Taken { block, heap } = thread.get(SEND, 4096).unwrap();
    let (head, tail) = block.split(1000);
    let (left, right) = tail.split(96);
    [left, head, right].into_iter().for_each(|block| thread.put(Taken { block, heap }));
    assert_eq!(used(&pool), 0);
    assert!(thread.get(SEND, 4096).is_some());
}

#[test]
fn a_thread_that_ends_gives_back_its_blocks_and_a_pool_frees_what_threads_keep() {
    let source = Ranges::new(usize::MAX);
    let pool = self::pool(source.clone(), [4096; BUDGETS], 0, 4096);
    let ended = Thread::new(&pool);
    let block = ended.get(SEND, 4096).unwrap();
    ended.put(block);
    drop(ended);
    let kept = pool.cache();
    let Taken { block, heap } = pool.try_take(Some(&kept), SEND, 0).map_err(|_| ()).unwrap();
    assert!(put_cached(&kept, heap, block).is_none());
    drop(pool);
    assert_eq!(source.alive.load(Ordering::Relaxed), 0);
}
