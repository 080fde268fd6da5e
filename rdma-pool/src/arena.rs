//! Registered arenas, and buffers as their blocks.

use std::ptr::NonNull;
use std::sync::Weak;

use rdma_safe::mr::{Backing, HugePages, Pages, Returned};
use rdma_safe::{Buffer, Errno, Error, ProtectionDomain};

use crate::block::{Block, Freed, Place, Source};
use crate::cache::put_cached;
use crate::local::{self, with_cache};
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
    /// [`Shared::number`].
    pub(crate) number: usize,
}

/// Memory whose buffers return to a heap of a pool, as long as the pool exists.
struct Arena<M> {
    memory: M,
    pool: Weak<Shared>,
    /// The number of the pool.
    number: usize,
    heap: usize,
}

// SAFETY: `memory` keeps the contract, and this type, which never replaces it, only forwards to it.
unsafe impl<M: Backing + Sync> Backing for Arena<M> {
    fn address(&self) -> NonNull<u8> {
        self.memory.address()
    }

    fn len(&self) -> usize {
        self.memory.len()
    }

    fn take_back(buffer: Returned<Self>) {
        let Arena { number, heap, .. } = *buffer.memory();
        if let Some(buffer) = local::put(number, heap, buffer) {
            return_to_allocator(buffer);
        }
    }
}

/// Returns a buffer that the current cache of this thread does not take. Frees it if its pool no longer exists, or belongs to the
/// parent of this process.
#[cold]
#[inline(never)]
fn return_to_allocator<M: Backing + Sync>(buffer: Returned<Arena<M>>) {
    let Arena { pool, heap, .. } = buffer.memory();
    let Some(shared) = pool.upgrade().filter(|shared| !shared.allocator.is_inherited()) else { return };
    let heap = *heap;
    with_cache(&shared, |cache| {
        // The thread may have used another pool before.
        let rest = match cache {
            Some(cache) => put_cached(cache, heap, buffer),
            None => Some(buffer),
        };
        if let Some(buffer) = rest {
            shared.allocator.put(cache, heap, buffer.into());
        }
    });
}

impl Arenas {
    fn register(&self, memory: impl Backing + Sync, heap: usize) -> Result<Buffer, Error> {
        self.pd.register(Arena { memory, pool: Weak::clone(&self.pool), number: self.number, heap })
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

    #[inline(always)]
    fn is_inherited(&self) -> bool {
        self.pd.context().is_inherited()
    }

    fn is_limit(error: &Error) -> bool {
        matches!(error, Error::RegisterMemory { errno: Errno(libc::ENOMEM), .. } | Error::Allocate { .. })
    }
}

impl<M: Backing> Freed<Buffer> for Returned<M> {
    #[inline(always)]
    fn capacity(&self) -> usize {
        self.capacity()
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
        // The arena has one of the types that `Arenas` registers. In a `Returned` it is not taken back.
        if let Err(buffer) = Returned::<Arena<Pages>>::try_from(self) {
            drop(Returned::<Arena<HugePages>>::try_from(buffer));
        }
    }
}
