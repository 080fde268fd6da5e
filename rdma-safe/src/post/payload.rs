//! The data of a work request: registered memory, or bytes that are copied when it is posted.

use std::ptr::NonNull;

use rdma_sys::*;

use super::{PostError, Sge};
use crate::Buffer;

/// Data of a send or an RDMA write: an [`Sge`], a slice of them, [`Inline`] or [`InlineList`].
pub trait Payload: sealed::Payload {}

/// Registered memory that an RDMA read is scattered into: an [`Sge`] or a slice of them.
pub trait Scatter: Payload {}

/// Bytes that are copied into the work request when it is posted. They need not be registered and can be reused at
/// once.
#[derive(Clone, Copy, Debug)]
pub struct Inline<'a>(pub &'a [u8]);

/// Several byte slices that are copied into the work request, one after another, when it is posted.
#[derive(Clone, Copy, Debug)]
pub struct InlineList<'a>(pub &'a [&'a [u8]]);

/// The bytes of a buffer up to its length, which fits in 32 bits. `set` and `fill` look the length up only when they
/// need it: a value that is known before the provider is called would have to be saved across the call.
pub(crate) struct BufferPayload<'a>(pub(crate) &'a Buffer);

/// No data: the work request carries its operands itself.
pub(crate) struct NoData;

impl Payload for NoData {}
impl Payload for Sge {}
impl Payload for BufferPayload<'_> {}
impl Scatter for BufferPayload<'_> {}
impl Payload for &[Sge] {}
impl Payload for Inline<'_> {}
impl Payload for InlineList<'_> {}
impl Scatter for Sge {}
impl Scatter for &[Sge] {}

/// Limits of the queue pair that a payload must keep.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    // 16 bits where that is enough, so that the whole structure fits in one register: it is copied to every batch.
    pub(super) max_sge: u16,
    /// Largest datagram in bytes, which is one packet. `u16::MAX` on queue pairs without datagrams.
    pub(super) max_datagram: u16,
    pub(super) max_inline: u32,
}

/// State that setting inline data needs.
#[derive(Debug)]
pub struct InlineScratch {
    /// Space for `max_inline` bytes, in which inline lists are concatenated.
    pub(super) bytes: Box<[u8]>,
    /// See `Quirks::INLINE_LISTS_EMPTY`.
    pub(super) copy_inline_lists: bool,
}

pub(super) mod sealed {
    use super::*;

    /// Sealed: the unsafe methods rely on the implementations to pass the provider the memory that they describe.
    pub trait Payload {
        /// Whether the bytes are copied when the work is posted.
        const INLINE: bool;

        /// Checks the payload against the limits of the queue pair.
        fn check(&self, limits: Limits) -> Result<(), PostError>;

        /// Length of the payload in bytes.
        fn bytes(&self) -> u64;

        /// Sets the payload of the work request that was just started.
        ///
        /// # Safety
        ///
        /// `qp` must be between two builder calls, and `check` must have passed.
        unsafe fn set(&self, qp: *mut ibv_qp_ex, inline_scratch: &mut InlineScratch);

        /// Writes the payload into a work request of `ibv_post_send`.
        ///
        /// # Safety
        ///
        /// `check` must have passed with the limits of the queue pair that `wr` belongs to. `sg_list` must have space
        /// for as many elements as these limits allow, at least one. `inline` must return space for as many bytes as
        /// they allow.
        unsafe fn fill(&self, wr: &mut ibv_send_wr, inline: impl FnOnce() -> NonNull<u8>);
    }
}

impl sealed::Payload for NoData {
    const INLINE: bool = false;

    #[inline(always)]
    fn check(&self, _limits: Limits) -> Result<(), PostError> {
        Ok(())
    }

    #[inline(always)]
    fn bytes(&self) -> u64 {
        0
    }

    #[inline(always)]
    unsafe fn set(&self, _qp: *mut ibv_qp_ex, _means: &mut InlineScratch) {}

    #[inline(always)]
    unsafe fn fill(&self, wr: &mut ibv_send_wr, _inline: impl FnOnce() -> NonNull<u8>) {
        wr.num_sge = 0;
    }
}

impl sealed::Payload for Sge {
    const INLINE: bool = false;

    #[inline(always)]
    fn check(&self, _limits: Limits) -> Result<(), PostError> {
        Ok(())
    }

    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.len.into()
    }

    #[inline(always)]
    unsafe fn set(&self, qp: *mut ibv_qp_ex, _means: &mut InlineScratch) {
        // SAFETY: the caller's contract.
        unsafe { ibv_wr_set_sge(qp, self.lkey, self.address, self.len) }
    }

    #[inline(always)]
    unsafe fn fill(&self, wr: &mut ibv_send_wr, _inline: impl FnOnce() -> NonNull<u8>) {
        // SAFETY: there is always space for one element.
        unsafe { wr.sg_list.write(self.to_raw()) };
        wr.num_sge = 1;
    }
}

impl sealed::Payload for BufferPayload<'_> {
    const INLINE: bool = false;

    #[inline(always)]
    fn check(&self, _limits: Limits) -> Result<(), PostError> {
        Ok(())
    }

    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.0.short_sge().len.into()
    }

    #[inline(always)]
    unsafe fn set(&self, qp: *mut ibv_qp_ex, inline_scratch: &mut InlineScratch) {
        // SAFETY: the caller's contract.
        unsafe { self.0.short_sge().set(qp, inline_scratch) }
    }

    #[inline(always)]
    unsafe fn fill(&self, wr: &mut ibv_send_wr, inline: impl FnOnce() -> NonNull<u8>) {
        // SAFETY: the caller's contract.
        unsafe { self.0.short_sge().fill(wr, inline) }
    }
}

