//! Registered memory that peers can access.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{ExposedPart, Region, RemoteMemory};
use crate::{Error, ProtectionDomain, Result, bounds};

/// Registered bytes that peers can access at any time, as their access rights allow.
///
/// It never provides a slice, because a peer's write would change bytes behind a `&[u8]`. Bytes are copied in and out
/// atomically, by aligned words of eight bytes where possible ([`rdma_sys::dma`]), and 64-bit words can be read and
/// changed atomically. If a peer writes during a copy, the copy may contain old and new words.
///
/// Writing takes `&mut self`, so writes of two threads do not mix. A write by the CPU is atomic with respect to a
/// peer's atomic operations only if the device reports so (`atomic_cap`, `IBV_ATOMIC_GLOB`).
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::time::Duration;
/// use rdma_safe::{Access, Device, Endpoint};
/// use rdma_safe::mr::Pages;
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// // The owner registers memory, and lets the peers of this endpoint write to it.
/// let mut region = pd.expose(Pages::new(4096)?, Access::REMOTE_WRITE)?;
/// let mut owner = Endpoint::builder(&pd).peer_access(Access::REMOTE_WRITE).build()?;
/// // The peer would be on another host.
/// let mut peer = Endpoint::builder(&pd).build()?;
/// owner.connect(&peer.address())?;
/// peer.connect(&owner.address())?;
/// let remote = region.remote(); // can be serialised with the feature `serde`
///
/// let mut buffer = pd.allocate(8)?;
/// buffer.fill_from(&7_u64.to_ne_bytes())?;
/// peer.write(buffer, remote.slice(128, 8)?)?;
/// let _ = peer.wait(Duration::from_secs(60))?.ok()?;
///
/// assert_eq!(region.load_u64(128)?, 7);
/// region.store_u64(128, 8)?;
/// let mut bytes = [0; 8];
/// region.read(128, &mut bytes)?;
/// assert_eq!(u64::from_ne_bytes(bytes), 8);
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
pub struct ExposedRegion {
    pub(super) region: Arc<Region>,
}

impl ExposedRegion {
    pub(super) fn new(region: Arc<Region>) -> Self {
        ExposedRegion { region }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.region.len
    }

    /// Always `false`: a region has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The domain of the region.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.region.registration.pd()
    }

    /// The kernel's handle of the region, for [`ProtectionDomain::import_mr`].
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.region.registration.handle()
    }

    /// The C object, valid while this region exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut rdma_sys::ibv_mr {
        self.region.registration.as_raw()
    }

    /// Address and key for peers. Give them only to peers that may have the access of this region.
    #[must_use]
    #[inline]
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { address: self.region.iova, len: self.region.len as u64, rkey: self.region.registration.rkey }
    }

    /// Copies bytes from `offset` into `target`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn read(&self, offset: usize, target: &mut [u8]) -> Result<()> {
        let source = self.range(offset, target.len())?;
        // SAFETY: `range` has checked that the bytes are within the region, whose memory is initialised and exists
        // while `self` does. In this process only this type and a software device access them, both atomically.
        unsafe { rdma_sys::dma::read(source.as_ptr(), target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    /// Copies `source` to `offset`, in ascending order. The last store has release ordering.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; nothing is copied then.
    pub fn write(&mut self, offset: usize, source: &[u8]) -> Result<()> {
        let target = self.range(offset, source.len())?;
        // SAFETY: as in `read`.
        unsafe { rdma_sys::dma::write(target.as_ptr(), source.as_ptr(), source.len()) };
        Ok(())
    }

    /// Reads the 64-bit word at `offset`, in host byte order, with acquire ordering.
    ///
    /// If the device keeps the order of its writes, later reads see everything that the peer wrote before this word.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`].
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Stores a 64-bit word at `offset`, in host byte order, with release ordering.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`].
    #[inline]
    pub fn store_u64(&mut self, offset: usize, value: u64) -> Result<()> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// `len` bytes from `offset` as the local memory of work: the source of a send or write, or the target of a receive or read.
    ///
    /// The region stays registered while parts of it exist, even if it is dropped. A part may overlap others, since all bytes of
    /// the region may change at any time.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::Unsupported`] for a region of
    /// [`ProtectionDomain::expose_at`] whose address for peers is not its own, because some providers write short messages to that
    /// address with the CPU.
    pub fn part(&self, offset: usize, len: usize) -> Result<ExposedPart> {
        bounds::check(offset, len, self.region.len)?;
        if self.region.iova != self.region.address.as_ptr() as u64 {
            return Err(self.pd().context().unsupported("local work on memory that peers see at another address"));
        }
        Ok(ExposedPart::new(Arc::clone(&self.region), offset, len))
    }

    #[inline]
    fn range(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        bounds::check(offset, len, self.region.len)?;
        // SAFETY: `offset` is at most the length of the region.
        Ok(unsafe { self.region.address.add(offset) })
    }

    #[inline]
    fn word(&self, offset: usize) -> Result<&AtomicU64> {
        let address = self.range(offset, size_of::<u64>())?;
        let align = align_of::<AtomicU64>();
        if address.addr().get() % align != 0 {
            return Err(Error::Misaligned { offset, align });
        }
        // SAFETY: eight initialised, aligned bytes within the region, which exists while `self` does. Threads of this
        // process access them by this function or by `write`, which `&mut self` excludes.
        Ok(unsafe { address.cast::<AtomicU64>().as_ref() })
    }
}

impl fmt::Debug for ExposedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExposedRegion").field("address", &self.region.address).field("len", &self.len()).finish()
    }
}
