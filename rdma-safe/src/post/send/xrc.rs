//! Work for a shared receive queue of the peer: XRC.

use super::super::{FlushPlacement, FlushRange, Payload, PostError, Remote, Scatter, Sge, WorkRequest};
use super::SendBatch;
use super::destination::Destination;
use crate::interface::{Any, Interface};

/// A batch of an [`XRC_SEND`](crate::QueuePairType::XRC_SEND) queue pair with a destination: a shared receive queue of
/// the peer.
///
/// Made by [`SendBatch::to_srq`]. Every operation names such a queue. Messages take their receives from it, and access
/// to memory is checked against its protection domain.
#[derive(Debug)]
#[must_use = "the number of a queue does nothing; call a method that adds work"]
pub struct XrcBatch<'b, 'q, I: Interface = Any> {
    batch: &'b mut SendBatch<'q, I>,
    srq: u32,
}

impl<'q, I: Interface> SendBatch<'q, I> {
    /// Adds work for the shared receive queue `number` of the peer: `ibv_wr_set_xrc_srqn`.
    ///
    /// Only for XRC_SEND queue pairs, which take no other work. The peer gets the number from
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
    /// [`SendBatch::send`], for this queue.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn send(&mut self, wr: WorkRequest, payload: impl Payload) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.batch.add_send(self.to(), wr, payload) }
    }

    /// [`SendBatch::send_imm`], for this queue.
    ///
    /// # Errors
    /// Those of [`SendBatch::send_imm`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn send_imm(&mut self, wr: WorkRequest, imm: u32, payload: impl Payload) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.batch.add_send_imm(self.to(), wr, imm, payload) }
    }

    /// [`SendBatch::send_invalidate`], for this queue.
    ///
    /// # Errors
    /// Those of [`SendBatch::send_invalidate`].
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
        // SAFETY: the caller's contract.
        unsafe { self.batch.add_send_invalidate(self.to(), wr, rkey, payload) }
    }

    /// [`SendBatch::write`], for this queue.
    ///
    /// # Errors
    /// Those of [`SendBatch::write`].
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
        // SAFETY: the caller's contract.
        unsafe { self.batch.add_write(self.to(), wr, remote.into(), payload) }
    }

    /// [`SendBatch::write_imm`], for this queue.
    ///
    /// # Errors
    /// Those of [`SendBatch::write_imm`].
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
        // SAFETY: the caller's contract.
        unsafe { self.batch.add_write_imm(self.to(), wr, remote.into(), imm, payload) }
    }

    /// [`SendBatch::read`], for this queue.
    ///
    /// # Errors
    /// Those of [`SendBatch::read`].
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
        // SAFETY: the caller's contract.
        unsafe { self.batch.add_read(self.to(), wr, remote.into(), target) }
    }

    /// [`SendBatch::compare_swap`], for this queue.
    ///
    /// # Errors
    /// Those of [`SendBatch::compare_swap`].
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
        // SAFETY: the caller's contract.
        unsafe { self.batch.add_compare_swap(self.to(), wr, remote.into(), compare, swap, result) }
    }

    /// [`SendBatch::fetch_add`], for this queue.
    ///
    /// # Errors
    /// Those of [`SendBatch::fetch_add`].
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
        // SAFETY: the caller's contract.
        unsafe { self.batch.add_fetch_add(self.to(), wr, remote.into(), add, result) }
    }

    /// [`SendBatch::flush`], for this queue.
    ///
    /// # Errors
    /// Those of [`SendBatch::flush`].
    #[inline(always)]
    pub fn flush(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        len: usize,
        placement: FlushPlacement,
        range: FlushRange,
    ) -> Result<(), PostError> {
        self.batch.add_flush(self.to(), wr, remote.into(), len, placement, range)
    }

    #[inline(always)]
    fn to(&self) -> Destination<'static> {
        Destination::Srq(self.srq)
    }
}
