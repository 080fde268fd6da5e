//! The caches of this thread, one for each pool that it uses.

use std::cell::{Cell, RefCell};
use std::ptr::null;
use std::sync::{Arc, Weak};

use rdma_safe::Buffer;
use rdma_safe::mr::{Backing, Returned};

use crate::cache::{self, put_cached, take_cached};
use crate::pool::Shared;

type Cache = cache::Cache<Buffer>;

thread_local! {
    /// The number of the pool that this thread used last, and its cache. Without a destructor, so that access is cheap.
    static CURRENT: Cell<(usize, *const Cache)> = const { Cell::new((0, null())) };
    /// Owners of the caches.
    static OWNED: RefCell<Owned> = const { RefCell::new(Owned(Vec::new())) };
}

struct Owned(Vec<Entry>);

struct Entry {
    pool: usize,
    cache: Arc<Cache>,
    shared: Weak<Shared>,
}

impl Drop for Owned {
    /// Gives back all caches when the thread ends.
    fn drop(&mut self) {
        CURRENT.set((0, null()));
        for entry in self.0.drain(..) {
            if let Some(shared) = entry.shared.upgrade() {
                shared.allocator.retire(&entry.cache);
            }
        }
    }
}

/// Calls `access` with this thread's cache, or with none while the thread ends. `access` may run code of wakers.
pub(crate) fn with_cache<R>(shared: &Shared, access: impl FnOnce(Option<&Cache>) -> R) -> R {
    access(select(shared).as_deref())
}

/// Takes a buffer of `class` from this thread's cache of the pool with this number, if that is the current pool of this thread.
#[inline(always)]
pub(crate) fn take(pool: usize, budget: usize, class: usize) -> Option<(Buffer, usize)> {
    let (current, cache) = CURRENT.get();
    if current != pool {
        return None;
    }
    // SAFETY: `CURRENT` names a cache only while `OWNED` has it: `select` and the destructor of `OWNED` change both. Neither runs
    // during this call, which runs no code of the user.
    take_cached(unsafe { &*cache }, budget, class)
}

/// Puts a buffer into this thread's cache of the pool with this number. Returns it if that is not the current pool of this thread,
/// or the cache does not take it.
#[inline(always)]
pub(crate) fn put<M: Backing>(pool: usize, heap: usize, buffer: Returned<M>) -> Option<Returned<M>> {
    let (current, cache) = CURRENT.get();
    if current != pool {
        return Some(buffer);
    }
    // SAFETY: as in `take`, whether or not the pool exists.
    put_cached(unsafe { &*cache }, heap, buffer)
}

/// Makes the pool the current one of this thread.
#[cold]
#[inline(never)]
fn select(shared: &Shared) -> Option<Arc<Cache>> {
    OWNED
        .try_with(|owned| {
            let Owned(entries) = &mut *owned.try_borrow_mut().ok()?;
            if let Some(entry) = entries.iter().find(|entry| entry.pool == shared.number) {
                CURRENT.set((entry.pool, &raw const *entry.cache));
                return Some(Arc::clone(&entry.cache));
            }
            // Pools that no longer exist have emptied their caches.
            CURRENT.set((0, null()));
            entries.retain(|entry| entry.shared.strong_count() > 0);
            let cache = shared.allocator.cache();
            entries.push(Entry { pool: shared.number, cache: Arc::clone(&cache), shared: Weak::clone(&shared.this) });
            CURRENT.set((shared.number, &raw const *cache));
            Some(cache)
        })
        .ok()?
}
