//! The atomic write operation.

use rdma_sys::*;

use super::super::payload::NoData;
use super::super::{PostError, Remote, SendOps, WorkRequest};
use super::SendBatch;
use super::batch::{Slot, set_rdma};
use super::destination::Destination::Connected;
use crate::interface::Interface;

impl<I: Interface> SendBatch<'_, I> {
    /// Writes eight bytes to memory of the peer in one atomic step: `ibv_wr_atomic_write`.
    ///
    /// The peer sees either all of them or none. Like a write, and unlike [`SendBatch::compare_swap`], it returns
    /// nothing. The bytes are copied during this call.
    ///
    /// Devices that support it report [`DeviceCapabilities::ATOMIC_WRITE`](crate::device::DeviceCapabilities::ATOMIC_WRITE).
    ///
    /// # Errors
    /// Those of [`SendBatch::send`]; [`PostError::AtomicOperand`] if the address is not a multiple of eight.
    /// `ibv_post_send` does not support the operation: [`PostError::NotEnabled`].
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
        let remote = remote.into();
        if remote.address % 8 != 0 {
            return Err(PostError::AtomicOperand);
        }
        let slot = self.begin(SendOps::ATOMIC_WRITE, Connected, wr, &NoData)?;
        // SAFETY: the queue pair has the operation, which copies the bytes; the caller's contract. No queue pair that
        // posts by `ibv_post_send` has it.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_atomic_write(qp, remote.rkey, remote.address, bytes.as_ptr().cast()),
                Slot::Classic(wr) => set_rdma(&mut *wr, IBV_WR_ATOMIC_WRITE, remote),
            }
            self.finish(slot, Connected, NoData);
        }
        Ok(())
    }
}
