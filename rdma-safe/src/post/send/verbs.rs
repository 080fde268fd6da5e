//! The operations of connected queue pairs.

use rdma_sys::*;

use super::super::payload::NoData;
use super::super::{FlushPlacement, FlushRange, Payload, PostError, Remote, Scatter, SendOps, Sge, WorkRequest};
use super::SendBatch;
use super::batch::{Slot, check_atomic, set_atomic, set_none, set_rdma};
use super::destination::Destination::{self, Connected};
use crate::interface::Interface;

impl<I: Interface> SendBatch<'_, I> {
    /// Sends `payload`: `ibv_wr_send`.
    ///
    /// # Errors
    /// [`PostError::NotEnabled`], [`PostError::TooManySges`], [`PostError::InlineTooLong`],
    /// [`PostError::BatchFull`]; [`PostError::NoDestination`] on UD queue pairs. XRC queue pairs need
    /// [`SendBatch::to_srq`] and return [`PostError::NoRemoteQueue`] without it; with it, other queue pairs return
    /// [`PostError::NotXrc`]. The batch is then unchanged.
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_send")]
    #[inline(always)]
    pub unsafe fn send(&mut self, wr: WorkRequest, payload: impl Payload) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.add_send(Connected, wr, payload) }
    }

    /// Sends `payload` with immediate data in host byte order: `ibv_wr_send_imm`.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_send_imm")]
    #[inline(always)]
    pub unsafe fn send_imm(&mut self, wr: WorkRequest, imm: u32, payload: impl Payload) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.add_send_imm(Connected, wr, imm, payload) }
    }

    /// Sends `payload` and invalidates a remote key of the peer: `ibv_wr_send_inv`.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_send_inv")]
    #[inline(always)]
    pub unsafe fn send_invalidate(
        &mut self,
        wr: WorkRequest,
        rkey: u32,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.add_send_invalidate(Connected, wr, rkey, payload) }
    }

    /// Writes `payload` to memory of the peer: `ibv_wr_rdma_write`.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_rdma_write")]
    #[inline(always)]
    pub unsafe fn write(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.add_write(Connected, wr, remote.into(), payload) }
    }

    /// Writes `payload` to memory of the peer and completes a receive there: `ibv_wr_rdma_write_imm`.
    ///
    /// The completion carries the immediate data `imm`, in host byte order.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_rdma_write_imm")]
    #[inline(always)]
    pub unsafe fn write_imm(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        imm: u32,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.add_write_imm(Connected, wr, remote.into(), imm, payload) }
    }

    /// Reads memory of the peer into `target`: `ibv_wr_rdma_read`.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_rdma_read")]
    #[inline(always)]
    pub unsafe fn read(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        target: impl Scatter,
    ) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.add_read(Connected, wr, remote.into(), target) }
    }

    /// Replaces the 64-bit word at `remote` by `swap` if it equals `compare`: `ibv_wr_atomic_cmp_swp`.
    ///
    /// The old value is written to the eight bytes of `result`, in host byte order.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`]; [`PostError::AtomicOperand`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_atomic_cmp_swp")]
    #[inline(always)]
    pub unsafe fn compare_swap(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        compare: u64,
        swap: u64,
        result: Sge,
    ) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.add_compare_swap(Connected, wr, remote.into(), compare, swap, result) }
    }

    /// Adds `add` to the 64-bit word at `remote`: `ibv_wr_atomic_fetch_add`.
    ///
    /// The old value is written to the eight bytes of `result`, in host byte order.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`]; [`PostError::AtomicOperand`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_atomic_fetch_add")]
    #[inline(always)]
    pub unsafe fn fetch_add(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        add: u64,
        result: Sge,
    ) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.add_fetch_add(Connected, wr, remote.into(), add, result) }
    }

    /// Waits until earlier writes to `len` bytes at `remote` have reached `placement`: `ibv_wr_flush`.
    ///
    /// The work completes after all earlier writes of this queue to that range. It transfers no data.
    ///
    /// Devices that support it report [`DeviceCapabilities::FLUSH_GLOBAL`](crate::device::DeviceCapabilities::FLUSH_GLOBAL)
    /// and [`FLUSH_PERSISTENT`](crate::device::DeviceCapabilities::FLUSH_PERSISTENT).
    ///
    /// # Errors
    /// Those of [`SendBatch::send`]. `ibv_post_send` does not support the operation: [`PostError::NotEnabled`].
    #[doc(alias = "ibv_wr_flush")]
    #[inline(always)]
    pub fn flush(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        len: usize,
        placement: FlushPlacement,
        range: FlushRange,
    ) -> Result<(), PostError> {
        self.add_flush(Connected, wr, remote.into(), len, placement, range)
    }
}

