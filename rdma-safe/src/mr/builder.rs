//! Registration with all that there is to say of it.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

use rdma_sys::*;

use super::{Backing, Buffer, ExposedRegion, Kept, ProviderMemory, RawMemoryRegion, Region, Registration};
use crate::{Access, DmaHandle, Errno, Error, ProtectionDomain, Result};

const FEATURE: &str = "registering memory with a DMA handle (ibv_reg_mr_ex, rdma-core 59)";

/// How memory is to be registered; made by [`ProtectionDomain::registration`].
///
/// It registers as the functions of [`ProtectionDomain`] do that have the same names, and with a DMA handle, if it was given one.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct RegistrationBuilder<'a> {
    pub(super) pd: &'a ProtectionDomain,
    pub(super) access: Access,
    pub(super) handle: Option<&'a DmaHandle>,
}

/// What is registered of this process's memory.
pub(super) struct Range<'a> {
    pub(super) address: *mut u8,
    pub(super) len: usize,
    /// What names the first byte, unless its address does.
    pub(super) iova: Option<u64>,
    /// Whose part it is.
    pub(super) of: Option<&'a ProviderMemory>,
}

impl ProtectionDomain {
    /// Starts describing a registration for what `access` says, with more than [`ProtectionDomain::register`],
    /// [`ProtectionDomain::expose`] and the like take: `ibv_reg_mr_ex(3)`.
    #[doc(alias = "ibv_reg_mr_ex")]
    pub fn registration(&self, access: Access) -> RegistrationBuilder<'_> {
        RegistrationBuilder { pd: self, access, handle: None }
    }
}

impl<'a> RegistrationBuilder<'a> {
    /// Has the device reach the memory with the hints of `handle`, which the region keeps: `ibv_reg_mr_ex(3)`.
    ///
    /// Registering fails then with [`Error::ForeignContext`] where the handle belongs to another context, with
    /// [`Error::Unsupported`] where the device cannot, and with [`Error::Verb`] in the place of [`Error::RegisterMemory`]; mlx5,
    /// for one, refuses [`Access::ON_DEMAND`] with it.
    pub fn dma_handle(mut self, handle: &'a DmaHandle) -> Self {
        self.handle = Some(handle);
        self
    }

    /// As [`ProtectionDomain::register_with`].
    ///
    /// # Errors
    /// As there, and see [`RegistrationBuilder::dma_handle`].
    pub fn register(self, backing: impl Backing) -> Result<Buffer> {
        if self.access.intersects(Access::EXPOSING) {
            return Err(Error::BufferAccess { access: self.access & Access::EXPOSING });
        }
        Region::new(self.with_local_write(), Box::new(backing), None).map(Buffer::whole)
    }

    /// As [`ProtectionDomain::expose`].
    ///
    /// # Errors
    /// As there, and see [`RegistrationBuilder::dma_handle`].
    pub fn expose(self, backing: impl Backing) -> Result<ExposedRegion> {
        Region::new(self.with_local_write(), Box::new(backing), None).map(ExposedRegion::new)
    }

    /// As [`ProtectionDomain::expose_at`].
    ///
    /// # Errors
    /// As there, and see [`RegistrationBuilder::dma_handle`].
    pub fn expose_at(self, backing: impl Backing, iova: u64) -> Result<ExposedRegion> {
        Region::new(self.with_local_write(), Box::new(backing), Some(iova)).map(ExposedRegion::new)
    }

