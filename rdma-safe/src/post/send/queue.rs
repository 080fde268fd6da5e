//! The send queue, where its interface is known.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use rdma_sys::*;

use super::super::chain::Chain;
use super::super::payload::Limits;
use super::super::{PostError, SendOps};
use super::batch::Target;
use super::{READY, SendBatch, SendState, complete};
use crate::cq::rare;
use crate::interface::{Any, Classic, Extended, Interface, Known};

/// The send queue of a queue pair, apart from its receive queue: [`QueuePair::split`](crate::QueuePair::split).
///
/// ```no_run
/// # use rdma_safe::{QueuePair, Remote, Sge, WorkRequest};
/// # fn example(qp: &mut QueuePair, memory: Sge, remote: Remote) -> Result<(), Box<dyn std::error::Error>> {
/// let (sends, _) = qp.split();
/// let mut sends = sends.extended().ok_or("the provider has no ibv_wr_*")?;
/// for id in 0..1000 {
///     // SAFETY: `memory` stays registered and is not written until the work has completed.
///     sends.post(|batch| unsafe { batch.write(WorkRequest::new(id).signaled(), remote, memory) })?;
///     // … take its completion
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SendQueue<'q, I: Interface = Any> {
    /// These two as `state` has them, as long as the queue pair is borrowed: here, they need not be read again for each
    /// posting.
    target: Target,
    raw: NonNull<ibv_qp>,
    limits: Limits,
    /// None where the state of the queue pair allows no sends. Nothing but `modify` and the like allows them, which would
    /// have to borrow the queue pair.
    usable: SendOps,
    state: &'q mut SendState,
    interface: PhantomData<I>,
}

// SAFETY: the pointer is that of `state`, which is `Send`: the C object may be used from any thread (see `Context`), and the
// mutable borrow of the queue pair goes along. A posting begins and ends within one call.
unsafe impl<I: Interface> Send for SendQueue<'_, I> {}
// SAFETY: through a shared reference there is only `Debug`, which prints the pointer without following it and immutable fields
// of `state`.
unsafe impl<I: Interface> Sync for SendQueue<'_, I> {}

impl<'q> SendQueue<'q> {
    pub(crate) fn new(state: &'q mut SendState) -> Self {
        SendQueue {
            target: state.target(),
            raw: state.raw,
            limits: state.limits,
            usable: SendOps::empty(),
            state,
            interface: PhantomData,
        }
    }

    pub(super) fn state(&mut self) -> &mut SendState {
        self.state
    }

    /// Begins a batch: [`QueuePair::send_batch`](crate::QueuePair::send_batch).
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn batch(&mut self) -> Result<SendBatch<'_>, PostError> {
        self.state.batch()
    }

    /// Posts by `ibv_wr_*`; `None` for a queue pair that takes `ibv_post_send`.
    #[doc(alias = "ibv_wr_start")]
    #[must_use]
    #[inline]
    pub fn extended(self) -> Option<SendQueue<'q, Extended>> {
        self.by()
    }

    /// Posts by `ibv_post_send(3)`; `None` for a queue pair that takes `ibv_wr_*`.
    #[doc(alias = "ibv_post_send")]
    #[must_use]
    #[inline]
    pub fn classic(self) -> Option<SendQueue<'q, Classic>> {
        self.by()
    }

    /// Posts by the interface `I`, for code that is generic over it; `None` for a queue pair that takes the other one.
    #[must_use]
    #[inline]
    pub fn by<I: Known>(self) -> Option<SendQueue<'q, I>> {
        if I::EXTENDED == Some(self.state.is_extended()) { Some(self.known()) } else { None }
    }

    // Once a loop: inlined, it would take registers from what is in the loop.
    #[inline(never)]
    fn known<I: Known>(self) -> SendQueue<'q, I> {
        let state = self.state;
        // A batch that was forgotten.
        state.abort();
        let usable = if *state.gate.get_mut() == READY { state.enabled } else { SendOps::empty() };
        SendQueue {
            target: state.target(),
            raw: state.raw,
            limits: state.limits,
            usable,
            state,
            interface: PhantomData,
        }
    }
}

