//! The allocator: heaps for each budget, caches for each thread, and waiters. It knows nothing of RDMA.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Instant;

use crate::block::{Block, Source};
use crate::cache::{Bins, COMMON, Cache, HEAPS, limit};
use crate::class;
use crate::heap::{BINNED, Heap};
use crate::sync::{AtomicUsize, Mutex, MutexGuard, Ordering, lock};
use crate::waiter::{Queues, Waiter};

/// Number of budgets.
pub(crate) const BUDGETS: usize = HEAPS - 1;

/// Smallest step by which a heap grows, unless less is left of its limit.
const LEAST_STEP: usize = 64 << 10;

/// Why there is no block.
#[derive(Debug)]
pub(crate) enum Shortage<E> {
    /// All memory that the budget may use is in use.
    Exhausted,
    /// No arena can be made.
    Source(E),
}

/// A block and its heap, or a place in the queue.
pub(crate) type Turn<'a, B, S> = Result<(B, usize), Waiting<'a, B, S>>;

/// Blocks by budget and class.
pub(crate) struct Allocator<B, S> {
    state: Mutex<State<B>>,
    /// Number of waiters. Changes only while `state` is locked.
    waiting: AtomicUsize,
    /// Held by the thread that makes an arena, and the current step in bytes.
    step: Mutex<usize>,
    source: S,
}

struct State<B> {
    heaps: Vec<Heap<B>>,
    queues: Queues<B>,
    caches: Vec<Arc<Cache<B>>>,
    /// Bytes in use that no existing cache counts, for each heap. Wraps.
    used: [usize; HEAPS],
    counts: Counts,
}

/// Events since the allocator was made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Calls of `try_get` that found the budget exhausted.
    pub(crate) refused: u64,
    /// Calls that had to wait.
    pub(crate) waited: u64,
    /// Arenas made.
    pub(crate) grown: u64,
    /// Arenas of a shorter length than the step because of a limit.
    pub(crate) shortened: u64,
    /// Times that the caches of all threads were emptied.
    pub(crate) reclaimed: u64,
}

/// Bytes of one heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) used: usize,
    pub(crate) capacity: usize,
    pub(crate) limit: usize,
    pub(crate) arenas: usize,
}

impl<B: Block, S: Source<B>> Allocator<B, S> {
    /// An allocator without memory. The common heap grows to `common` bytes by `step` bytes at a time.
    pub(crate) fn new(source: S, shares: [usize; BUDGETS], common: usize, step: usize) -> Self {
        let state = State {
            heaps: shares.into_iter().chain([common]).map(Heap::new).collect(),
            queues: Queues::new(BUDGETS),
            caches: Vec::new(),
            used: [0; HEAPS],
            counts: Counts::default(),
        };
        Allocator { state: Mutex::new(state), waiting: AtomicUsize::new(0), step: Mutex::new(step), source }
    }

    /// Makes the arenas of the shares, once.
    pub(crate) fn reserve(&self) -> Result<(), S::Error> {
        let mut state = lock(&self.state);
        for heap in 0..BUDGETS {
            let share = state.heaps[heap].growth();
            if share > 0 {
                let arena = self.source.arena(share, heap)?;
                state.heaps[heap].add(arena);
            }
        }
        Ok(())
    }

    /// A cache for a thread. [`Allocator::retire`] must get it when the thread ends.
    pub(crate) fn cache(&self) -> Arc<Cache<B>> {
        let cache = Arc::new(Cache::new(Bins::new()));
        lock(&self.state).caches.push(Arc::clone(&cache));
        cache
    }

    /// Takes back all that a thread's cache has, and forgets the cache.
    pub(crate) fn retire(&self, cache: &Arc<Cache<B>>) {
        let mut state = lock(&self.state);
        state.caches.retain(|other| !Arc::ptr_eq(other, cache));
        let State { heaps, used, .. } = &mut *state;
        cache.with(|bins| {
            bins.drain(|heap, block| heaps[heap].put(block));
            for (total, used) in used.iter_mut().zip(std::mem::take(&mut bins.used)) {
                *total = total.wrapping_add(used);
            }
        });
        self.serve(state);
    }

