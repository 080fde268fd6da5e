//! Memory of other devices.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use super::{RawMemoryRegion, Registration};
use crate::errno::check_ptr;
use crate::{Access, Error, ProtectionDomain, Result};

impl ProtectionDomain {
    /// Registers `len` bytes of a DMA-BUF from its byte `offset` on, for instance memory of a GPU: `ibv_reg_dmabuf_mr(3)` with
    /// exactly `access`. Work requests and peers name its first byte by the address `iova`, which must lie as far into a page as
    /// `offset` does.
    ///
    /// The registration holds the DMA-BUF; `fd` may be closed afterwards.
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
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        let (fd, verbs) = (fd.as_fd().as_raw_fd(), self.context().verbs());
        // SAFETY: the domain is valid and the descriptor open for the duration of the call; the caller vouches for the memory.
        let raw = check_ptr(|| unsafe {
            (verbs.ibv_reg_dmabuf_mr)(self.as_raw(), offset, len, iova, fd, access.bits() as i32)
        })
        .map_err(|errno| match errno.is_unsupported() {
            true => self.context().unsupported("registering DMA-BUFs"),
            false => Error::RegisterDmaBuf { offset, len, access, errno },
        })?;
        // SAFETY: just made, and given to nobody else.
        let inner = Arc::new(unsafe { Registration::from_raw(raw, self, access) });
        Ok(RawMemoryRegion { inner, address: iova, len })
    }
}
