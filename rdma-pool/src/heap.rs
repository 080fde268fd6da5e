//! The free blocks of one budget, or of the common rest.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{Block, Place};
use crate::class;

/// Number of classes with free lists. Larger blocks are split from extents, and joined with their neighbours when they return.
pub(crate) const BINNED: usize = 41;

/// Free blocks. The caller grows the heap up to its limit.
pub(crate) struct Heap<B> {
    /// Free extents. No two of them are adjacent.
    extents: BTreeMap<Place, B>,
    /// Lengths and places of the free extents.
    lengths: BTreeSet<(usize, Place)>,
    /// Free blocks of the smaller classes. They may have free neighbours.
    bins: Vec<Vec<B>>,
    /// Places and lengths of all arenas.
    arenas: BTreeMap<Place, usize>,
    /// Bytes of all arenas.
    capacity: usize,
    /// Maximum of `capacity`.
    limit: usize,
}

impl<B: Block> Heap<B> {
    pub(crate) fn new(limit: usize) -> Self {
        Heap {
            extents: BTreeMap::new(),
            lengths: BTreeSet::new(),
            bins: (0..BINNED).map(|_| Vec::new()).collect(),
            arenas: BTreeMap::new(),
            capacity: 0,
            limit,
        }
    }

    /// Bytes of all arenas.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Maximum of the capacity.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Number of arenas.
    pub(crate) fn arenas(&self) -> usize {
        self.arenas.len()
    }

    /// Bytes by which the heap may grow.
    pub(crate) fn growth(&self) -> usize {
        self.limit.saturating_sub(self.capacity)
    }

    /// Adds an arena. Rounding may exceed the limit.
    pub(crate) fn add(&mut self, arena: B) {
        self.capacity += arena.capacity();
        self.arenas.insert(arena.place(), arena.capacity());
        self.insert(arena);
    }

    /// A free block of `class`.
    pub(crate) fn take(&mut self, class: usize) -> Option<B> {
        if let Some(block) = self.bins.get_mut(class).and_then(Vec::pop) {
            return Some(block);
        }
        let size = class::size(class);
        match self.carve(size) {
            None if self.coalesce() => self.carve(size),
            carved => carved,
        }
    }

    /// Moves up to `count` free blocks of `class`, which has a free list, to `blocks`, without joining smaller ones.
    pub(crate) fn take_many(&mut self, class: usize, count: usize, blocks: &mut Vec<B>) {
        let bin = &mut self.bins[class];
        blocks.extend(bin.drain(bin.len().saturating_sub(count)..));
        let (size, end) = (class::size(class), blocks.len() + count);
        let Some(mut rest) = blocks.is_empty().then(|| self.carve(size * count)).flatten() else { return };
        while blocks.len() + 1 < end {
            let (block, others) = rest.split(size);
            blocks.push(block);
            rest = others;
        }
        blocks.push(rest);
    }

    /// Takes a block back, of any length.
    pub(crate) fn put(&mut self, block: B) {
        match class::of_block(block.capacity()) {
            Some(class) if class < BINNED => self.bins[class].push(block),
            _ => self.insert(block),
        }
    }

    /// Bytes by which the heap could grow after [`Heap::release`], apart from blocks in the free lists.
    pub(crate) fn room(&self) -> usize {
        let is_whole =
            |(place, len): &(&Place, &usize)| self.extents.get(place).is_some_and(|free| free.capacity() == **len);
        self.growth() + self.arenas.iter().filter(is_whole).map(|(_, len)| *len).sum::<usize>()
    }

    /// Removes arenas that are free as a whole until the heap may grow by `len` bytes, if that is possible.
    pub(crate) fn release(&mut self, len: usize) -> Vec<B> {
        self.coalesce();
        let mut released = Vec::new();
        if self.room() < len {
            return released;
        }
        let is_whole =
            |(place, len): &(&Place, &usize)| self.extents.get(place).is_some_and(|free| free.capacity() == **len);
        let whole: Vec<Place> = self.arenas.iter().filter(is_whole).map(|(place, _)| *place).collect();
        for place in whole {
            if self.growth() >= len {
                break;
            }
            released.extend(self.remove(place));
            self.capacity -= self.arenas.remove(&place).unwrap_or(0);
        }
        released
    }

    /// Whether all bytes of all arenas are free. Joins all blocks.
    #[cfg(test)]
    pub(crate) fn is_whole(&mut self) -> bool {
        self.coalesce();
        let extents: BTreeMap<Place, usize> =
            self.extents.iter().map(|(place, extent)| (*place, extent.capacity())).collect();
        extents == self.arenas
    }

    /// Moves all blocks from the free lists to the extents. Returns whether there were any.
    fn coalesce(&mut self) -> bool {
        let mut any = false;
        for class in 0..BINNED {
            for block in std::mem::take(&mut self.bins[class]) {
                any = true;
                self.insert(block);
            }
        }
        any
    }

    /// Splits `len` bytes from the shortest extent that has them.
    fn carve(&mut self, len: usize) -> Option<B> {
        let (_, place) = *self.lengths.range((len, (0, 0))..).next()?;
        let extent = self.remove(place)?;
        if extent.capacity() == len {
            return Some(extent);
        }
        let (block, rest) = extent.split(len);
        self.insert(rest);
        Some(block)
    }

    fn remove(&mut self, place: Place) -> Option<B> {
        let extent = self.extents.remove(&place)?;
        self.lengths.remove(&(extent.capacity(), place));
        Some(extent)
    }

    /// Adds a free extent and joins it with adjacent ones.
    fn insert(&mut self, block: B) {
        let (arena, start) = block.place();
        let end = start + block.capacity();
        let mut extent = block;
        let before = self.extents.range(..(arena, start)).next_back();
        let before = before.filter(|(place, other)| place.0 == arena && place.1 + other.capacity() == start);
        let before = before.map(|(place, _)| *place).and_then(|place| self.remove(place));
        if let Some(before) = before {
            extent = before.join(extent);
        }
        if let Some(after) = self.remove((arena, end)) {
            extent = extent.join(after);
        }
        self.lengths.insert((extent.capacity(), extent.place()));
        self.extents.insert(extent.place(), extent);
    }
}
