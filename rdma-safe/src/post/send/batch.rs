//! A batch of send work requests.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use rdma_sys::*;

use super::super::chain::Chain;
use super::super::payload::Limits;
use super::super::{Payload, PostError, Remote, SendOps, Sge, WorkRequest};
use super::destination::Destination;
use super::operations::refusal;
use super::{READY, SendState};
use crate::Errno;
use crate::branch::rare;
use crate::interface::{Any, Interface};
use crate::qp::Core;

/// Send work requests that are posted together, with one doorbell. Dropping it posts nothing.
///
/// Each method adds one whole work request, so none can be left half-built.
///
/// Some providers hold the locks of the send queue and of its completion queue while a batch is open. To avoid a
/// deadlock, this thread must post or drop the batch before it polls or arms that completion queue. The same holds
/// before it posts receives to, starts a batch on, resets or drops another queue pair that completes to it.
///
/// # Safety
///
/// The methods that add work are `unsafe`, because the device accesses memory without the compiler's knowledge. The
/// caller must ensure the following from [`SendBatch::post`] until the work request is finished. It is finished when
/// its own completion was polled; on [`TransportType::IB`](crate::device::TransportType::IB) also when the completion of later
/// work of the same send queue was polled; or when [`QueuePair::destroy`](crate::QueuePair::destroy) returned success.
/// - The memory named by an [`Sge`] stays allocated and registered under its key, and is not written. If it receives a
///   result (reads, atomics), it is neither read nor referred to by a reference.
/// - If the address in an [`Sge`] is not the address of the memory in this process, as with a
///   [`DeviceRegion`](crate::dm::DeviceRegion), the provider does not access that address. mlx5 copies short results there
///   with the CPU, see [`RecvBatch`](crate::RecvBatch), and reads the first bytes of the packets of a RAW_PACKET queue
///   pair.
/// - The header of [`SendBatch::send_tso`] is unchanged until [`SendBatch::post`] has returned.
/// - A memory window that the batch binds is left alone ([`SendBatch::bind`] says for how long).
/// - The address handle of a [`UdTarget`](crate::UdTarget) belongs to the protection domain of the queue pair and is
///   not destroyed.
/// - Overwriting the peer's memory is harmless: the peer may be a queue pair of the same process, and a write then
///   reaches any memory that this process has registered with remote write access.
#[must_use = "dropping a batch posts nothing; call `post`"]
pub struct SendBatch<'q, I: Interface = Any> {
    /// If `I` is known, [`SendQueue::post`] or an endpoint owns the batch and ends it. Its type then differs from the type of a
    /// batch of [`SendQueue::batch`], which its holder ends, so the two cannot be swapped.
    interface: PhantomData<I>,
    pub(super) info: QueueInfo,
    pub(super) queue: &'q mut SendState,
    pub(super) count: u32,
}

/// Fields of a send queue that stay the same while it is borrowed.
///
/// They are copied so that they need not be read again for each work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueInfo {
    pub(super) raw: NonNull<ibv_qp>,
    pub(super) target: Target,
    pub(super) limits: Limits,
    /// Enabled operations; empty if the state of the queue pair does not allow sends.
    pub(super) usable: SendOps,
}

/// The C objects by which work is posted, for each interface. They also make a batch `!Send`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Extended(NonNull<ibv_qp_ex>),
    /// First work request of the queue's chain, which is not [`Chain::none`].
    Classic(*mut ibv_send_wr),
}

/// A work request that was begun and not finished.
#[derive(Clone, Copy)]
pub(super) enum Slot {
    /// The queue pair, for the `ibv_wr_*` function of the operation.
    Extended(*mut ibv_qp_ex),
    /// A work request of the queue's chain, for the fields of the operation.
    Classic(*mut ibv_send_wr),
}

impl<'q, I: Interface> SendBatch<'q, I> {
    /// Makes the batch of `queue` that was just started.
    ///
    /// # Safety
    /// `info` must be [`SendState::info`] of `queue`, with operations that are enabled. If the queue is extended,
    /// `ibv_wr_start` was just called.
    #[inline(always)]
    pub(super) unsafe fn new(queue: &'q mut SendState, info: QueueInfo) -> Self {
        SendBatch { interface: PhantomData, info, queue, count: 0 }
    }
}

