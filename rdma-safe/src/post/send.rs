//! The send queue.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rdma_sys::*;

use super::chain::Chain;
use super::payload::Limits;
use super::{Payload, PostError, Remote, Scatter, SendOps, Sge, WorkRequest};
use crate::cq::rare;
use crate::interface::{Any, Classic, Extended, Interface, Known};
use crate::qp::Shared;
use crate::{Errno, QueuePairState, Quirks};

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
    /// posting. Null for a classic queue pair.
    extended: *mut ibv_qp_ex,
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
        SendQueue { extended: null_mut(), usable: SendOps::empty(), state, interface: PhantomData }
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
        if self.state.is_extended() { Some(self.known()) } else { None }
    }

    /// Posts by `ibv_post_send(3)`; `None` for a queue pair that takes `ibv_wr_*`.
    #[doc(alias = "ibv_post_send")]
    #[must_use]
    #[inline]
    pub fn classic(self) -> Option<SendQueue<'q, Classic>> {
        if self.state.is_extended() { None } else { Some(self.known()) }
    }

    // Once a loop: inlined, it would take registers from what is in the loop.
    #[inline(never)]
    fn known<I: Known>(self) -> SendQueue<'q, I> {
        let state = self.state;
        // A batch that was forgotten.
        state.abort();
        let usable = if *state.gate.get_mut() == READY { state.enabled } else { SendOps::empty() };
        let extended = state.extended.map_or(null_mut(), NonNull::as_ptr);
        SendQueue { extended, usable, state, interface: PhantomData }
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
        // As a condition that stays, it is looked at once for a whole loop.
        if self.usable.is_empty() {
            rare();
            if *self.state.gate.get_mut() != READY {
                return Err(PostError::NotReady { state: self.state.shared.state() });
            }
        }
        if I::EXTENDED == Some(false) {
            let mut batch = SendBatch::new(None, self.usable, self.state);
            fill(&mut batch)?;
            if batch.count == 0 {
                return Ok(());
            }
            let (queue, count) = (&mut *batch.queue, batch.count);
            // SAFETY: the queue pair is valid, so many work requests were built, and the callers of the methods that did that
            // vouch for the memory.
            return unsafe { queue.chain.post(queue.raw, count) };
        }
        // SAFETY: such a queue is made by `extended` only, of a queue pair that has it.
        let qp = unsafe { NonNull::new_unchecked(self.extended) };
        let doorbell_fails = self.state.doorbell_fails;
        // SAFETY: the queue pair is valid and no batch is open on it: one that was forgotten was aborted when this queue was
        // made, which is borrowed mutably, and what this method begins it ends.
        let started = unsafe { Started::new(qp) };
        let mut batch = SendBatch::new(Some(qp), self.usable, self.state);
        fill(&mut batch)?;
        if batch.count == 0 {
            return Ok(());
        }
        started.complete(doorbell_fails)
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
    fn complete(self, doorbell_fails: bool) -> Result<(), PostError> {
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

/// # Safety
/// The queue pair must be valid and a batch be open on it.
#[inline(always)]
unsafe fn complete(qp: NonNull<ibv_qp_ex>, doorbell_fails: bool) -> Result<(), PostError> {
    // SAFETY: the caller's contract.
    match unsafe { ibv_wr_complete(qp.as_ptr()) } {
        0 => Ok(()),
        // ibv_wr_post(3): on failure none of the batch was posted. That holds for a batch that does not fit.
        libc::ENOSPC => Err(PostError::QueueFull { posted: 0 }),
        libc::ENOMEM if !doorbell_fails => Err(PostError::QueueFull { posted: 0 }),
        errno => Err(PostError::InDoubt { errno: Errno(errno) }),
    }
}

/// The send side of a queue pair. It never leaves its queue pair, so that no two queue pairs can exchange theirs.
pub(crate) struct SendState {
    /// For `ibv_wr_*`; without it work requests are collected in `chain`, for `ibv_post_send`.
    extended: Option<NonNull<ibv_qp_ex>>,
    raw: NonNull<ibv_qp>,
    enabled: SendOps,
    limits: Limits,
    chain: Chain,
    /// The doorbell is a system call, which can fail, with `ENOMEM` among others, when the work is in the queue already:
    /// see [`Quirks::REFUSED_SENDS_EXECUTE`].
    doorbell_fails: bool,
    /// Flags below: in one field, so that posting has one thing to look at.
    gate: AtomicU8,
    shared: Arc<Shared>,
}

/// The state of the queue pair allows sends.
const READY: u8 = 1;
/// `ibv_wr_start` was called, and neither `ibv_wr_complete` nor `ibv_wr_abort`. Here and not in the batch, so that
/// forgetting one is not fatal.
const OPEN: u8 = 2;

// SAFETY: the C objects may be used from any thread (see `Context`); a batch, which may not, borrows the queue.
unsafe impl Send for SendState {}
// SAFETY: through a shared reference immutable fields are read, and `gate`, which is atomic, is changed; the C object is not
// used.
unsafe impl Sync for SendState {}

impl SendState {
    pub(crate) fn new(shared: &Arc<Shared>, qp_ex: Option<NonNull<ibv_qp_ex>>, ops: SendOps, max_batch: u32) -> Self {
        let capacity = shared.capacity();
        let limits = Limits {
            max_sge: capacity.max_send_sge,
            max_inline: capacity.max_inline_data,
            scratch: vec![0; capacity.max_inline_data as usize].into_boxed_slice(),
            copy_inline_lists: shared.context().quirks().contains(Quirks::INLINE_LISTS_EMPTY),
        };
        let doorbell_fails = shared.context().quirks().contains(Quirks::REFUSED_SENDS_EXECUTE);
        let chain = match qp_ex {
            Some(_) => Chain::none(),
            None => Chain::new(&limits, max_batch.min(capacity.max_send_wr.max(1))),
        };
        SendState {
            extended: qp_ex,
            raw: shared.raw(),
            enabled: ops,
            limits,
            chain,
            doorbell_fails,
            gate: AtomicU8::new(0),
            shared: Arc::clone(shared),
        }
    }

    /// The queue pair is in `state`.
    pub(crate) fn set_state(&self, state: QueuePairState) {
        use QueuePairState as S;
        match state {
            S::RTS | S::SQD | S::SQE | S::ERR => self.gate.fetch_or(READY, Ordering::Relaxed),
            _ => self.gate.fetch_and(!READY, Ordering::Relaxed),
        };
    }

    pub(crate) fn is_extended(&self) -> bool {
        self.extended.is_some()
    }

    pub(crate) fn operations(&self) -> SendOps {
        self.enabled
    }

    #[inline(always)]
    pub(crate) fn batch(&mut self) -> Result<SendBatch<'_>, PostError> {
        if *self.gate.get_mut() != READY {
            rare();
            // A batch that was forgotten instead of dropped left the provider's lock held.
            self.abort();
            if *self.gate.get_mut() != READY {
                return Err(PostError::NotReady { state: self.shared.state() });
            }
        }
        if let Some(qp) = self.extended {
            *self.gate.get_mut() = READY | OPEN;
            // SAFETY: the queue pair is valid and no batch is open on it: this is the only send queue, borrowed mutably.
            unsafe { ibv_wr_start(qp.as_ptr()) }
        }
        Ok(SendBatch::new(self.extended, self.enabled, self))
    }

    #[inline(always)]
    pub(crate) fn abort(&mut self) {
        let gate = self.gate.get_mut();
        if *gate & OPEN != 0 {
            *gate &= !OPEN;
            if let Some(qp) = self.extended {
                // SAFETY: the queue pair is valid and a batch is open on it.
                unsafe { ibv_wr_abort(qp.as_ptr()) }
            }
        }
    }
}

