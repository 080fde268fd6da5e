//! Work requests of receives, collected in memory.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};

use rdma_sys::*;

use super::chain::{allocate, free, position};
use super::{PostError, Sge};
use crate::{QueuePair, SharedReceiveQueue, WorkQueue};

/// What receives are posted to: a [`QueuePair`], a [`SharedReceiveQueue`] or a [`WorkQueue`].
pub trait Receives: sealed::Receives {}

impl Receives for QueuePair {}
impl Receives for SharedReceiveQueue {}
impl Receives for WorkQueue {}

mod sealed {
    use std::ptr::NonNull;

    use rdma_sys::ibv_recv_wr;

    /// Not implementable elsewhere: memory is handed to the provider on its word.
    pub trait Receives {
        /// The C object.
        type Raw;

        /// Posts a chain; 0 or an errno.
        ///
        /// # Safety
        /// `raw` must be valid, `first` be a chain of valid work requests, and for the memory that they name the caller keep
        /// the contract of [`RecvBatch`](crate::RecvBatch).
        unsafe fn post(raw: NonNull<Self::Raw>, first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> i32;
    }
}

impl sealed::Receives for QueuePair {
    type Raw = ibv_qp;

    #[inline(always)]
    unsafe fn post(raw: NonNull<ibv_qp>, first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> i32 {
        // SAFETY: the caller's contract is the same.
        unsafe { ibv_post_recv(raw.as_ptr(), first, bad) }
    }
}

impl sealed::Receives for SharedReceiveQueue {
    type Raw = ibv_srq;

    #[inline(always)]
    unsafe fn post(raw: NonNull<ibv_srq>, first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> i32 {
        // SAFETY: the caller's contract is the same; every context of rdma-core has the operation.
        unsafe { ibv_post_srq_recv(raw.as_ptr(), first, bad) }
    }
}

impl sealed::Receives for WorkQueue {
    type Raw = ibv_wq;

    #[inline(always)]
    unsafe fn post(raw: NonNull<ibv_wq>, first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> i32 {
        // SAFETY: the caller's contract is the same; that the queue has the operation was looked at when it was made.
        unsafe { ibv_post_wq_recv(raw.as_ptr(), first, bad) }
    }
}

/// Work requests for receives, and the memory they refer to, allocated once, beside the queue that they are posted to.
pub(crate) struct RecvChain<Q: Receives> {
    raw: NonNull<Q::Raw>,
    max_sge: u32,
    max_batch: u32,
    /// `max_batch` of them, each linked to the next one and to its elements for good: see [`RecvBatch::post`].
    wrs: NonNull<ibv_recv_wr>,
    /// As many for each as [`stride`] says.
    sges: NonNull<ibv_sge>,
    /// A chain of one, with one element.
    single: NonNull<Single>,
    queue: PhantomData<fn() -> Q>,
}

struct Single {
    wr: ibv_recv_wr,
    sge: ibv_sge,
}

// SAFETY: the C objects may be used from any thread (see `Context`); the work requests are memory of this alone.
unsafe impl<Q: Receives> Send for RecvChain<Q> {}
// SAFETY: through a shared reference only immutable fields are read.
unsafe impl<Q: Receives> Sync for RecvChain<Q> {}

impl<Q: Receives> RecvChain<Q> {
    /// For batches of `max_batch` at most; with 0 there is room for single receives only.
    ///
    /// # Safety
    /// `raw` must stay valid for as long as something is posted.
    pub(crate) unsafe fn new(raw: NonNull<Q::Raw>, max_sge: u32, max_batch: u32) -> Self {
        let stride = stride(max_sge);
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
        RecvChain { raw, max_sge, max_batch, wrs, sges, single, queue: PhantomData }
    }

    /// Posts one receive.
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
            self.post(&raw mut (*single).wr, 1)
        }
    }

    #[inline(always)]
    pub(crate) fn batch(&mut self) -> RecvBatch<'_, Q> {
        RecvBatch { chain: self, count: 0 }
    }

