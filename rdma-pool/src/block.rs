//! What the allocator manages: parts of arenas, and where arenas come from.

/// The start of a block: its arena, and its address.
pub(crate) type Place = (usize, usize);

/// A part of an arena with one owner.
pub(crate) trait Block: Send + Sized {
    /// The start of the block. Two blocks that exist at the same time have different places.
    fn place(&self) -> Place;

    /// Length in bytes.
    fn capacity(&self) -> usize;

    /// Splits the block at `at` bytes, which is neither zero nor its whole length.
    fn split(self, at: usize) -> (Self, Self);

    /// Joins the block with `next`, which starts where this block ends, in the same arena.
    fn join(self, next: Self) -> Self;

    /// Frees the block, which is a whole arena.
    fn free(self);
}

/// A block for a user, and the heap that it returns to.
#[derive(Debug)]
pub(crate) struct Taken<B> {
    pub(crate) block: B,
    pub(crate) heap: usize,
}

/// A block that its user has dropped.
pub(crate) trait Freed<B>: Into<B> {
    /// Length in bytes.
    fn capacity(&self) -> usize;
}

impl<B: Block> Freed<B> for B {
    #[inline(always)]
    fn capacity(&self) -> usize {
        Block::capacity(self)
    }
}

/// Makes arenas.
pub(crate) trait Source<B> {
    /// Why there is no arena.
    type Error;

    /// Makes an arena of `len` bytes for a heap.
    fn arena(&self, len: usize, heap: usize) -> Result<B, Self::Error>;

    /// Whether this process was forked after the source was made. The arenas then belong to the parent.
    fn is_inherited(&self) -> bool;

    /// Whether a shorter arena may succeed after this error.
    fn is_limit(error: &Self::Error) -> bool;
}
