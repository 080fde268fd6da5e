//! Work requests collected in memory.

use rdma_sys::*;

use super::payload::{Limits, Slot};
use super::{PostError, Sge};

/// Work requests for `ibv_post_send`, and the memory they refer to, allocated once.
pub(super) struct Chain {
    wrs: Box<[ibv_send_wr]>,
    sges: Box<[ibv_sge]>,
    inline: Box<[u8]>,
    pub(super) len: u32,
}

impl Chain {
    pub(super) fn new(limits: &Limits, max_batch: u32) -> Self {
        let count = max_batch as usize;
        let sges = limits.max_sge.max(1) as usize;
        let wr = ibv_send_wr::zeroed();
        Chain {
            wrs: vec![wr; count].into_boxed_slice(),
            sges: vec![Sge::EMPTY.to_raw(); count * sges].into_boxed_slice(),
            inline: vec![0; count * limits.max_inline as usize].into_boxed_slice(),
            len: 0,
        }
    }

    /// The next work request, zeroed, and the memory for its payload.
    #[inline]
    pub(super) fn push(&mut self) -> Result<Slot<'_>, PostError> {
        let max = self.wrs.len();
        let index = self.len as usize;
        if index >= max {
            return Err(PostError::BatchFull { max: max as u32 });
        }
        self.len += 1;
        let (sges, inline) = (self.sges.len() / max, self.inline.len() / max);
        let wr = &mut self.wrs[index];
        // Providers check fields of unions that other operations have set.
        *wr = ibv_send_wr::zeroed();
        Ok(Slot {
            wr,
            sges: &mut self.sges[index * sges..][..sges],
            inline: &mut self.inline[index * inline..][..inline],
        })
    }

    #[inline]
    pub(super) fn post(&mut self, qp: *mut ibv_qp) -> Result<(), PostError> {
        let len = std::mem::take(&mut self.len) as usize;
        let stride = self.sges.len() / self.wrs.len();
        let inline_stride = self.inline.len() / self.wrs.len();
        // Once each: another `as_mut_ptr` would end the right to use what the one before it gave.
        let (first, sges, inline) = (self.wrs.as_mut_ptr(), self.sges.as_mut_ptr(), self.inline.as_mut_ptr());
        for index in 0..len {
            // SAFETY: `index` is below `len`, which is at most the length of `wrs`, and the elements of each work request
            // are `stride` of `sges`, at least one, and its inline data `inline_stride` of `inline`.
            unsafe {
                let wr = first.add(index);
                (*wr).sg_list = sges.add(index * stride);
                if (*wr).send_flags & IBV_SEND_INLINE.0 != 0 {
                    (*(*wr).sg_list).addr = inline.add(index * inline_stride).expose_provenance() as u64;
                }
                (*wr).next = if index + 1 < len { first.add(index + 1) } else { std::ptr::null_mut() };
            }
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is valid, and `first` is a chain of at least one work request, whose memory the callers of
        // the batch's methods vouch for.
        match unsafe { ibv_post_send(qp, first, &mut bad) } {
            0 => Ok(()),
            errno => Err(PostError::from_provider(errno, position(first, bad, len))),
        }
    }
}

/// Where in the chain the work request is that the provider refused; `None` where it did not say.
pub(super) fn position<T>(first: *const T, bad: *const T, len: usize) -> Option<u32> {
    let offset = (bad as usize).checked_sub(first as usize)?;
    let index = offset / size_of::<T>();
    (index < len && offset % size_of::<T>() == 0).then_some(index as u32)
}
