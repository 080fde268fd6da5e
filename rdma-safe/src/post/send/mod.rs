//! The send queue of a queue pair.

mod atomic_write;
mod batch;
mod datagram;
mod destination;
mod flush;
mod operations;
mod queue;
mod tso;
mod verbs;
mod window;
mod xrc;

use std::fmt;
use std::hint::assert_unchecked;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use rdma_sys::*;

use super::chain::Chain;
use super::payload::{InlineScratch, Limits};
use super::{PostError, SendOps};
use crate::branch::rare;
use crate::device::Quirks;
use crate::interface::Interface;
use crate::qp::{Core, QueuePairCapacity};
use crate::{QueuePairState, Result};

use batch::{QueueInfo, Target};
pub(crate) use operations::EXTENDED_ONLY;

pub use batch::SendBatch;
pub use destination::UdTarget;
pub use flush::{FlushPlacement, FlushRange};
pub use queue::SendQueue;
pub use tso::Segments;
pub use xrc::XrcBatch;

/// The send side of a queue pair, with its C object.
///
/// It never leaves its queue pair, so that `mem::swap` cannot exchange the send sides of two queue pairs.
pub(crate) struct SendState {
    /// The queue pair for `ibv_wr_*`. If `None`, work requests are collected in `chain` for `ibv_post_send`.
    extended: Option<NonNull<ibv_qp_ex>>,
    raw: NonNull<ibv_qp>,
    /// Enabled operations as `operations::encode` represents them; never empty.
    enabled: SendOps,
    limits: Limits,
    inline_scratch: InlineScratch,
    /// Largest header of a TCP segment, in bytes.
    max_tso_header: u16,
    chain: Chain,
    /// Whether the doorbell is a system call. It can fail, for example with `ENOMEM`, when the work is already in the
    /// queue: see [`Quirks::REFUSED_SENDS_EXECUTE`].
    doorbell_fails: bool,
    /// The flags [`READY`] and [`OPEN`], in one field, so that posting needs one comparison.
    gate: AtomicU8,
    /// Once `destroy_or_keep` has run, it has nothing to drop.
    core: ManuallyDrop<Core>,
}

/// Flag: the state of the queue pair allows sends.
const READY: u8 = 1;
/// Flag: `ibv_wr_start` was called without `ibv_wr_complete` or `ibv_wr_abort` since. It is stored here and not in the
/// batch, so that a forgotten batch can still be aborted.
const OPEN: u8 = 2;

// SAFETY: the C objects may be used from any thread (see `Context`). A batch may not, but it borrows the queue.
unsafe impl Send for SendState {}
// SAFETY: a shared reference reads immutable fields, changes `gate`, which is atomic, and gives access to `core`, which is
// `Sync`.
unsafe impl Sync for SendState {}

/// Limits of a send queue, with the memory that it allocates.
pub(crate) struct SendMemory {
    limits: Limits,
    inline: Box<[u8]>,
    chain: Chain,
}

impl SendMemory {
    /// `max_batch` is the largest number of work requests in a batch that is collected in memory.
    #[inline(always)]
    pub(crate) fn new(capacity: QueuePairCapacity, extended: bool, max_batch: u32) -> Self {
        let limits = Limits {
            max_sge: u16::try_from(capacity.max_send_sge).unwrap_or(u16::MAX),
            max_datagram: u16::MAX,
            max_inline: capacity.max_inline_data,
        };
        let inline = match capacity.max_inline_data as usize {
            0 => Box::default(),
            len => vec![0; len].into_boxed_slice(),
        };
        let chain = match extended {
            true => Chain::none(),
            false => Chain::new(limits, max_batch.min(capacity.max_send_wr.max(1))),
        };
        SendMemory { limits, inline, chain }
    }
}

impl SendState {
    #[inline(always)]
    pub(crate) fn new(
        core: Core,
        qp_ex: Option<NonNull<ibv_qp_ex>>,
        ops: SendOps,
        memory: SendMemory,
        max_tso_header: u16,
    ) -> Self {
        let SendMemory { limits, inline, chain } = memory;
        let quirks = core.context().quirks();
        let inline_scratch =
            InlineScratch { bytes: inline, copy_inline_lists: quirks.contains(Quirks::INLINE_LISTS_EMPTY) };
        let doorbell_fails = quirks.contains(Quirks::REFUSED_SENDS_EXECUTE);
        SendState {
            extended: qp_ex,
            raw: core.raw(),
            enabled: operations::encode(ops, core.qp_type()),
            limits,
            inline_scratch,
            max_tso_header,
            chain,
            doorbell_fails,
            gate: AtomicU8::new(0),
            core: ManuallyDrop::new(core),
        }
    }

    /// Updates the gate for a queue pair in `state`.
    pub(crate) fn set_state(&self, state: QueuePairState) {
        use QueuePairState as S;
        match state {
            S::RTS | S::SQD | S::SQE | S::ERR => self.gate.fetch_or(READY, Ordering::Relaxed),
            _ => self.gate.fetch_and(!READY, Ordering::Relaxed),
        };
    }

