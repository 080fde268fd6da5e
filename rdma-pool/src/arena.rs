//! Registered arenas, and buffers as their blocks.

use std::ptr::NonNull;
use std::sync::Weak;

use rdma_safe::mr::{Backing, Home, HugePages, Pages};
use rdma_safe::{Buffer, Errno, Error, ProtectionDomain};

use crate::block::{Block, Place, Source};
use crate::pool::Shared;

/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Registers arenas in a domain.
#[derive(Debug)]
pub(crate) struct Arenas {
    pub(crate) pd: ProtectionDomain,
    /// Whether to try huge pages first.
    pub(crate) huge_pages: bool,
    pub(crate) pool: Weak<Shared>,
}

/// Memory whose buffers return to a heap of a pool, as long as the pool exists.
struct Arena<M> {
    memory: M,
    pool: Weak<Shared>,
    heap: usize,
}

// SAFETY: `memory` keeps the contract, and this type, which never replaces it, only forwards to it.
unsafe impl<M: Backing> Backing for Arena<M> {
    fn address(&self) -> NonNull<u8> {
        self.memory.address()
    }

    fn len(&self) -> usize {
        self.memory.len()
    }

    #[inline]
    fn home(&self) -> Option<Home> {
        Some(Home { owner: self.pool.upgrade()?, tag: self.heap })
    }
}

impl Arenas {
    fn register(&self, memory: impl Backing, heap: usize) -> Result<Buffer, Error> {
        self.pd.register(Arena { memory, pool: Weak::clone(&self.pool), heap })
    }
}

impl Source<Buffer> for Arenas {
    type Error = Error;

    fn arena(&self, len: usize, heap: usize) -> Result<Buffer, Error> {
        if self.huge_pages && len % HUGE_PAGE == 0 {
            // A huge page may be missing, or more of them may be locked than the limit permits.
            if let Ok(arena) = HugePages::new(len).and_then(|pages| self.register(pages, heap)) {
                return Ok(arena);
            }
        }
        self.register(Pages::new(len)?, heap)
    }

    fn is_limit(error: &Error) -> bool {
        matches!(error, Error::RegisterMemory { errno: Errno(libc::ENOMEM), .. } | Error::Allocate { .. })
    }
}

impl Block for Buffer {
    #[inline]
    fn place(&self) -> Place {
        (self.as_raw().addr(), self.address() as usize)
    }

    #[inline(always)]
    fn capacity(&self) -> usize {
        self.capacity()
    }

    fn split(self, at: usize) -> (Self, Self) {
        self.into_split(at).expect("the allocator splits within the block")
    }

    fn join(self, next: Self) -> Self {
        self.join(next).expect("the allocator joins adjacent blocks of one arena")
    }

    fn free(self) {
        self.free();
    }
}