impl<I: Known> SendQueue<'_, I> {
    /// Posts at once what `fill` adds to a batch; nothing when it fails or panics.
    ///
    /// As the batch cannot be forgotten half done, and the state of the queue pair cannot change while it is borrowed, there is
    /// nothing to look at and nothing to note here.
    ///
    /// # Errors
    /// [`PostError::NotReady`] unless the queue pair was brought to RTS; the error of `fill`; those of [`SendBatch::post`].
    #[doc(alias = "ibv_wr_start")]
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post(&mut self, fill: impl FnOnce(&mut SendBatch<'_, I>) -> Result<(), PostError>) -> Result<(), PostError> {
        // As a condition that stays and ends the loop, it is looked at once for a whole loop.
        if self.usable.is_empty() {
            rare();
            return Err(PostError::NotReady { state: self.state.shared.state() });
        }
        // SAFETY: no batch is open: one that was forgotten was aborted when this queue was made, which is borrowed mutably, and
        // what this method begins it ends. `extended` and `classic`, which alone make such queues, have looked at the interface.
        unsafe { self.state.post_to::<I>(self.target, self.raw, self.limits, self.usable, fill) }
    }
}

impl SendState {
    /// Posts at once what `fill` adds to a batch; nothing when it fails or panics.
    ///
    /// # Safety
    /// The queue pair must be of the interface `I`, `usable` at most what is enabled, and no batch be open.
    #[inline(always)]
    pub(crate) unsafe fn post<I: Known>(
        &mut self,
        usable: SendOps,
        fill: impl FnOnce(&mut SendBatch<'_, I>) -> Result<(), PostError>,
    ) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.post_to::<I>(self.target(), self.raw, self.limits, usable, fill) }
    }

    /// As [`SendState::post`], where `target`, `raw` and `limits` are those of this.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn post_to<I: Known>(
        &mut self,
        target: Target,
        raw: NonNull<ibv_qp>,
        limits: Limits,
        usable: SendOps,
        fill: impl FnOnce(&mut SendBatch<'_, I>) -> Result<(), PostError>,
    ) -> Result<(), PostError> {
        let started = match target {
            Target::Extended(qp) if I::EXTENDED == Some(true) => {
                // SAFETY: the queue pair is valid; the caller's contract.
                unsafe { Started::new(qp) }
            }
            Target::Classic(first) if I::EXTENDED == Some(false) => {
                let mut batch = SendBatch::new(target, usable, limits, self);
                fill(&mut batch)?;
                let count = batch.count;
                // SAFETY: the queue pair is valid, so many work requests were built, and the callers of the methods that did
                // that vouch for the memory.
                return if count == 0 { Ok(()) } else { unsafe { Chain::post(raw, first, count) } };
            }
            // SAFETY: the caller's contract.
            _ => unsafe { std::hint::unreachable_unchecked() },
        };
        let mut batch = SendBatch::new(target, usable, limits, self);
        fill(&mut batch)?;
        if batch.count == 0 {
            return Ok(());
        }
        started.complete(&batch.queue.doorbell_fails)
    }
}

/// Between `ibv_wr_start` and `ibv_wr_complete` or, also where a closure panics, `ibv_wr_abort`.
struct Started(NonNull<ibv_qp_ex>);

impl Started {
    /// # Safety
    /// The queue pair must outlive this, and no batch be open on it.
    #[inline(always)]
    unsafe fn new(qp: NonNull<ibv_qp_ex>) -> Self {
        // SAFETY: the caller's contract.
        unsafe { ibv_wr_start(qp.as_ptr()) }
        Started(qp)
    }

    #[inline(always)]
    fn complete(self, doorbell_fails: &bool) -> Result<(), PostError> {
        let qp = ManuallyDrop::new(self).0;
        // SAFETY: the queue pair is valid and a batch is open on it, which is not aborted any more.
        unsafe { complete(qp, doorbell_fails) }
    }
}

impl Drop for Started {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the queue pair is valid and a batch is open on it.
        unsafe { ibv_wr_abort(self.0.as_ptr()) }
    }
}
