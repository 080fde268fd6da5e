//! The receive queue.

use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_sys::*;

use super::chain::{allocate, free, position};
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
    #[inline(always)]
    pub unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.state.receive(wr_id, sge) }
    }

    /// Begins a batch of receives: [`QueuePair::recv_batch`](crate::QueuePair::recv_batch).
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn batch(&mut self) -> Result<RecvBatch<'_>, PostError> {
        self.state.batch()
    }
}

/// The receive side of a queue pair. It never leaves its queue pair, so that no two queue pairs can exchange theirs.
pub(crate) struct RecvState {
    raw: NonNull<ibv_qp>,
    max_sge: u32,
    max_batch: u32,
    /// `max_batch` of them, each linked to the next one and to its elements for good: see [`RecvBatch::post`].
    wrs: NonNull<ibv_recv_wr>,
    /// As many for each as [`RecvState::stride`] says.
    sges: NonNull<ibv_sge>,
    /// A chain of one, with one element.
    single: NonNull<Single>,
    /// Whether the state of the queue pair allows receives.
    ready: AtomicBool,
    shared: Arc<Shared>,
}

struct Single {
    wr: ibv_recv_wr,
    sge: ibv_sge,
}

// SAFETY: the C objects may be used from any thread (see `Context`); the work requests are memory of this alone.
unsafe impl Send for RecvState {}
// SAFETY: through a shared reference immutable fields are read, and `ready`, which is atomic, is changed; the C object is not
// used.
unsafe impl Sync for RecvState {}

impl RecvState {
    pub(crate) fn new(shared: &Arc<Shared>, max_batch: u32) -> Self {
        let max_sge = shared.capacity().max_recv_sge;
        let max_batch = max_batch.min(shared.capacity().max_recv_wr.max(1));
        let stride = Self::stride(max_sge);
        let empty = ibv_recv_wr { wr_id: 0, next: null_mut(), sg_list: null_mut(), num_sge: 0 };
        let (wrs, sges) =
            (allocate(empty, max_batch as usize), allocate(Sge::EMPTY.to_raw(), max_batch as usize * stride));
        for index in 0..max_batch as usize {
            // SAFETY: `index` is below the number of work requests, each of which has `stride` elements; the pointer to the
            // next one is at most one behind the last.
            unsafe {
                let wr = wrs.add(index).as_ptr();
                (*wr).next = wr.add(1);
                (*wr).sg_list = sges.add(index * stride).as_ptr();
            }
        }
        let single = NonNull::from(Box::leak(Box::new(Single {
            wr: ibv_recv_wr { num_sge: 1, ..empty },
            sge: Sge::EMPTY.to_raw(),
        })));
        // SAFETY: just made.
        unsafe { (*single.as_ptr()).wr.sg_list = &raw mut (*single.as_ptr()).sge };
        RecvState {
            raw: shared.raw(),
            max_sge,
            max_batch,
            wrs,
            sges,
            single,
            ready: AtomicBool::new(false),
            shared: Arc::clone(shared),
        }
    }

    /// The queue pair is in `state`.
    pub(crate) fn set_state(&self, state: QueuePairState) {
        let refuses = matches!(state, QueuePairState::RESET | QueuePairState::UNKNOWN);
        self.ready.store(!refuses, Ordering::Relaxed);
    }

    /// Elements of a work request, at least one.
    #[inline(always)]
    fn stride(max_sge: u32) -> usize {
        max_sge.max(1) as usize
    }

