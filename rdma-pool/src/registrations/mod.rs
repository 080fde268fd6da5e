//! Registrations of memory that the program owns and shares.

#[cfg(feature = "bytes")]
mod handles;
pub(crate) mod lru;
mod memory;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdma_safe::mr::ReadOnly;
use rdma_safe::{Errno, Error, ProtectionDomain, SharedBuffer};

use lru::{Failed, Lru, References};

#[cfg(feature = "bytes")]
pub use handles::{Payload, PayloadError};
pub use memory::SharedMemory;

/// Registrations of shared memory, kept for its next use.
///
/// Registering memory for each message costs more than most messages. A `RegistrationCache` registers the bytes of an
/// [`Arc`] on their first use, and finds the registration again by the identity of the `Arc`. Addresses are no identity: an
/// allocator reuses them. A cache that is keyed by addresses has to watch each `munmap(2)`, and sends the wrong bytes when it
/// misses one. This cache keeps a clone of the `Arc` instead, so nothing can free or change the bytes while they are registered.
///
/// The cache is limited by bytes. It evicts the least recently used registration first. A registration is in use as long as a
/// [`SharedBuffer`] of it exists, also in flight, and is then never evicted. When the kernel refuses to lock more memory
/// (`ulimit -l`), the cache evicts one registration after the other until it succeeds.
///
/// Clones share one cache. The memory is registered for local reads only, so the device can send it but never write to it.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::sync::Arc;
/// use rdma_pool::RegistrationCache;
///
/// let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
/// let cache = RegistrationCache::new(&pd, 1 << 20);
/// let payload: Arc<[u8]> = vec![7; 10_000].into();
///
/// let first = cache.register(&payload)?;
/// let second = cache.register(&payload)?; // no call of the kernel
/// assert_eq!(first.sge(), second.sge());
/// // `endpoint.send_list((header, first))` sends it without a copy, also to several peers at once.
/// assert_eq!(cache.statistics().hits, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RegistrationCache(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pd: ProtectionDomain,
    pub(crate) regions: Lru<Key, SharedBuffer>,
    /// Calls of `payload` that copied.
    copied: AtomicU64,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.is_inherited() {
            self.regions.leak();
        }
    }
}

/// Identity of the memory of an `Arc` that the entry keeps alive: its allocation, and the start and length of its bytes.
///
/// The start and the length are the same for all uses of an allocation, unless `Arc::from_raw` has changed the type.
pub(crate) type Key = (usize, usize, usize);

impl RegistrationCache {
    /// Creates a cache of registrations with `pd` of at most `limit` bytes.
    ///
    /// The limit also counts registrations in use. `ulimit -l` limits those of all processes of the user together.
    #[must_use]
    pub fn new(pd: &ProtectionDomain, limit: usize) -> Self {
        RegistrationCache(Arc::new(Inner { pd: pd.clone(), regions: Lru::new(limit), copied: AtomicU64::new(0) }))
    }

    /// Registers the bytes of `owner`, unless they are registered already.
    ///
    /// The cache keeps a clone of `owner`, so `Arc::into_inner` and `Arc::get_mut` return `None` until [`RegistrationCache::evict`]
    /// or until the bytes are needed for others.
    ///
    /// # Errors
    /// [`RegistrationError::Full`] while too much is in use: wait for completions, drop their buffers, and try again.
    /// [`RegistrationError::TooLong`] if the bytes exceed the limit.
    /// [`RegistrationError::Register`] with the reason of the kernel, with [`Error::EmptyRegion`] for no bytes, or with
    /// [`Error::Inherited`] in a forked child.
    pub fn register<T: SharedMemory + ?Sized>(&self, owner: &Arc<T>) -> Result<SharedBuffer, RegistrationError> {
        let inner = &*self.0;
        inner.require_own()?;
        let bytes = owner.bytes();
        let register = || inner.pd.share(Owner(Arc::clone(owner))).map_err(Error::from);
        let region = inner.regions.get(key(owner), bytes.len(), register, is_limit);
        region.map_err(|failed| inner.error(failed, bytes.len()))
    }

    /// Deregisters the bytes of `owner` and drops the clone of it, unless they are in use. Returns whether it did.
    pub fn evict<T: SharedMemory + ?Sized>(&self, owner: &Arc<T>) -> bool {
        !self.0.is_inherited() && self.0.regions.evict(&key(owner))
    }

