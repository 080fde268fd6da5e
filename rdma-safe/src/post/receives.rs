//! Receive work requests, collected in memory.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::marker::PhantomData;
use std::mem;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

use rdma_sys::*;

use super::chain::position;
use super::{PostError, Sge};
use crate::wq::WorkQueue;
use crate::{QueuePair, SharedReceiveQueue};

/// A queue that takes receives: a [`QueuePair`], a [`SharedReceiveQueue`] or a [`WorkQueue`].
pub trait ReceiveQueue: sealed::ReceiveQueue {}

impl ReceiveQueue for QueuePair {}
impl ReceiveQueue for SharedReceiveQueue {}
impl ReceiveQueue for WorkQueue {}

mod sealed {
    use std::ptr::NonNull;

    use rdma_sys::ibv_recv_wr;

    /// Sealed: the provider is given memory on the word of the implementation.
    pub trait ReceiveQueue {
        /// The C object.
        type Raw;

        /// Posts a chain and returns 0 or an errno.
        ///
        /// # Safety
        /// `raw` must be valid and `first` must be a chain of valid work requests. For the memory that they name, the
        /// caller keeps the contract of [`RecvBatch`](crate::RecvBatch).
        unsafe fn post(raw: NonNull<Self::Raw>, first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> i32;
    }
}

impl sealed::ReceiveQueue for QueuePair {
    type Raw = ibv_qp;

    #[inline(always)]
    unsafe fn post(raw: NonNull<ibv_qp>, first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> i32 {
        // SAFETY: the caller's contract is the same.
        unsafe { ibv_post_recv(raw.as_ptr(), first, bad) }
    }
}

impl sealed::ReceiveQueue for SharedReceiveQueue {
    type Raw = ibv_srq;

    #[inline(always)]
    unsafe fn post(raw: NonNull<ibv_srq>, first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> i32 {
        // SAFETY: the caller's contract is the same. Every context of rdma-core has the operation.
        unsafe { ibv_post_srq_recv(raw.as_ptr(), first, bad) }
    }
}

impl sealed::ReceiveQueue for WorkQueue {
    type Raw = ibv_wq;

    #[inline(always)]
    unsafe fn post(raw: NonNull<ibv_wq>, first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> i32 {
        // SAFETY: the caller's contract is the same. Creating the work queue checked that the operation exists.
        unsafe { ibv_post_wq_recv(raw.as_ptr(), first, bad) }
    }
}

/// Receive work requests and their scatter/gather elements, allocated once, with the queue that they are posted to.
pub(crate) struct RecvChain<Q: ReceiveQueue> {
    raw: NonNull<Q::Raw>,
    max_sge: u32,
    max_batch: u32,
    /// The only allocation, or null before [`RecvChain::allocate`]. It starts with a chain of one work request with one
    /// element. `max_batch` work requests follow. Each always links to the next one and to its own elements: see
    /// [`RecvBatch::post`].
    block: AtomicPtr<Single>,
    queue: PhantomData<fn() -> Q>,
}

struct Single {
    wr: ibv_recv_wr,
    sge: ibv_sge,
    /// Where the provider reports the work request that it refuses. Null between calls, so that no call need clear it.
    bad: *mut ibv_recv_wr,
}

// SAFETY: the C objects may be used from any thread (see `Context`); nothing else refers to the work requests.
unsafe impl<Q: ReceiveQueue> Send for RecvChain<Q> {}
// SAFETY: a shared reference reads immutable fields, and sets `block`, which is atomic, once.
unsafe impl<Q: ReceiveQueue> Sync for RecvChain<Q> {}

impl<Q: ReceiveQueue> RecvChain<Q> {
    /// Allocates work requests for batches of up to `max_batch` receives; with 0, only for single receives.
    ///
    /// # Safety
    /// `raw` must stay valid as long as this is used to post.
    pub(crate) unsafe fn new(raw: NonNull<Q::Raw>, max_sge: u32, max_batch: u32) -> Self {
        // SAFETY: the caller's contract is the same.
        let chain = unsafe { RecvChain::unallocated(raw, max_sge, max_batch) };
        chain.allocate();
        chain
    }

    /// Like [`RecvChain::new`], but [`RecvChain::allocate`] allocates them later.
    ///
    /// # Safety
    /// That of [`RecvChain::new`].
    #[inline]
    pub(crate) unsafe fn unallocated(raw: NonNull<Q::Raw>, max_sge: u32, max_batch: u32) -> Self {
        RecvChain { raw, max_sge, max_batch, block: AtomicPtr::new(null_mut()), queue: PhantomData }
    }

