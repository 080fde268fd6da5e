//! Sends that the device cuts into TCP segments.

use rdma_sys::*;

use super::super::{PostError, Scatter, SendOps, WorkRequest};
use super::SendBatch;
use super::batch::set_none;
use super::operations::TSO_TO;
use crate::UdTarget;
use crate::cq::rare;
use crate::interface::Interface;

/// What a TCP stream is cut by: the largest segment, and the headers that come before each.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    /// All headers of the network, up to and with that of TCP; the device counts on what changes from segment to segment.
    pub header: &'a [u8],
    /// Bytes of the stream in a segment: the maximum segment size.
    pub mss: u16,
}

impl Segments<'_> {
    fn set(self, wr: &mut ibv_send_wr) {
        let (hdr, hdr_sz) = (self.header.as_ptr().cast_mut().cast(), self.header.len() as u16);
        wr.__bindgen_anon_2.tso = ibv_send_wr__bindgen_ty_4__bindgen_ty_2 { hdr, hdr_sz, mss: self.mss };
    }
}

impl<I: Interface> SendBatch<'_, I> {
    /// Sends `stream` as packets of a segment each: `ibv_wr_send_tso`. Of RAW_PACKET queue pairs only.
    ///
    /// # Errors
    /// As [`SendBatch::send`]; [`PostError::HeaderTooLong`]; [`PostError::NoDestination`] on UD queue pairs.
    ///
    /// # Safety
    /// See [`SendBatch`]: `segments.header` stays as it is until the batch was posted.
    #[doc(alias = "ibv_wr_send_tso")]
    pub unsafe fn send_tso(
        &mut self,
        wr: WorkRequest,
        segments: Segments<'_>,
        stream: impl Scatter,
    ) -> Result<(), PostError> {
        self.check_header(segments)?;
        let extended = |qp| {
            // SAFETY: called by `add` as it says; the header is read only.
            unsafe { begin(qp, segments) }
        };
        let classic = |wr: &mut ibv_send_wr| {
            set_none(wr);
            segments.set(wr);
        };
        // SAFETY: the caller's contract; the operation and its builder belong together.
        unsafe { self.add(SendOps::TSO, IBV_WR_TSO, wr, stream, extended, classic) }
    }

    /// As [`SendBatch::send_tso`], to `to`: `ibv_wr_send_tso` and `ibv_wr_set_ud_addr`. Of UD queue pairs only.
    ///
    /// # Errors
    /// As [`SendBatch::send`]; [`PostError::HeaderTooLong`]; [`PostError::NotDatagram`] on other queue pairs.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn send_tso_to(
        &mut self,
        wr: WorkRequest,
        to: UdTarget<'_>,
        segments: Segments<'_>,
        stream: impl Scatter,
    ) -> Result<(), PostError> {
        self.check_header(segments)?;
        let extended = |qp| {
            // SAFETY: as in `send_tso`; a queue pair that has this operation has both functions, and the handle exists.
            unsafe {
                begin(qp, segments);
                ibv_wr_set_ud_addr(qp, to.as_raw(), to.qp_num, to.qkey);
            }
        };
        let classic = |wr: &mut ibv_send_wr| {
            to.set(wr);
            segments.set(wr);
        };
        // SAFETY: as in `send_tso`.
        unsafe { self.add(TSO_TO, IBV_WR_TSO, wr, stream, extended, classic) }
    }

    fn check_header(&self, segments: Segments<'_>) -> Result<(), PostError> {
        let (len, max) = (segments.header.len(), self.queue.max_tso_header);
        if len > usize::from(max) {
            rare();
            return Err(PostError::HeaderTooLong { len, max });
        }
        Ok(())
    }
}

/// # Safety
/// As of `ibv_wr_send_tso`.
unsafe fn begin(qp: *mut ibv_qp_ex, segments: Segments<'_>) {
    let Segments { header, mss } = segments;
    // SAFETY: the caller's contract. `check_header` has found that the length has 16 bits.
    unsafe { ibv_wr_send_tso(qp, header.as_ptr().cast_mut().cast(), header.len() as u16, mss) }
}
