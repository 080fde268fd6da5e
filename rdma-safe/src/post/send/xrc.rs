//! Work that names a shared receive queue of the peer.

use rdma_sys::*;

use super::super::payload::NoData;
use super::super::{FlushPlacement, FlushRange, Payload, PostError, Remote, Scatter, SendOps, Sge, WorkRequest};
use super::SendBatch;
use super::batch::{check_atomic, set_atomic, set_none, set_rdma};
use super::operations::to_srq;
use crate::interface::{Any, Interface};

/// A batch of an [`XRC_SEND`](crate::QueuePairType::XRC_SEND) queue pair, and the shared receive queue of the peer that the work
/// added by this goes to. Made by [`SendBatch::to_srq`].
///
/// Every operation names one: it takes the receives of messages, and the rights to memory are those of its domain.
#[derive(Debug)]
#[must_use = "the number of a queue does nothing; call a method that adds work"]
pub struct XrcBatch<'b, 'q, I: Interface = Any> {
    batch: &'b mut SendBatch<'q, I>,
    srq: u32,
}

impl<'q, I: Interface> SendBatch<'q, I> {
    /// Adds work that goes to the shared receive queue `number` of the peer: `ibv_wr_set_xrc_srqn`. Of XRC_SEND queue pairs only,
    /// which take no other work. The peer knows the number:
    /// [`SharedReceiveQueue::xrc_number`](crate::SharedReceiveQueue::xrc_number).
    ///
    /// ```no_run
    /// # use rdma_safe::{Inline, PostError, QueuePair, WorkRequest};
    /// # fn example(qp: &mut QueuePair, number: u32) -> Result<(), PostError> {
    /// let mut batch = qp.send_batch()?;
    /// // SAFETY: the bytes are copied in the call.
    /// unsafe { batch.to_srq(number).send(WorkRequest::new(1).signaled(), Inline(b"hello"))? };
    /// batch.post()
    /// # }
    /// ```
    #[doc(alias = "ibv_wr_set_xrc_srqn")]
    #[inline(always)]
    pub fn to_srq(&mut self, number: u32) -> XrcBatch<'_, 'q, I> {
        XrcBatch { batch: self, srq: number }
    }
}

