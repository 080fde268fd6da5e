//! Registrations of memory that the program owns and shares.

#[cfg(feature = "bytes")]
mod handles;
mod lru;
mod memory;

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::ops::{Deref, Range, RangeBounds};
use std::sync::Arc;

use rdma_safe::{Access, Errno, Error, ProtectionDomain, RawMemoryRegion, Sge};

use lru::{Failed, Lru};

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
/// [`RegisteredMemory`] of it exists, and is then never evicted. When the kernel refuses to lock more memory (`ulimit -l`), the
/// cache evicts one registration after the other until it succeeds.
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
/// assert_eq!(first.lkey(), second.lkey());
/// assert_eq!(second.sge(..100).unwrap().len, 100); // for the raw API
/// assert_eq!(cache.statistics().hits, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RegistrationCache(Arc<Inner>);

struct Inner {
    pd: ProtectionDomain,
    regions: Lru<Key, Region>,
}

/// Identity of the memory of an `Arc` that the entry keeps alive: its allocation, and the start and length of its bytes.
///
/// The start and the length are the same for all uses of an allocation, unless `Arc::from_raw` has changed the type.
type Key = (usize, usize, usize);

impl RegistrationCache {
    /// Creates a cache of registrations with `pd` of at most `limit` bytes.
    ///
    /// The limit also counts registrations in use. `ulimit -l` limits those of all processes of the user together.
    #[must_use]
    pub fn new(pd: &ProtectionDomain, limit: usize) -> Self {
        RegistrationCache(Arc::new(Inner { pd: pd.clone(), regions: Lru::new(limit) }))
    }

    /// Registers the bytes of `owner`, unless they are registered already.
    ///
    /// The cache keeps a clone of `owner`, so `Arc::into_inner` and `Arc::get_mut` return `None` until [`RegistrationCache::evict`]
    /// or until the bytes are needed for others.
    ///
    /// # Errors
    /// [`RegistrationError::Full`] while too much is in use: wait for completions, drop their [`RegisteredMemory`], and try again.
    /// [`RegistrationError::Register`] with the reason of the kernel, or with [`Error::EmptyRegion`] for no bytes.
    pub fn register<T: SharedMemory + ?Sized>(&self, owner: &Arc<T>) -> Result<RegisteredMemory, RegistrationError> {
        let inner = &*self.0;
        let bytes = owner.bytes();
        let register = || Region::new(&inner.pd, Arc::clone(owner));
        let region = inner.regions.get(key(owner), bytes.len(), register, is_limit);
        region.map(RegisteredMemory).map_err(|failed| inner.error(failed, bytes.len()))
    }

    /// Deregisters the bytes of `owner` and drops the clone of it, unless they are in use. Returns whether it did.
    pub fn evict<T: SharedMemory + ?Sized>(&self, owner: &Arc<T>) -> bool {
        self.0.regions.evict(&key(owner))
    }