    /// Allocates the work requests, unless that is done.
    #[cold]
    pub(crate) fn allocate(&self) {
        if self.block.load(Ordering::Acquire).is_null() {
            let new = self.new_block();
            if self.block.compare_exchange(null_mut(), new, Ordering::Release, Ordering::Relaxed).is_err() {
                // Another thread was faster.
                self.free(new);
            }
        }
    }

    fn new_block(&self) -> *mut Single {
        let RecvChain { max_sge, max_batch, .. } = *self;
        let stride = max_sge.max(1) as usize;
        let (layout, sges_at) = layout(max_sge, max_batch);
        // SAFETY: the layout has at least the size of `Single`.
        let block = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        let empty = ibv_recv_wr { wr_id: 0, next: null_mut(), sg_list: null_mut(), num_sge: 0 };
        // SAFETY: `layout` places these in the block, aligned and without overlap, and `index` is below their number. The
        // pointer to the next work request points at most one past the last.
        unsafe {
            let single = block.cast::<Single>();
            let sge = &raw mut (*single.as_ptr()).sge;
            let wr = ibv_recv_wr { num_sge: 1, sg_list: sge, ..empty };
            single.write(Single { wr, sge: Sge::EMPTY.to_raw(), bad: null_mut() });
            let (wrs, sges) = (single.add(1).cast::<ibv_recv_wr>(), block.add(sges_at).cast::<ibv_sge>());
            for index in 0..max_batch as usize {
                let (wr, first) = (wrs.add(index), sges.add(index * stride));
                wr.write(ibv_recv_wr { next: wr.add(1).as_ptr(), sg_list: first.as_ptr(), ..empty });
                (0..stride).for_each(|element| first.add(element).write(Sge::EMPTY.to_raw()));
            }
            single.as_ptr()
        }
    }

    /// Frees a block of [`RecvChain::new_block`].
    fn free(&self, block: *mut Single) {
        let (layout, _) = layout(self.max_sge, self.max_batch);
        // SAFETY: `new_block` allocated it with this layout. Nothing else frees it.
        unsafe { dealloc(block.cast(), layout) }
    }

    /// Posts one receive.
    ///
    /// # Safety
    /// See [`RecvBatch`]. The chain must be allocated.
    #[inline(always)]
    pub(crate) unsafe fn post_one(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        let single = *self.block.get_mut();
        // SAFETY: the chain is allocated, and starts with one work request that ends there. The caller vouches for its memory.
        unsafe {
            (*single).wr.wr_id = wr_id;
            (*single).sge = sge.to_raw();
            self.post(&raw mut (*single).wr, 1, &mut (*single).bad)
        }
    }

    /// # Safety
    /// The chain must be allocated.
    #[inline(always)]
    pub(crate) unsafe fn batch(&mut self) -> RecvBatch<'_, Q> {
        RecvBatch { chain: self, count: 0 }
    }

    /// The work requests of batches.
    ///
    /// # Safety
    /// The chain must be allocated.
    #[inline(always)]
    unsafe fn wrs(&mut self) -> *mut ibv_recv_wr {
        // SAFETY: they follow the `Single`.
        unsafe { self.block.get_mut().add(1).cast() }
    }

