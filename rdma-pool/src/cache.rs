//! Free blocks of one thread.

use crate::block::{Freed, Taken};
use crate::class;
use crate::heap::BINNED;
use crate::lock::SpinLock;

/// Number of heaps: one for each budget, and the common rest.
pub(crate) const HEAPS: usize = 5;

/// The heap that all budgets share.
pub(crate) const COMMON: usize = HEAPS - 1;

/// Bytes of free blocks of one class and heap that a thread keeps, if they are more than one block.
const KEPT: usize = 64 << 10;

/// Maximum number of free blocks of one class and heap that a thread keeps.
const MOST: usize = 64;

/// Free blocks of one thread. Other threads take them when memory is short.
pub(crate) type Cache<B> = SpinLock<Bins<B>>;

/// Free blocks by heap and class.
pub(crate) struct Bins<B> {
    lists: Box<[[List<B>; BINNED]; HEAPS]>,
    /// Whether the lists take blocks: not while callers wait for them, nor after the allocator was dropped.
    pub(crate) open: bool,
}

/// Free blocks of one heap and class.
struct List<B> {
    /// The capacity is the number of blocks that it may hold: zero until the first one.
    blocks: Vec<B>,
    /// Bytes of a block.
    size: usize,
    /// Number of blocks that this cache has handed out minus the number returned to it. Wraps.
    used: usize,
}

/// A block of `class` for `budget` from the cache of this thread.
#[inline(always)]
pub(crate) fn take_cached<B>(cache: &Cache<B>, budget: usize, class: usize) -> Option<Taken<B>> {
    cache.try_lock()?.take(budget, class)
}

/// Puts a block of `heap` into the cache of this thread, and returns it if that is not possible.
#[inline(always)]
pub(crate) fn put_cached<B, F: Freed<B>>(cache: &Cache<B>, heap: usize, freed: F) -> Option<F> {
    match cache.try_lock() {
        Some(mut bins) => bins.put(heap, freed),
        None => Some(freed),
    }
}

/// Number of blocks of `class` that a thread keeps for each heap.
pub(crate) fn limit(class: usize) -> usize {
    (KEPT / class::size(class)).clamp(1, MOST)
}

impl<B> Bins<B> {
    pub(crate) fn new(open: bool) -> Self {
        let list = |class| List { blocks: Vec::new(), size: class::size(class), used: 0 };
        // Not by way of the stack, which is small in the model checker.
        let lists: Vec<_> = (0..HEAPS).map(|_| std::array::from_fn(list)).collect();
        let Ok(lists) = lists.try_into() else { unreachable!("there are as many heaps as lists") };
        Bins { lists, open }
    }

    /// A block of `class` that `budget` may use.
    #[inline(always)]
    fn take(&mut self, budget: usize, class: usize) -> Option<Taken<B>> {
        let own = self.lists.get_mut(budget)?.get_mut(class)?.take();
        if let Some(block) = own {
            return Some(Taken { block, heap: budget });
        }
        let block = self.lists[COMMON].get_mut(class)?.take()?;
        Some(Taken { block, heap: COMMON })
    }

    /// Keeps a block that a user returns, unless the cache is closed or the list full.
    #[inline(always)]
    fn put<F: Freed<B>>(&mut self, heap: usize, freed: F) -> Option<F> {
        let capacity = freed.capacity();
        match self.lists.get_mut(heap).and_then(|lists| lists.get_mut(class::quarter(capacity))) {
            Some(list) if list.size == capacity && self.open && list.blocks.len() < list.blocks.capacity() => {
                list.blocks.push(freed.into());
                list.used = list.used.wrapping_sub(1);
                None
            }
            _ => Some(freed),
        }
    }

    /// Adds free blocks of `class` as far as there is room, and returns the others.
    pub(crate) fn fill(&mut self, heap: usize, class: usize, mut blocks: Vec<B>) -> Vec<B> {
        let List { blocks: list, .. } = &mut self.lists[heap][class];
        list.reserve_exact(limit(class).saturating_sub(list.len()));
        let room = (list.capacity() - list.len()).min(blocks.len());
        list.extend(blocks.drain(..room));
        blocks
    }

    /// Reserves the capacity of a list, and removes the half that was used least recently.
    pub(crate) fn make_room(&mut self, heap: usize, class: usize) -> Vec<B> {
        let List { blocks, .. } = &mut self.lists[heap][class];
        blocks.reserve_exact(limit(class).saturating_sub(blocks.len()));
        blocks.drain(..blocks.len().div_ceil(2)).collect()
    }

    /// Bytes that this cache has handed out minus the bytes returned to it, for each heap. Wraps.
    pub(crate) fn used(&self) -> [usize; HEAPS] {
        std::array::from_fn(|heap| {
            self.lists[heap].iter().fold(0, |bytes, list| list.used.wrapping_mul(list.size).wrapping_add(bytes))
        })
    }

    /// Removes all blocks.
    pub(crate) fn drain(&mut self, mut each: impl FnMut(usize, B)) {
        for (heap, lists) in self.lists.iter_mut().enumerate() {
            lists.iter_mut().flat_map(|list| list.blocks.drain(..)).for_each(|block| each(heap, block));
        }
    }

    /// Removes all blocks, and takes no others.
    pub(crate) fn close(&mut self) -> Vec<B> {
        self.open = false;
        let mut blocks = Vec::new();
        self.drain(|_, block| blocks.push(block));
        blocks
    }
}

impl<B> List<B> {
    #[inline(always)]
    fn take(&mut self) -> Option<B> {
        let block = self.blocks.pop()?;
        self.used = self.used.wrapping_add(1);
        Some(block)
    }
}
