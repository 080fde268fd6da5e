//! Registered memory.
//!
//! There are six types:
//!
//! | type | access to the bytes | view of the CPU |
//! |---|---|---|
//! | [`Buffer`] | this process, and the device while the buffer is in flight | `&[u8]`, `&mut [u8]` |
//! | [`SharedBuffer`] | this process and, at any time, the device, which only reads | `&[u8]` |
//! | [`ExposedRegion`] | this process, and peers at any time | atomic access, never a slice |
//! | [`NullRegion`] | there are no bytes | none: a key |
//! | [`ImportedRegion`] | determined by its owner, another process | none: keys |
//! | [`RawMemoryRegion`] | determined by the `unsafe` caller | none: keys and an address |

mod access;
mod advise;
mod backing;
mod buffer;
mod builder;
mod cut;
mod dmabuf;
mod exposed;
mod gather;
mod huge_pages;
mod implicit;
mod imported;
mod memory;
mod null;
mod provider_memory;
mod raw;
mod remote;
mod reregister;
mod returned;
mod shared;

use std::any::{TypeId, type_name};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::dmah::DmaHandle;
use crate::errno::{check, check_ptr};
use crate::error::Verb;
use crate::{Context, Errno, Error, ProtectionDomain, Result};

pub use access::Access;
pub use advise::Advice;
pub use backing::{Backing, Pages};
pub use buffer::Buffer;
pub use builder::RegistrationBuilder;
pub use cut::{JoinError, JoinReason};
pub use exposed::ExposedRegion;
pub use gather::{ExposedPart, Gather, IntoIter, Piece};
pub use huge_pages::{HugePages, PageKind};
pub use imported::ImportedRegion;
pub use memory::{Memory, ReclaimError, ReclaimReason, RegisterError};
pub use null::NullRegion;
pub use provider_memory::ProviderMemory;
pub use raw::RawMemoryRegion;
pub use remote::RemoteMemory;
pub use reregister::{ReregisterError, Reregistration};
pub use returned::Returned;
pub use shared::{ReadOnly, SharedBuffer};

use builder::Range;

/// `struct ibv_mr`, deregistered on drop. The owner is responsible for the memory.
pub(crate) struct Registration {
    raw: NonNull<ibv_mr>,
    pd: Option<ProtectionDomain>,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    /// The requested access.
    pub(crate) access: Access,
    dependencies: Option<Box<Dependencies>>,
}

/// Objects besides its domain that a region must not outlive.
#[derive(Default)]
struct Dependencies {
    _handle: Option<DmaHandle>,
    /// Memory of the provider, unless the owner of the registration keeps it.
    _memory: Option<Arc<provider_memory::Allocation>>,
}

