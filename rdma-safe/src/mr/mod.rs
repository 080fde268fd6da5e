//! Registered memory.
//!
//! Five kinds, told apart by type:
//!
//! | type | who may access the bytes | the CPU sees them as |
//! |---|---|---|
//! | [`Buffer`] | this process, and the device while the buffer is in flight | `&[u8]`, `&mut [u8]` |
//! | [`ExposedRegion`] | this process, and peers at any time | by atomic access only, never as a slice |
//! | [`NullRegion`] | there are none | nothing: a key |
//! | [`ImportedRegion`] | as its owner, another process, says | nothing: keys |
//! | [`RawMemoryRegion`] | whoever the `unsafe` caller says | nothing: keys and an address |

mod advise;
mod backing;
mod buffer;
mod builder;
mod dmabuf;
mod exposed;
mod implicit;
mod imported;
mod null;
mod provider_memory;
mod raw;
mod remote;
mod reregister;

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::{check, check_ptr};
use crate::{Access, DmaHandle, Errno, Error, ProtectionDomain, Result};

pub use advise::Advice;
pub use backing::{Backing, HugePages, Pages};
pub use buffer::Buffer;
pub use builder::RegistrationBuilder;
pub use exposed::ExposedRegion;
pub use imported::ImportedRegion;
pub use null::NullRegion;
pub use provider_memory::ProviderMemory;
pub use raw::RawMemoryRegion;
pub use remote::RemoteMemory;
pub use reregister::{ReregisterError, Reregistration};

use builder::Range;

/// `struct ibv_mr`, deregistered on drop. What it covers is the owner's business.
pub(crate) struct Registration {
    raw: NonNull<ibv_mr>,
    pd: Option<ProtectionDomain>,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    /// As asked for.
    pub(crate) access: Access,
    kept: Kept,
}

/// What a region must not outlive besides its domain.
#[derive(Default)]
struct Kept {
    _handle: Option<DmaHandle>,
    /// Unless the owner of the registration has it.
    _memory: Option<Arc<provider_memory::Allocation>>,
}

// SAFETY: libibverbs objects may be used from any thread (see `Context`); the keys are immutable.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// What `register` makes of `pd` and gives to nobody else, unless the device is known to refuse it.
    fn made(
        pd: &ProtectionDomain,
        len: usize,
        access: Access,
        register: impl FnOnce() -> *mut ibv_mr,
        failed: impl FnOnce(Errno) -> Error,
    ) -> Result<Self> {
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        if access.contains(Access::ON_DEMAND) && pd.context().attributes().on_demand_paging().is_none() {
            return Err(pd.context().unsupported("on-demand paging (Access::ON_DEMAND)"));
        }
        let raw = check_ptr(register).map_err(failed)?;
        // SAFETY: just made, and given to nobody else.
        Ok(unsafe { Registration::from_raw(raw, pd, access) })
    }

    /// # Safety
    ///
    /// `raw` must be a valid region of `pd` that nobody else releases.
    pub(crate) unsafe fn from_raw(raw: NonNull<ibv_mr>, pd: &ProtectionDomain, access: Access) -> Self {
        // SAFETY: the caller's contract; these fields change in `ibv_rereg_mr` only, after which `changed` is called.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Registration { raw, pd: Some(pd.clone()), lkey, rkey, access, kept: Kept::default() }
    }

    /// `ibv_rereg_mr` was successful, and gave the region `pd` and `access` if they are there.
    fn changed(&mut self, pd: Option<ProtectionDomain>, access: Option<Access>) {
        // SAFETY: the region is valid, and borrowed mutably.
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

    /// Whether it is of `pd`; where it was released, of none.
    fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.pd.as_ref().is_some_and(|own| own.is_same(pd))
    }

    pub(crate) fn as_raw(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }

    fn handle(&self) -> u32 {
        // SAFETY: the region is valid, and the field changes in `ibv_rereg_mr` at most, for which it is borrowed mutably.
        unsafe { (*self.as_raw()).handle }
    }

    /// Leaves the deregistration to others.
    fn disown(&mut self) -> NonNull<ibv_mr> {
        self.pd = None;
        // When they will do it is not known.
        std::mem::forget(std::mem::take(&mut self.kept));
        self.raw
    }

    /// Deregisters: `ibv_dereg_mr(3)`. On an error the device may still use the memory, so the owner must leak it.
    pub(crate) fn release(&mut self) -> Result<(), Errno> {
        let Some(pd) = self.pd.take() else { return Ok(()) };
        // SAFETY: the region is valid and, since `pd` was just taken, released once. Objects that could still name its
        // keys to the device are the device's business: it refuses a key that is gone.
        let released = check(unsafe { (pd.context().verbs().ibv_dereg_mr)(self.raw.as_ptr()) });
        let kept = std::mem::take(&mut self.kept);
        if released.is_err() {
            // None of it can go before the region.
            std::mem::forget((pd, kept));
        }
        released
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let _ = self.release();
    }
}

