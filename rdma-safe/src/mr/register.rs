//! Registering memory.

use std::fmt;

use super::{Access, Buffer, ExposedRegion, Memory, Pages, RawMemoryRegion, Region, RegistrationBuilder};
use crate::{Error, ProtectionDomain, Result};

/// A failed registration, with the memory.
#[non_exhaustive]
pub struct RegisterError<M> {
    /// Reason of the failure.
    pub error: Error,
    /// The memory, unchanged.
    pub memory: M,
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

    /// Like [`ProtectionDomain::register`], but returns the memory if it cannot be registered.
    ///
    /// # Errors
    /// [`RegisterError`], with the errors of [`ProtectionDomain::register`].
    pub fn try_register<M: Memory>(&self, memory: M) -> std::result::Result<Buffer, RegisterError<M>> {
        self.registration(Access::empty()).try_register(memory)
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

impl RegistrationBuilder<'_> {
    /// Like [`ProtectionDomain::try_register`].
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register_with`]; see also [`RegistrationBuilder::dma_handle`].
    pub fn try_register<M: Memory>(self, memory: M) -> std::result::Result<Buffer, RegisterError<M>> {
        let access = self.access & Access::EXPOSING;
        if !access.is_empty() {
            return Err(RegisterError { error: Error::BufferAccess { access }, memory });
        }
        match Region::new::<M, _>(self.with_local_write(), Box::new(memory.into_backing()), None) {
            Ok(region) => Ok(Buffer::whole(region)),
            Err((error, backing)) => Err(RegisterError { error, memory: M::from_backing(*backing) }),
        }
    }
}

impl<M> fmt::Display for RegisterError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<M> fmt::Debug for RegisterError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisterError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<M> std::error::Error for RegisterError<M> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<M> From<RegisterError<M>> for Error {
    /// Drops the memory.
    fn from(failed: RegisterError<M>) -> Self {
        failed.error
    }
}