    /// Deregisters all memory that is not in use. Returns its bytes.
    pub fn clear(&self) -> usize {
        if self.0.is_inherited() { 0 } else { self.0.regions.clear() }
    }

    /// The domain of the registrations.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.0.pd
    }

    /// Maximum of the registered bytes.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.0.regions.limit()
    }

    /// Counts since the cache was created, and its present size. All are zero in a forked child that has inherited the cache.
    #[must_use]
    pub fn statistics(&self) -> RegistrationStatistics {
        if self.0.is_inherited() {
            return RegistrationStatistics::default();
        }
        let (counts, usage) = (self.0.regions.counts(), self.0.regions.usage());
        RegistrationStatistics {
            hits: counts.hits,
            misses: counts.misses,
            uncached: counts.uncached,
            copied: self.0.copied.load(Ordering::Relaxed),
            evictions: counts.evictions,
            regions: usage.entries,
            bytes: usage.bytes,
            bytes_in_use: usage.pinned,
        }
    }
}

impl fmt::Debug for RegistrationCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (limit, statistics) = (self.limit(), self.statistics());
        f.debug_struct("RegistrationCache")
            .field("limit", &limit)
            .field("statistics", &statistics)
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// Whether this process was forked after the device was opened.
    fn is_inherited(&self) -> bool {
        self.pd.context().is_inherited()
    }

    fn require_own(&self) -> Result<(), RegistrationError> {
        if self.is_inherited() {
            let object = self.pd.context().device_name().into();
            return Err(RegistrationError::Register(Error::Inherited { object }));
        }
        Ok(())
    }

    fn error(&self, failed: Failed<Error>, len: usize) -> RegistrationError {
        match failed {
            Failed::Full { .. } if len > self.regions.limit() => {
                RegistrationError::TooLong { len, limit: self.regions.limit() }
            }
            Failed::Full { pinned } => RegistrationError::Full { len, in_use: pinned, limit: self.regions.limit() },
            Failed::Make(error) => RegistrationError::Register(error),
        }
    }
}

fn key<T: SharedMemory + ?Sized>(owner: &Arc<T>) -> Key {
    let bytes = owner.bytes();
    (Arc::as_ptr(owner).cast::<()>().addr(), bytes.as_ptr().addr(), bytes.len())
}

/// Whether the kernel refused to lock more memory.
fn is_limit(error: &Error) -> bool {
    error.errno() == Some(Errno(libc::ENOMEM))
}

/// The clone of an `Arc` that a registration keeps.
struct Owner<T: SharedMemory + ?Sized>(Arc<T>);

// SAFETY: while this clone exists, the value has shared references only, so its bytes stay in place and unchanged (`SharedMemory`).
unsafe impl<T: SharedMemory + ?Sized> ReadOnly for Owner<T> {
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl References for SharedBuffer {
    fn is_only(&self) -> bool {
        self.owners() == 1
    }
}

/// Why memory was not registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// The registrations in use leave too few bytes of the limit. Try again when some of them have been dropped.
    #[error(
        "{len} bytes do not fit into the registration cache now: {in_use} of its {limit} bytes are in use; drop completions, or \
         raise the limit"
    )]
    Full {
        /// Length of the memory in bytes.
        len: usize,
        /// Bytes of the registrations in use.
        in_use: usize,
        /// Limit of the cache in bytes.
        limit: usize,
    },
    /// The memory never fits into the cache.
    #[error(
        "{len} bytes are more than the registration cache may hold: raise the limit of {limit} bytes in RegistrationCache::new, or \
         register the memory by ProtectionDomain::share"
    )]
    TooLong {
        /// Length of the memory in bytes.
        len: usize,
        /// Limit of the cache in bytes.
        limit: usize,
    },
    /// The kernel or the device refused.
    #[error(transparent)]
    Register(Error),
}

/// Counts of a [`RegistrationCache`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct RegistrationStatistics {
    /// Uses that found a registration.
    pub hits: u64,
    /// Uses that found none.
    pub misses: u64,
    /// Uses that registered `Bytes`, which the cache does not keep.
    pub uncached: u64,
    /// Payloads that were copied instead of registered.
    pub copied: u64,
    /// Registrations removed for others, by [`RegistrationCache::evict`], or by [`RegistrationCache::clear`].
    pub evictions: u64,
    /// Cached registrations.
    pub regions: usize,
    /// Registered bytes, and those being registered.
    pub bytes: usize,
    /// Registered bytes that cannot be evicted now.
    pub bytes_in_use: usize,
}