impl Drop for SendState {
    fn drop(&mut self) {
        self.abort();
    }
}

impl fmt::Debug for SendState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendState").field("extended", &self.is_extended()).field("operations", &self.enabled).finish()
    }
}

/// Work to post at once, with one doorbell. Dropping it posts nothing.
///
/// Each method adds one whole work request, so none can be left half-built.
///
/// On some providers it holds a lock that polling takes, too, when work has failed: post or drop it before completions are taken.
///
/// # Safety
///
/// The methods that add work are `unsafe`, for the device works on memory behind the compiler's back. From
/// [`SendBatch::post`] until the work request has completed (its own completion, or, except on iWARP, that of a later one of
/// the same send queue, was polled; or [`QueuePair::destroy`](crate::QueuePair::destroy) returned success), the caller must see to it that
/// - the memory named by an [`Sge`] stays allocated and registered under its key, is not written, and, where it takes a
///   result (reads, atomics), is neither read nor referred to by a reference;
/// - what the peer's memory is overwritten with harms nobody: a queue pair can be connected to one of the same process,
///   and a write then reaches any memory that this process registered with remote write access.
#[must_use = "dropping a batch posts nothing; call `post`"]
pub struct SendBatch<'q, I: Interface = Any> {
    /// Where `I` is known, [`SendQueue::post`] owns this and ends what it has begun. As another type, it cannot be exchanged
    /// for one that a [`SendQueue::batch`] has made, which is ended by whoever has it.
    interface: PhantomData<I>,
    not_send: PhantomData<*mut ()>,
    /// As the queue has it.
    extended: Option<NonNull<ibv_qp_ex>>,
    /// Enabled operations, if the state of the queue pair allows any. Where `I` is [`Any`], those of the queue count: its state
    /// was looked at when this was begun.
    usable: SendOps,
    queue: &'q mut SendState,
    count: u32,
}