    /// A block of `class` for `budget`, and its heap, from the cache of this thread.
    #[inline(always)]
    pub(crate) fn take_cached(cache: &Cache<B>, budget: usize, class: usize) -> Option<(B, usize)> {
        if class >= BINNED {
            return None;
        }
        cache.try_with(|bins| bins.take(budget, class)).flatten()
    }

    /// Puts a block of `heap` into the cache of this thread, and returns it if that is not possible.
    #[inline(always)]
    pub(crate) fn put_cached(&self, cache: &Cache<B>, heap: usize, block: B) -> Option<B> {
        let capacity = block.capacity();
        let Some(class) = class::of_block(capacity).filter(|class| *class < BINNED) else {
            return Some(block);
        };
        let mut block = Some(block);
        cache.try_with(|bins| {
            // A waiter counts itself before it locks this cache to empty it. So either this sees the waiter, or the waiter finds
            // the block.
            if self.waiting.load(Ordering::Relaxed) == 0 {
                block = block.take().and_then(|block| bins.put(heap, class, block));
            }
        });
        block
    }

    /// A block of `class` for `budget`, and its heap, if there is one. Grows the common heap if necessary.
    #[cold]
    pub(crate) fn try_take(
        &self,
        cache: Option<&Cache<B>>,
        budget: usize,
        class: usize,
    ) -> Result<(B, usize), Shortage<S::Error>> {
        let found = self.take_or_grow(cache, budget, class);
        if let Err(Shortage::Exhausted) = found {
            lock(&self.state).counts.refused += 1;
        }
        found
    }

