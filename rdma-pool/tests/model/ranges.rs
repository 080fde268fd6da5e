//! Blocks that are only ranges, and a pool of a single one.

use std::convert::Infallible;
use std::sync::Arc;

use crate::allocator::{Allocator, BUDGETS};
use crate::block::{Block, Place, Source, Taken};
use crate::cache::Cache;
use crate::{SEND, class};

/// Bytes of the only block.
pub(crate) const BLOCK: usize = 4096;

/// A range of an arena.
#[derive(Debug)]
pub(crate) struct Range {
    start: usize,
    len: usize,
}

impl Range {
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Block for Range {
    fn place(&self) -> Place {
        (0, self.start)
    }

    fn capacity(&self) -> usize {
        self.len
    }

    fn split(self, at: usize) -> (Self, Self) {
        (Range { start: self.start, len: at }, Range { start: self.start + at, len: self.len - at })
    }

    fn join(self, next: Self) -> Self {
        assert_eq!(self.start + self.len, next.start);
        Range { start: self.start, len: self.len + next.len }
    }

    fn free(self) {}
}

/// Makes an arena of any length. The limit of the allocator lets it make one.
pub(crate) struct Ranges;

impl Source<Range> for Ranges {
    type Error = Infallible;

    fn arena(&self, len: usize, _: usize) -> Result<Range, Infallible> {
        Ok(Range { start: 0, len })
    }

    fn is_inherited(&self) -> bool {
        false
    }

    fn is_limit(error: &Infallible) -> bool {
        match *error {}
    }
}

pub(crate) type Ranged = Allocator<Range, Ranges>;

/// A pool whose only block is in use, and the cache of the thread that has it.
pub(crate) fn drained() -> (Arc<Ranged>, Arc<Cache<Range>>, Taken<Range>) {
    let pool = Ranged::new(Ranges, [0; BUDGETS], BLOCK, BLOCK);
    let cache = pool.cache();
    let Ok(block) = pool.try_take(Some(&cache), SEND, class::of(BLOCK).unwrap()) else { panic!("there is a block") };
    (Arc::new(pool), cache, block)
}