impl<I: Interface> SendBatch<'_, I> {
    /// Number of work requests in the batch.
    #[must_use]
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether the batch has no work requests.
    #[must_use]
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Begins a work request: checks it, and sets its identifier and flags.
    ///
    /// The caller sets the operation `op` in the returned slot, then calls [`SendBatch::finish`].
    #[inline(always)]
    pub(super) fn begin<P: Payload>(
        &mut self,
        op: SendOps,
        to: Destination<'_>,
        wr: WorkRequest,
        payload: &P,
    ) -> Result<Slot, PostError> {
        let QueueInfo { target, limits, usable, .. } = self.info;
        let op = to.encode(op);
        if !usable.contains(op) {
            rare();
            return Err(refusal(usable, op));
        }
        payload.check(limits)?;
        let flags = wr.flags.bits() | if P::INLINE { IBV_SEND_INLINE.0 } else { 0 };
        match target {
            Target::Extended(qp) => {
                let qp = qp.as_ptr();
                // SAFETY: the queue pair is valid and a batch is open on it. See `Quirks::INLINE_NEEDS_FLAG` for the
                // flag.
                unsafe { ((*qp).wr_id, (*qp).wr_flags) = (wr.id, flags) };
                Ok(Slot::Extended(qp))
            }
            Target::Classic(first) => {
                // SAFETY: the target belongs to the queue, and `count` work requests were started.
                let to = unsafe { self.queue.chain.slot(first, self.count) }?;
                // SAFETY: this is a work request of the chain, and there is no reference to it.
                unsafe {
                    ((*to).wr_id, (*to).send_flags) = (wr.id, flags);
                    // An earlier operation may have set this field, and providers check union members that the operation
                    // does not use.
                    (*to).__bindgen_anon_1.imm_data = 0;
                }
                Ok(Slot::Classic(to))
            }
        }
    }

    /// Finishes a work request: sets its destination and its payload.
    ///
    /// # Safety
    ///
    /// The contract of [`SendBatch`]. `slot` must come from the last call of [`SendBatch::begin`], with the same `to`
    /// and `payload`. The operation must be set: by its builder call, or by `opcode` and the whole of `wr.wr`.
    #[inline(always)]
    pub(super) unsafe fn finish(&mut self, slot: Slot, to: Destination<'_>, payload: impl Payload) {
        // SAFETY: the caller's contract. The functions exist because the operation is enabled, `check` has passed with
        // the limits of the queue, and `chain.slot` has returned work request `count`.
        unsafe {
            match slot {
                Slot::Extended(qp) => {
                    to.set(qp);
                    payload.set(qp, &mut self.queue.inline_scratch);
                }
                Slot::Classic(wr) => {
                    to.fill(&mut *wr);
                    payload.fill(&mut *wr, || self.queue.chain.inline(self.count));
                }
            }
        }
        self.count += 1;
    }

    /// The queue pair.
    #[inline(always)]
    pub(crate) fn core(&self) -> &Core {
        &self.queue.core
    }

    /// Posts the batch: `ibv_wr_complete`, or `ibv_post_send(3)`. An empty batch is aborted.
    #[inline(always)]
    pub(crate) fn complete(self) -> Result<(), PostError> {
        // SAFETY: it is neither used nor dropped afterwards.
        unsafe { ManuallyDrop::new(self).complete_in_place() }
    }

    /// Posts the batch like [`SendBatch::complete`].
    ///
    /// # Safety
    /// Nothing may be added to the batch afterwards, and it must not be dropped, because a posted batch must not be aborted.
    #[inline(always)]
    pub(crate) unsafe fn complete_in_place(&mut self) -> Result<(), PostError> {
        if self.count == 0 {
            self.abort();
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { self.complete_nonempty() }
    }

    /// Posts the batch, which is not empty.
    ///
    /// # Safety
    /// Like [`SendBatch::complete_in_place`].
    #[inline(always)]
    pub(crate) unsafe fn complete_nonempty(&mut self) -> Result<(), PostError> {
        let SendBatch { info, queue, count, .. } = self;
        let qp = match info.target {
            Target::Extended(qp) => qp,
            Target::Classic(first) => {
                // If `I` is not known, this is rarely needed, and the copy would occupy a register.
                let raw = if I::EXTENDED.is_none() { queue.raw } else { info.raw };
                // SAFETY: the queue pair is valid, `count` work requests were built, and the callers of the methods that
                // built them vouch for the memory.
                return unsafe { Chain::post(raw, first, *count) };
            }
        };
        if I::EXTENDED.is_none() {
            // The state was ready when the batch was started. Changing it requires the borrow that the batch holds.
            *queue.gate.get_mut() = READY;
        }
        // SAFETY: the queue pair is valid and a batch is open on it.
        match unsafe { ibv_wr_complete(qp.as_ptr()) } {
            0 => Ok(()),
            // ibv_wr_post(3): on failure none of the batch was posted. This holds for a batch that does not fit.
            libc::ENOSPC => Err(PostError::QueueFull { posted: 0 }),
            libc::ENOMEM if !queue.doorbell_fails => Err(PostError::QueueFull { posted: 0 }),
            errno => Err(PostError::MaybePosted { errno: Errno(errno) }),
        }
    }

    /// Ends the batch without posting.
    #[inline(always)]
    fn abort(&mut self) {
        if I::EXTENDED.is_none() {
            self.queue.abort();
        } else if let Target::Extended(qp) = self.info.target {
            // SAFETY: the queue pair is valid. `start` has opened the batch, and it is ended once.
            unsafe { ibv_wr_abort(qp.as_ptr()) }
        }
    }
}

