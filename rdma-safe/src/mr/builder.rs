//! Registration with all options.

use std::ffi::c_int;
use std::ptr::null_mut;

use rdma_sys::*;

use super::raw::Holder;
use super::registration::Dependencies;
use super::{Buffer, ExposedRegion, Memory, ProviderMemory, RawMemoryRegion, Region, Registration};
use crate::dmah::DmaHandle;
use crate::error::Verb;
use crate::{Access, Errno, Error, ProtectionDomain, Result};

const FEATURE: &str = "registering memory with a DMA handle (ibv_reg_mr_ex, rdma-core 59)";

/// Options of a registration. Made by [`ProtectionDomain::registration`].
///
/// Its functions register like those of [`ProtectionDomain`] with the same names, and with a DMA handle if there is
/// one.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct RegistrationBuilder<'a> {
    pub(super) pd: &'a ProtectionDomain,
    pub(super) access: Access,
    pub(super) handle: Option<&'a DmaHandle>,
}

/// A range of this process's memory.
pub(super) struct Range<'a> {
    pub(super) address: *mut u8,
    pub(super) len: usize,
    /// Address for work requests and peers, unless it equals `address`.
    pub(super) iova: Option<u64>,
    /// Memory of a provider that the range is part of.
    pub(super) of: Option<&'a ProviderMemory>,
}

impl ProtectionDomain {
    /// Starts building a registration with the given access and more options: `ibv_reg_mr_ex(3)`.
    ///
    /// It has options that [`ProtectionDomain::register`], [`ProtectionDomain::expose`] and similar functions lack.
    #[doc(alias = "ibv_reg_mr_ex")]
    pub fn registration(&self, access: Access) -> RegistrationBuilder<'_> {
        RegistrationBuilder { pd: self, access, handle: None }
    }
}

impl<'a> RegistrationBuilder<'a> {
    /// Lets the device access the memory with the hints of `handle`, which the region keeps: `ibv_reg_mr_ex(3)`.
    ///
    /// Registering then fails with [`Error::ForeignContext`] if the handle belongs to another context, with
    /// [`Error::Unsupported`] if the device lacks this, and with [`Error::Verb`] instead of [`Error::RegisterMemory`].
    /// For example, mlx5 rejects it in combination with [`Access::ON_DEMAND`].
    pub fn dma_handle(mut self, handle: &'a DmaHandle) -> Self {
        self.handle = Some(handle);
        self
    }

