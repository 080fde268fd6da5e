//! Memory of other devices.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use rdma_sys::*;

use super::builder::mask;
use super::{RawMemoryRegion, RegistrationBuilder};
use crate::{Access, Errno, Error, ProtectionDomain, Result};

impl ProtectionDomain {
    /// Registers `len` bytes of a DMA-BUF from its byte `offset` on, for instance memory of a GPU: `ibv_reg_dmabuf_mr(3)` with
    /// exactly `access`. Work requests and peers name its first byte by the address `iova`, which must lie as far into a page as
    /// `offset` does: where it is mapped, or `offset`, by which they name each byte by its place in the DMA-BUF.
    ///
    /// The registration holds the DMA-BUF; `fd` may be closed afterwards. With a DMA handle it is made by
    /// [`ProtectionDomain::registration`].
    ///
    /// ```no_run
    /// # use rdma_safe::*;
    /// # fn example(pd: &ProtectionDomain, gpu: std::os::fd::OwnedFd) -> rdma_safe::Result<()> {
    /// // SAFETY: nobody on this host uses the memory until the region is gone; the peers are to write there.
    /// let region = unsafe { pd.register_dmabuf(&gpu, 0, 1 << 20, 0, Access::LOCAL_WRITE | Access::REMOTE_WRITE)? };
    /// // … tell the peers `region.address()` and `region.rkey()`
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device cannot; [`Error::RegisterDmaBuf`], with `EBADF` or `EINVAL` when `fd` is no DMA-BUF
    /// or the range does not lie within it; [`Error::EmptyRegion`].
    ///
    /// # Safety
    ///
    /// As of [`ProtectionDomain::register_raw`] for the bytes of the DMA-BUF, wherever they are mapped, but for their staying
    /// allocated, which the registration sees to. Unless `iova` is where they are mapped in this process, mind what
    /// [`RecvBatch`](crate::RecvBatch) says of providers that copy short messages.
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
    /// As [`ProtectionDomain::register_dmabuf`].
    ///
    /// # Errors
    /// As there; with a DMA handle also [`Error::Verb`] of `ibv_reg_mr_ex`, in the place of [`Error::RegisterDmaBuf`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn register_dmabuf(self, fd: impl AsFd, offset: u64, len: usize, iova: u64) -> Result<RawMemoryRegion> {
        let RegistrationBuilder { pd, access, .. } = self;
        let (fd, context) = (fd.as_fd().as_raw_fd(), pd.context());
        if iova.checked_add(len as u64).is_none() || offset.checked_add(len as u64).is_none() {
            return Err(Error::RegisterDmaBuf { offset, len, access, errno: Errno(libc::EINVAL) });
        }
        let register = context.verbs().ibv_reg_dmabuf_mr;
        let registration = match self.handle {
            None => self.made(
                len,
                // SAFETY: the domain is valid and the descriptor open for the duration of the call; the caller vouches for the
                // memory.
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
                // SAFETY: the descriptor is open for the duration of the call; the caller vouches for the memory.
                unsafe { self.by_attributes(attr)? }
            }
        };
        Ok(RawMemoryRegion { inner: Arc::new(registration), address: iova, len })
    }
}
