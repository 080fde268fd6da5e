//! Free blocks of one thread.

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
    /// The capacity of a list is the number of blocks that it may hold: zero until the first one.
    lists: Vec<Vec<B>>,
    /// Bytes that this cache has handed out minus the bytes returned to it, for each heap. Wraps.
    pub(crate) used: [usize; HEAPS],
}

/// Number of blocks of `class` that a thread keeps for each heap.
pub(crate) fn limit(class: usize) -> usize {
    (KEPT / class::size(class)).clamp(1, MOST)
}

impl<B> Bins<B> {
    pub(crate) fn new() -> Self {
        Bins { lists: (0..HEAPS * BINNED).map(|_| Vec::new()).collect(), used: [0; HEAPS] }
    }

    /// A block of `class` that `budget` may use, and its heap.
    #[inline(always)]
    pub(crate) fn take(&mut self, budget: usize, class: usize) -> Option<(B, usize)> {
        let own = self.lists.get_mut(budget * BINNED + class)?.pop();
        let found = match own {
            Some(block) => (block, budget),
            None => (self.lists.get_mut(COMMON * BINNED + class)?.pop()?, COMMON),
        };
        self.used[found.1] = self.used[found.1].wrapping_add(class::size(class));
        Some(found)
    }

    /// Keeps a block of `class` that a user returns, unless its list is full.
    #[inline(always)]
    pub(crate) fn put(&mut self, heap: usize, class: usize, block: B) -> Option<B> {
        let Some(list) = self.lists.get_mut(heap * BINNED + class) else { return Some(block) };
        if list.len() == list.capacity() && !start(list, class) {
            return Some(block);
        }
        list.push(block);
        self.used[heap] = self.used[heap].wrapping_sub(class::size(class));
        None
    }

    /// Adds free blocks of `class` as far as there is room, and returns the others.
    pub(crate) fn fill(&mut self, heap: usize, class: usize, mut blocks: Vec<B>) -> Vec<B> {
        let list = &mut self.lists[heap * BINNED + class];
        start(list, class);
        let room = (list.capacity() - list.len()).min(blocks.len());
        list.extend(blocks.drain(..room));
        blocks
    }

    /// Removes half of a list, the blocks that were used least recently.
    pub(crate) fn halve(&mut self, heap: usize, class: usize) -> Vec<B> {
        let list = &mut self.lists[heap * BINNED + class];
        list.drain(..list.len().div_ceil(2)).collect()
    }

    /// Removes all blocks.
    pub(crate) fn drain(&mut self, mut each: impl FnMut(usize, B)) {
        for (index, list) in self.lists.iter_mut().enumerate() {
            list.drain(..).for_each(|block| each(index / BINNED, block));
        }
    }
}

/// Allocates a list that has no room yet. Returns whether it did.
#[cold]
#[inline(never)]
fn start<B>(list: &mut Vec<B>, class: usize) -> bool {
    let is_new = list.capacity() == 0;
    if is_new {
        list.reserve_exact(limit(class));
    }
    is_new
}