impl SendBatch<'_> {
    /// Posts the batch: `ibv_wr_complete`, or `ibv_post_send(3)`. An empty batch does nothing.
    ///
    /// # Errors
    /// [`PostError::QueueFull`]; [`PostError::Refused`] or [`PostError::MaybePosted`] if the provider failed for another
    /// reason.
    #[doc(alias = "ibv_wr_complete")]
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post(self) -> Result<(), PostError> {
        self.complete()
    }
}

impl<I: Interface> Drop for SendBatch<'_, I> {
    #[inline(always)]
    fn drop(&mut self) {
        self.abort();
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
pub(super) fn set_none(wr: &mut ibv_send_wr, opcode: ibv_wr_opcode) {
    wr.opcode = opcode;
    wr.wr = ibv_send_wr__bindgen_ty_2::zeroed();
}

#[inline(always)]
pub(super) fn set_rdma(wr: &mut ibv_send_wr, opcode: ibv_wr_opcode, Remote { address, rkey }: Remote) {
    wr.opcode = opcode;
    wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: address, rkey };
    // Clears the rest of the union, where two other members are longer.
    wr.wr.ud.remote_qkey = 0;
    (wr.wr.atomic.swap, wr.wr.atomic.rkey) = (0, 0);
}

#[inline(always)]
pub(super) fn set_atomic(wr: &mut ibv_send_wr, opcode: ibv_wr_opcode, remote: Remote, compare_add: u64, swap: u64) {
    let Remote { address: remote_addr, rkey } = remote;
    wr.opcode = opcode;
    wr.wr.atomic = ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr, compare_add, swap, rkey };
}

// `set_rdma` covers the whole union.
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(ibv_send_wr__bindgen_ty_2__bindgen_ty_1, rkey) == 8);
    assert!(offset_of!(ibv_send_wr__bindgen_ty_2__bindgen_ty_3, remote_qkey) == 12);
    assert!(offset_of!(ibv_send_wr__bindgen_ty_2__bindgen_ty_2, swap) == 16);
    assert!(offset_of!(ibv_send_wr__bindgen_ty_2__bindgen_ty_2, rkey) == 24);
    assert!(size_of::<ibv_send_wr__bindgen_ty_2>() == 32);
};
