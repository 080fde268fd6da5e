//! Work that names a shared receive queue of the peer.

use rdma_sys::*;

use super::super::payload::NoData;
use super::super::{FlushPlacement, FlushRange, Payload, PostError, Remote, Scatter, SendOps, Sge, WorkRequest};
use super::SendBatch;
use super::batch::{check_atomic, set_atomic, set_none, set_rdma};
use super::operations::to_srq;
use super::verbs::operations;
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
    operations! {}

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
