//! The receive queue of a queue pair.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::receives::RecvChain;
use super::{PostError, RecvBatch, Sge};
use crate::qp::Shared;
use crate::{QueuePair, QueuePairState};

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
    shared: Arc<Shared>,
}

impl RecvState {
    pub(crate) fn new(shared: &Arc<Shared>, max_batch: u32) -> Self {
        let capacity = shared.capacity();
        let max_batch = max_batch.min(capacity.max_recv_wr.max(1));
        // SAFETY: `shared`, which is stored next to the chain, owns the queue pair.
        let chain = unsafe { RecvChain::unallocated(shared.raw(), capacity.max_recv_sge, max_batch) };
        RecvState { chain, ready: AtomicBool::new(false), shared: Arc::clone(shared) }
    }

    /// Updates `ready` for a queue pair in `state`.
    pub(crate) fn set_state(&self, state: QueuePairState) {
        let refuses = matches!(state, QueuePairState::RESET | QueuePairState::UNKNOWN)
            || self.shared.has_srq()
            || self.shared.has_no_receives();
        if !refuses {
            self.chain.allocate();
        }
        self.ready.store(!refuses, Ordering::Relaxed);
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
            return Err(self.shared.no_receives_error());
        }
        Ok(())
    }
}

impl fmt::Debug for RecvState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvState").field("chain", &self.chain).finish_non_exhaustive()
    }
}