// SAFETY: libibverbs objects may be used from any thread (see `Context`). The keys are immutable.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Calls `register` unless the device is known to reject it. `register` must return a new region of `pd`.
    #[inline(always)]
    fn create(
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
    fn update(&mut self, pd: Option<ProtectionDomain>, access: Option<Access>) {
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
    fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.pd.as_ref().is_some_and(|own| own.is_same(pd))
    }

    pub(crate) fn as_raw(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }

    fn handle(&self) -> u32 {
        // SAFETY: the region is valid. The field changes at most in `ibv_rereg_mr`, which borrows the region mutably.
        unsafe { (*self.as_raw()).handle }
    }

    /// Gives up ownership without deregistering.
    fn disown(&mut self) -> NonNull<ibv_mr> {
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
    fn deregister(self) -> Result<()> {
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

/// A registration with its memory, which outlives it.
pub(crate) struct Region {
    pub(crate) registration: Registration,
    address: NonNull<u8>,
    len: usize,
    /// Address of the first byte for work requests and peers.
    iova: u64,
    backing: std::mem::ManuallyDrop<Box<dyn Backing>>,
    /// [`Returned::take_back`] for the type of the backing.
    take_back: unsafe fn(Box<buffer::Part>),
    /// Type of the backing.
    type_id: TypeId,
    /// Name of the type that was registered, for errors.
    type_name: &'static str,
}

// SAFETY: `Registration` is `Send`, and so is the backing. The address is used by the owners of the range.
unsafe impl Send for Region {}
// SAFETY: as above. A shared reference to this type gives no access to the memory, and to the backing only if that is `Sync`.
unsafe impl Sync for Region {}

impl Region {
    /// Registers `backing`, which was made of a `T`, under the address `iova`, or under its own.
    fn new<T, B: Backing>(
        builder: RegistrationBuilder<'_>,
        backing: Box<B>,
        iova: Option<u64>,
    ) -> Result<Arc<Self>, (Error, Box<B>)> {
        let (address, len) = (backing.address(), backing.len());
        // SAFETY: by the contract of `Backing`, the memory exists until the backing is dropped, which `drop` below does only after
        // the registration is released. `Buffer` and `ExposedRegion` control access to the bytes.
        let registration = match unsafe { Region::registration(builder, &*backing, iova) } {
            Ok(registration) => registration,
            Err(error) => return Err((error, backing)),
        };
        let iova = iova.unwrap_or(address.as_ptr() as u64);
        let backing = std::mem::ManuallyDrop::new(backing as Box<dyn Backing>);
        let (take_back, type_id, type_name) = (Returned::<B>::take_back as _, TypeId::of::<B>(), type_name::<T>());
        Ok(Arc::new(Region { registration, address, len, iova, backing, take_back, type_id, type_name }))
    }

    /// # Safety
    ///
    /// The contract of [`RegistrationBuilder::registration`] applies to the memory.
    unsafe fn registration(
        builder: RegistrationBuilder<'_>,
        backing: &dyn Backing,
        iova: Option<u64>,
    ) -> Result<Registration> {
        let (address, len, access) = (backing.address(), backing.len(), builder.access);
        if !(Access::all() - Access::RAW).contains(access) {
            // An access flag unknown to this crate might let peers access memory behind a slice.
            return Err(Error::RegisterMemory { len, access, errno: Errno(libc::EINVAL) });
        }
        // The device accesses the memory by address alone, so its provenance is exposed once.
        let _ = address.as_ptr().expose_provenance();
        let range = Range { address: address.as_ptr(), len, iova, of: backing.provider_memory() };
        // SAFETY: the caller's contract is the same.
        unsafe { builder.registration(range) }
    }

    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.registration.lkey
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.registration.release().is_ok() {
            // SAFETY: dropped only here, and not used later.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.backing) }
        }
    }
}

impl ProtectionDomain {
    /// Allocates `len` zeroed bytes and registers them for local use.
    ///
    /// A registration costs a system call and locks pages: allocate one large buffer and split it with
    /// [`Buffer::into_chunks`].
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register`].
    pub fn allocate(&self, len: usize) -> Result<Buffer> {
        self.register(Pages::new(len)?)
    }

    /// Registers memory for local use: `ibv_reg_mr(3)` with local write access.
    ///
    /// Local use means sends, receives, and the local side of writes and reads. [`Buffer::into_memory`] returns the memory,
    /// which may be a `Vec<u8>` or any other [`Memory`]. [`ProtectionDomain::try_register`] returns it if it cannot be registered.
    ///
    /// # Errors
    /// [`Error::RegisterMemory`], with `ENOMEM` when the limit of locked memory (`ulimit -l`) is too small;
    /// [`Error::EmptyRegion`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn register(&self, memory: impl Memory) -> Result<Buffer> {
        self.register_with(memory, Access::empty())
    }

    /// Like [`ProtectionDomain::register`], with additional access flags.
    ///
    /// Flags in [`Access::REMOTE`] and [`Access::MW_BIND`] are rejected, because a buffer dereferences to a slice: use
    /// [`ProtectionDomain::expose`].
    ///
    /// # Errors
    /// [`Error::BufferAccess`] for flags that grant remote access; the errors of [`ProtectionDomain::register`].
    pub fn register_with(&self, memory: impl Memory, access: Access) -> Result<Buffer> {
        self.registration(access).register(memory)
    }

    /// Registers memory that peers may access according to `access`: `ibv_reg_mr(3)`.
    ///
    /// With [`Access::MW_BIND`] they may also access it through any [`MemoryWindow`](crate::mw::MemoryWindow) that is bound
    /// to it.
    ///
    /// Peers need the address and key from [`ExposedRegion::remote`], and a local queue pair that allows the same
    /// access ([`EndpointBuilder::peer_access`](crate::EndpointBuilder::peer_access)). Local write access, which remote
    /// writes and atomics require, is added. Dropping the region revokes the access: a later one fails with
    /// [`WcStatus::REM_ACCESS_ERR`](crate::WcStatus::REM_ACCESS_ERR) and breaks the peer's connection.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use rdma_safe::*;
    /// use rdma_safe::mr::Pages;
    ///
    /// # fn owner(pd: &ProtectionDomain, notice: Buffer) -> Result<()> {
    /// let mut endpoint = Endpoint::builder(pd).peer_access(Access::REMOTE_WRITE).build()?;
    /// let region = pd.expose(Pages::new(4096)?, Access::REMOTE_WRITE)?;
    /// endpoint.receive(notice)?; // consumed by the peer's immediate data
    /// // … exchange `endpoint.address()` and `region.remote()`, connect; the peer then writes:
    /// // endpoint.post(Work::write(buffer, remote).imm(42))?;
    /// let done = endpoint.wait(Duration::from_secs(5))?.ok()?;
    /// assert_eq!((done.operation, done.imm()), (Operation::ReceiveWrite, Some(42)));
    /// let mut bytes = vec![0; done.byte_len as usize];
    /// region.read(0, &mut bytes)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register`].
    pub fn expose(&self, memory: impl Memory, access: Access) -> Result<ExposedRegion> {
        self.registration(access).expose(memory)
    }

    /// Like [`ProtectionDomain::expose`], but peers use the address `iova` for the first byte: `ibv_reg_mr_iova(3)`.
    ///
    /// Peers thus do not learn the address in this process. [`ExposedRegion::remote`] contains `iova`. Local offsets
    /// still count from the first byte.
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register`]; [`Error::Verb`], also with `EINVAL` unless `iova` and the memory have the
    /// same offset within a page of 4096 bytes ([`Pages`] start at offset 0), or if the addresses would wrap.
    #[doc(alias = "ibv_reg_mr_iova")]
    pub fn expose_at(&self, memory: impl Memory, iova: u64, access: Access) -> Result<ExposedRegion> {
        self.registration(access).expose_at(memory, iova)
    }

    /// Registers memory that the caller owns: `ibv_reg_mr(3)` with exactly `access`.
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register`].
    ///
    /// # Safety
    ///
    /// The contract holds until the returned object is deregistered and every work request that names its keys has
    /// completed. It is deregistered once [`RawMemoryRegion::deregister`] has returned success, or once it and every
    /// window that was bound to it are dropped, which does not report a failure.
    ///
    /// Until then `address..address + len` must stay allocated and must tolerate everything that `access` allows, at
    /// any time. With remote access, with [`Access::MW_BIND`], by which anyone can grant peers such access, or with
    /// local write access and a posted work request, bytes change while the program runs. Then no reference to them may
    /// exist, and they must be accessed atomically, as by [`rdma_sys::dma`].
    pub unsafe fn register_raw(&self, address: *mut u8, len: usize, access: Access) -> Result<RawMemoryRegion> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.registration(access).register_raw(address, len) }
    }

    /// Like [`ProtectionDomain::register_raw`], but under the address `iova`: `ibv_reg_mr_iova(3)`.
    ///
    /// Work requests and peers use `iova` for the first byte, and [`RawMemoryRegion::address`] returns it. With 0,
    /// addresses equal offsets.
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register_raw`], with [`Error::Verb`] instead of [`Error::RegisterMemory`]; also with
    /// `EINVAL` unless `iova` and `address` have the same offset within a page, or if the addresses would wrap.
    ///
    /// # Safety
    ///
    /// The contract of [`ProtectionDomain::register_raw`].
    #[doc(alias = "ibv_reg_mr_iova")]
    pub unsafe fn register_raw_at(
        &self,
        address: *mut u8,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<RawMemoryRegion> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.registration(access).register_raw_at(address, len, iova) }
    }
}
