//! How much of what the device takes.

/// Of a message: so that its packets can be told apart by their numbers at the smallest MTU.
pub(crate) const MAX_MESSAGE: u32 = 1 << 30;

/// Work requests of a queue, completions of a queue, and parts and inline bytes of a work request.
pub(crate) const MAX_WR: u32 = 1 << 15;
pub(crate) const MAX_CQE: u32 = 1 << 22;
pub(crate) const MAX_SGE: u32 = 32;
pub(crate) const MAX_INLINE: u32 = 1024;
/// Reads and atomics of a queue pair that a peer has under way.
pub(crate) const MAX_READS: u8 = 128;
/// Of objects of a kind.
pub(crate) const MANY: i32 = 1 << 16;