    /// # Safety
    ///
    /// `first` must be a chain of `len` work requests that lie one after another, whose elements are valid. The caller
    /// keeps the contract of [`RecvBatch`] for the memory.
    #[inline(always)]
    unsafe fn post(&self, first: *mut ibv_recv_wr, len: u32) -> Result<(), PostError> {
        let mut bad = null_mut();
        // SAFETY: the queue is valid, as `new` was promised; the rest is the caller's contract.
        match unsafe { Q::post(self.raw, first, &mut bad) } {
            0 => Ok(()),
            errno => Err(PostError::from_provider(errno, position(first, bad, len))),
        }
    }
}

/// Elements of a work request, at least one.
#[inline(always)]
fn stride(max_sge: u32) -> usize {
    max_sge.max(1) as usize
}

impl<Q: Receives> Drop for RecvChain<Q> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` in these lengths, and freed here only.
        unsafe {
            free(self.wrs, self.max_batch as usize);
            free(self.sges, self.max_batch as usize * stride(self.max_sge));
            drop(Box::from_raw(self.single.as_ptr()));
        }
    }
}

impl<Q: Receives> fmt::Debug for RecvChain<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvChain").field("max_sge", &self.max_sge).field("max_batch", &self.max_batch).finish()
    }
}

/// Receives to post at once, to a [`QueuePair`], a [`SharedReceiveQueue`] or a [`WorkQueue`]. Dropping it posts nothing.
///
/// # Safety
///
/// From [`RecvBatch::post`] until the receive has completed (its completion was polled, or [`QueuePair::destroy`] or
/// [`SharedReceiveQueue::destroy`] or [`WorkQueue::destroy`] of the queue that it was posted to has returned success; a shared
/// receive queue that is dropped is destroyed when all its queue pairs are, too, a queue pair when all its flows are, and a work
/// queue when all its tables are), the caller must see to it that the memory named by an [`Sge`] stays allocated and registered
/// under its key with local write access, and is neither read, nor written, nor referred to by a reference: the device writes it
/// when a message arrives.
///
/// So may the provider, by the CPU, at the address that the [`Sge`] has: mlx5 does for short messages, unless the environment has
/// `MLX5_SCATTER_TO_CQE=0` or the queue pair was made without that by `mlx5dv_create_qp`, and so does hns. Where that is not the
/// address of the memory in this process, as of a [`DeviceRegion`](crate::DeviceRegion) and mostly of a DMA-BUF, the caller must
/// see to it that the provider does not.
#[must_use = "dropping a batch posts nothing; call `post`"]
pub struct RecvBatch<'q, Q: Receives = QueuePair> {
    chain: &'q mut RecvChain<Q>,
    count: u32,
}

impl<Q: Receives> RecvBatch<'_, Q> {
    /// Adds a receive into `sges`, one after another.
    ///
    /// # Errors
    /// [`PostError::TooManySges`], [`PostError::BatchFull`]. The batch is as before then.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[inline(always)]
    pub unsafe fn receive(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        let chain = &mut *self.chain;
        if sges.len() > chain.max_sge as usize {
            return Err(PostError::TooManySges { count: sges.len(), max: chain.max_sge });
        }
        if self.count >= chain.max_batch {
            return Err(PostError::BatchFull { max: chain.max_batch });
        }
        // SAFETY: `count` is below the number of work requests, and `sges` are no more than the elements that each has.
        unsafe {
            let wr = chain.wrs.add(self.count as usize).as_ptr();
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

    /// Posts all of it: `ibv_post_recv(3)`, `ibv_post_srq_recv(3)` or `ibv_post_wq_recv`. An empty batch does nothing.
    ///
    /// # Errors
    /// As [`QueuePair::receive`](crate::QueuePair::receive) and [`SharedReceiveQueue::receive`].
    #[doc(alias = "ibv_post_recv")]
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline(always)]
    pub fn post(self) -> Result<(), PostError> {
        if self.count == 0 {
            return Ok(());
        }
        let chain = &mut *self.chain;
        // SAFETY: `last` is the last of the `count` work requests that were filled; the chain is cut behind it for the call.
        // The callers of `receive` vouch for the memory.
        unsafe {
            let last = chain.wrs.add(self.count as usize - 1).as_ptr();
            (*last).next = null_mut();
            let result = chain.post(chain.wrs.as_ptr(), self.count);
            (*last).next = last.add(1);
            result
        }
    }
}

impl<Q: Receives> fmt::Debug for RecvBatch<'_, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvBatch").field("len", &self.count).finish_non_exhaustive()
    }
}
