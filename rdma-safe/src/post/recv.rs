//! The receive queue.

use std::fmt;
use std::sync::Arc;

use rdma_sys::*;

use super::chain::position;
use super::{PostError, Sge};
use crate::QueuePairState;
use crate::qp::Shared;

/// The receive queue of a queue pair, apart from its send queue: [`QueuePair::split`](crate::QueuePair::split).
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
    /// As there.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[inline]
    pub unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.state.receive(wr_id, sge) }
    }

    /// Begins a batch of receives: [`QueuePair::recv_batch`](crate::QueuePair::recv_batch).
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn batch(&mut self) -> Result<RecvBatch<'_>, PostError> {
        self.state.batch()
    }
}

/// The receive side of a queue pair. It never leaves its queue pair, so that no two queue pairs can exchange theirs.
pub(crate) struct RecvState {
    shared: Arc<Shared>,
    max_sge: u32,
    wrs: Box<[ibv_recv_wr]>,
    sges: Box<[ibv_sge]>,
}

// SAFETY: the C objects may be used from any thread (see `Context`); the work requests are plain memory whose pointers
// are set just before they are posted.
unsafe impl Send for RecvState {}
// SAFETY: through a shared reference there are only immutable fields to be read.
unsafe impl Sync for RecvState {}

impl RecvState {
    pub(crate) fn new(shared: &Arc<Shared>, max_batch: u32) -> Self {
        let max_sge = shared.capacity().max_recv_sge;
        let count = max_batch.min(shared.capacity().max_recv_wr.max(1)) as usize;
        let empty = ibv_recv_wr { wr_id: 0, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge: 0 };
        RecvState {
            shared: Arc::clone(shared),
            max_sge,
            wrs: vec![empty; count].into_boxed_slice(),
            sges: vec![Sge::EMPTY.to_raw(); count * max_sge.max(1) as usize].into_boxed_slice(),
        }
    }

    /// # Safety
    /// See [`RecvBatch`].
    #[inline]
    pub(crate) unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        self.check_state()?;
        let mut sge = sge.to_raw();
        let mut wr = ibv_recv_wr { wr_id, next: std::ptr::null_mut(), sg_list: &mut sge, num_sge: 1 };
        // SAFETY: a chain of one work request, for whose memory the caller vouches.
        unsafe { self.post_chain(&mut wr, 1) }
    }

    #[inline]
    pub(crate) fn batch(&mut self) -> Result<RecvBatch<'_>, PostError> {
        self.check_state()?;
        Ok(RecvBatch { queue: self, count: 0 })
    }

    #[inline]
    fn check_state(&self) -> Result<(), PostError> {
        match self.shared.state() {
            state @ (QueuePairState::RESET | QueuePairState::UNKNOWN) => Err(PostError::NotReady { state }),
            _ => Ok(()),
        }
    }

    /// # Safety
    ///
    /// `first` must be a chain of `len` work requests that lie one after another, whose elements are valid. The caller
    /// keeps the contract of [`RecvBatch`] for the memory.
    #[inline]
    unsafe fn post_chain(&self, first: *mut ibv_recv_wr, len: usize) -> Result<(), PostError> {
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is valid; the rest is the caller's contract.
        match unsafe { ibv_post_recv(self.shared.as_raw(), first, &mut bad) } {
            0 => Ok(()),
            errno => Err(PostError::from_provider(errno, position(first, bad, len))),
        }
    }
}

impl fmt::Debug for RecvState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvState").field("max_sge", &self.max_sge).field("max_batch", &self.wrs.len()).finish()
    }
}

/// Receives to post at once. Dropping it posts nothing.
///
/// # Safety
///
/// From [`RecvBatch::post`] until the receive has completed (its completion was polled, or the queue pair was destroyed),
/// the caller must see to it that the memory named by an [`Sge`] stays allocated and registered under its key with local
/// write access, and is neither read, nor written, nor referred to by a reference: the device writes it when a message
/// arrives.
#[must_use = "dropping a batch posts nothing; call `post`"]
pub struct RecvBatch<'q> {
    queue: &'q mut RecvState,
    count: usize,
}

impl RecvBatch<'_> {
    /// Adds a receive into `sges`, one after another.
    ///
    /// # Errors
    /// [`PostError::TooManySges`], [`PostError::BatchFull`]. The batch is as before then.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[inline]
    pub unsafe fn receive(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        let queue = &mut *self.queue;
        if sges.len() > queue.max_sge as usize {
            return Err(PostError::TooManySges { count: sges.len(), max: queue.max_sge });
        }
        let max = queue.wrs.len();
        let stride = queue.sges.len() / max;
        let Some(wr) = queue.wrs.get_mut(self.count) else {
            return Err(PostError::BatchFull { max: max as u32 });
        };
        wr.wr_id = wr_id;
        wr.num_sge = sges.len() as i32;
        for (raw, sge) in queue.sges[self.count * stride..][..stride].iter_mut().zip(sges) {
            *raw = sge.to_raw();
        }
        self.count += 1;
        Ok(())
    }

    /// How many receives it holds.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it holds none.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Posts all of it: `ibv_post_recv(3)`. An empty batch does nothing.
    ///
    /// # Errors
    /// As [`QueuePair::receive`](crate::QueuePair::receive).
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub fn post(self) -> Result<(), PostError> {
        if self.count == 0 {
            return Ok(());
        }
        let queue = &mut *self.queue;
        let stride = queue.sges.len() / queue.wrs.len();
        // Once each: another `as_mut_ptr` would end the right to use what the one before it gave.
        let (first, sges) = (queue.wrs.as_mut_ptr(), queue.sges.as_mut_ptr());
        for index in 0..self.count {
            // SAFETY: `index` is below `count`, which is at most the length of `wrs`, and the elements of each work request
            // are `stride` of `sges`.
            unsafe {
                let wr = first.add(index);
                (*wr).sg_list = sges.add(index * stride);
                (*wr).next = if index + 1 < self.count { first.add(index + 1) } else { std::ptr::null_mut() };
            }
        }
        // SAFETY: a chain of `count` work requests as just linked; the callers of `receive` vouch for the memory.
        unsafe { queue.post_chain(first, self.count) }
    }
}

impl fmt::Debug for RecvBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvBatch").field("len", &self.count).finish_non_exhaustive()
    }
}