    /// Maximum number of work requests in a batch.
    #[inline(always)]
    pub(crate) fn max_batch<I: Interface>(&self) -> u64 {
        if I::EXTENDED.unwrap_or_else(|| self.is_extended()) { u64::MAX } else { self.chain.max_len().into() }
    }

    /// Whether the state allows sends and no forgotten batch is open.
    pub(crate) fn is_ready(&mut self) -> bool {
        *self.gate.get_mut() == READY
    }

    #[inline(always)]
    pub(crate) fn is_extended(&self) -> bool {
        self.extended.is_some()
    }

    pub(crate) fn operations(&self) -> SendOps {
        operations::decode(self.enabled)
    }

    pub(crate) fn max_datagram(&self) -> Option<u32> {
        (self.limits.max_datagram != u16::MAX).then(|| self.limits.max_datagram.into())
    }

    pub(crate) fn set_max_datagram(&mut self, bytes: u16) {
        self.limits.max_datagram = bytes;
    }

    #[inline(always)]
    pub(crate) fn batch(&mut self) -> Result<SendBatch<'_>, PostError> {
        if *self.gate.get_mut() != READY {
            rare();
            // A batch that was forgotten instead of dropped still holds the provider's lock.
            self.abort();
            if *self.gate.get_mut() != READY {
                return Err(PostError::NotReady { state: self.core.state() });
            }
        }
        // SAFETY: the gate implies that the state allows sends and that no batch is open.
        Ok(unsafe { self.start(None) })
    }

    /// Starts a batch: `ibv_wr_start`. It takes only the operations in `usable`; by default, all that are enabled.
    ///
    /// # Safety
    /// The queue pair must use the interface `I` and be in a state that allows sends. `usable` must be enabled. No batch
    /// may be open. If `I` is known, the returned batch must not be forgotten.
    #[inline(always)]
    pub(crate) unsafe fn start<I: Interface>(&mut self, usable: Option<SendOps>) -> SendBatch<'_, I> {
        // SAFETY: the caller's contract.
        unsafe { self.open::<I>(self.target()) }
        // Read after the call, so that no register holds it during the call.
        let info = self.info(usable.unwrap_or(self.enabled));
        // SAFETY: the batch was started above. The caller vouches for `usable`.
        unsafe { SendBatch::new(self, info) }
    }

    /// Calls `ibv_wr_start` if the queue has it. The caller then makes the batch.
    ///
    /// # Safety
    /// `target` must be [`SendState::target`] of this queue. The queue pair must use the interface `I` and be in a state
    /// that allows sends. No batch may be open. If `I` is known, the caller must end the batch.
    #[inline(always)]
    unsafe fn open<I: Interface>(&mut self, target: Target) {
        let is_extended = matches!(target, Target::Extended(_));
        // SAFETY: the caller's contract.
        unsafe { assert_unchecked(I::EXTENDED.is_none_or(|extended| extended == is_extended)) }
        if let Target::Extended(qp) = target {
            if I::EXTENDED.is_none() {
                *self.gate.get_mut() = READY | OPEN;
            }
            // SAFETY: the queue pair is valid, and no batch is open on it.
            unsafe { ibv_wr_start(qp.as_ptr()) }
        }
    }

    /// The C object by which work is posted.
    #[inline(always)]
    fn target(&self) -> Target {
        match self.extended {
            Some(qp) => Target::Extended(qp),
            None => Target::Classic(self.chain.first()),
        }
    }

    /// The properties of the queue that a batch needs.
    #[inline(always)]
    fn info(&self, usable: SendOps) -> QueueInfo {
        QueueInfo { raw: self.raw, target: self.target(), limits: self.limits, usable }
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

    /// Aborts a forgotten batch and destroys the queue pair: see `QueuePair::destroy`.
    ///
    /// # Safety
    /// `self` must only be dropped afterwards.
    pub(crate) unsafe fn destroy(&mut self) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.destroy_or_keep(|| ()) }
    }

    /// Aborts a forgotten batch and destroys the queue pair: see `QueuePair::destroy_or_keep`.
    ///
    /// # Safety
    /// `self` must only be dropped afterwards.
    #[inline]
    pub(crate) unsafe fn destroy_or_keep<W: Send + 'static>(&mut self, work: impl FnOnce() -> W) -> Result<()> {
        if *self.gate.get_mut() & OPEN != 0 && !self.core.context().is_inherited() {
            self.abort();
        }
        // SAFETY: the caller's contract.
        unsafe { self.core.destroy_or_keep(work) }
    }

    #[inline(always)]
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    #[inline(always)]
    pub(crate) fn core_mut(&mut self) -> &mut Core {
        &mut self.core
    }

    pub(crate) fn as_raw_ex(&self) -> Option<NonNull<ibv_qp_ex>> {
        self.extended
    }
}

impl Drop for SendState {
    #[inline]
    fn drop(&mut self) {
        if self.core.exists() {
            // SAFETY: nothing uses it after its drop.
            let _ = unsafe { self.destroy() };
        }
    }
}

impl fmt::Debug for SendState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendState")
            .field("extended", &self.is_extended())
            .field("operations", &self.operations())
            .finish()
    }
}