    /// # Safety
    /// See [`RecvBatch`].
    #[inline(always)]
    pub(crate) unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        self.check_state()?;
        // SAFETY: the caller's contract is the same.
        unsafe { self.post_one(wr_id, sge) }
    }

    /// Whether the state of the queue pair allows receives.
    pub(crate) fn is_ready(&mut self) -> bool {
        *self.ready.get_mut()
    }

    /// As [`RecvState::receive`], where the state allows it.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[inline(always)]
    pub(crate) unsafe fn post_one(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        let single = self.single.as_ptr();
        // SAFETY: a chain of one work request, for whose memory the caller vouches.
        unsafe {
            (*single).wr.wr_id = wr_id;
            (*single).sge = sge.to_raw();
            self.post_chain(&raw mut (*single).wr, 1)
        }
    }

    #[inline(always)]
    pub(crate) fn batch(&mut self) -> Result<RecvBatch<'_>, PostError> {
        self.check_state()?;
        Ok(RecvBatch { queue: self, count: 0 })
    }

    #[inline(always)]
    fn check_state(&mut self) -> Result<(), PostError> {
        if !*self.ready.get_mut() {
            return Err(PostError::NotReady { state: self.shared.state() });
        }
        Ok(())
    }

    /// # Safety
    ///
    /// `first` must be a chain of `len` work requests that lie one after another, whose elements are valid. The caller
    /// keeps the contract of [`RecvBatch`] for the memory.
    #[inline(always)]
    unsafe fn post_chain(&self, first: *mut ibv_recv_wr, len: u32) -> Result<(), PostError> {
        let mut bad = null_mut();
        // SAFETY: the queue pair is valid; the rest is the caller's contract.
        match unsafe { ibv_post_recv(self.raw.as_ptr(), first, &mut bad) } {
            0 => Ok(()),
            errno => Err(PostError::from_provider(errno, position(first, bad, len))),
        }
    }
}

impl Drop for RecvState {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` in these lengths, and freed here only.
        unsafe {
            free(self.wrs, self.max_batch as usize);
            free(self.sges, self.max_batch as usize * Self::stride(self.max_sge));
            drop(Box::from_raw(self.single.as_ptr()));
        }
    }
}

impl fmt::Debug for RecvState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvState").field("max_sge", &self.max_sge).field("max_batch", &self.max_batch).finish()
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
    count: u32,
}

impl RecvBatch<'_> {
    /// Adds a receive into `sges`, one after another.
    ///
    /// # Errors
    /// [`PostError::TooManySges`], [`PostError::BatchFull`]. The batch is as before then.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[inline(always)]
    pub unsafe fn receive(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        let queue = &mut *self.queue;
        if sges.len() > queue.max_sge as usize {
            return Err(PostError::TooManySges { count: sges.len(), max: queue.max_sge });
        }
        if self.count >= queue.max_batch {
            return Err(PostError::BatchFull { max: queue.max_batch });
        }
        // SAFETY: `count` is below the number of work requests, and `sges` are no more than the elements that each has.
        unsafe {
            let wr = queue.wrs.add(self.count as usize).as_ptr();
            (*wr).wr_id = wr_id;
            (*wr).num_sge = sges.len() as i32;
            for (index, sge) in sges.iter().enumerate() {
                (*wr).sg_list.add(index).write(sge.to_raw());
            }
        }
        self.count += 1;
        Ok(())
    }

    /// How many receives it holds.
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

    /// Posts all of it: `ibv_post_recv(3)`. An empty batch does nothing.
    ///
    /// # Errors
    /// As [`QueuePair::receive`](crate::QueuePair::receive).
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub fn post(self) -> Result<(), PostError> {
        if self.count == 0 {
            return Ok(());
        }
        let queue = &mut *self.queue;
        // SAFETY: `last` is the last of the `count` work requests that were filled; the chain is cut behind it for the call.
        // The callers of `receive` vouch for the memory.
        unsafe {
            let last = queue.wrs.add(self.count as usize - 1).as_ptr();
            (*last).next = null_mut();
            let result = queue.post_chain(queue.wrs.as_ptr(), self.count);
            (*last).next = last.add(1);
            result
        }
    }
}

impl fmt::Debug for RecvBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvBatch").field("len", &self.count).finish_non_exhaustive()
    }
}
