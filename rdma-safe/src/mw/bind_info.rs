//! Memory that a window gives access to.

use std::sync::Arc;

use rdma_sys::*;

use crate::mr::{Region, Registration};
use crate::{Access, Error, ExposedRegion, ProtectionDomain, RawMemoryRegion, Result, bounds};

/// A range of a region that a window opens to peers, with their access: `struct ibv_mw_bind_info`.
///
/// Made by [`ExposedRegion::bind_info`] and [`RawMemoryRegion::bind_info`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct BindInfo<'r> {
    region: Source<'r>,
    address: u64,
    len: u64,
    access: Access,
    zero_based: bool,
}

#[derive(Clone, Copy)]
enum Source<'r> {
    Exposed(&'r Arc<Region>),
    Raw(&'r Arc<Registration>),
}

/// Keeps a region registered while a window may be bound to it.
pub(super) enum BoundRegion {
    Exposed(Arc<Region>),
    Raw(Arc<Registration>),
}

impl ExposedRegion {
    /// Describes `len` bytes from `offset` for a memory window with the remote access `access`.
    ///
    /// The region itself need not have that access.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::EmptyRegion`] for no bytes; [`Error::NotBindable`] unless the region was
    /// registered with [`Access::MW_BIND`].
    pub fn bind_info(&self, offset: usize, len: usize, access: Access) -> Result<BindInfo<'_>> {
        let region = self.region();
        let access = permitted(region.registration.access, self.len(), offset, len, access)?;
        Ok(BindInfo::new(Source::Exposed(region), self.remote().address + offset as u64, len, access))
    }
}

impl RawMemoryRegion {
    /// Describes `len` bytes from `offset` for a memory window with the remote access `access`.
    ///
    /// The region itself need not have that access.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::EmptyRegion`] for no bytes; [`Error::NotBindable`] unless the region was
    /// registered with [`Access::MW_BIND`], and for writes and atomics with [`Access::LOCAL_WRITE`].
    pub fn bind_info(&self, offset: usize, len: usize, access: Access) -> Result<BindInfo<'_>> {
        let access = permitted(self.access(), self.len(), offset, len, access)?;
        Ok(BindInfo::new(Source::Raw(self.bindable()?), self.address() + offset as u64, len, access))
    }
}

/// The remote part of `access`, if `len` bytes from `offset` of a region with `region_access` can be opened with it.
fn permitted(region_access: Access, region_len: usize, offset: usize, len: usize, access: Access) -> Result<Access> {
    bounds::check(offset, len, region_len)?;
    if len == 0 {
        return Err(Error::EmptyRegion);
    }
    let access = access & Access::REMOTE;
    let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
    let needed = Access::MW_BIND | if writes { Access::LOCAL_WRITE } else { Access::empty() };
    let missing = needed - region_access;
    if missing.is_empty() { Ok(access) } else { Err(Error::NotBindable { missing }) }
}

impl<'r> BindInfo<'r> {
    fn new(region: Source<'r>, address: u64, len: usize, access: Access) -> BindInfo<'r> {
        BindInfo { region, address, len: len as u64, access, zero_based: false }
    }

    /// Makes peers address the first byte as 0, which hides its address. Only for windows of type 2.
    pub fn zero_based(mut self) -> Self {
        self.zero_based = true;
        self
    }

    pub(crate) fn is_zero_based(&self) -> bool {
        self.zero_based
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        self.region.registration().pd()
    }

    /// The address of the first byte, for peers.
    pub(crate) fn remote_address(&self) -> u64 {
        if self.zero_based { 0 } else { self.address }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn keep(&self) -> BoundRegion {
        match self.region {
            Source::Exposed(region) => BoundRegion::Exposed(Arc::clone(region)),
            Source::Raw(region) => BoundRegion::Raw(Arc::clone(region)),
        }
    }

    /// The region as a C object.
    #[inline]
    pub(super) fn region_raw(&self) -> *mut ibv_mr {
        self.region.registration().as_raw()
    }

    /// The C structure, valid while the region is.
    #[inline]
    pub(crate) fn to_raw(self) -> ibv_mw_bind_info {
        let zero_based = if self.zero_based { IBV_ACCESS_ZERO_BASED.0 } else { 0 };
        ibv_mw_bind_info {
            mr: self.region.registration().as_raw(),
            addr: self.address,
            length: self.len,
            mw_access_flags: self.access.bits() | zero_based,
        }
    }
}

impl<'r> Source<'r> {
    fn registration(&self) -> &'r Registration {
        match self {
            Source::Exposed(region) => &region.registration,
            Source::Raw(region) => region,
        }
    }
}

impl std::fmt::Debug for Source<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "lkey {:#x}", self.registration().lkey)
    }
}

impl BoundRegion {
    #[inline]
    pub(super) fn as_raw(&self) -> *mut ibv_mr {
        self.registration().as_raw()
    }

    fn registration(&self) -> &Registration {
        match self {
            BoundRegion::Exposed(region) => &region.registration,
            BoundRegion::Raw(region) => region,
        }
    }

    /// The start of the region with a length of 0, which unbinds a window.
    ///
    /// A NULL region also means that, but the SoftRoCE provider dereferences it.
    pub(super) fn unbind_info(&self) -> ibv_mw_bind_info {
        let region = self.registration();
        // SAFETY: the region is valid. The field changes only in `ibv_rereg_mr`, which requires exclusive ownership of
        // the region.
        let addr = unsafe { (*region.as_raw()).addr }.addr() as u64;
        ibv_mw_bind_info { mr: region.as_raw(), addr, length: 0, mw_access_flags: 0 }
    }
}
