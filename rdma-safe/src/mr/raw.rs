//! Registered memory that the caller keeps.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::ibv_mr;

use super::{Registration, RemoteMemory};
use crate::{Access, Error, ProtectionDomain, Result};

/// A registration over memory that the caller keeps, for the raw door; deregistered on drop.
///
/// Made by [`ProtectionDomain::register_raw`], [`ProtectionDomain::register_raw_at`], [`ProtectionDomain::register_implicit`],
/// [`ProtectionDomain::register_dmabuf`] and, of memory of the provider,
/// [`RegistrationBuilder::register_part`](crate::RegistrationBuilder::register_part).
pub struct RawMemoryRegion {
    /// Shared with the memory windows that have been bound to it.
    pub(super) inner: Arc<Registration>,
    pub(super) address: u64,
    pub(super) len: usize,
}

impl RawMemoryRegion {
    /// Adopts a region that other code has registered, for instance by calls of the vendor's. It is deregistered on drop.
    ///
    /// # Safety
    /// `raw` must be a region of `pd`, and be this one's alone to deregister; memory windows that other code has bound to it must
    /// be gone before that. For its memory the contract is that of [`ProtectionDomain::register_raw`]. Its
    /// address is what the C object says, also where the device names the bytes otherwise.
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, raw: NonNull<ibv_mr>) -> RawMemoryRegion {
        // SAFETY: the region is valid, says the caller.
        let (address, len) = unsafe { ((*raw.as_ptr()).addr, (*raw.as_ptr()).length) };
        // Its access is not known: whether windows can be bound to it is left to the device.
        // SAFETY: the caller's contract is the same.
        RawMemoryRegion::new(unsafe { Registration::from_raw(raw, pd, Access::all()) }, address.cast(), len)
    }

    /// Gives it up: it is the caller's to deregister, and does not keep its domain any more. Its DMA handle and the memory of a
    /// provider that it keeps stay until the process ends.
    ///
    /// # Errors
    /// [`Error::InUse`] while there are memory windows that were bound to it: it is deregistered when the last of them is dropped.
    pub fn into_raw(self) -> Result<NonNull<ibv_mr>> {
        match Arc::into_inner(self.inner) {
            Some(mut inner) => Ok(inner.disown()),
            None => Err(Error::InUse { object: "memory region", by: "memory windows that were bound to it" }),
        }
    }

    pub(super) fn new(inner: Registration, address: *mut u8, len: usize) -> Self {
        RawMemoryRegion { inner: Arc::new(inner), address: address.expose_provenance() as u64, len }
    }

    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.inner
    }

    /// Local key.
    #[must_use]
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.inner.lkey
    }

    /// Remote key; meaningful only with a remote right.
    #[must_use]
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.inner.rkey
    }

    /// What work requests and peers name the first byte by: its address, unless it was registered under another.
    #[must_use]
    #[inline]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// What a peer needs to reach it, as far as it was registered for that.
    #[must_use]
    #[inline]
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { address: self.address, len: self.len as u64, rkey: self.rkey() }
    }

    /// Length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always `false`: a region has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Deregisters: `ibv_dereg_mr(3)`. Dropping does the same and tells nobody.
    ///
    /// # Errors
    /// [`Error::InUse`] while there are memory windows that were bound to it: it is deregistered when the last of them is dropped.
    /// [`Error::Verb`]: the device may still use the memory, which then has to stay as it is until the process ends.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn deregister(self) -> Result<()> {
        let device = self.pd().context().device_name().to_owned();
        match Arc::into_inner(self.inner) {
            Some(mut inner) => inner.release().map_err(|errno| Error::Verb { verb: "ibv_dereg_mr", device, errno }),
            None => Err(Error::InUse { object: "memory region", by: "memory windows that were bound to it" }),
        }
    }

    /// The domain it is registered in.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.inner.pd()
    }

    /// The kernel's handle, by which it can be imported: [`ProtectionDomain::import_mr`].
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.inner.handle()
    }

    /// The C object, valid while this region is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_mr {
        self.inner.as_raw()
    }
}

impl fmt::Debug for RawMemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawMemoryRegion")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("lkey", &format_args!("{:#x}", self.lkey()))
            .field("rkey", &format_args!("{:#x}", self.rkey()))
            .finish()
    }
}
