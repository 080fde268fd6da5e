//! Work that is posted at once.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use rdma_sys::*;

use super::super::chain::Chain;
use super::super::payload::Limits;
use super::super::payload::NoData;
use super::super::{FlushPlacement, FlushRange, Payload, PostError, Remote, Scatter, SendOps, Sge, WorkRequest};
use super::operations::refusal;
use super::verbs::operations;
use super::{READY, SendState, complete};
use crate::cq::rare;
use crate::interface::{Any, Interface};

/// Work to post at once, with one doorbell. Dropping it posts nothing.
///
/// Each method adds one whole work request, so none can be left half-built.
///
/// On some providers it holds the locks of the send queue and of the completion queue of its sends, for which this thread would
/// wait for ever: post or drop it before completions are taken from that queue, before it is armed, and before, of a queue pair
/// that completes to it, receives are posted, another batch is begun, or it is dropped or reset.
///
/// # Safety
///
/// The methods that add work are `unsafe`, for the device works on memory behind the compiler's back. From
/// [`SendBatch::post`] until the work request has completed (its own completion, or, on
/// [`TransportType::IB`](crate::TransportType::IB), that of a later one of the same send queue, was polled; or
/// [`QueuePair::destroy`](crate::QueuePair::destroy) returned success), the caller must see to it that
/// - the memory named by an [`Sge`] stays allocated and registered under its key, is not written, and, where it takes a
///   result (reads, atomics), is neither read nor referred to by a reference;
/// - where the address of an [`Sge`] is not that of the memory in this process, as of a [`DeviceRegion`](crate::DeviceRegion), the
///   provider does not use it: mlx5 copies short results there by the CPU, see [`RecvBatch`](crate::RecvBatch), and reads the first
///   bytes of what a RAW_PACKET queue pair sends;
/// - the header of [`SendBatch::send_tso`] stays as it is until [`SendBatch::post`] has returned;
/// - a memory window that it binds is left alone ([`SendBatch::bind`] says for how long);
/// - the address handle of a [`UdTarget`](crate::UdTarget) is of the protection domain of the queue pair and is not destroyed;
/// - what the peer's memory is overwritten with harms nobody: a queue pair can be connected to one of the same process,
///   and a write then reaches any memory that this process registered with remote write access.
#[must_use = "dropping a batch posts nothing; call `post`"]
pub struct SendBatch<'q, I: Interface = Any> {
    /// Where `I` is known, [`SendQueue::post`] owns this and ends what it has begun. As another type, it cannot be exchanged
    /// for one that a [`SendQueue::batch`] has made, which is ended by whoever has it.
    interface: PhantomData<I>,
    target: Target,
    /// Enabled operations, if the state of the queue pair allows any. Where `I` is [`Any`], those of the queue count: its state
    /// was looked at when this was begun.
    usable: SendOps,
    /// Those of the queue.
    pub(super) limits: Limits,
    pub(super) queue: &'q mut SendState,
    pub(super) count: u32,
}

/// Where work goes. The pointers are those of the queue: here, they need not be read again for each piece. They keep a batch in
/// its thread.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Extended(NonNull<ibv_qp_ex>),
    /// The first work request of its chain, which is not [`Chain::none`].
    Classic(*mut ibv_send_wr),
}

impl<'q, I: Interface> SendBatch<'q, I> {
    /// `target` and `limits` must be those of `queue`.
    #[inline(always)]
    pub(super) fn new(target: Target, usable: SendOps, limits: Limits, queue: &'q mut SendState) -> Self {
        SendBatch { interface: PhantomData, target, usable, limits, queue, count: 0 }
    }
}

