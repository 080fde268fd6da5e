//! Writing a word at once.

use rdma_sys::*;

use super::super::payload::NoData;
use super::super::{PostError, Remote, SendOps, WorkRequest};
use super::SendBatch;
use super::batch::set_rdma;
use crate::interface::Interface;

impl<I: Interface> SendBatch<'_, I> {
    /// Writes eight bytes to memory of the peer, which are seen there all at once or not at all: `ibv_wr_atomic_write`. Like a
    /// write, and unlike [`SendBatch::compare_swap`], it returns nothing. The bytes are copied in this call.
    ///
    /// Devices that have it report [`DeviceCapabilities::ATOMIC_WRITE`](crate::DeviceCapabilities::ATOMIC_WRITE).
    ///
    /// # Errors
    /// As [`SendBatch::send`]; [`PostError::AtomicOperand`] when the address is not a multiple of eight. Work that is posted by
    /// `ibv_post_send` does not have it: [`PostError::NotEnabled`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_atomic_write")]
    #[inline(always)]
    pub unsafe fn atomic_write(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        bytes: [u8; 8],
    ) -> Result<(), PostError> {
        let Remote { address, rkey } = remote.into();
        if address % 8 != 0 {
            return Err(PostError::AtomicOperand);
        }
        let extended = |qp| {
            // SAFETY: called by `add` as it says. The provider copies the bytes.
            unsafe { ibv_wr_atomic_write(qp, rkey, address, bytes.as_ptr().cast()) }
        };
        let classic = |wr: &mut ibv_send_wr| set_rdma(wr, address, rkey);
        // SAFETY: the caller's contract; the operation and its builder belong together. No queue pair that is posted to by
        // `ibv_post_send` has the operation.
        unsafe { self.add(SendOps::ATOMIC_WRITE, IBV_WR_ATOMIC_WRITE, wr, NoData, extended, classic) }
    }
}
