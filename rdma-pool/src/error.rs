//! Errors of a pool.

use crate::Budget;

/// Why a pool gives no buffer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// All memory that the budget may use is in use, or earlier callers wait for it. Try again when buffers have been dropped.
    ///
    /// Once the pool is built, a limit of locked memory (`ulimit -l`) counts as this.
    #[error("no block of {len} bytes is free for {budget}: drop buffers, or wait with get or get_async")]
    Exhausted {
        /// The budget.
        budget: Budget,
        /// The requested length in bytes.
        len: usize,
    },
    /// The budget never has a buffer of this length.
    #[error(
        "{budget} can get at most {largest} bytes of the pool at once, fewer than {len}: raise PoolBuilder::share or common, which \
         give buffers of at most 64 MiB"
    )]
    TooLong {
        /// The budget.
        budget: Budget,
        /// The requested length in bytes.
        len: usize,
        /// Length of the longest buffer of the budget in bytes.
        largest: usize,
    },
    /// The pool was built in the parent of this process, see [After a fork](crate#after-a-fork).
    #[error(
        "the pool was built before this process was forked, and belongs to the parent: open the device and build a pool in this \
         process"
    )]
    Inherited,
    /// An arena could not be registered.
    #[error("cannot register an arena of the pool: {0}")]
    Register(#[source] rdma_safe::Error),
}

/// The result of a pool's functions.
pub type Result<T> = std::result::Result<T, Error>;