impl<I: Interface> SendBatch<'_, I> {
    operations! {}

    /// How many work requests it holds.
    #[must_use]
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether it holds none.
    #[must_use]
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// # Safety
    ///
    /// The contract of [`SendBatch`]; `extended` and `classic` must make the work request that `op` and `opcode` name, `classic`
    /// the whole of `wr`. `extended` is called with a queue pair between `ibv_wr_start` and `ibv_wr_complete` that has the
    /// operation.
    #[inline(always)]
    pub(super) unsafe fn add<P: Payload>(
        &mut self,
        op: SendOps,
        opcode: ibv_wr_opcode,
        wr: WorkRequest,
        payload: P,
        extended: impl FnOnce(*mut ibv_qp_ex),
        classic: impl FnOnce(&mut ibv_send_wr),
    ) -> Result<(), PostError> {
        let queue = &mut *self.queue;
        let usable = if I::EXTENDED.is_none() { queue.enabled } else { self.usable };
        if !usable.contains(op) {
            rare();
            return Err(refusal(usable, op));
        }
        payload.check(self.limits)?;
        let flags = wr.flags.bits() | if P::INLINE { IBV_SEND_INLINE.0 } else { 0 };
        match self.target {
            Target::Extended(qp) => {
                let qp = qp.as_ptr();
                // SAFETY: the queue pair is valid and a batch is open. Its identifier and flags are read by the builder
                // call, which `op` says exists. `check` has passed. See `Quirks::INLINE_NEEDS_FLAG` for the flag.
                unsafe {
                    (*qp).wr_id = wr.id;
                    (*qp).wr_flags = flags;
                    extended(qp);
                    payload.set(qp, &mut queue.means);
                }
            }
            Target::Classic(first) => {
                // SAFETY: the target is that of the queue, and so many work requests were begun.
                let to = unsafe { queue.chain.slot(first, self.count) }?;
                // SAFETY: one of the work requests of the chain, of which there is no other reference.
                let to = unsafe { &mut *to };
                to.wr_id = wr.id;
                to.opcode = opcode;
                to.send_flags = flags;
                // Another operation may have set it: providers check fields of unions that theirs do not use.
                to.__bindgen_anon_1.imm_data = 0;
                classic(to);
                // SAFETY: `check` has passed, with the limits of the queue; the chain has given out so many work requests.
                unsafe { payload.fill(to, || queue.chain.inline(self.count)) };
            }
        }
        self.count += 1;
        Ok(())
    }
}

impl SendBatch<'_> {
    /// Posts all of it: `ibv_wr_complete`, or `ibv_post_send(3)`. An empty batch does nothing.
    ///
    /// # Errors
    /// [`PostError::QueueFull`]; [`PostError::Refused`] and [`PostError::InDoubt`] when the provider failed otherwise.
    #[doc(alias = "ibv_wr_complete")]
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post(self) -> Result<(), PostError> {
        if self.count == 0 {
            return Ok(());
        }
        // Not dropped: there is nothing to abort then.
        let mut this = ManuallyDrop::new(self);
        let SendBatch { target, queue, count, .. } = &mut *this;
        let qp = match *target {
            Target::Extended(qp) => qp,
            // SAFETY: the queue pair is valid, so many work requests were built, and the callers of the methods that did that
            // vouch for the memory.
            Target::Classic(first) => return unsafe { Chain::post(queue.raw, first, *count) },
        };
        // It was ready when the batch was begun, and whoever could have changed that would have had to borrow it.
        *queue.gate.get_mut() = READY;
        // SAFETY: the queue pair is valid and a batch is open on it.
        unsafe { complete(qp, &queue.doorbell_fails) }
    }
}

impl<I: Interface> Drop for SendBatch<'_, I> {
    #[inline(always)]
    fn drop(&mut self) {
        if I::EXTENDED.is_none() {
            self.queue.abort();
        }
    }
}

impl<I: Interface> fmt::Debug for SendBatch<'_, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendBatch").field("len", &self.count).finish_non_exhaustive()
    }
}

#[inline(always)]
pub(super) fn check_atomic(address: u64, result: Sge) -> Result<(), PostError> {
    if address % 8 != 0 || result.address % 8 != 0 || result.len != 8 {
        return Err(PostError::AtomicOperand);
    }
    Ok(())
}

#[inline(always)]
pub(super) fn set_none(wr: &mut ibv_send_wr) {
    wr.wr = ibv_send_wr__bindgen_ty_2::zeroed();
}

#[inline(always)]
pub(super) fn set_rdma(wr: &mut ibv_send_wr, remote_addr: u64, rkey: u32) {
    wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
    // The rest, which is the end of two longer ones.
    wr.wr.ud.remote_qkey = 0;
    (wr.wr.atomic.swap, wr.wr.atomic.rkey) = (0, 0);
}

#[inline(always)]
pub(super) fn set_atomic(wr: &mut ibv_send_wr, remote_addr: u64, rkey: u32, compare_add: u64, swap: u64) {
    wr.wr.atomic = ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr, compare_add, swap, rkey };
}

// What `set_rdma` sets is the whole of it.
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(ibv_send_wr__bindgen_ty_2__bindgen_ty_1, rkey) == 8);
    assert!(offset_of!(ibv_send_wr__bindgen_ty_2__bindgen_ty_3, remote_qkey) == 12);
    assert!(offset_of!(ibv_send_wr__bindgen_ty_2__bindgen_ty_2, swap) == 16);
    assert!(offset_of!(ibv_send_wr__bindgen_ty_2__bindgen_ty_2, rkey) == 24);
    assert!(size_of::<ibv_send_wr__bindgen_ty_2>() == 32);
};