impl sealed::Payload for &[Sge] {
    const INLINE: bool = false;

    #[inline(always)]
    fn check(&self, limits: Limits) -> Result<(), PostError> {
        if self.len() > limits.max_sge as usize {
            return Err(PostError::TooManySges { count: self.len(), max: limits.max_sge.into() });
        }
        Ok(())
    }

    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.iter().fold(0, |sum, sge| sum + u64::from(sge.len))
    }

    #[inline(always)]
    unsafe fn set(&self, qp: *mut ibv_qp_ex, _means: &mut InlineScratch) {
        // SAFETY: the caller's contract. `Sge` has the layout of `struct ibv_sge`, and the provider copies the list.
        unsafe {
            match self {
                [] => ibv_wr_set_sge(qp, 0, 0, 0),
                [one] => ibv_wr_set_sge(qp, one.lkey, one.address, one.len),
                list => ibv_wr_set_sge_list(qp, list.len(), list.as_ptr().cast()),
            }
        }
    }

    #[inline(always)]
    unsafe fn fill(&self, wr: &mut ibv_send_wr, _inline: impl FnOnce() -> NonNull<u8>) {
        for (index, sge) in self.iter().enumerate() {
            // SAFETY: `check` ensures that the elements fit.
            unsafe { wr.sg_list.add(index).write(sge.to_raw()) };
        }
        wr.num_sge = self.len() as i32;
    }
}

impl sealed::Payload for Inline<'_> {
    const INLINE: bool = true;

    #[inline(always)]
    fn check(&self, limits: Limits) -> Result<(), PostError> {
        if self.0.len() > limits.max_inline as usize {
            return Err(PostError::InlineTooLong { len: self.0.len(), max: limits.max_inline });
        }
        Ok(())
    }

    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    #[inline(always)]
    unsafe fn set(&self, qp: *mut ibv_qp_ex, _means: &mut InlineScratch) {
        // SAFETY: the caller's contract; the provider copies the bytes.
        unsafe { ibv_wr_set_inline_data(qp, self.0.as_ptr().cast_mut().cast(), self.0.len()) }
    }

    #[inline(always)]
    unsafe fn fill(&self, wr: &mut ibv_send_wr, inline: impl FnOnce() -> NonNull<u8>) {
        // SAFETY: the caller's contract; `check` is the same for a list of one slice.
        unsafe { InlineList(&[self.0]).fill(wr, inline) }
    }
}

impl sealed::Payload for InlineList<'_> {
    const INLINE: bool = true;

    #[inline(always)]
    fn check(&self, limits: Limits) -> Result<(), PostError> {
        let len = self.0.iter().fold(0_usize, |sum, piece| sum.saturating_add(piece.len()));
        if len > limits.max_inline as usize {
            return Err(PostError::InlineTooLong { len, max: limits.max_inline });
        }
        Ok(())
    }

    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.0.iter().fold(0_u64, |sum, piece| sum.saturating_add(piece.len() as u64))
    }

    unsafe fn set(&self, qp: *mut ibv_qp_ex, inline_scratch: &mut InlineScratch) {
        /// Longest list that is passed to the provider as it is. Longer ones are concatenated first.
        const DIRECT: usize = 16;
        if inline_scratch.copy_inline_lists || self.0.len() > DIRECT {
            // SAFETY: the caller's contract. `scratch` has space for every payload that passes `check`, `concatenate`
            // writes `len` bytes of it, and the provider copies them.
            return unsafe {
                let scratch = NonNull::from(&mut *inline_scratch.bytes).cast();
                let len = concatenate(self.0, scratch);
                ibv_wr_set_inline_data(qp, scratch.as_ptr().cast(), len)
            };
        }
        let mut list = [ibv_data_buf { addr: std::ptr::null_mut(), length: 0 }; DIRECT];
        for (raw, piece) in list.iter_mut().zip(self.0) {
            *raw = ibv_data_buf { addr: piece.as_ptr().cast_mut().cast(), length: piece.len() };
        }
        // SAFETY: the caller's contract; the provider copies the slices.
        unsafe { ibv_wr_set_inline_data_list(qp, self.0.len(), list.as_ptr()) }
    }

    #[inline]
    unsafe fn fill(&self, wr: &mut ibv_send_wr, inline: impl FnOnce() -> NonNull<u8>) {
        let inline = inline();
        // SAFETY: `check` ensures that the slices fit.
        let len = unsafe { concatenate(self.0, inline) };
        let element = ibv_sge { addr: inline.as_ptr() as u64, length: len as u32, lkey: 0 };
        // SAFETY: there is always space for one element.
        unsafe { wr.sg_list.write(element) };
        wr.num_sge = i32::from(len > 0);
    }
}

/// Copies the slices one after another to `target` and returns their total length.
///
/// # Safety
///
/// `target` must have space for all slices and must not overlap them.
#[inline]
unsafe fn concatenate(pieces: &[&[u8]], target: NonNull<u8>) -> usize {
    let mut len = 0;
    for piece in pieces {
        // SAFETY: the caller's contract.
        unsafe { target.as_ptr().add(len).copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
        len += piece.len();
    }
    len
}