    /// # Safety
    ///
    /// `first` must be a chain of `len` adjacent work requests with valid elements. `bad` must be null, and is null afterwards. The
    /// caller keeps the contract of [`RecvBatch`] for the memory.
    #[inline(always)]
    unsafe fn post(&self, first: *mut ibv_recv_wr, len: u32, bad: &mut *mut ibv_recv_wr) -> Result<(), PostError> {
        // SAFETY: the caller of `new` vouches for the queue; the rest is the caller's contract.
        match unsafe { Q::post(self.raw, first, bad) } {
            0 => Ok(()),
            errno => {
                let bad = mem::replace(bad, null_mut());
                Err(PostError::from_provider(errno, position(first, bad, len)))
            }
        }
    }
}

/// Layout of the allocation, and the offset of the elements in it. The work requests follow `Single`.
///
/// Each work request has at least one element.
fn layout(max_sge: u32, max_batch: u32) -> (Layout, usize) {
    const ALIGN: usize = align_of::<Single>();
    const {
        assert!(ALIGN >= align_of::<ibv_recv_wr>() && size_of::<Single>() % align_of::<ibv_recv_wr>() == 0);
        assert!(ALIGN >= align_of::<ibv_sge>() && size_of::<ibv_recv_wr>() % align_of::<ibv_sge>() == 0);
    }
    let (batch, stride) = (max_batch as usize, max_sge.max(1) as usize);
    let sges_at = size_of::<Single>() + batch * size_of::<ibv_recv_wr>();
    let size = batch.checked_mul(stride).and_then(|sges| sges.checked_mul(size_of::<ibv_sge>()));
    let size = size.and_then(|size| size.checked_add(sges_at)).expect("the capacity of a queue pair fits in memory");
    (Layout::from_size_align(size, ALIGN).expect("as above"), sges_at)
}

impl<Q: ReceiveQueue> Drop for RecvChain<Q> {
    fn drop(&mut self) {
        let block = *self.block.get_mut();
        if !block.is_null() {
            self.free(block);
        }
    }
}

impl<Q: ReceiveQueue> fmt::Debug for RecvChain<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvChain").field("max_sge", &self.max_sge).field("max_batch", &self.max_batch).finish()
    }
}

/// A batch of receives for a [`QueuePair`], a [`SharedReceiveQueue`] or a [`WorkQueue`].
///
/// Dropping it posts nothing.
///
/// # Safety
///
/// The device writes the memory when a message arrives. From [`RecvBatch::post`] until the receive is finished, the
/// caller must ensure that the memory named by an [`Sge`] stays allocated and registered under its key with local write
/// access. It must not be read, written or referred to by a reference in that time.
///
/// The receive is finished when its completion was polled, or when [`QueuePair::destroy`],
/// [`SharedReceiveQueue::destroy`] or [`WorkQueue::destroy`] of the queue that it was posted to has returned success.
/// Dropping a queue destroys it later if other objects use it: a shared receive queue with its last queue pair, a queue
/// pair with its last flow, and a work queue with its last table.
///
/// The provider may also write the memory with the CPU, at the address in the [`Sge`]. mlx5 does so for short messages,
/// unless the environment has `MLX5_SCATTER_TO_CQE=0` or `mlx5dv_create_qp` disabled it for the queue pair. So does
/// hns. If that address is not the address of the memory in this process, as with a
/// [`DeviceRegion`](crate::dm::DeviceRegion) and usually with a DMA-BUF, the caller must ensure that the provider does not
/// do this.
#[must_use = "dropping a batch posts nothing; call `post`"]
pub struct RecvBatch<'q, Q: ReceiveQueue = QueuePair> {
    chain: &'q mut RecvChain<Q>,
    count: u32,
}

impl<Q: ReceiveQueue> RecvBatch<'_, Q> {
    /// Adds a receive that is scattered into `sges`, in order.
    ///
    /// # Errors
    /// [`PostError::TooManySges`], [`PostError::BatchFull`]. The batch is then unchanged.
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
        // SAFETY: `count` is below the number of work requests, and each has space for as many elements as `sges` has.
        unsafe {
            let wr = chain.wrs().add(self.count as usize);
            (*wr).wr_id = wr_id;
            (*wr).num_sge = sges.len() as i32;
            for (index, sge) in sges.iter().enumerate() {
                (*wr).sg_list.add(index).write(sge.to_raw());
            }
        }
        self.count += 1;
        Ok(())
    }

    /// Number of receives in the batch.
    #[must_use]
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether the batch has no receives.
    #[must_use]
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Posts the batch: `ibv_post_recv(3)`, `ibv_post_srq_recv(3)` or `ibv_post_wq_recv`. An empty batch does nothing.
    ///
    /// # Errors
    /// Those of [`QueuePair::receive`](crate::QueuePair::receive) and [`SharedReceiveQueue::receive`].
    #[doc(alias = "ibv_post_recv")]
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline(always)]
    pub fn post(self) -> Result<(), PostError> {
        if self.count == 0 {
            return Ok(());
        }
        let chain = &mut *self.chain;
        // SAFETY: `last` is the last of the `count` filled work requests, and the chain ends there during the call. The
        // callers of `receive` vouch for the memory.
        unsafe {
            let first = chain.wrs();
            let last = first.add(self.count as usize - 1);
            (*last).next = null_mut();
            let result = chain.post(first, self.count, &mut null_mut());
            (*last).next = last.add(1);
            result
        }
    }
}

impl<Q: ReceiveQueue> fmt::Debug for RecvBatch<'_, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvBatch").field("len", &self.count).finish_non_exhaustive()
    }
}