/// A registration and the memory it covers, which outlives it.
pub(crate) struct Region {
    pub(crate) registration: Registration,
    address: NonNull<u8>,
    len: usize,
    /// What work requests and peers name the first byte by.
    iova: u64,
    backing: std::mem::ManuallyDrop<Box<dyn Backing>>,
}

// SAFETY: `Registration` is; the backing is `Send` and only dropped; the address is used by those who own the range.
unsafe impl Send for Region {}
// SAFETY: as above; nothing here gives access to the memory through a shared reference.
unsafe impl Sync for Region {}

impl Region {
    /// Named by `iova`, or by its address.
    fn new(how: RegistrationBuilder<'_>, backing: Box<dyn Backing>, iova: Option<u64>) -> Result<Arc<Self>> {
        let (address, len, access) = (backing.address(), backing.len(), how.access);
        if !(Access::all() - Access::RAW).contains(access) {
            // A right that this crate has no name for could let peers in behind a slice.
            return Err(Error::RegisterMemory { len, access, errno: Errno(libc::EINVAL) });
        }
        // The device reaches the memory by address alone, so its provenance has to be exposed once.
        let _ = address.as_ptr().expose_provenance();
        let range = Range { address: address.as_ptr(), len, iova, of: backing.provider_memory() };
        // SAFETY: `Backing` promises that the memory stays until it is dropped, which `drop` below does only after the
        // registration was released. Who may see which bytes when is kept by `Buffer` and `ExposedRegion`.
        let registration = unsafe { how.registration(range)? };
        let iova = iova.unwrap_or(address.as_ptr() as u64);
        let backing = std::mem::ManuallyDrop::new(backing);
        Ok(Arc::new(Region { registration, address, len, iova, backing }))
    }

    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.registration.lkey
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.registration.release().is_ok() {
            // SAFETY: dropped here only, and not used after.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.backing) }
        }
    }
}

impl ProtectionDomain {
    /// Allocates `len` zeroed bytes and registers them for local use.
    ///
    /// One registration costs a system call and locks pages: allocate a large buffer once and cut it by [`Buffer::into_chunks`].
    ///
    /// # Errors
    /// As [`ProtectionDomain::register`].
    pub fn allocate(&self, len: usize) -> Result<Buffer> {
        self.register(Pages::new(len)?)
    }

