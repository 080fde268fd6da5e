//! Regions that other processes have registered.

use std::fmt;
use std::ptr::NonNull;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::{ProtectionDomain, Result};

/// A region that another context of the same kernel context has registered, for its keys: its memory need not be in this process,
/// and its address is its owner's to tell. For the raw door. Dropping it leaves the region registered.
///
/// Made by [`ProtectionDomain::import_mr`].
pub struct ImportedRegion {
    raw: NonNull<ibv_mr>,
    pd: ProtectionDomain,
    len: usize,
    lkey: u32,
    rkey: u32,
}

// SAFETY: libibverbs objects may be used from any thread (see `Context`); the other fields are immutable.
unsafe impl Send for ImportedRegion {}
// SAFETY: as above.
unsafe impl Sync for ImportedRegion {}

impl ProtectionDomain {
    /// Takes part in the use of a region that another context of the same kernel context has registered: `ibv_import_mr(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb), with `ENOENT` when the kernel's
    /// context has no such region.
    ///
    /// # Safety
    /// `handle` must be that of a region ([`RawMemoryRegion::handle`](crate::RawMemoryRegion::handle),
    /// [`ExposedRegion::handle`](crate::ExposedRegion::handle)) in the domain that this one is, or was imported from (see
    /// [`Context::import_pd`](crate::Context::import_pd)), and whoever has registered it must keep it until this is gone.
    #[doc(alias = "ibv_import_mr")]
    pub unsafe fn import_mr(&self, handle: u32) -> Result<ImportedRegion> {
        let context = self.context();
        // SAFETY: the domain is valid; the caller vouches for the handle.
        let raw = check_ptr(|| unsafe { (context.verbs().ibv_import_mr)(self.as_raw(), handle) })
            .map_err(|errno| context.feature_error("ibv_import_mr", "importing memory regions", errno))?;
        // SAFETY: just made.
        let ibv_mr { length: len, lkey, rkey, .. } = unsafe { *raw.as_ptr() };
        Ok(ImportedRegion { raw, pd: self.clone(), len, lkey, rkey })
    }
}

impl ImportedRegion {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes, as no region should.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Local key.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Remote key; meaningful only with a remote right.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The domain that it was imported to.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The C object, valid while this region is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }
}

impl Drop for ImportedRegion {
    fn drop(&mut self) {
        // SAFETY: it was imported, is given back once, and its domain is there. What still names its keys to the device does so by
        // their numbers.
        unsafe { (self.pd.context().verbs().ibv_unimport_mr)(self.raw.as_ptr()) }
    }
}

impl fmt::Debug for ImportedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportedRegion")
            .field("len", &self.len)
            .field("lkey", &format_args!("{:#x}", self.lkey))
            .field("rkey", &format_args!("{:#x}", self.rkey))
            .finish_non_exhaustive()
    }
}
