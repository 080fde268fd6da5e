//! Regions registered by other processes.

use std::fmt;
use std::ptr::NonNull;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::error::Verb;
use crate::{ProtectionDomain, Result};

/// A region that another context of the same kernel context has registered, imported for its keys.
///
/// Made by [`ProtectionDomain::import_mr`], for the raw API. Its memory may be in another process, and its owner has to
/// report its address. Dropping it leaves the region registered.
pub struct ImportedRegion {
    raw: NonNull<ibv_mr>,
    pd: ProtectionDomain,
    len: usize,
    lkey: u32,
    rkey: u32,
}

// SAFETY: libibverbs objects may be used from any thread (see `Context`). The other fields are immutable.
unsafe impl Send for ImportedRegion {}
// SAFETY: as above.
unsafe impl Sync for ImportedRegion {}

impl ProtectionDomain {
    /// Imports a region that another context of the same kernel context has registered: `ibv_import_mr(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb), with `ENOENT` when the
    /// kernel context has no such region.
    ///
    /// # Safety
    /// `handle` must be the handle of a region ([`RawMemoryRegion::handle`](crate::RawMemoryRegion::handle),
    /// [`ExposedRegion::handle`](crate::ExposedRegion::handle)) in this domain, or in the domain that this one was
    /// imported from (see [`Context::import_pd`](crate::Context::import_pd)). The owner must keep the region registered
    /// until the result is dropped.
    #[doc(alias = "ibv_import_mr")]
    pub unsafe fn import_mr(&self, handle: u32) -> Result<ImportedRegion> {
        let context = self.context();
        // SAFETY: the domain is valid, and the caller guarantees that the handle is.
        let raw = check_ptr(|| unsafe { (context.verbs().ibv_import_mr)(self.as_raw(), handle) })
            .map_err(|errno| context.feature_error(Verb::ImportMr, "importing memory regions", errno))?;
        // SAFETY: just created.
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

    /// Whether it has no bytes. This should be false for any region.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Local key.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Remote key; meaningful only with remote access.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The domain that it was imported into.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The C object, valid while this region exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }
}

impl Drop for ImportedRegion {
    fn drop(&mut self) {
        if self.pd.context().is_inherited() {
            return;
        }
        // SAFETY: it was imported, is released once, and its domain exists. Work requests that still use its keys
        // contain only their numbers.
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
