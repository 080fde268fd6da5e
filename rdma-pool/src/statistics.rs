//! Statistics of a pool.

use crate::Budget;
use crate::allocator::{Counts, Usage};
use crate::cache::{COMMON, HEAPS};

/// Memory of a share, or of the common rest, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// Blocks in use, with what their rounding wastes.
    pub used: usize,
    /// Registered memory.
    pub registered: usize,
    /// Limit of the registered memory.
    pub limit: usize,
    /// Number of registrations.
    pub arenas: usize,
}

/// Bytes of each heap of a pool, and counts of events since it was built. Made by [`Pool::statistics`](crate::Pool::statistics).
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Statistics {
    shares: [Memory; HEAPS],
    /// Callers that wait now.
    pub waiting: usize,
    /// Calls of [`Pool::try_get`](crate::Pool::try_get) that failed because of an exhausted budget.
    pub refused: u64,
    /// Calls that had to wait.
    pub waited: u64,
    /// Arenas registered for the common memory.
    pub grown: u64,
    /// Arenas shorter than the step because of the limit of locked memory.
    pub shortened: u64,
    /// Times that the caches of all threads were emptied because memory was short.
    pub reclaimed: u64,
}

impl Statistics {
    pub(crate) fn new((heaps, counts, waiting): ([Usage; HEAPS], Counts, usize)) -> Self {
        let shares =
            heaps.map(|Usage { used, capacity, limit, arenas }| Memory { used, registered: capacity, limit, arenas });
        let Counts { refused, waited, grown, shortened, reclaimed } = counts;
        Statistics { shares, waiting, refused, waited, grown, shortened, reclaimed }
    }

    /// The share of a budget.
    #[must_use]
    pub fn share(&self, budget: Budget) -> Memory {
        self.shares[budget as usize]
    }

    /// The memory that all budgets use beyond their shares.
    #[must_use]
    pub fn common(&self) -> Memory {
        self.shares[COMMON]
    }

    /// Bytes of all blocks in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.shares.iter().map(|share| share.used).sum()
    }
}