    /// As [`ProtectionDomain::register_raw`].
    ///
    /// # Errors
    /// As there, and see [`RegistrationBuilder::dma_handle`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn register_raw(self, address: *mut u8, len: usize) -> Result<RawMemoryRegion> {
        // SAFETY: the caller's contract is the same.
        let inner = unsafe { self.registration(Range { address, len, iova: None, of: None })? };
        Ok(RawMemoryRegion::new(inner, address, len))
    }

    /// As [`ProtectionDomain::register_raw_at`].
    ///
    /// # Errors
    /// As there, and see [`RegistrationBuilder::dma_handle`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn register_raw_at(self, address: *mut u8, len: usize, iova: u64) -> Result<RawMemoryRegion> {
        let _ = address.expose_provenance();
        // SAFETY: the caller's contract is the same.
        let inner = unsafe { self.registration(Range { address, len, iova: Some(iova), of: None })? };
        Ok(RawMemoryRegion { inner: Arc::new(inner), address: iova, len })
    }

    /// Registers `len` bytes of `memory` from `offset` on, for the raw door, as often and in as many parts as wanted, with exactly
    /// this access: `ibv_reg_buf_mr(3)`. The region keeps the memory.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::EmptyRegion`]; [`Error::ForeignMemory`] unless the memory was allocated from this very
    /// domain; [`Error::Unsupported`]; [`Error::Verb`]; and see [`RegistrationBuilder::dma_handle`].
    ///
    /// # Safety
    /// As of [`ProtectionDomain::register_raw`], but for the bytes staying allocated, which the region sees to until it is
    /// deregistered.
    #[doc(alias = "ibv_reg_buf_mr")]
    pub unsafe fn register_part(self, memory: &ProviderMemory, offset: usize, len: usize) -> Result<RawMemoryRegion> {
        let address = memory.part(offset, len)?;
        let _ = address.expose_provenance();
        // SAFETY: these bytes are of the memory, which the registration keeps; the caller answers for the rest.
        let mut inner = unsafe { self.registration(Range { address, len, iova: None, of: Some(memory) })? };
        inner.kept._memory = Some(memory.share());
        Ok(RawMemoryRegion::new(inner, address, len))
    }

    /// What owns its memory lets the device write there.
    fn with_local_write(mut self) -> Self {
        self.access |= Access::LOCAL_WRITE;
        self
    }

    /// # Safety
    ///
    /// The range must be allocated memory that stays so until the registration is released, and that tolerates whatever the access
    /// lets the device and peers do with it.
    pub(super) unsafe fn registration(self, range: Range<'_>) -> Result<Registration> {
        let (RegistrationBuilder { pd, access, .. }, Range { address, len, iova, of }) = (self, range);
        let (context, flags) = (pd.context(), access.bits() as c_int);
        const AT: &str = "ibv_reg_mr_iova";
        if iova.is_some_and(|iova| iova.checked_add(len as u64).is_none()) {
            return Err(context.verb_error(AT, Errno(libc::EINVAL)));
        }
        // It compares the pointers, so that a parent domain is another one than what it extends.
        if of.is_some_and(|memory| memory.pd().as_raw() != pd.as_raw()) {
            return Err(Error::ForeignMemory);
        }
        match (self.handle, of, iova) {
            (None, None, None) => self.made(
                len,
                // SAFETY: the domain is valid; the caller vouches for the range.
                || unsafe { ibv_reg_mr(pd.as_raw(), address.cast(), len, flags) },
                |errno| Error::RegisterMemory { len, access, errno },
            ),
            (None, None, Some(iova)) => self.made(
                len,
                // SAFETY: as above.
                || unsafe { ibv_reg_mr_iova(pd.as_raw(), address.cast(), len, iova, flags) },
                |errno| context.verb_error(AT, errno),
            ),
            (None, Some(memory), None) => self.made(
                len,
                // SAFETY: as above, and the memory that the range is of is valid.
                || unsafe { memory.reg_buf_mr()(pd.as_raw(), memory.as_raw(), address.cast(), len, flags) },
                |errno| context.feature_error("ibv_reg_buf_mr", "registering memory of the provider", errno),
            ),
            (_, of, iova) => {
                // Without, libraries of some releases leave it out for providers that want it; of memory of the provider they
                // derive it, and refuse another one where that is a DMA-BUF.
                let iova = iova.or(of.is_none().then(|| address.addr() as u64));
                let mut attr = ibv_mr_init_attr {
                    comp_mask: mask(IBV_REG_MR_MASK_ADDR),
                    addr: address.cast(),
                    length: len,
                    iova: iova.unwrap_or(0),
                    buf: of.map_or(null_mut(), ProviderMemory::as_raw),
                    ..ibv_mr_init_attr::zeroed()
                };
                attr.comp_mask |= iova.map_or(0, |_| mask(IBV_REG_MR_MASK_IOVA));
                attr.comp_mask |= of.map_or(0, |_| mask(IBV_REG_MR_MASK_BUF));
                // SAFETY: as above; the mask says what of it is set.
                unsafe { self.by_attributes(attr) }
            }
        }
    }

    /// Calls `ibv_reg_mr_ex(3)` with `attr`, and this domain, access and DMA handle.
    ///
    /// # Safety
    /// As of [`RegistrationBuilder::registration`], for what `attr` names; all of it must be valid.
    pub(super) unsafe fn by_attributes(self, mut attr: ibv_mr_init_attr) -> Result<Registration> {
        let context = self.pd.context();
        let register = context.verbs().ibv_reg_mr_ex.ok_or_else(|| context.unsupported(FEATURE))?;
        attr.access = self.access.bits() as c_int;
        if let Some(handle) = self.handle {
            context.require_same(handle.context(), "DMA handle")?;
            attr.comp_mask |= mask(IBV_REG_MR_MASK_DMAH);
            attr.dmah = handle.as_raw();
        }
        let feature =
            if self.handle.is_some() { FEATURE } else { "memory of the provider under an address of its own" };
        self.made(
            attr.length,
            // SAFETY: the domain is valid and `attr` is for the duration of the call; so is what the mask says that it names, of
            // one context. The caller vouches for the memory.
            || unsafe { register(self.pd.as_raw(), &mut attr) },
            |errno| context.feature_error("ibv_reg_mr_ex", feature, errno),
        )
    }

    /// What `register` makes of this and gives to nobody else, unless the device is known to refuse it.
    pub(super) fn made(
        self,
        len: usize,
        register: impl FnOnce() -> *mut ibv_mr,
        failed: impl FnOnce(Errno) -> Error,
    ) -> Result<Registration> {
        let mut registration = Registration::made(self.pd, len, self.access, register, failed)?;
        registration.kept = Kept { _handle: self.handle.cloned(), _memory: None };
        Ok(registration)
    }
}

pub(super) fn mask(bits: ibv_mr_init_attr_mask) -> u64 {
    bits.0.into()
}
