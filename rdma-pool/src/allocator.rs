//! The allocator: heaps for each budget, caches for each thread, and waiters. It knows nothing of RDMA.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Instant;

use crate::block::{Block, Source, Taken};
use crate::cache::{Bins, COMMON, Cache, HEAPS, limit};
use crate::class;
use crate::heap::{BINNED, Heap};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::waiter::{Queues, Waiter, wake_all};

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

/// A block, or a place in the queue.
pub(crate) type Turn<'a, B, S> = Result<Taken<B>, Waiting<'a, B, S>>;

/// Blocks by budget and class.
///
/// In a forked child, other threads of the parent hold locks for ever and may have been changing what these protect. An inherited
/// allocator and places in its queue may be dropped there. All other calls require [`Allocator::is_inherited`] to be false.
pub(crate) struct Allocator<B, S: Source<B>> {
    state: Mutex<State<B>>,
    /// Held by the thread that makes an arena, and the current step in bytes.
    step: Mutex<usize>,
    source: S,
}

struct State<B> {
    heaps: Vec<Heap<B>>,
    queues: Queues<B>,
    /// Number of waiters. While there are any, all caches are empty and closed.
    waiting: usize,
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
            ..State::default()
        };
        Allocator { state: Mutex::new(state), step: Mutex::new(step), source }
    }

    /// Whether this process was forked after the allocator was made.
    #[inline(always)]
    pub(crate) fn is_inherited(&self) -> bool {
        self.source.is_inherited()
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
        let mut state = lock(&self.state);
        let cache = Arc::new(Cache::new(Bins::new(state.waiting == 0)));
        state.caches.push(Arc::clone(&cache));
        cache
    }

    /// Takes back all that a thread's cache has, and forgets the cache.
    pub(crate) fn retire(&self, cache: &Arc<Cache<B>>) {
        let mut state = lock(&self.state);
        state.caches.retain(|other| !Arc::ptr_eq(other, cache));
        let State { heaps, used, .. } = &mut *state;
        let mut bins = cache.lock();
        bins.drain(|heap, block| heaps[heap].put(block));
        for (total, used) in used.iter_mut().zip(bins.used()) {
            *total = total.wrapping_add(used);
        }
        drop(bins);
        self.serve(state);
    }

    /// A block of `class` for `budget`, if there is one. Grows the common heap if necessary.
    #[cold]
    pub(crate) fn try_take(
        &self,
        cache: Option<&Cache<B>>,
        budget: usize,
        class: usize,
    ) -> Result<Taken<B>, Shortage<S::Error>> {
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
        state.waiting += 1;
        // Blocks that returned before are in the caches. Those that return later go to the heaps.
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
        if let Some(mut bins) = cache.and_then(|cache| cache.try_lock()) {
            bins.open = state.waiting == 0;
            let blocks = class.map(|class| bins.make_room(heap, class));
            drop(bins);
            blocks.into_iter().flatten().for_each(|block| state.heaps[heap].put(block));
        }
        self.serve(state);
    }

    /// The usage of each heap, and counts of events.
    pub(crate) fn statistics(&self) -> ([Usage; HEAPS], Counts, usize) {
        let state = lock(&self.state);
        let mut used = state.used;
        for cache in &state.caches {
            let of_thread = cache.lock().used();
            used.iter_mut().zip(of_thread).for_each(|(total, used)| *total = total.wrapping_add(used));
        }
        let usage = |heap: usize| {
            let of = &state.heaps[heap];
            Usage { used: used[heap], capacity: of.capacity(), limit: of.limit(), arenas: of.arenas() }
        };
        (std::array::from_fn(usage), state.counts, state.waiting)
    }

    /// Bytes of the longest arena that `budget` can use.
    pub(crate) fn largest(&self, budget: usize) -> usize {
        let state = lock(&self.state);
        state.heaps[budget].capacity().max(state.heaps[COMMON].limit())
    }

    /// Calls `run` with all locks held.
    #[cfg(test)]
    pub(crate) fn locked(&self, run: impl FnOnce()) {
        let (_step, _state) = (lock(&self.step), lock(&self.state));
        run();
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
    ) -> Result<Taken<B>, Shortage<S::Error>> {
        if let Some(found) = self.take_from_heaps(cache, budget, class)? {
            return Ok(found);
        }
        // Tried once more if the caches had blocks. Trying on might never end, because other threads refill theirs.
        let mut again = true;
        loop {
            let mut step = lock(&self.step);
            // Another thread may have grown the heap, or the caches have been emptied.
            if let Some(found) = self.take_from_heaps(cache, budget, class)? {
                return Ok(found);
            }
            let failed = self.grow(&mut step, class::size(class)).err();
            drop(step);
            self.serve(lock(&self.state));
            if let Some(found) = self.take_from_heaps(cache, budget, class)? {
                return Ok(found);
            }
            again = again && lock(&self.state).reclaim();
            if !again {
                return Err(failed.filter(|error| !S::is_limit(error)).map_or(Shortage::Exhausted, Shortage::Source));
            }
        }
    }

    /// Takes a block from the heaps, and more of its class for the cache. Fails if others of the budget wait.
    fn take_from_heaps(
        &self,
        cache: Option<&Cache<B>>,
        budget: usize,
        class: usize,
    ) -> Result<Option<Taken<B>>, Shortage<S::Error>> {
        let mut state = lock(&self.state);
        if !state.queues.is_empty(budget) {
            return Err(Shortage::Exhausted);
        }
        let Some(found) = state.take(budget, class) else { return Ok(None) };
        let heap = found.heap;
        state.used[heap] = state.used[heap].wrapping_add(found.block.capacity());
        if let (Some(cache), true) = (cache, class < BINNED && state.waiting == 0 && limit(class) > 1) {
            let mut more = Vec::with_capacity(limit(class) / 2);
            state.heaps[heap].take_many(class, limit(class) / 2, &mut more);
            if let Some(mut bins) = cache.try_lock() {
                bins.open = true;
                more = bins.fill(heap, class, more);
            }
            more.into_iter().for_each(|block| state.heaps[heap].put(block));
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
        if state.waiting == 0 {
            return None;
        }
        let mut wakers = Vec::new();
        let State { heaps, queues, waiting, used, .. } = &mut *state;
        let take = |budget: usize, class: usize| {
            let taken = take(heaps, budget, class)?;
            used[taken.heap] = used[taken.heap].wrapping_add(taken.block.capacity());
            Some(taken)
        };
        let missing = queues.serve(take, |waker| {
            *waiting -= 1;
            wakers.extend(waker);
        });
        let missing = missing.map(class::size).filter(|len| heaps[COMMON].room() >= *len);
        drop(state);
        wake_all(wakers);
        missing
    }
}

