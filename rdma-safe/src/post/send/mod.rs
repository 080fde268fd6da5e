//! Sending.

mod atomic_write;
mod batch;
mod datagram;
mod flush;
mod operations;
mod queue;
mod tso;
mod verbs;
mod window;
mod xrc;

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rdma_sys::*;

use super::chain::Chain;
use super::payload::{Limits, Means};
use super::{PostError, SendOps};
use crate::cq::rare;
use crate::qp::Shared;
use crate::{Errno, QueuePairState, Quirks};

use batch::Target;
pub(crate) use operations::EXTENDED_ONLY;

pub use batch::SendBatch;
pub use datagram::UdTarget;
pub use flush::{FlushPlacement, FlushRange};
pub use queue::SendQueue;
pub use tso::Segments;
pub use xrc::XrcBatch;

/// The send side of a queue pair. It never leaves its queue pair, so that no two queue pairs can exchange theirs.
pub(crate) struct SendState {
    /// For `ibv_wr_*`; without it work requests are collected in `chain`, for `ibv_post_send`.
    extended: Option<NonNull<ibv_qp_ex>>,
    raw: NonNull<ibv_qp>,
    /// As `operations::kept` has them; never empty.
    enabled: SendOps,
    limits: Limits,
    means: Means,
    /// Bytes of the headers before what is segmented.
    max_tso_header: u16,
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

/// What a queue pair is built with that the provider says nothing about.
pub(crate) struct Sizes {
    /// Work requests in a batch, where they are collected in memory.
    pub(crate) max_batch: u32,
    /// Bytes of the headers before what is segmented.
    pub(crate) max_tso_header: u16,
}

impl SendState {
    pub(crate) fn new(shared: &Arc<Shared>, qp_ex: Option<NonNull<ibv_qp_ex>>, ops: SendOps, sizes: Sizes) -> Self {
        let Sizes { max_batch, max_tso_header } = sizes;
        let capacity = shared.capacity();
        let limits = Limits {
            max_sge: u16::try_from(capacity.max_send_sge).unwrap_or(u16::MAX),
            max_datagram: u16::MAX,
            max_inline: capacity.max_inline_data,
        };
        let means = Means {
            scratch: vec![0; capacity.max_inline_data as usize].into_boxed_slice(),
            copy_inline_lists: shared.context().quirks().contains(Quirks::INLINE_LISTS_EMPTY),
        };
        let doorbell_fails = shared.context().quirks().contains(Quirks::REFUSED_SENDS_EXECUTE);
        let chain = match qp_ex {
            Some(_) => Chain::none(),
            None => Chain::new(limits, max_batch.min(capacity.max_send_wr.max(1))),
        };
        SendState {
            extended: qp_ex,
            raw: shared.raw(),
            enabled: operations::kept(ops, shared.qp_type()),
            limits,
            means,
            max_tso_header,
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

    /// Whether the state allows sends, and no batch was forgotten.
    pub(crate) fn is_ready(&mut self) -> bool {
        *self.gate.get_mut() == READY
    }

    #[inline(always)]
    pub(crate) fn is_extended(&self) -> bool {
        self.extended.is_some()
    }

    pub(crate) fn operations(&self) -> SendOps {
        operations::operations(self.enabled)
    }

    pub(crate) fn max_datagram(&self) -> Option<u32> {
        (self.limits.max_datagram != u16::MAX).then(|| self.limits.max_datagram.into())
    }

    pub(crate) fn set_max_datagram(&mut self, bytes: u16) {
        self.limits.max_datagram = bytes;
    }

    /// Where work goes: the same as long as this is.
    #[inline(always)]
    fn target(&self) -> Target {
        match self.extended {
            Some(qp) => Target::Extended(qp),
            None => Target::Classic(self.chain.first()),
        }
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
        Ok(SendBatch::new(self.target(), self.enabled, self.limits, self))
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

impl SendState {
    pub(crate) fn as_raw_ex(&self) -> Option<NonNull<ibv_qp_ex>> {
        self.extended
    }
}

impl Drop for SendState {
    fn drop(&mut self) {
        self.abort();
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

/// # Safety
/// The queue pair must be valid and a batch be open on it.
#[inline(always)]
unsafe fn complete(qp: NonNull<ibv_qp_ex>, doorbell_fails: &bool) -> Result<(), PostError> {
    // SAFETY: the caller's contract.
    match unsafe { ibv_wr_complete(qp.as_ptr()) } {
        0 => Ok(()),
        // ibv_wr_post(3): on failure none of the batch was posted. That holds for a batch that does not fit.
        libc::ENOSPC => Err(PostError::QueueFull { posted: 0 }),
        libc::ENOMEM if !*doorbell_fails => Err(PostError::QueueFull { posted: 0 }),
        errno => Err(PostError::InDoubt { errno: Errno(errno) }),
    }
}
