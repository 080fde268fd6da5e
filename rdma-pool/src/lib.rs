//! Pools of registered memory.
//!
//! A [`Pool`] registers arenas once and hands out their parts as [`rdma_safe::Buffer`]s. A buffer returns to its pool when it is
//! dropped, on any thread, whether by the program, by a queue pair that is destroyed, or by anything else that owns it.
//!
//! ```
//! use rdma_pool::{Budget, Error, Pool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # rdma_safe::soft::install()?;
//! let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
//! let pool = Pool::builder(&pd)
//!     .share(Budget::Receives, 64 << 10) // always there for receives, whatever the sends do
//!     .common(128 << 10)
//!     .build()?;
//!
//! let mut message = pool.try_get(Budget::Sends, 5)?;
//! message.copy_from_slice(b"hello");
//! assert_eq!((message.len(), message.capacity()), (5, 64));
//!
//! // Sends that use up what they may use…
//! let sends: Vec<_> = std::iter::from_fn(|| pool.try_get(Budget::Sends, 4096).ok()).collect();
//! assert!(matches!(pool.try_get(Budget::Sends, 4096), Err(Error::Exhausted { .. })));
//! // … leave the receives their share.
//! let receive = pool.try_get(Budget::Receives, 4096)?;
//!
//! drop((message, sends, receive)); // back to the pool
//! assert_eq!(pool.statistics().used(), 0);
//! # Ok(())
//! # }
//! ```
//!
//! # Back-pressure
//!
//! | | when the budget is exhausted |
//! |---|---|
//! | [`Pool::try_get`] | fails with [`Error::Exhausted`] |
//! | [`Pool::get`] | waits, at most for a timeout |
//! | [`Pool::get_async`] | is pending |
//!
//! Callers that wait in one [`Budget`] are served in order of arrival.
//!
//! # Caches
//!
//! Each thread keeps some free blocks of up to 64 KiB for itself: at most 64 blocks or 64 KiB of one size and budget.
//! They go back when the thread ends. When a budget is exhausted, the caches of all threads are emptied first, so a block
//! in the cache of an idle thread reaches a caller that needs it.
//!
//! # After a fork
//!
//! A child of `fork(3)` may drop the pools, buffers and registration caches that it has inherited. It waits for no lock, and
//! nothing of the parent's is deregistered or freed. Gets fail with [`Error::Inherited`]: the child opens the device and builds a
//! pool of its own. [`rdma_safe::fork`] says which children are recognised.

#![deny(missing_docs)]

mod allocator;
mod arena;
mod block;
mod cache;
mod class;
mod error;
mod heap;
mod local;
mod lock;
mod pool;
mod registrations;
mod statistics;
mod sync;
#[cfg(test)]
mod tests;
mod waiter;

pub use error::{Error, Result};
pub use pool::{Budget, Get, Pool, PoolBuilder};
#[cfg(feature = "bytes")]
pub use registrations::{Payload, PayloadError};
pub use registrations::{RegistrationCache, RegistrationError, RegistrationStatistics, SharedMemory};
pub use statistics::{Memory, Statistics};

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