    /// Deregisters all memory that is not in use. Returns its bytes.
    pub fn clear(&self) -> usize {
        self.0.regions.clear()
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

    /// Counts since the cache was created, and its present size.
    #[must_use]
    pub fn statistics(&self) -> RegistrationStatistics {
        let (counts, usage) = (self.0.regions.counts(), self.0.regions.usage());
        RegistrationStatistics {
            hits: counts.hits,
            misses: counts.misses,
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
    fn error(&self, failed: Failed<Error>, len: usize) -> RegistrationError {
        match failed {
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

/// A registration of the bytes of an owner.
struct Region {
    /// `None` once it is being deregistered.
    region: Option<RawMemoryRegion>,
    /// Dropped after the region, and leaked if the device may still read the bytes.
    owner: ManuallyDrop<Box<dyn Send + Sync>>,
    bytes: *const [u8],
    /// The part of the limit of a region that is not in the cache. Given back last.
    #[cfg(feature = "bytes")]
    lease: Option<handles::Lease>,
}

// SAFETY: the bytes belong to the owner, which may be used and dropped by any thread, and are only read.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn new<T: SharedMemory + ?Sized>(pd: &ProtectionDomain, owner: Arc<T>) -> rdma_safe::Result<Self> {
        let bytes: *const [u8] = owner.bytes();
        // SAFETY: the device only reads the bytes, since `Access::empty()` allows no writes. They stay in place and unchanged while
        // the `Arc` has shared references only (`SharedMemory`), which holds as long as this clone of it exists. It is dropped
        // after the region has been deregistered successfully.
        let region = unsafe { pd.register_raw(bytes.cast::<u8>().cast_mut(), bytes.len(), Access::empty())? };
        Ok(Region {
            region: Some(region),
            owner: ManuallyDrop::new(Box::new(owner)),
            bytes,
            #[cfg(feature = "bytes")]
            lease: None,
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let deregistered = self.region.take().map(RawMemoryRegion::deregister);
        if matches!(deregistered, Some(Ok(()))) {
            // SAFETY: dropped once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.owner) };
        }
    }
}

/// Shared memory that is registered. Dropping the last clone returns it to its cache.
///
/// For the raw API, which posts memory by address and key: keep a clone until the completion of the work.
#[derive(Clone)]
#[must_use = "the registration may be evicted once this is dropped"]
pub struct RegisteredMemory(Arc<Region>);

impl RegisteredMemory {
    /// Local key.
    #[must_use]
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.region().lkey()
    }

    /// The bytes in `range` for a work request, or `None` if they are out of bounds or exceed the 32 bits of a length.
    #[must_use]
    pub fn sge(&self, range: impl RangeBounds<usize>) -> Option<Sge> {
        let range = self.range(range)?;
        let address = self.region().address() + range.start as u64;
        Some(Sge { address, len: u32::try_from(range.len()).ok()?, lkey: self.lkey() })
    }

    fn region(&self) -> &RawMemoryRegion {
        self.0.region.as_ref().expect("only `drop` takes it")
    }

    fn range(&self, range: impl RangeBounds<usize>) -> Option<Range<usize>> {
        let start = match range.start_bound() {
            Included(start) => *start,
            Excluded(before) => before.checked_add(1)?,
            Unbounded => 0,
        };
        let end = match range.end_bound() {
            Included(last) => last.checked_add(1)?,
            Excluded(end) => *end,
            Unbounded => self.len(),
        };
        (start <= end && end <= self.len()).then_some(start..end)
    }
}

impl Deref for RegisteredMemory {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the owner returned this slice from `SharedMemory::bytes`. It exists as long as the region, and has shared
        // references only, so the bytes stay in place and unchanged. The device does not write to them either.
        unsafe { &*self.0.bytes }
    }
}

impl AsRef<[u8]> for RegisteredMemory {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for RegisteredMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredMemory").field("len", &self.len()).field("lkey", &self.lkey()).finish_non_exhaustive()
    }
}

/// Why memory was not registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// The registrations in use leave too few bytes of the limit. Completions free some of them, unless the memory is larger than
    /// the limit.
    #[error("{len} bytes exceed the limit of {limit} bytes of the registration cache, of which {in_use} are in use")]
    Full {
        /// Length of the memory in bytes.
        len: usize,
        /// Bytes of the registrations in use.
        in_use: usize,
        /// Limit of the cache in bytes.
        limit: usize,
    },
    /// The kernel or the device refused.
    #[error(transparent)]
    Register(Error),
}

/// Counts of a [`RegistrationCache`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RegistrationStatistics {
    /// Uses that found a registration.
    pub hits: u64,
    /// Uses that found none.
    pub misses: u64,
    /// Registrations removed for others, by [`RegistrationCache::evict`], or by [`RegistrationCache::clear`].
    pub evictions: u64,
    /// Cached registrations.
    pub regions: usize,
    /// Registered bytes, and those being registered.
    pub bytes: usize,
    /// Registered bytes that cannot be evicted now.
    pub bytes_in_use: usize,
}
