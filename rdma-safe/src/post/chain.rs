//! Work requests collected in memory.

use std::ptr::{NonNull, null_mut};

use rdma_sys::*;

use super::payload::Limits;
use super::{PostError, Sge};

/// Work requests for `ibv_post_send`, and the memory they refer to, allocated once.
///
/// Each refers to its elements for good, and is linked to the one before as it is begun. What no operation sets stays as C
/// would have it, zero.
pub(super) struct Chain {
    // Pointers and not boxes: work requests point to each other, and a box that is used ends the right to what was derived
    // from it before.
    wrs: NonNull<ibv_send_wr>,
    sges: NonNull<ibv_sge>,
    inline: NonNull<u8>,
    max: u32,
    /// Elements of a work request, at least one.
    max_sge: u32,
    max_inline: u32,
}

impl Chain {
    /// For a queue pair that needs none.
    pub(super) fn none() -> Self {
        Chain::with(0, 1, 0)
    }

    /// Of at least one work request.
    pub(super) fn new(limits: Limits, max_batch: u32) -> Self {
        Chain::with(max_batch.max(1), u32::from(limits.max_sge).max(1), limits.max_inline)
    }

    fn with(max: u32, max_sge: u32, max_inline: u32) -> Self {
        let count = max as usize;
        let chain = Chain {
            wrs: allocate(ibv_send_wr::zeroed(), count),
            sges: allocate(Sge::EMPTY.to_raw(), count * max_sge as usize),
            inline: allocate(0, count * max_inline as usize),
            max,
            max_sge,
            max_inline,
        };
        // The provider reaches inline data by its address alone.
        let _ = chain.inline.as_ptr().expose_provenance();
        for index in 0..count {
            // SAFETY: `index` is below the length of `wrs`, and `sges` has `max_sge` for each.
            unsafe { (*chain.wrs.add(index).as_ptr()).sg_list = chain.sges.add(index * max_sge as usize).as_ptr() }
        }
        chain
    }

    /// The first work request: what [`Chain::slot`] and [`Chain::post`] are told.
    #[inline(always)]
    pub(super) fn first(&self) -> *mut ibv_send_wr {
        self.wrs.as_ptr()
    }

    /// The work request at `index`, which ends the chain now.
    ///
    /// # Safety
    ///
    /// This must not be [`Chain::none`], `first` be [`Chain::first`], and `index` be the number of calls since the last posting
    /// or since the chain was begun anew.
    #[inline(always)]
    pub(super) unsafe fn slot(&self, first: *mut ibv_send_wr, index: u32) -> Result<*mut ibv_send_wr, PostError> {
        // There is always a first one.
        if index != 0 && index >= self.max {
            return Err(PostError::BatchFull { max: self.max });
        }
        // SAFETY: `index` is below the number of work requests. Between calls the provider has no use for them.
        unsafe {
            let wr = first.add(index as usize);
            (*wr).next = null_mut();
            if index != 0 {
                (*wr.sub(1)).next = wr;
            }
            Ok(wr)
        }
    }

    /// Room for the inline data of the work request at `index`, as much as the limits allow.
    ///
    /// # Safety
    ///
    /// [`Chain::slot`] must have given it out.
    #[inline(always)]
    pub(super) unsafe fn inline(&self, index: u32) -> NonNull<u8> {
        // SAFETY: it is below the number of work requests, each of which has so many bytes.
        unsafe { self.inline.add(index as usize * self.max_inline as usize) }
    }

    /// Posts the first `len`, those that were begun.
    ///
    /// # Safety
    ///
    /// `qp` must be valid, `first` be [`Chain::first`], `len` at least one and as many as [`Chain::slot`] has given out since the
    /// chain was begun; for the memory that they name the caller keeps the contract of [`SendBatch`](super::SendBatch).
    #[inline(always)]
    pub(super) unsafe fn post(qp: NonNull<ibv_qp>, first: *mut ibv_send_wr, len: u32) -> Result<(), PostError> {
        let mut bad = null_mut();
        // SAFETY: the caller's contract; `slot` has linked them, and the last one to none.
        match unsafe { ibv_post_send(qp.as_ptr(), first, &mut bad) } {
            0 => Ok(()),
            errno => Err(PostError::from_provider(errno, position(first, bad, len))),
        }
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        let count = self.max as usize;
        // SAFETY: allocated by `with` in these lengths, and freed here only.
        unsafe {
            free(self.wrs, count);
            free(self.sges, count * self.max_sge as usize);
            free(self.inline, count * self.max_inline as usize);
        }
    }
}

pub(super) fn allocate<T: Copy>(value: T, count: usize) -> NonNull<T> {
    NonNull::from(Box::leak(vec![value; count].into_boxed_slice())).cast()
}

/// # Safety
///
/// `first` must come from [`allocate`] with `count`, and not be used any more.
pub(super) unsafe fn free<T: Copy>(first: NonNull<T>, count: usize) {
    // SAFETY: the caller's contract: this is the box that was leaked.
    drop(unsafe { Box::from_raw(NonNull::slice_from_raw_parts(first, count).as_ptr()) });
}

/// Where in the chain the work request is that the provider refused; `None` where it did not say.
#[inline(always)]
pub(super) fn position<T>(first: *const T, bad: *const T, len: u32) -> Option<u32> {
    let offset = (bad as usize).checked_sub(first as usize)?;
    let index = offset / size_of::<T>();
    (index < len as usize && offset % size_of::<T>() == 0).then_some(index as u32)
}
