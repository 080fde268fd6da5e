//! The receive queue of a queue pair.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::receives::RecvChain;
use super::{PostError, RecvBatch, Sge};
use crate::qp::Core;
use crate::{QueuePair, QueuePairState, QueuePairType};

/// The receive queue of a queue pair, borrowed separately by [`QueuePair::split`](crate::QueuePair::split).
#[derive(Debug)]
pub struct RecvQueue<'q> {
    state: &'q mut RecvState,
}

impl<'q> RecvQueue<'q> {
    pub(crate) fn new(state: &'q mut RecvState) -> Self {
        RecvQueue { state }
    }

    /// Posts one receive: [`QueuePair::receive`](crate::QueuePair::receive).
    ///
    /// # Errors
    /// Those of [`QueuePair::receive`](crate::QueuePair::receive).
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[inline(always)]
    pub unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.state.receive(wr_id, sge) }
    }

    /// Starts a batch of receives: [`QueuePair::recv_batch`](crate::QueuePair::recv_batch).
    ///
    /// # Errors
    /// Those of [`QueuePair::recv_batch`](crate::QueuePair::recv_batch).
    #[inline(always)]
    pub fn batch(&mut self) -> Result<RecvBatch<'_>, PostError> {
        self.state.batch()
    }
}

/// The receive side of a queue pair.
///
/// It never leaves its queue pair, so that `mem::swap` cannot exchange the receive sides of two queue pairs.
pub(crate) struct RecvState {
    chain: RecvChain<QueuePair>,
    /// Whether receives can be posted: the state allows it, and the queue pair has its own receive queue. The memory of the
    /// chain is allocated before.
    ready: AtomicBool,
    source: Source,
    /// The state of the queue pair, for errors.
    state: AtomicU32,
}

/// Where the receives of a queue pair come from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Its own receive queue.
    Own,
    /// A shared receive queue.
    Shared,
    /// A shared receive queue that the peer names in each XRC message.
    Named,
}

impl RecvState {
    /// # Safety
    /// Must not be used after the queue pair of `core` is destroyed.
    #[inline(always)]
    pub(crate) unsafe fn new(core: &Core, max_batch: u32) -> Self {
        let capacity = core.capacity();
        let max_batch = max_batch.min(capacity.max_recv_wr.max(1));
        // SAFETY: the caller's contract.
        let chain = unsafe { RecvChain::unallocated(core.raw(), capacity.max_recv_sge, max_batch) };
        let source = match core.qp_type() {
            _ if core.has_srq() => Source::Shared,
            QueuePairType::XRC_SEND => Source::Named,
            _ => Source::Own,
        };
        let state = AtomicU32::new(core.state().0);
        RecvState { chain, ready: AtomicBool::new(false), source, state }
    }

    /// Updates `ready` for a queue pair in `state`.
    pub(crate) fn set_state(&self, state: QueuePairState) {
        let refuses = matches!(state, QueuePairState::RESET | QueuePairState::UNKNOWN) || self.source != Source::Own;
        if !refuses {
            self.chain.allocate();
        }
        self.ready.store(!refuses, Ordering::Relaxed);
        self.state.store(state.0, Ordering::Relaxed);
    }

    /// # Safety
    /// See [`RecvBatch`].
    #[inline(always)]
    pub(crate) unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        self.check_state()?;
        // SAFETY: the caller's contract is the same, and the state was checked.
        unsafe { self.post_one(wr_id, sge) }
    }

    /// Whether receives can be posted.
    pub(crate) fn is_ready(&mut self) -> bool {
        *self.ready.get_mut()
    }

    /// Posts one receive like [`RecvState::receive`], without checking the state.
    ///
    /// # Safety
    /// See [`RecvBatch`]. It was [ready](RecvState::is_ready) before.
    #[inline(always)]
    pub(crate) unsafe fn post_one(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        // SAFETY: the chain was allocated before the queue became ready. `&mut self` comes after all calls of `set_state`. The rest
        // is the caller's contract.
        unsafe { self.chain.post_one(wr_id, sge) }
    }

    #[inline(always)]
    pub(crate) fn batch(&mut self) -> Result<RecvBatch<'_>, PostError> {
        self.check_state()?;
        // SAFETY: the chain was allocated before the queue became ready, as in `post_one`.
        Ok(unsafe { self.chain.batch() })
    }

    #[inline(always)]
    fn check_state(&mut self) -> Result<(), PostError> {
        if !*self.ready.get_mut() {
            return Err(self.refusal());
        }
        Ok(())
    }

    /// The reason why a receive cannot be posted.
    #[cold]
    fn refusal(&mut self) -> PostError {
        match self.source {
            Source::Own => PostError::NotReady { state: QueuePairState(*self.state.get_mut()) },
            Source::Shared => PostError::SharedReceives,
            Source::Named => PostError::NoReceiveQueue,
        }
    }
}

impl fmt::Debug for RecvState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvState").field("chain", &self.chain).finish_non_exhaustive()
    }
}