    /// Like [`Allocator::try_take`], or adds a waiter that gets the block later.
    pub(crate) fn take_or_queue(
        &self,
        cache: Option<&Cache<B>>,
        budget: usize,
        class: usize,
        waker: Option<Waker>,
    ) -> Result<Turn<'_, B, S>, S::Error> {
        match self.take_or_grow(cache, budget, class) {
            Ok(found) => return Ok(Ok(found)),
            Err(Shortage::Source(error)) => return Err(error),
            Err(Shortage::Exhausted) => {}
        }
        let mut state = lock(&self.state);
        let waiter = state.queues.push(budget, class, waker);
        state.counts.waited += 1;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // From here on blocks that return go to the heaps. Those that returned before are in the caches.
        state.reclaim();
        self.serve(state);
        Ok(Err(Waiting { allocator: self, budget, waiter: Some(waiter) }))
    }

    /// Returns a block to `heap`, and serves its waiters.
    #[cold]
    pub(crate) fn put(&self, cache: Option<&Cache<B>>, heap: usize, block: B) {
        let mut state = lock(&self.state);
        let class = class::of_block(block.capacity()).filter(|class| *class < BINNED);
        state.used[heap] = state.used[heap].wrapping_sub(block.capacity());
        state.heaps[heap].put(block);
        if let (Some(cache), Some(class)) = (cache, class) {
            // The list is full: make room for the next ones.
            let blocks = cache.try_with(|bins| bins.halve(heap, class)).unwrap_or_default();
            blocks.into_iter().for_each(|block| state.heaps[heap].put(block));
        }
        self.serve(state);
    }

    /// The usage of each heap, and counts of events.
    pub(crate) fn statistics(&self) -> ([Usage; HEAPS], Counts, usize) {
        let state = lock(&self.state);
        let mut used = state.used;
        for cache in &state.caches {
            let of_thread = cache.with(|bins| bins.used);
            used.iter_mut().zip(of_thread).for_each(|(total, used)| *total = total.wrapping_add(used));
        }
        let usage = |heap: usize| {
            let of = &state.heaps[heap];
            Usage { used: used[heap], capacity: of.capacity(), limit: of.limit(), arenas: of.arenas() }
        };
        (std::array::from_fn(usage), state.counts, self.waiting.load(Ordering::Relaxed))
    }

    /// Bytes of the largest block that `budget` can get.
    pub(crate) fn largest(&self, budget: usize) -> usize {
        let state = lock(&self.state);
        state.heaps[budget].capacity().max(state.heaps[COMMON].limit())
    }

    /// Whether all blocks have returned to the heaps and make up whole arenas again.
    #[cfg(test)]
    pub(crate) fn is_whole(&self) -> bool {
        lock(&self.state).heaps.iter_mut().all(Heap::is_whole)
    }

    fn take_or_grow(
        &self,
        cache: Option<&Cache<B>>,
        budget: usize,
        class: usize,
    ) -> Result<(B, usize), Shortage<S::Error>> {
        if let Some(found) = self.take_from_heaps(cache, budget, class)? {
            return Ok(found);
        }
        let mut step = lock(&self.step);
        // Another thread may have grown the heap in the meantime.
        if let Some(found) = self.take_from_heaps(cache, budget, class)? {
            return Ok(found);
        }
        let failed = self.grow(&mut step, class::size(class)).err();
        drop(step);
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.serve(lock(&self.state));
        }
        if let Some(found) = self.take_from_heaps(cache, budget, class)? {
            return Ok(found);
        }
        let mut state = lock(&self.state);
        state.reclaim();
        let found = if state.queues.is_empty(budget) { state.take(budget, class) } else { None };
        if let Some(found) = found {
            state.used[found.1] = state.used[found.1].wrapping_add(found.0.capacity());
            return Ok(found);
        }
        Err(failed.filter(|error| !S::is_limit(error)).map_or(Shortage::Exhausted, Shortage::Source))
    }

    /// Takes a block from the heaps, and more of its class for the cache. Fails if others of the budget wait.
    fn take_from_heaps(
        &self,
        cache: Option<&Cache<B>>,
        budget: usize,
        class: usize,
    ) -> Result<Option<(B, usize)>, Shortage<S::Error>> {
        let mut state = lock(&self.state);
        if !state.queues.is_empty(budget) {
            return Err(Shortage::Exhausted);
        }
        let Some(found) = state.take(budget, class) else { return Ok(None) };
        let heap = found.1;
        state.used[heap] = state.used[heap].wrapping_add(found.0.capacity());
        let is_calm = self.waiting.load(Ordering::Relaxed) == 0;
        if let (Some(cache), true) = (cache, class < BINNED && is_calm && limit(class) > 1) {
            let mut more = Vec::with_capacity(limit(class) / 2);
            state.heaps[heap].take_many(class, limit(class) / 2, &mut more);
            let mut more = Some(more);
            cache.try_with(|bins| more = more.take().map(|blocks| bins.fill(heap, class, blocks)));
            more.into_iter().flatten().for_each(|block| state.heaps[heap].put(block));
        }
        Ok(Some(found))
    }

    /// Adds an arena of at least `len` bytes to the common heap, if its limit permits. Shortens the step when the source does not
    /// give as much.
    fn grow(&self, step: &mut usize, len: usize) -> Result<(), S::Error> {
        let mut room = lock(&self.state).heaps[COMMON].growth();
        if room < len {
            let released = lock(&self.state).heaps[COMMON].release(len);
            // Frees the arenas without the lock.
            released.into_iter().for_each(Block::free);
            room = lock(&self.state).heaps[COMMON].growth();
        }
        if room < len {
            return Ok(());
        }
        let wanted = (*step).max(len).min(room);
        let mut tried = wanted;
        let arena = loop {
            match self.source.arena(tried, COMMON) {
                Ok(arena) => break arena,
                Err(error) if !S::is_limit(&error) || tried == len => return Err(error),
                Err(_) => tried = (tried / 2).max(len),
            }
        };
        if tried < wanted {
            *step = tried.max(LEAST_STEP);
        }
        let mut state = lock(&self.state);
        state.counts.grown += 1;
        state.counts.shortened += u64::from(tried < wanted);
        state.heaps[COMMON].add(arena);
        Ok(())
    }

    /// Hands free blocks to waiters. Grows the common heap for them up to its limit.
    fn serve(&self, state: MutexGuard<'_, State<B>>) {
        let mut missing = self.serve_once(state);
        while let Some(len) = missing {
            let grown = self.grow(&mut lock(&self.step), len);
            // The waiters of an allocator whose source has failed wait for blocks that return.
            missing = grown.ok().and_then(|()| self.serve_once(lock(&self.state)));
        }
    }

    /// Hands free blocks to waiters, and wakes their tasks after unlocking. Returns the bytes by which the common heap must grow
    /// for the next waiter.
    fn serve_once(&self, mut state: MutexGuard<'_, State<B>>) -> Option<usize> {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut wakers = Vec::new();
        let State { heaps, queues, used, .. } = &mut *state;
        let take = |budget: usize, class: usize| {
            let (block, heap) = take(heaps, budget, class)?;
            used[heap] = used[heap].wrapping_add(block.capacity());
            Some((block, heap))
        };
        let missing = queues.serve(take, |waker| {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            wakers.extend(waker);
        });
        let missing = missing.map(class::size).filter(|len| heaps[COMMON].room() >= *len);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        missing
    }
}

