//! Registered memory that the caller keeps.

use std::fmt;
use std::ptr::NonNull;

use rdma_sys::ibv_mr;

use super::Registration;
use crate::{Error, ProtectionDomain, Result};

/// A registration over memory that the caller keeps, for the raw door; deregistered on drop.
///
/// Made by [`ProtectionDomain::register_raw`] and [`ProtectionDomain::register_dmabuf`].
pub struct RawMemoryRegion {
    pub(super) inner: Registration,
    pub(super) address: u64,
    pub(super) len: usize,
}

impl RawMemoryRegion {
    /// Adopts a region that other code has registered, for instance by calls of the vendor's. It is deregistered on drop.
    ///
    /// # Safety
    /// `raw` must be a region of `pd`, and be this one's alone to deregister; memory windows that other code has bound to it must be
    /// gone before that. For its memory the contract is that of [`ProtectionDomain::register_raw`].
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, raw: NonNull<ibv_mr>) -> RawMemoryRegion {
        // SAFETY: the region is valid, says the caller.
        let (address, len) = unsafe { ((*raw.as_ptr()).addr, (*raw.as_ptr()).length) };
        // SAFETY: the caller's contract is the same.
        RawMemoryRegion::new(unsafe { Registration::from_raw(raw, pd) }, address.cast(), len)
    }

    /// Gives it up: it is the caller's to deregister, and does not keep its domain any more.
    #[must_use]
    pub fn into_raw(mut self) -> NonNull<ibv_mr> {
        self.inner.disown()
    }

    pub(super) fn new(inner: Registration, address: *mut u8, len: usize) -> Self {
        RawMemoryRegion { inner, address: address.expose_provenance() as u64, len }
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

    /// Address of the first byte.
    #[must_use]
    #[inline]
    pub fn address(&self) -> u64 {
        self.address
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
    /// [`Error::Verb`]: the device may still use the memory, which then has to stay as it is until the process ends.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn deregister(mut self) -> Result<()> {
        let device = self.pd().context().device_name().to_owned();
        self.inner.release().map_err(|errno| Error::Verb { verb: "ibv_dereg_mr", device, errno })
    }

    /// The domain it is registered in.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.inner.pd()
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
