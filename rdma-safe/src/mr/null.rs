//! A memory region without memory.

use std::fmt;

use rdma_sys::*;

use super::Registration;
use crate::errno::check_ptr;
use crate::error::Verb;
use crate::{Access, ProtectionDomain, Result, Sge};

/// A region without memory: the device discards writes, and reads zeros. Made by [`ProtectionDomain::null_region`].
///
/// With the raw API it stands for parts of a message that are not needed.
pub struct NullRegion {
    inner: Registration,
}

impl ProtectionDomain {
    /// Allocates a region that discards writes and reads as zeros: `ibv_alloc_null_mr(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_alloc_null_mr")]
    pub fn null_region(&self) -> Result<NullRegion> {
        // SAFETY: the domain is valid.
        let raw = check_ptr(|| unsafe { ibv_alloc_null_mr(self.as_raw()) })
            .map_err(|errno| self.context().feature_error(Verb::AllocNullMr, "null memory regions", errno))?;
        // SAFETY: just created, and not shared with anything.
        Ok(NullRegion { inner: unsafe { Registration::from_raw(raw, self, Access::LOCAL_WRITE) } })
    }
}

impl NullRegion {
    /// Local key.
    #[must_use]
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.inner.lkey
    }

    /// A scatter/gather element of `len` bytes.
    #[must_use]
    #[inline]
    pub fn sge(&self, len: u32) -> Sge {
        Sge { address: 0, len, lkey: self.lkey() }
    }

    /// The domain of the region.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.inner.pd()
    }

    /// The C object, valid while this region exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_mr {
        self.inner.as_raw()
    }
}

impl fmt::Debug for NullRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullRegion").field("lkey", &format_args!("{:#x}", self.lkey())).finish_non_exhaustive()
    }
}