    /// Registers memory for local use, that is for sends, receives, and as the local side of writes and reads:
    /// `ibv_reg_mr(3)` with local write access.
    ///
    /// # Errors
    /// [`Error::RegisterMemory`], with `ENOMEM` when the limit of locked memory (`ulimit -l`) is too small;
    /// [`Error::EmptyRegion`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn register(&self, backing: impl Backing) -> Result<Buffer> {
        self.register_with(backing, Access::empty())
    }

    /// As [`ProtectionDomain::register`], with more access flags; those in [`Access::REMOTE`] and [`Access::MW_BIND`] are
    /// refused, since a buffer hands out slices: use [`ProtectionDomain::expose`].
    ///
    /// # Errors
    /// [`Error::BufferAccess`] for what lets peers in, and those of [`ProtectionDomain::register`].
    pub fn register_with(&self, backing: impl Backing, access: Access) -> Result<Buffer> {
        self.registration(access).register(backing)
    }

    /// Registers memory that peers may reach as `access` says: `ibv_reg_mr(3)`. With [`Access::MW_BIND`] they may also reach it
    /// through each [`MemoryWindow`](crate::MemoryWindow) that is bound to it.
    ///
    /// Peers need the address and key from [`ExposedRegion::remote`], and a queue pair here that allows the same access
    /// ([`EndpointBuilder::peer_access`](crate::EndpointBuilder::peer_access)). Local write access, which remote writes and
    /// atomics need, is added. Dropping the region takes the access back: a later one fails with
    /// [`WcStatus::REM_ACCESS_ERR`](crate::WcStatus::REM_ACCESS_ERR) and breaks the peer's connection.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use rdma_safe::*;
    /// # fn owner(pd: &ProtectionDomain, notice: Buffer) -> Result<()> {
    /// let mut endpoint = Endpoint::builder(pd).peer_access(Access::REMOTE_WRITE).build()?;
    /// let region = pd.expose(Pages::new(4096)?, Access::REMOTE_WRITE)?;
    /// endpoint.receive(notice)?; // taken by the peer's immediate data
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
    /// As [`ProtectionDomain::register`].
    pub fn expose(&self, backing: impl Backing, access: Access) -> Result<ExposedRegion> {
        self.registration(access).expose(backing)
    }

    /// As [`ProtectionDomain::expose`], but that peers name the first byte by the address `iova`, of which they learn where nothing
    /// is here: `ibv_reg_mr_iova(3)`. [`ExposedRegion::remote`] says the same; offsets here are from the first byte, as ever.
    ///
    /// # Errors
    /// As [`ProtectionDomain::register`]; [`Error::Verb`] with `EINVAL`, too, unless `iova` lies as far into a page of 4096 bytes
    /// as the memory does ([`Pages`] lie at the start of one), or where the addresses would wrap.
    #[doc(alias = "ibv_reg_mr_iova")]
    pub fn expose_at(&self, backing: impl Backing, iova: u64, access: Access) -> Result<ExposedRegion> {
        self.registration(access).expose_at(backing, iova)
    }

    /// Registers memory that the caller keeps: `ibv_reg_mr(3)` with exactly `access`.
    ///
    /// # Errors
    /// As [`ProtectionDomain::register`].
    ///
    /// # Safety
    ///
    /// Until the returned object was deregistered, that is until [`RawMemoryRegion::deregister`] has returned success (or the
    /// object was dropped, which does the same and does not say whether it failed, and every window that was bound to it), and
    /// every work request that names its keys has completed, `address..address + len` must stay allocated, and must tolerate
    /// what `access` allows at any time: with a remote right, with [`Access::MW_BIND`], by which anyone can give peers such a
    /// right, or with local write access and a posted work request, bytes change under the program's hands, so no
    /// reference to them may exist and they must be accessed atomically, as by [`rdma_sys::dma`].
    pub unsafe fn register_raw(&self, address: *mut u8, len: usize, access: Access) -> Result<RawMemoryRegion> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.registration(access).register_raw(address, len) }
    }

    /// As [`ProtectionDomain::register_raw`], but that work requests and peers name the first byte by the address `iova`, which
    /// [`RawMemoryRegion::address`] is then: `ibv_reg_mr_iova(3)`. With 0 they name each byte by its offset.
    ///
    /// # Errors
    /// As [`ProtectionDomain::register_raw`], but for [`Error::Verb`] in the place of [`Error::RegisterMemory`]; also with `EINVAL`
    /// unless `iova` lies as far into a page as `address` does, or where the addresses would wrap.
    ///
    /// # Safety
    ///
    /// As of [`ProtectionDomain::register_raw`].
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
