//! Pools of registered memory.

#![deny(missing_docs)]
#![cfg_attr(not(test), expect(dead_code, reason = "the allocator precedes its joint with rdma-safe"))]

mod allocator;
mod block;
mod cache;
mod class;
mod heap;
mod lock;
mod registrations;
mod sync;
#[cfg(test)]
mod tests;
mod waiter;

#[cfg(feature = "bytes")]
pub use registrations::{Payload, PayloadError};
pub use registrations::{RegisteredMemory, RegistrationCache, RegistrationError, RegistrationStatistics, SharedMemory};

/// Bytes of the block that an allocation of `len` bytes takes, or `None` above 64 MiB.
///
/// There are four block sizes to each power of two, from 64 B, so an allocation above 64 B wastes at most a quarter of its length.
///
/// ```
/// assert_eq!(rdma_pool::block_size(1), Some(64));
/// assert_eq!(rdma_pool::block_size(4096), Some(4096));
/// assert_eq!(rdma_pool::block_size(4097), Some(5120));
/// assert_eq!(rdma_pool::block_size(65 << 20), None);
/// ```
#[must_use]
pub fn block_size(len: usize) -> Option<usize> {
    class::of(len).map(class::size)
}