impl<'q, I: Interface> SendBatch<'q, I> {
    #[inline(always)]
    fn new(extended: Option<NonNull<ibv_qp_ex>>, usable: SendOps, queue: &'q mut SendState) -> Self {
        SendBatch { interface: PhantomData, not_send: PhantomData, extended, usable, queue, count: 0 }
    }
}

impl<I: Interface> SendBatch<'_, I> {
    /// Sends `payload`: `ibv_wr_send`.
    ///
    /// # Errors
    /// [`PostError::NotEnabled`], [`PostError::TooManySges`], [`PostError::InlineTooLong`], [`PostError::BatchFull`]. The
    /// batch is as before then.
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_send")]
    #[inline(always)]
    pub unsafe fn send(&mut self, wr: WorkRequest, payload: impl Payload) -> Result<(), PostError> {
        // SAFETY: the caller's contract; the operation and its builder belong together.
        unsafe { self.add(SendOps::SEND, IBV_WR_SEND, wr, payload, |qp| ibv_wr_send(qp), |_| {}) }
    }

    /// Sends `payload` with immediate data, given in host byte order: `ibv_wr_send_imm`.
    ///
    /// # Errors
    /// As [`SendBatch::send`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_send_imm")]
    #[inline(always)]
    pub unsafe fn send_imm(&mut self, wr: WorkRequest, imm: u32, payload: impl Payload) -> Result<(), PostError> {
        let imm = imm.to_be();
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_send_imm(qp, imm) }
        };
        let classic = |wr: &mut ibv_send_wr| wr.__bindgen_anon_1.imm_data = imm;
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::SEND_WITH_IMM, IBV_WR_SEND_WITH_IMM, wr, payload, extended, classic) }
    }

    /// Sends `payload` and invalidates a key of the peer: `ibv_wr_send_inv`.
    ///
    /// # Errors
    /// As [`SendBatch::send`].
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
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_send_inv(qp, rkey) }
        };
        let classic = |wr: &mut ibv_send_wr| wr.__bindgen_anon_1.invalidate_rkey = rkey;
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::SEND_WITH_INV, IBV_WR_SEND_WITH_INV, wr, payload, extended, classic) }
    }

    /// Writes `payload` to memory of the peer: `ibv_wr_rdma_write`.
    ///
    /// # Errors
    /// As [`SendBatch::send`].
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
        let Remote { address, rkey } = remote.into();
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_rdma_write(qp, rkey, address) }
        };
        let classic = |wr: &mut ibv_send_wr| set_rdma(wr, address, rkey);
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::RDMA_WRITE, IBV_WR_RDMA_WRITE, wr, payload, extended, classic) }
    }

    /// Writes `payload` to memory of the peer and completes a receive there, with immediate data, given in host byte
    /// order: `ibv_wr_rdma_write_imm`.
    ///
    /// # Errors
    /// As [`SendBatch::send`].
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

    /// Reads memory of the peer into `target`: `ibv_wr_rdma_read`.
    ///
    /// # Errors
    /// As [`SendBatch::send`].
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
        let Remote { address, rkey } = remote.into();
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_rdma_read(qp, rkey, address) }
        };
        let classic = |wr: &mut ibv_send_wr| set_rdma(wr, address, rkey);
        // SAFETY: as in `send`.
        unsafe { self.add(SendOps::RDMA_READ, IBV_WR_RDMA_READ, wr, target, extended, classic) }
    }

    /// Replaces the 64-bit word at `remote` by `swap` if it equals `compare`, and puts its old value into the eight bytes
    /// of `result`, in host byte order: `ibv_wr_atomic_cmp_swp`.
    ///
    /// # Errors
    /// As [`SendBatch::send`]; [`PostError::AtomicOperand`].
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
        let Remote { address, rkey } = remote.into();
        check_atomic(address, result)?;
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_atomic_cmp_swp(qp, rkey, address, compare, swap) }
        };
        let classic = |wr: &mut ibv_send_wr| set_atomic(wr, address, rkey, compare, swap);
        let (op, opcode) = (SendOps::ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_CMP_AND_SWP);
        // SAFETY: as in `send`.
        unsafe { self.add(op, opcode, wr, result, extended, classic) }
    }

    /// Adds `add` to the 64-bit word at `remote`, and puts its old value into the eight bytes of `result`, in host byte
    /// order: `ibv_wr_atomic_fetch_add`.
    ///
    /// # Errors
    /// As [`SendBatch::send`]; [`PostError::AtomicOperand`].
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
        let Remote { address, rkey } = remote.into();
        check_atomic(address, result)?;
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_atomic_fetch_add(qp, rkey, address, add) }
        };
        let classic = |wr: &mut ibv_send_wr| set_atomic(wr, address, rkey, add, 0);
        let (op, opcode) = (SendOps::ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_FETCH_AND_ADD);
        // SAFETY: as in `send`.
        unsafe { self.add(op, opcode, wr, result, extended, classic) }
    }

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
    /// The contract of [`SendBatch`]; `extended` and `classic` must make the work request that `op` and `opcode` name.
    /// `extended` is called with a queue pair between `ibv_wr_start` and `ibv_wr_complete` that has the operation.
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
        let queue = &mut *self.queue;
        let usable = if I::EXTENDED.is_none() { queue.enabled } else { self.usable };
        if !usable.contains(op) {
            rare();
            return Err(PostError::NotEnabled { op });
        }
        payload.check(&queue.limits)?;
        let flags = wr.flags.bits() | if P::INLINE { IBV_SEND_INLINE.0 } else { 0 };
        match self.extended {
            Some(qp) => {
                let qp = qp.as_ptr();
                // SAFETY: the queue pair is valid and a batch is open. Its identifier and flags are read by the builder
                // call, which `op` says exists. `check` has passed. See `Quirks::INLINE_NEEDS_FLAG` for the flag.
                unsafe {
                    (*qp).wr_id = wr.id;
                    (*qp).wr_flags = flags;
                    extended(qp);
                    payload.set(qp, &mut queue.limits);
                }
            }
            None => {
                let slot = queue.chain.slot(self.count)?;
                let to = &mut *slot.wr;
                to.wr_id = wr.id;
                to.opcode = opcode;
                to.send_flags = flags;
                // What another operation may have set: providers check fields of unions that theirs do not use.
                to.__bindgen_anon_1.imm_data = 0;
                to.wr = ibv_send_wr__bindgen_ty_2::zeroed();
                classic(to);
                // SAFETY: `check` has passed, with the limits of the queue.
                unsafe { payload.fill(slot) };
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
        let SendBatch { extended, queue, count, .. } = &mut *this;
        let Some(qp) = *extended else {
            // SAFETY: the queue pair is valid, so many work requests were built, and the callers of the methods that did that
            // vouch for the memory.
            return unsafe { queue.chain.post(queue.raw, *count) };
        };
        // It was ready when the batch was begun, and whoever could have changed that would have had to borrow it.
        *queue.gate.get_mut() = READY;
        // SAFETY: the queue pair is valid and a batch is open on it.
        unsafe { complete(qp, queue.doorbell_fails) }
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
fn check_atomic(address: u64, result: Sge) -> Result<(), PostError> {
    if address % 8 != 0 || result.address % 8 != 0 || result.len != 8 {
        return Err(PostError::AtomicOperand);
    }
    Ok(())
}

#[inline(always)]
fn set_rdma(wr: &mut ibv_send_wr, remote_addr: u64, rkey: u32) {
    wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
}

#[inline(always)]
fn set_atomic(wr: &mut ibv_send_wr, remote_addr: u64, rkey: u32, compare_add: u64, swap: u64) {
    wr.wr.atomic = ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr, compare_add, swap, rkey };
}