// These build the work requests of this queue pair, of `XrcBatch` and of datagrams, for both interfaces.
impl<I: Interface> SendBatch<'_, I> {
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub(super) unsafe fn add_send(
        &mut self,
        to: Destination<'_>,
        wr: WorkRequest,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        let slot = self.begin(SendOps::SEND, to, wr, &payload)?;
        // SAFETY: the queue pair has the operation, which both branches set whole; the caller's contract.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_send(qp),
                Slot::Classic(wr) => set_none(&mut *wr, IBV_WR_SEND),
            }
            self.finish(slot, to, payload);
        }
        Ok(())
    }

    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub(super) unsafe fn add_send_imm(
        &mut self,
        to: Destination<'_>,
        wr: WorkRequest,
        imm: u32,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        let slot = self.begin(SendOps::SEND_WITH_IMM, to, wr, &payload)?;
        // SAFETY: the queue pair has the operation, which both branches set whole; the caller's contract.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_send_imm(qp, imm.to_be()),
                Slot::Classic(wr) => {
                    set_none(&mut *wr, IBV_WR_SEND_WITH_IMM);
                    (*wr).__bindgen_anon_1.imm_data = imm.to_be();
                }
            }
            self.finish(slot, to, payload);
        }
        Ok(())
    }

    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub(super) unsafe fn add_send_invalidate(
        &mut self,
        to: Destination<'_>,
        wr: WorkRequest,
        rkey: u32,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        let slot = self.begin(SendOps::SEND_WITH_INV, to, wr, &payload)?;
        // SAFETY: the queue pair has the operation, which both branches set whole; the caller's contract.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_send_inv(qp, rkey),
                Slot::Classic(wr) => {
                    set_none(&mut *wr, IBV_WR_SEND_WITH_INV);
                    (*wr).__bindgen_anon_1.invalidate_rkey = rkey;
                }
            }
            self.finish(slot, to, payload);
        }
        Ok(())
    }

    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub(super) unsafe fn add_write(
        &mut self,
        to: Destination<'_>,
        wr: WorkRequest,
        remote: Remote,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        let slot = self.begin(SendOps::RDMA_WRITE, to, wr, &payload)?;
        // SAFETY: the queue pair has the operation, which both branches set whole; the caller's contract.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_rdma_write(qp, remote.rkey, remote.address),
                Slot::Classic(wr) => set_rdma(&mut *wr, IBV_WR_RDMA_WRITE, remote),
            }
            self.finish(slot, to, payload);
        }
        Ok(())
    }

    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub(super) unsafe fn add_write_imm(
        &mut self,
        to: Destination<'_>,
        wr: WorkRequest,
        remote: Remote,
        imm: u32,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        let slot = self.begin(SendOps::RDMA_WRITE_WITH_IMM, to, wr, &payload)?;
        // SAFETY: the queue pair has the operation, which both branches set whole; the caller's contract.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_rdma_write_imm(qp, remote.rkey, remote.address, imm.to_be()),
                Slot::Classic(wr) => {
                    set_rdma(&mut *wr, IBV_WR_RDMA_WRITE_WITH_IMM, remote);
                    (*wr).__bindgen_anon_1.imm_data = imm.to_be();
                }
            }
            self.finish(slot, to, payload);
        }
        Ok(())
    }

    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub(super) unsafe fn add_read(
        &mut self,
        to: Destination<'_>,
        wr: WorkRequest,
        remote: Remote,
        target: impl Scatter,
    ) -> Result<(), PostError> {
        let slot = self.begin(SendOps::RDMA_READ, to, wr, &target)?;
        // SAFETY: the queue pair has the operation, which both branches set whole; the caller's contract.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_rdma_read(qp, remote.rkey, remote.address),
                Slot::Classic(wr) => set_rdma(&mut *wr, IBV_WR_RDMA_READ, remote),
            }
            self.finish(slot, to, target);
        }
        Ok(())
    }

    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub(super) unsafe fn add_compare_swap(
        &mut self,
        to: Destination<'_>,
        wr: WorkRequest,
        remote: Remote,
        compare: u64,
        swap: u64,
        result: Sge,
    ) -> Result<(), PostError> {
        check_atomic(remote.address, result)?;
        let slot = self.begin(SendOps::ATOMIC_CMP_AND_SWP, to, wr, &result)?;
        // SAFETY: the queue pair has the operation, which both branches set whole; the caller's contract.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_atomic_cmp_swp(qp, remote.rkey, remote.address, compare, swap),
                Slot::Classic(wr) => set_atomic(&mut *wr, IBV_WR_ATOMIC_CMP_AND_SWP, remote, compare, swap),
            }
            self.finish(slot, to, result);
        }
        Ok(())
    }

    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub(super) unsafe fn add_fetch_add(
        &mut self,
        to: Destination<'_>,
        wr: WorkRequest,
        remote: Remote,
        add: u64,
        result: Sge,
    ) -> Result<(), PostError> {
        check_atomic(remote.address, result)?;
        let slot = self.begin(SendOps::ATOMIC_FETCH_AND_ADD, to, wr, &result)?;
        // SAFETY: the queue pair has the operation, which both branches set whole; the caller's contract.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_atomic_fetch_add(qp, remote.rkey, remote.address, add),
                Slot::Classic(wr) => set_atomic(&mut *wr, IBV_WR_ATOMIC_FETCH_AND_ADD, remote, add, 0),
            }
            self.finish(slot, to, result);
        }
        Ok(())
    }

    #[inline(always)]
    pub(super) fn add_flush(
        &mut self,
        to: Destination<'_>,
        wr: WorkRequest,
        remote: Remote,
        len: usize,
        placement: FlushPlacement,
        range: FlushRange,
    ) -> Result<(), PostError> {
        let slot = self.begin(SendOps::FLUSH, to, wr, &NoData)?;
        // SAFETY: the queue pair has the operation, which names no local memory and writes none of the peer's. No queue
        // pair that posts by `ibv_post_send` has it.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_flush(qp, remote.rkey, remote.address, len, placement.bits(), range.0),
                Slot::Classic(wr) => set_rdma(&mut *wr, IBV_WR_FLUSH, remote),
            }
            self.finish(slot, to, NoData);
        }
        Ok(())
    }
}
