//! DMA-BUFs: memory of other devices.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd};

use rdma_sys::*;

use super::builder::mask;
use super::raw::Holder;
use super::{RawMemoryRegion, RegistrationBuilder};
use crate::{Access, Errno, Error, ProtectionDomain, Result};

impl ProtectionDomain {
    /// Registers `len` bytes of a DMA-BUF from `offset`, for example memory of a GPU: `ibv_reg_dmabuf_mr(3)`.
    ///
    /// The access is exactly `access`. Work requests and peers use the address `iova` for the first byte. It must have
    /// the same offset within a page as `offset`. Pass the address at which the bytes are mapped, or `offset`, so that
    /// addresses equal offsets in the DMA-BUF.
    ///
    /// The registration keeps the DMA-BUF alive; `fd` may be closed afterwards. To use a DMA handle, see
    /// [`ProtectionDomain::registration`].
    ///
    /// ```no_run
    /// # use rdma_safe::*;
    /// # fn example(pd: &ProtectionDomain, gpu: std::os::fd::OwnedFd) -> rdma_safe::Result<()> {
    /// // SAFETY: nothing on this host accesses the memory until the region is dropped, because the peers write to it.
    /// let region = unsafe { pd.register_dmabuf(&gpu, 0, 1 << 20, 0, Access::LOCAL_WRITE | Access::REMOTE_WRITE)? };
    /// // … send `region.address()` and `region.rkey()` to the peers
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device lacks this; [`Error::RegisterDmaBuf`], with `EBADF` or `EINVAL` when `fd`
    /// is no DMA-BUF or the range is not within it; [`Error::EmptyRegion`].
    ///
    /// # Safety
    ///
    /// The contract of [`ProtectionDomain::register_raw`] applies to the bytes of the DMA-BUF, wherever they are
    /// mapped, except that the registration keeps them allocated. Unless `iova` is the address at which they are mapped
    /// in this process, see [`RecvBatch`](crate::RecvBatch) for providers that copy short messages.
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub unsafe fn register_dmabuf(
        &self,
        fd: impl AsFd,
        offset: u64,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<RawMemoryRegion> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.registration(access).register_dmabuf(fd, offset, len, iova) }
    }
}

impl RegistrationBuilder<'_> {
    /// Like [`ProtectionDomain::register_dmabuf`].
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register_dmabuf`]; with a DMA handle, [`Error::Verb`] of `ibv_reg_mr_ex` instead of
    /// [`Error::RegisterDmaBuf`].
    ///
    /// # Safety
    /// The contract of [`ProtectionDomain::register_dmabuf`].
    pub unsafe fn register_dmabuf(self, fd: impl AsFd, offset: u64, len: usize, iova: u64) -> Result<RawMemoryRegion> {
        let RegistrationBuilder { pd, access, .. } = self;
        let (fd, context) = (fd.as_fd().as_raw_fd(), pd.context());
        if iova.checked_add(len as u64).is_none() || offset.checked_add(len as u64).is_none() {
            return Err(Error::RegisterDmaBuf { offset, len, access, errno: Errno(libc::EINVAL) });
        }
        let register = context.verbs().ibv_reg_dmabuf_mr;
        let registration = match self.handle {
            None => self.create(
                len,
                // SAFETY: the domain is valid, and the descriptor is open during the call. The caller guarantees the
                // contract for the memory.
                || unsafe { register(pd.as_raw(), offset, len, iova, fd, access.bits() as c_int) },
                |errno| match errno.is_unsupported() {
                    true => context.unsupported("registering DMA-BUFs"),
                    false => Error::RegisterDmaBuf { offset, len, access, errno },
                },
            )?,
            Some(_) => {
                let attr = ibv_mr_init_attr {
                    comp_mask: mask(IBV_REG_MR_MASK_FD | IBV_REG_MR_MASK_FD_OFFSET | IBV_REG_MR_MASK_IOVA),
                    fd,
                    fd_offset: offset,
                    iova,
                    length: len,
                    ..ibv_mr_init_attr::zeroed()
                };
                // SAFETY: the descriptor is open during the call. The caller guarantees the contract for the memory.
                unsafe { self.register_ex(attr)? }
            }
        };
        Ok(RawMemoryRegion { inner: Holder::new(registration), address: iova, len })
    }
}
