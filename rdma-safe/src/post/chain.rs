//! Work requests collected in memory.

use std::ptr::NonNull;

use rdma_sys::*;

use super::payload::{Limits, Slot};
use super::{PostError, Sge};

/// Work requests for `ibv_post_send`, and the memory they refer to, allocated once.
///
/// Each is linked to the next one and to its elements for good; [`Chain::post`] cuts the chain behind the last one for as
/// long as the call takes. What no operation sets stays as C would have it, zero.
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

    pub(super) fn new(limits: &Limits, max_batch: u32) -> Self {
        Chain::with(max_batch, limits.max_sge.max(1), limits.max_inline)
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
            // SAFETY: `index` is below the length of `wrs`, and `sges` has `max_sge` for each; the pointer to the next one is
            // at most one behind the last.
            unsafe {
                let wr = chain.wrs.add(index).as_ptr();
                (*wr).next = wr.add(1);
                (*wr).sg_list = chain.sges.add(index * max_sge as usize).as_ptr();
            }
        }
        chain
    }

    /// The work request at `index` and the memory for its payload.
    #[inline(always)]
    pub(super) fn slot(&mut self, index: u32) -> Result<Slot<'_>, PostError> {
        if index >= self.max {
            return Err(PostError::BatchFull { max: self.max });
        }
        // SAFETY: `index` is below the number of work requests, each of which has `max_inline` bytes of inline data. Nothing
        // else refers to them: `self` is borrowed mutably, and between calls the provider has no use for them.
        unsafe {
            let wr = &mut *self.wrs.add(index as usize).as_ptr();
            let inline = self.inline.add(index as usize * self.max_inline as usize);
            Ok(Slot { wr, inline })
        }
    }

    /// Posts the first `len`.
    ///
    /// # Safety
    ///
    /// `qp` must be valid, `len` at least one and at most as many as [`Chain::slot`] has given out since the last call; for the
    /// memory that they name the caller keeps the contract of [`SendBatch`](super::SendBatch).
    #[inline(always)]
    pub(super) unsafe fn post(&mut self, qp: NonNull<ibv_qp>, len: u32) -> Result<(), PostError> {
        let first = self.wrs.as_ptr();
        let mut bad = std::ptr::null_mut();
        // SAFETY: the caller's contract; `last` is one of the work requests, and `next` at most one behind the last of them,
        // where it is followed only if there is one.
        let errno = unsafe {
            let last = first.add(len as usize - 1);
            (*last).next = std::ptr::null_mut();
            let errno = ibv_post_send(qp.as_ptr(), first, &mut bad);
            (*last).next = last.add(1);
            errno
        };
        match errno {
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
