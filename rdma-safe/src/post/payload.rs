//! What a work request sends: elements of registered memory, or bytes copied as it is posted.

use std::ptr::NonNull;

use rdma_sys::*;

use super::{PostError, Sge};
use crate::Buffer;

/// Data of a send or an RDMA write: an [`Sge`], a slice of them, [`Inline`] or [`InlineList`].
pub trait Payload: sealed::Payload {}

/// Registered memory that an RDMA read is scattered into: an [`Sge`] or a slice of them.
pub trait Scatter: Payload {}

/// Bytes that are copied into the work request as it is posted; they need not be registered, and are free again at once.
#[derive(Clone, Copy, Debug)]
pub struct Inline<'a>(pub &'a [u8]);

/// Pieces that are copied into the work request one after another, as it is posted.
#[derive(Clone, Copy, Debug)]
pub struct InlineList<'a>(pub &'a [&'a [u8]]);

/// The bytes of a buffer up to its length, which has 32 bits. They are looked up when they are set: what is known before the
/// provider is called has to be kept over the call.
pub(crate) struct Short<'a>(pub(crate) &'a Buffer);

/// None, of work that carries its operands in itself.
pub(crate) struct NoData;

impl Payload for NoData {}
impl Payload for Sge {}
impl Payload for Short<'_> {}
impl Scatter for Short<'_> {}
impl Payload for &[Sge] {}
impl Payload for Inline<'_> {}
impl Payload for InlineList<'_> {}
impl Scatter for Sge {}
impl Scatter for &[Sge] {}

/// Limits of the queue pair that a payload has to keep.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    // Of 16 bits where that is enough, so that all of it is one register: it is copied to every batch.
    pub(super) max_sge: u16,
    /// Bytes of a datagram, which is one packet; the largest number where there are no datagrams.
    pub(super) max_datagram: u16,
    pub(super) max_inline: u32,
}

/// What it takes to set a payload.
#[derive(Debug)]
pub struct Means {
    /// Room for `max_inline` bytes, in which inline lists are put together.
    pub(super) scratch: Box<[u8]>,
    /// See `Quirks::INLINE_LISTS_EMPTY`.
    pub(super) copy_inline_lists: bool,
}

pub(super) mod sealed {
    use super::*;

    /// Not implementable elsewhere: the unsafe methods have to hand the provider memory that is what they say.
    pub trait Payload {
        /// Whether the bytes are copied as the work is posted.
        const INLINE: bool;

        /// Checks the payload against the queue pair.
        fn check(&self, limits: Limits) -> Result<(), PostError>;

        /// How many bytes it has.
        fn bytes(&self) -> u64;

        /// Sets the payload of the work request that was just begun.
        ///
        /// # Safety
        ///
        /// `qp` must be between a builder call and the next, and `check` must have passed.
        unsafe fn set(&self, qp: *mut ibv_qp_ex, means: &mut Means);

        /// Writes the payload into a work request of `ibv_post_send`.
        ///
        /// # Safety
        ///
        /// `check` must have passed with the limits of the queue pair that `wr` belongs to. Its `sg_list` must have room for as
        /// many elements as they allow, at least one, and where `inline` says for as many bytes.
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
    unsafe fn set(&self, _qp: *mut ibv_qp_ex, _means: &mut Means) {}

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
    unsafe fn set(&self, qp: *mut ibv_qp_ex, _means: &mut Means) {
        // SAFETY: the caller's contract.
        unsafe { ibv_wr_set_sge(qp, self.lkey, self.address, self.len) }
    }

    #[inline(always)]
    unsafe fn fill(&self, wr: &mut ibv_send_wr, _inline: impl FnOnce() -> NonNull<u8>) {
        // SAFETY: there is always room for one element.
        unsafe { wr.sg_list.write(self.to_raw()) };
        wr.num_sge = 1;
    }
}

impl sealed::Payload for Short<'_> {
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
    unsafe fn set(&self, qp: *mut ibv_qp_ex, means: &mut Means) {
        // SAFETY: the caller's contract.
        unsafe { self.0.short_sge().set(qp, means) }
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
    unsafe fn set(&self, qp: *mut ibv_qp_ex, _means: &mut Means) {
        // SAFETY: the caller's contract; `Sge` has the layout of `struct ibv_sge`, and the provider copies the list.
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
            // SAFETY: `check` has found that there are no more than there is room for.
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
    unsafe fn set(&self, qp: *mut ibv_qp_ex, _means: &mut Means) {
        // SAFETY: the caller's contract; the provider copies the bytes.
        unsafe { ibv_wr_set_inline_data(qp, self.0.as_ptr().cast_mut().cast(), self.0.len()) }
    }

    #[inline(always)]
    unsafe fn fill(&self, wr: &mut ibv_send_wr, inline: impl FnOnce() -> NonNull<u8>) {
        // SAFETY: the caller's contract; for one piece the check is the same.
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

    unsafe fn set(&self, qp: *mut ibv_qp_ex, means: &mut Means) {
        /// Pieces that are handed over as a list; more are put together first.
        const DIRECT: usize = 16;
        if means.copy_inline_lists || self.0.len() > DIRECT {
            // SAFETY: the caller's contract; `scratch` has room for what `check` has passed, `len` bytes of it were written,
            // and the provider copies them.
            return unsafe {
                let scratch = NonNull::from(&mut *means.scratch).cast();
                let len = concatenate(self.0, scratch);
                ibv_wr_set_inline_data(qp, scratch.as_ptr().cast(), len)
            };
        }
        let mut list = [ibv_data_buf { addr: std::ptr::null_mut(), length: 0 }; DIRECT];
        for (raw, piece) in list.iter_mut().zip(self.0) {
            *raw = ibv_data_buf { addr: piece.as_ptr().cast_mut().cast(), length: piece.len() };
        }
        // SAFETY: the caller's contract; the provider copies the pieces.
        unsafe { ibv_wr_set_inline_data_list(qp, self.0.len(), list.as_ptr()) }
    }

    #[inline]
    unsafe fn fill(&self, wr: &mut ibv_send_wr, inline: impl FnOnce() -> NonNull<u8>) {
        let inline = inline();
        // SAFETY: `check` has found that the pieces are no longer than there is room for.
        let len = unsafe { concatenate(self.0, inline) };
        let element = ibv_sge { addr: inline.as_ptr() as u64, length: len as u32, lkey: 0 };
        // SAFETY: there is always room for one element.
        unsafe { wr.sg_list.write(element) };
        wr.num_sge = i32::from(len > 0);
    }
}

/// Copies the pieces one after another to `target`; returns their length.
///
/// # Safety
///
/// `target` must have room for all of them, and be no part of them.
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