impl<B> Default for State<B> {
    /// A state without heaps.
    fn default() -> Self {
        let counts = Counts::default();
        State { heaps: Vec::new(), queues: Queues::new(0), waiting: 0, caches: Vec::new(), used: [0; HEAPS], counts }
    }
}

impl<B: Block> State<B> {
    fn take(&mut self, budget: usize, class: usize) -> Option<Taken<B>> {
        take(&mut self.heaps, budget, class)
    }

    /// Empties the caches of all threads, and closes them if there are waiters. Returns whether they had any blocks.
    fn reclaim(&mut self) -> bool {
        self.counts.reclaimed += 1;
        let mut found = false;
        for cache in &self.caches {
            let mut bins = cache.lock();
            bins.open = self.waiting == 0;
            bins.drain(|heap, block| {
                self.heaps[heap].put(block);
                found = true;
            });
        }
        found
    }
}

/// A block of `class` from the heap of `budget`, or from the common heap.
fn take<B: Block>(heaps: &mut [Heap<B>], budget: usize, class: usize) -> Option<Taken<B>> {
    [budget, COMMON].into_iter().find_map(|heap| Some(Taken { block: heaps[heap].take(class)?, heap }))
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
    pub(crate) fn wait(mut self, deadline: Option<Instant>) -> Option<Taken<B>> {
        let found = self.waiter.as_ref()?.wait(deadline)?;
        self.waiter = None;
        Some(found)
    }

    /// The block, or registers the task to wake.
    pub(crate) fn poll(&mut self, context: &Context<'_>) -> Option<Taken<B>> {
        let found = self.waiter.as_ref()?.take_or_register(context.waker())?;
        self.waiter = None;
        Some(found)
    }
}

impl<B: Block, S: Source<B>> Drop for Waiting<'_, B, S> {
    fn drop(&mut self) {
        let Some(waiter) = self.waiter.take().filter(|_| !self.allocator.is_inherited()) else { return };
        let mut state = lock(&self.allocator.state);
        if state.queues.remove(self.budget, &waiter) {
            state.waiting -= 1;
        } else if let Some(Taken { block, heap }) = waiter.take() {
            state.used[heap] = state.used[heap].wrapping_sub(block.capacity());
            state.heaps[heap].put(block);
        }
        // The next in the queue may need less.
        self.allocator.serve(state);
    }
}

impl<B, S: Source<B>> Drop for Allocator<B, S> {
    fn drop(&mut self) {
        if self.source.is_inherited() {
            // The state may be half changed.
            std::mem::forget(std::mem::replace(&mut self.state, Mutex::new(State::default())));
            return;
        }
        // Threads may keep their caches for longer.
        for cache in lock(&self.state).caches.drain(..) {
            let blocks = cache.lock().close();
            // Freeing a block takes it back first. It finds this cache closed, or enters the cache of this thread, which this loop
            // closes later.
            drop(blocks);
        }
    }
}
