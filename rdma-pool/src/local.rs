//! The caches of this thread, one for each pool that it uses.
//!
//! The only thread of a forked child has inherited them. A handler of `fork(3)` makes it forget the current one, so gets and drops
//! take the slow path, which recognises inherited pools. The fast path checks nothing.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::ptr::null;
use std::sync::{Arc, OnceLock, Weak};

use rdma_safe::mr::{Backing, Returned};
use rdma_safe::{Buffer, Errno};

use crate::block::Taken;
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
    /// Gives back all caches when the thread ends, except those that a forked child has inherited.
    fn drop(&mut self) {
        CURRENT.set((0, null()));
        for entry in self.0.drain(..) {
            match entry.shared.upgrade() {
                // The pool keeps the cache.
                Some(shared) if shared.allocator.is_inherited() => {}
                Some(shared) => shared.allocator.retire(&entry.cache),
                None => {}
            }
        }
    }
}

/// Makes forked children forget the current cache.
///
/// # Errors
/// `ENOMEM` if the C library cannot store the handler.
pub(crate) fn watch_forks() -> Result<(), Errno> {
    static WATCHED: OnceLock<c_int> = OnceLock::new();
    let watched = *WATCHED.get_or_init(|| {
        if cfg!(miri) {
            // Miri neither forks nor has this function.
            return 0;
        }
        // SAFETY: the handler sets two words of the calling thread, which needs no allocation. It can run in the child of a process
        // with several threads.
        unsafe { libc::pthread_atfork(None, None, Some(forget)) }
    });
    if watched == 0 { Ok(()) } else { Err(Errno(watched)) }
}

extern "C" fn forget() {
    CURRENT.set((0, null()));
}

/// Calls `access` with this thread's cache, or with none while the thread ends. `access` may run code of wakers.
pub(crate) fn with_cache<R>(shared: &Shared, access: impl FnOnce(Option<&Cache>) -> R) -> R {
    access(select(shared).as_deref())
}

/// Takes a buffer of `class` from this thread's cache of the pool with this number, if that is the current pool of this thread.
#[inline(always)]
pub(crate) fn take(pool: usize, budget: usize, class: usize) -> Option<Taken<Buffer>> {
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