impl<B: Block> State<B> {
    fn take(&mut self, budget: usize, class: usize) -> Option<(B, usize)> {
        take(&mut self.heaps, budget, class)
    }

    /// Empties the caches of all threads.
    fn reclaim(&mut self) {
        self.counts.reclaimed += 1;
        for cache in &self.caches {
            cache.with(|bins| bins.drain(|heap, block| self.heaps[heap].put(block)));
        }
    }
}

/// A block of `class` from the heap of `budget`, or from the common heap.
fn take<B: Block>(heaps: &mut [Heap<B>], budget: usize, class: usize) -> Option<(B, usize)> {
    [budget, COMMON].into_iter().find_map(|heap| Some((heaps[heap].take(class)?, heap)))
}

/// A place in the queue of a budget. Dropping it gives up the place.
pub(crate) struct Waiting<'a, B: Block, S: Source<B>> {
    allocator: &'a Allocator<B, S>,
    budget: usize,
    /// None after the block has been taken.
    waiter: Option<Arc<Waiter<B>>>,
}

impl<B: Block, S: Source<B>> Waiting<'_, B, S> {
    /// Blocks the thread until it gets a block, or until `deadline` has passed.
    pub(crate) fn wait(mut self, deadline: Option<Instant>) -> Option<(B, usize)> {
        let found = self.waiter.as_ref()?.wait(deadline)?;
        self.waiter = None;
        Some(found)
    }

    /// The block, or registers the task to wake.
    pub(crate) fn poll(&mut self, context: &Context<'_>) -> Option<(B, usize)> {
        let found = self.waiter.as_ref()?.take_or_register(context.waker())?;
        self.waiter = None;
        Some(found)
    }
}

impl<B: Block, S: Source<B>> Drop for Waiting<'_, B, S> {
    fn drop(&mut self) {
        let Some(waiter) = self.waiter.take() else { return };
        let mut state = lock(&self.allocator.state);
        if state.queues.remove(self.budget, &waiter) {
            self.allocator.waiting.fetch_sub(1, Ordering::Relaxed);
        } else if let Some((block, heap)) = waiter.take() {
            state.used[heap] = state.used[heap].wrapping_sub(block.capacity());
            state.heaps[heap].put(block);
        }
        // The next in the queue may need less.
        self.allocator.serve(state);
    }
}

impl<B, S> Drop for Allocator<B, S> {
    fn drop(&mut self) {
        // Threads may keep their caches for longer.
        for cache in lock(&self.state).caches.drain(..) {
            cache.with(|bins| bins.drain(|_, block| drop(block)));
        }
    }
}