impl<I: Interface> XrcBatch<'_, '_, I> {
    /// As [`SendBatch::send`].
    ///
    /// # Errors
    /// As there; [`PostError::NotXrc`] on queue pairs of other types.
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn send(&mut self, wr: WorkRequest, payload: impl Payload) -> Result<(), PostError> {
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_send(qp) }
        };
        // SAFETY: the caller's contract; the operation and its builder belong together.
        unsafe { self.add(SendOps::SEND, IBV_WR_SEND, wr, payload, extended, set_none) }
    }

    /// As [`SendBatch::send_imm`].
    ///
    /// # Errors
    /// As [`XrcBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn send_imm(&mut self, wr: WorkRequest, imm: u32, payload: impl Payload) -> Result<(), PostError> {
        let imm = imm.to_be();
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_send_imm(qp, imm) }
        };
        let classic = |wr: &mut ibv_send_wr| {
            set_none(wr);
            wr.__bindgen_anon_1.imm_data = imm;
        };
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::SEND_WITH_IMM, IBV_WR_SEND_WITH_IMM, wr, payload, extended, classic) }
    }

    /// As [`SendBatch::send_invalidate`].
    ///
    /// # Errors
    /// As [`XrcBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn send_invalidate(
        &mut self,
        wr: WorkRequest,
        rkey: u32,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_send_inv(qp, rkey) }
        };
        let classic = |wr: &mut ibv_send_wr| {
            set_none(wr);
            wr.__bindgen_anon_1.invalidate_rkey = rkey;
        };
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::SEND_WITH_INV, IBV_WR_SEND_WITH_INV, wr, payload, extended, classic) }
    }

    /// As [`SendBatch::write`]; the queue says whose memory it is.
    ///
    /// # Errors
    /// As [`XrcBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn write(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        let Remote { address, rkey } = remote.into();
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_rdma_write(qp, rkey, address) }
        };
        let classic = |wr: &mut ibv_send_wr| set_rdma(wr, address, rkey);
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::RDMA_WRITE, IBV_WR_RDMA_WRITE, wr, payload, extended, classic) }
    }

    /// As [`SendBatch::write_imm`].
    ///
    /// # Errors
    /// As [`XrcBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn write_imm(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        imm: u32,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        let Remote { address, rkey } = remote.into();
        let imm = imm.to_be();
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_rdma_write_imm(qp, rkey, address, imm) }
        };
        let classic = |wr: &mut ibv_send_wr| {
            set_rdma(wr, address, rkey);
            wr.__bindgen_anon_1.imm_data = imm;
        };
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM, wr, payload, extended, classic) }
    }

    /// As [`SendBatch::read`].
    ///
    /// # Errors
    /// As [`XrcBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn read(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        target: impl Scatter,
    ) -> Result<(), PostError> {
        let Remote { address, rkey } = remote.into();
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_rdma_read(qp, rkey, address) }
        };
        let classic = |wr: &mut ibv_send_wr| set_rdma(wr, address, rkey);
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::RDMA_READ, IBV_WR_RDMA_READ, wr, target, extended, classic) }
    }

    /// As [`SendBatch::compare_swap`].
    ///
    /// # Errors
    /// As [`XrcBatch::send`]; [`PostError::AtomicOperand`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn compare_swap(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        compare: u64,
        swap: u64,
        result: Sge,
    ) -> Result<(), PostError> {
        let Remote { address, rkey } = remote.into();
        check_atomic(address, result)?;
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_atomic_cmp_swp(qp, rkey, address, compare, swap) }
        };
        let classic = |wr: &mut ibv_send_wr| set_atomic(wr, address, rkey, compare, swap);
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_CMP_AND_SWP, wr, result, extended, classic) }
    }

    /// As [`SendBatch::fetch_add`].
    ///
    /// # Errors
    /// As [`XrcBatch::send`]; [`PostError::AtomicOperand`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn fetch_add(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        add: u64,
        result: Sge,
    ) -> Result<(), PostError> {
        let Remote { address, rkey } = remote.into();
        check_atomic(address, result)?;
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_atomic_fetch_add(qp, rkey, address, add) }
        };
        let classic = |wr: &mut ibv_send_wr| set_atomic(wr, address, rkey, add, 0);
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_FETCH_AND_ADD, wr, result, extended, classic) }
    }

    /// As [`SendBatch::flush`].
    ///
    /// # Errors
    /// As there; [`PostError::NotXrc`] on queue pairs of other types.
    #[inline(always)]
    pub fn flush(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        len: usize,
        placement: FlushPlacement,
        range: FlushRange,
    ) -> Result<(), PostError> {
        let Remote { address, rkey } = remote.into();
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_flush(qp, rkey, address, len, placement.bits(), range.0) }
        };
        let classic = |wr: &mut ibv_send_wr| set_rdma(wr, address, rkey);
        // SAFETY: as in `SendBatch::flush`.
        unsafe { self.add(SendOps::FLUSH, IBV_WR_FLUSH, wr, NoData, extended, classic) }
    }

    /// # Safety
    /// As of [`SendBatch::add`].
    #[inline(always)]
    unsafe fn add<P: Payload>(
        &mut self,
        op: SendOps,
        opcode: ibv_wr_opcode,
        wr: WorkRequest,
        payload: P,
        extended: impl FnOnce(*mut ibv_qp_ex),
        classic: impl FnOnce(&mut ibv_send_wr),
    ) -> Result<(), PostError> {
        let srq = self.srq;
        let extended = |qp| {
            extended(qp);
            // SAFETY: after a builder call; a queue pair that has one of these operations has this function, too.
            unsafe { ibv_wr_set_xrc_srqn(qp, srq) }
        };
        let classic = |wr: &mut ibv_send_wr| {
            classic(wr);
            wr.qp_type.xrc.remote_srqn = srq;
        };
        // SAFETY: the caller's contract.
        unsafe { self.batch.add(to_srq(op), opcode, wr, payload, extended, classic) }
    }
}
