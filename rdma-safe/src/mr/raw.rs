//! Registered memory that the caller owns.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::ibv_mr;

use super::{Registration, RemoteMemory};
use crate::{Access, Error, ProtectionDomain, Result};

/// A registration of memory that the caller owns, for the raw API; deregistered on drop.
///
/// Made by [`ProtectionDomain::register_raw`], [`ProtectionDomain::register_raw_at`],
/// [`ProtectionDomain::register_implicit`], [`ProtectionDomain::register_dmabuf`] and, for memory of the provider,
/// [`RegistrationBuilder::register_part`](crate::mr::RegistrationBuilder::register_part).
pub struct RawMemoryRegion {
    pub(super) inner: Holder,
    pub(super) address: u64,
    pub(super) len: usize,
}

/// Owns a registration.
pub(super) enum Holder {
    /// No window can be bound to it, since it lacks [`Access::MW_BIND`].
    Alone(Registration),
    /// Shared with the memory windows that were bound to it.
    Shared(Arc<Registration>),
}

impl Holder {
    #[inline(always)]
    pub(super) fn new(registration: Registration) -> Self {
        if registration.access.contains(Access::MW_BIND) {
            return Holder::Shared(Arc::new(registration));
        }
        Holder::Alone(registration)
    }

    /// The registration, unless windows share it.
    #[inline]
    pub(super) fn exclusive(&mut self) -> Option<&mut Registration> {
        match self {
            Holder::Alone(registration) => Some(registration),
            Holder::Shared(shared) => Arc::get_mut(shared),
        }
    }

    /// The registration by value, unless windows share it.
    #[inline]
    fn into_exclusive(self) -> Option<Registration> {
        match self {
            Holder::Alone(registration) => Some(registration),
            Holder::Shared(shared) => Arc::into_inner(shared),
        }
    }

    /// Adapts to a change of the access.
    pub(super) fn refreshed(self) -> Self {
        match self {
            Holder::Alone(registration) => Holder::new(registration),
            shared @ Holder::Shared(_) => shared,
        }
    }
}

impl Deref for Holder {
    type Target = Registration;

    #[inline]
    fn deref(&self) -> &Registration {
        match self {
            Holder::Alone(registration) => registration,
            Holder::Shared(shared) => shared,
        }
    }
}

impl RawMemoryRegion {
    /// Adopts a region that other code has registered, for example by a vendor's API. It is deregistered on drop.
    ///
    /// # Safety
    /// `raw` must be a region of `pd` that other code no longer deregisters. Memory windows that other code has bound
    /// to it must be deallocated first. The contract of [`ProtectionDomain::register_raw`] applies to its memory. The
    /// address is taken from the C object, even if the device uses a different one.
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, raw: NonNull<ibv_mr>) -> RawMemoryRegion {
        // SAFETY: the region is valid by the caller's contract.
        let (address, len) = unsafe { ((*raw.as_ptr()).addr, (*raw.as_ptr()).length) };
        // SAFETY: the caller's contract is the same. The access is unknown, so it is left to the device whether windows
        // can be bound.
        RawMemoryRegion::new(unsafe { Registration::from_raw(raw, pd, Access::all()) }, address.cast(), len)
    }

    /// Gives up ownership: the caller has to deregister the region, which no longer keeps its domain alive.
    ///
    /// Its DMA handle and the provider memory that it keeps are leaked.
    ///
    /// # Errors
    /// [`Error::InUse`] while memory windows that were bound to it exist; it is deregistered when the last of them is
    /// dropped.
    pub fn into_raw(self) -> Result<NonNull<ibv_mr>> {
        match self.inner.into_exclusive() {
            Some(mut inner) => Ok(inner.disown()),
            None => Err(Error::InUse { object: "memory region", users: "memory windows that were bound to it" }),
        }
    }

    #[inline(always)]
    pub(super) fn new(inner: Registration, address: *mut u8, len: usize) -> Self {
        RawMemoryRegion { inner: Holder::new(inner), address: address.expose_provenance() as u64, len }
    }

    pub(crate) fn access(&self) -> Access {
        self.inner.access
    }

    /// The registration, to which a window can be bound.
    ///
    /// # Errors
    /// [`Error::NotBindable`] without [`Access::MW_BIND`].
    pub(crate) fn bindable(&self) -> Result<&Arc<Registration>> {
        match &self.inner {
            Holder::Shared(shared) => Ok(shared),
            Holder::Alone(_) => Err(Error::NotBindable { missing: Access::MW_BIND }),
        }
    }

    /// Local key.
    #[must_use]
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.inner.lkey
    }

    /// Remote key; meaningful only with remote access.
    #[must_use]
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.inner.rkey
    }

    /// Address of the first byte for work requests and peers: its own, unless it was registered with another.
    #[must_use]
    #[inline]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Address and key for peers, with the access of the registration.
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

    /// Deregisters the region: `ibv_dereg_mr(3)`. Dropping does the same, but ignores errors.
    ///
    /// # Errors
    /// [`Error::InUse`] while memory windows that were bound to it exist; it is deregistered when the last of them is
    /// dropped. [`Error::Verb`]: the device may still use the memory, which must then be kept until the process ends.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn deregister(self) -> Result<()> {
        match self.inner.into_exclusive() {
            Some(inner) => inner.deregister(),
            None => Err(Error::InUse { object: "memory region", users: "memory windows that were bound to it" }),
        }
    }

    /// The domain of the region.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.inner.pd()
    }

    /// The kernel's handle of the region, for [`ProtectionDomain::import_mr`].
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.inner.handle()
    }

    /// The C object, valid while this region exists.
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
