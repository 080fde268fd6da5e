//! The registration of a region: `struct ibv_mr`.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use super::{Access, provider_memory};
use crate::dmah::DmaHandle;
use crate::errno::{check, check_ptr};
use crate::error::Verb;
use crate::{Context, Errno, Error, ProtectionDomain, Result};

/// `struct ibv_mr`, deregistered on drop. The owner is responsible for the memory.
pub(crate) struct Registration {
    raw: NonNull<ibv_mr>,
    pd: Option<ProtectionDomain>,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    /// The requested access.
    pub(crate) access: Access,
    pub(super) dependencies: Option<Box<Dependencies>>,
}

/// Objects besides its domain that a region must not outlive.
#[derive(Default)]
pub(super) struct Dependencies {
    pub(super) _handle: Option<DmaHandle>,
    /// Memory of the provider, unless the owner of the registration keeps it.
    pub(super) _memory: Option<Arc<provider_memory::Allocation>>,
}

// SAFETY: libibverbs objects may be used from any thread (see `Context`). The keys are immutable.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Calls `register` unless the device is known to reject it. `register` must return a new region of `pd`.
    #[inline(always)]
    pub(super) fn create(
        pd: &ProtectionDomain,
        len: usize,
        access: Access,
        dependencies: Option<Box<Dependencies>>,
        register: impl FnOnce() -> *mut ibv_mr,
        failed: impl FnOnce(Errno) -> Error,
    ) -> Result<Self> {
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        pd.context().require_own()?;
        if access.contains(Access::ON_DEMAND) && pd.context().attributes().on_demand_paging().is_none() {
            return Err(pd.context().unsupported("on-demand paging (Access::ON_DEMAND)"));
        }
        let raw = check_ptr(register).map_err(failed)?;
        // SAFETY: just created, and not shared with anything.
        Ok(unsafe { Registration::with_dependencies(raw, pd, access, dependencies) })
    }

    /// # Safety
    ///
    /// `raw` must be a valid region of `pd`, and the result must be its only owner.
    pub(crate) unsafe fn from_raw(raw: NonNull<ibv_mr>, pd: &ProtectionDomain, access: Access) -> Self {
        // SAFETY: the caller's contract is the same.
        unsafe { Registration::with_dependencies(raw, pd, access, None) }
    }

    /// # Safety
    ///
    /// As for [`Registration::from_raw`].
    #[inline(always)]
    unsafe fn with_dependencies(
        raw: NonNull<ibv_mr>,
        pd: &ProtectionDomain,
        access: Access,
        dependencies: Option<Box<Dependencies>>,
    ) -> Self {
        // SAFETY: the caller's contract. These fields change only in `ibv_rereg_mr`, after which `update` is called.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Registration { raw, pd: Some(pd.clone()), lkey, rkey, access, dependencies }
    }

    /// Updates the fields after a successful `ibv_rereg_mr`, which changed the domain and access if they are set.
    pub(super) fn update(&mut self, pd: Option<ProtectionDomain>, access: Option<Access>) {
        // SAFETY: the region is valid and borrowed mutably.
        (self.lkey, self.rkey) = unsafe { ((*self.raw.as_ptr()).lkey, (*self.raw.as_ptr()).rkey) };
        if pd.is_some() {
            self.pd = pd;
        }
        self.access = access.unwrap_or(self.access);
    }

    #[inline]
    pub(crate) fn pd(&self) -> &ProtectionDomain {
        self.pd.as_ref().expect("only `release` takes it")
    }

    /// Whether it belongs to `pd`; false after it was released.
    pub(super) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.pd.as_ref().is_some_and(|own| own.is_same(pd))
    }

    pub(crate) fn as_raw(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }

    pub(super) fn handle(&self) -> u32 {
        // SAFETY: the region is valid. The field changes at most in `ibv_rereg_mr`, which borrows the region mutably.
        unsafe { (*self.as_raw()).handle }
    }

    /// Gives up ownership without deregistering.
    pub(super) fn disown(&mut self) -> NonNull<ibv_mr> {
        self.pd = None;
        // The region may use its DMA handle and provider memory until its new owner deregisters it, so they are leaked.
        std::mem::forget(self.dependencies.take());
        self.raw
    }

    /// Deregisters: `ibv_dereg_mr(3)`. After an error the device may still use the memory, so the owner must leak it.
    #[inline]
    pub(crate) fn release(&mut self) -> Result<(), Errno> {
        self.release_or(|_, errno| errno)
    }

    /// Deregisters: `ibv_dereg_mr(3)`.
    #[inline(always)]
    pub(super) fn deregister(self) -> Result<()> {
        // Nothing is left to drop: without a domain there is nothing to release, and the dependencies are taken.
        let mut this = std::mem::ManuallyDrop::new(self);
        let released = this.release_or(|context, errno| context.verb_error(Verb::DeregMr, errno));
        if this.dependencies.is_some() {
            this.drop_dependencies();
        }
        released
    }

    /// Like [`Registration::release`], with the error that `failed` makes.
    #[inline(always)]
    fn release_or<E>(&mut self, failed: impl FnOnce(&Context, Errno) -> E) -> Result<(), E> {
        let Some(pd) = self.pd.take() else { return Ok(()) };
        let released = match pd.context().is_inherited() {
            // SAFETY: the region is valid and, since `pd` was just taken, released once. Other objects may still pass its
            // keys to the device, which rejects keys that do not exist.
            false => check(unsafe { (pd.context().verbs().ibv_dereg_mr)(self.raw.as_ptr()) }),
            // The region and its memory belong to the parent process. `failed` then returns another error.
            true => Err(Errno(libc::EPERM)),
        };
        match released {
            // The dependencies are dropped with `self`.
            Ok(()) => Ok(()),
            Err(errno) => {
                let error = failed(pd.context(), errno);
                self.leak_dependencies(pd);
                Err(error)
            }
        }
    }

    #[cold]
    fn drop_dependencies(&mut self) {
        self.dependencies = None;
    }

    /// Leaks the domain and the other objects that the region needs, because it still exists.
    #[cold]
    fn leak_dependencies(&mut self, pd: ProtectionDomain) {
        std::mem::forget((pd, self.dependencies.take()));
    }
}

impl Drop for Registration {
    #[inline]
    fn drop(&mut self) {
        let _ = self.release();
    }
}
