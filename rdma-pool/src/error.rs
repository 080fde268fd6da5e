//! Errors of a pool.

use crate::Budget;

/// Why a pool gives no buffer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// All memory that the budget may use is in use, or earlier callers wait for it. Try again when buffers have been dropped.
    #[error("the pool has no {len} bytes left for {budget}")]
    Exhausted {
        /// The budget.
        budget: Budget,
        /// The requested length in bytes.
        len: usize,
    },
    /// The budget never has a buffer of this length.
    #[error("a buffer of {len} bytes for {budget} exceeds {largest} bytes, the longest that the pool can give")]
    TooLong {
        /// The budget.
        budget: Budget,
        /// The requested length in bytes.
        len: usize,
        /// The longest block in bytes.
        largest: usize,
    },
    /// An arena could not be registered, for another reason than a limit of memory.
    #[error("cannot register an arena of the pool")]
    Register(#[source] rdma_safe::Error),
}

/// The result of a pool's functions.
pub type Result<T> = std::result::Result<T, Error>;