    /// Like [`ProtectionDomain::register_with`].
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register_with`]; see also [`RegistrationBuilder::dma_handle`].
    pub fn register(self, memory: impl Memory) -> Result<Buffer> {
        Ok(self.try_register(memory)?)
    }

    /// Like [`ProtectionDomain::expose`].
    ///
    /// # Errors
    /// Like [`ProtectionDomain::expose`]; see also [`RegistrationBuilder::dma_handle`].
    pub fn expose<M: Memory>(self, memory: M) -> Result<ExposedRegion> {
        let region = Region::new::<M, _>(self.with_local_write(), Box::new(memory.into_backing()), None);
        region.map(ExposedRegion::new).map_err(|(error, _)| error)
    }

    /// Like [`ProtectionDomain::expose_at`].
    ///
    /// # Errors
    /// Like [`ProtectionDomain::expose_at`]; see also [`RegistrationBuilder::dma_handle`].
    pub fn expose_at<M: Memory>(self, memory: M, iova: u64) -> Result<ExposedRegion> {
        let region = Region::new::<M, _>(self.with_local_write(), Box::new(memory.into_backing()), Some(iova));
        region.map(ExposedRegion::new).map_err(|(error, _)| error)
    }

    /// Like [`ProtectionDomain::register_raw`].
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register_raw`]; see also [`RegistrationBuilder::dma_handle`].
    ///
    /// # Safety
    /// The contract of [`ProtectionDomain::register_raw`].
    #[inline(always)]
    pub unsafe fn register_raw(self, address: *mut u8, len: usize) -> Result<RawMemoryRegion> {
        // SAFETY: the caller's contract is the same.
        let inner = unsafe { self.registration(Range { address, len, iova: None, of: None })? };
        Ok(RawMemoryRegion::new(inner, address, len))
    }

    /// Like [`ProtectionDomain::register_raw_at`].
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register_raw_at`]; see also [`RegistrationBuilder::dma_handle`].
    ///
    /// # Safety
    /// The contract of [`ProtectionDomain::register_raw_at`].
    pub unsafe fn register_raw_at(self, address: *mut u8, len: usize, iova: u64) -> Result<RawMemoryRegion> {
        let _ = address.expose_provenance();
        // SAFETY: the caller's contract is the same.
        let inner = unsafe { self.registration(Range { address, len, iova: Some(iova), of: None })? };
        Ok(RawMemoryRegion { inner: Holder::new(inner), address: iova, len })
    }

    /// Registers `len` bytes of `memory` from `offset`, with exactly this access: `ibv_reg_buf_mr(3)`.
    ///
    /// The region is for the raw API and keeps the memory alive. Parts may overlap and be registered repeatedly.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::EmptyRegion`]; [`Error::ForeignMemory`] unless the memory was allocated from
    /// exactly this domain; [`Error::Unsupported`]; [`Error::Verb`]; see also [`RegistrationBuilder::dma_handle`].
    ///
    /// # Safety
    /// The contract of [`ProtectionDomain::register_raw`] applies, except that the region keeps the bytes allocated
    /// until it is deregistered.
    #[doc(alias = "ibv_reg_buf_mr")]
    pub unsafe fn register_part(self, memory: &ProviderMemory, offset: usize, len: usize) -> Result<RawMemoryRegion> {
        let address = memory.part(offset, len)?;
        let _ = address.expose_provenance();
        // SAFETY: the bytes belong to `memory`, which the registration keeps. The caller guarantees the rest.
        let mut inner = unsafe { self.registration(Range { address, len, iova: None, of: Some(memory) })? };
        inner.dependencies.get_or_insert_default()._memory = Some(memory.share());
        Ok(RawMemoryRegion::new(inner, address, len))
    }

    /// Adds local write access, for regions that own their memory.
    pub(super) fn with_local_write(mut self) -> Self {
        self.access |= Access::LOCAL_WRITE;
        self
    }

    /// # Safety
    ///
    /// The range must be memory that stays allocated until the registration is released, and that tolerates everything
    /// that the access allows the device and peers to do.
    #[inline(always)]
    pub(super) unsafe fn registration(self, range: Range<'_>) -> Result<Registration> {
        let Range { address, len, iova: None, of: None } = range else {
            // SAFETY: the caller's contract is the same.
            return unsafe { self.special_registration(range) };
        };
        if self.handle.is_some() {
            // SAFETY: as above.
            return unsafe { self.special_registration(range) };
        }
        let RegistrationBuilder { pd, access, .. } = self;
        // The function that C's macro `ibv_reg_mr` calls for access that is not known at compile time.
        let register = pd.context().verbs().ibv_reg_mr_iova2;
        self.create(
            len,
            // SAFETY: the domain is valid. The caller guarantees the contract for the range.
            || unsafe { register(pd.as_raw(), address.cast(), len, address.addr() as u64, access.bits()) },
            |errno| Error::RegisterMemory { len, access, errno },
        )
    }

    /// Registers with an IOVA, with memory of the provider, or with a DMA handle.
    ///
    /// # Safety
    /// As for [`RegistrationBuilder::registration`].
    unsafe fn special_registration(self, range: Range<'_>) -> Result<Registration> {
        let (RegistrationBuilder { pd, access, .. }, Range { address, len, iova, of }) = (self, range);
        let (context, flags) = (pd.context(), access.bits() as c_int);
        const VERB: Verb = Verb::RegMrIova;
        if iova.is_some_and(|iova| iova.checked_add(len as u64).is_none()) {
            return Err(context.verb_error(VERB, Errno(libc::EINVAL)));
        }
        // libibverbs compares the pointers, so a parent domain differs from the domain that it extends.
        if of.is_some_and(|memory| memory.pd().as_raw() != pd.as_raw()) {
            return Err(Error::ForeignMemory);
        }
        match (self.handle, of, iova) {
            (None, None, Some(iova)) => self.create(
                len,
                // SAFETY: the domain is valid. The caller guarantees the contract for the range.
                || unsafe { ibv_reg_mr_iova(pd.as_raw(), address.cast(), len, iova, flags) },
                |errno| context.verb_error(VERB, errno),
            ),
            (None, Some(memory), None) => self.create(
                len,
                // SAFETY: as above. The memory that contains the range is valid.
                || unsafe { memory.reg_buf_mr()(pd.as_raw(), memory.as_raw(), address.cast(), len, flags) },
                |errno| context.feature_error(Verb::RegBufMr, "registering memory of the provider", errno),
            ),
            (_, of, iova) => {
                // Without IOVA, some releases of libibverbs omit it for providers that require it. For memory of the
                // provider they derive it, and reject a different one if the memory is a DMA-BUF.
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
                // SAFETY: as above. The mask names the fields that are set.
                unsafe { self.register_ex(attr) }
            }
        }
    }

    /// Calls `ibv_reg_mr_ex(3)` with `attr` and this domain, access and DMA handle.
    ///
    /// # Safety
    /// The contract of [`RegistrationBuilder::registration`] applies to the memory in `attr`. All objects in it must be
    /// valid.
    pub(super) unsafe fn register_ex(self, mut attr: ibv_mr_init_attr) -> Result<Registration> {
        let context = self.pd.context();
        let register = context.verbs().ibv_reg_mr_ex.ok_or_else(|| context.unsupported(FEATURE))?;
        attr.access = self.access.bits() as c_int;
        if let Some(handle) = self.handle {
            context.require_same(handle.context(), "DMA handle")?;
            attr.comp_mask |= mask(IBV_REG_MR_MASK_DMAH);
            attr.dmah = handle.as_raw();
        }
        let feature = if self.handle.is_some() {
            FEATURE
        } else {
            "registering memory of the provider under a different address"
        };
        self.create(
            attr.length,
            // SAFETY: the domain is valid. `attr` is valid during the call, and the mask names only objects that are
            // valid and of one context. The caller guarantees the contract for the memory.
            || unsafe { register(self.pd.as_raw(), &mut attr) },
            |errno| context.feature_error(Verb::RegMrEx, feature, errno),
        )
    }

    /// Calls `register` unless the device is known to reject it. `register` must return a new region.
    #[inline(always)]
    pub(super) fn create(
        self,
        len: usize,
        register: impl FnOnce() -> *mut ibv_mr,
        failed: impl FnOnce(Errno) -> Error,
    ) -> Result<Registration> {
        let dependencies =
            self.handle.map(|handle| Box::new(Dependencies { _handle: Some(handle.clone()), _memory: None }));
        Registration::create(self.pd, len, self.access, dependencies, register, failed)
    }
}

pub(super) fn mask(bits: ibv_mr_init_attr_mask) -> u64 {
    bits.0.into()
}
