//! Work requests for `ibv_post_send`, collected in memory.

use std::ptr::{NonNull, null_mut};

use rdma_sys::*;

use super::payload::Limits;
use super::{PostError, Sge};

/// Work requests for `ibv_post_send`, with their scatter/gather elements and inline data.
///
/// Everything is allocated once. A work request always points to the same elements. [`Chain::slot`] links it to the
/// previous one. Fields that no operation sets stay zero, as in C.
pub(super) struct Chain {
    // Raw pointers instead of boxes: work requests point to each other, and using a box would invalidate pointers that
    // were derived from it before.
    wrs: NonNull<ibv_send_wr>,
    sges: NonNull<ibv_sge>,
    inline: NonNull<u8>,
    max: u32,
    /// Elements of a work request, at least one.
    max_sge: u32,
    max_inline: u32,
}

impl Chain {
    /// An empty chain, for a queue pair that posts by `ibv_wr_*`.
    #[inline(always)]
    pub(super) fn none() -> Self {
        let (wrs, sges, inline) = (NonNull::dangling(), NonNull::dangling(), NonNull::dangling());
        Chain { wrs, sges, inline, max: 0, max_sge: 1, max_inline: 0 }
    }

    /// A chain of `max_batch` work requests, at least one.
    pub(super) fn new(limits: Limits, max_batch: u32) -> Self {
        let (max, max_sge, max_inline) = (max_batch.max(1), u32::from(limits.max_sge).max(1), limits.max_inline);
        let count = max as usize;
        let chain = Chain {
            wrs: allocate(ibv_send_wr::zeroed(), count),
            sges: allocate(Sge::EMPTY.to_raw(), count * max_sge as usize),
            inline: allocate(0, count * max_inline as usize),
            max,
            max_sge,
            max_inline,
        };
        // The provider gets the inline data as an integer address.
        let _ = chain.inline.as_ptr().expose_provenance();
        for index in 0..count {
            // SAFETY: `index` is below the length of `wrs`, and `sges` has `max_sge` for each.
            unsafe { (*chain.wrs.add(index).as_ptr()).sg_list = chain.sges.add(index * max_sge as usize).as_ptr() }
        }
        chain
    }

    /// The first work request, which [`Chain::slot`] and [`Chain::post`] take as an argument.
    #[inline(always)]
    pub(super) fn first(&self) -> *mut ibv_send_wr {
        self.wrs.as_ptr()
    }

    /// Maximum number of work requests.
    #[inline(always)]
    pub(super) fn max_len(&self) -> u32 {
        self.max
    }

    /// Returns the work request at `index` and makes it the end of the chain.
    ///
    /// # Safety
    ///
    /// This must not be [`Chain::none`]. `first` must be [`Chain::first`]. `index` must be the number of calls since
    /// the last post, or since the chain was started again.
    #[inline(always)]
    pub(super) unsafe fn slot(&self, first: *mut ibv_send_wr, index: u32) -> Result<*mut ibv_send_wr, PostError> {
        // A chain always has a first work request.
        if index != 0 && index >= self.max {
            return Err(PostError::BatchFull { max: self.max });
        }
        // SAFETY: `index` is below the number of work requests. The provider does not use them between calls.
        unsafe {
            let wr = first.add(index as usize);
            (*wr).next = null_mut();
            if index != 0 {
                (*wr.sub(1)).next = wr;
            }
            Ok(wr)
        }
    }

    /// Space for the inline data of the work request at `index`: `max_inline` bytes.
    ///
    /// # Safety
    ///
    /// [`Chain::slot`] must have returned the work request at `index`.
    #[inline(always)]
    pub(super) unsafe fn inline(&self, index: u32) -> NonNull<u8> {
        // SAFETY: `index` is below the number of work requests, and each has `max_inline` bytes.
        unsafe { self.inline.add(index as usize * self.max_inline as usize) }
    }

    /// Posts the first `len` work requests.
    ///
    /// # Safety
    ///
    /// `qp` must be valid and `first` must be [`Chain::first`]. `len` must be at least one, and the number of work
    /// requests that [`Chain::slot`] has returned since the chain was started. For the memory that they name, the
    /// caller keeps the contract of [`SendBatch`](super::SendBatch).
    #[inline(always)]
    pub(super) unsafe fn post(qp: NonNull<ibv_qp>, first: *mut ibv_send_wr, len: u32) -> Result<(), PostError> {
        let mut bad = null_mut();
        // SAFETY: the caller's contract; `slot` has linked the work requests and terminated the chain.
        match unsafe { ibv_post_send(qp.as_ptr(), first, &mut bad) } {
            0 => Ok(()),
            errno => Err(PostError::from_provider(errno, position(first, bad, len))),
        }
    }
}

impl Drop for Chain {
    #[inline]
    fn drop(&mut self) {
        let count = self.max as usize;
        if count > 0 {
            // SAFETY: `new` allocated these with the same lengths, and nothing else frees them.
            unsafe {
                free(self.wrs, count);
                free(self.sges, count * self.max_sge as usize);
                free(self.inline, count * self.max_inline as usize);
            }
        }
    }
}

pub(super) fn allocate<T: Copy>(value: T, count: usize) -> NonNull<T> {
    NonNull::from(Box::leak(vec![value; count].into_boxed_slice())).cast()
}

/// # Safety
///
/// `first` must come from [`allocate`] with the same `count`, and must not be used afterwards.
pub(super) unsafe fn free<T: Copy>(first: NonNull<T>, count: usize) {
    // SAFETY: the caller's contract: this is the box that `allocate` leaked.
    drop(unsafe { Box::from_raw(NonNull::slice_from_raw_parts(first, count).as_ptr()) });
}

/// Index of the work request that the provider refused; `None` if the provider did not report it.
#[inline(always)]
pub(super) fn position<T>(first: *const T, bad: *const T, len: u32) -> Option<u32> {
    let offset = (bad as usize).checked_sub(first as usize)?;
    let index = offset / size_of::<T>();
    (index < len as usize && offset % size_of::<T>() == 0).then_some(index as u32)
}
