//! TCP segmentation offload (TSO): sends that the device cuts into TCP segments.

use rdma_sys::*;

use super::super::{PostError, Scatter, SendOps, WorkRequest};
use super::SendBatch;
use super::batch::{Slot, set_none};
use super::destination::Destination;
use crate::UdTarget;
use crate::branch::rare;
use crate::interface::Interface;

/// How a TCP stream is segmented: the largest segment and the headers of each packet.
///
/// The fields are the arguments of `ibv_wr_send_tso`, which never change.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    /// All network headers, up to and including TCP. The device updates the fields that change from segment to segment.
    pub header: &'a [u8],
    /// Maximum segment size: bytes of the stream per segment.
    pub mss: u16,
}

impl<I: Interface> SendBatch<'_, I> {
    /// Sends `stream` as one packet per segment: `ibv_wr_send_tso`. RAW_PACKET queue pairs only.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`]; [`PostError::HeaderTooLong`]; [`PostError::NoDestination`] on UD queue pairs.
    ///
    /// # Safety
    /// See [`SendBatch`]: `segments.header` must not change until the batch was posted.
    #[doc(alias = "ibv_wr_send_tso")]
    pub unsafe fn send_tso(
        &mut self,
        wr: WorkRequest,
        segments: Segments<'_>,
        stream: impl Scatter,
    ) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.add_tso(Destination::Connected, wr, segments, stream) }
    }

    /// Like [`SendBatch::send_tso`], to `to`: `ibv_wr_send_tso` and `ibv_wr_set_ud_addr`. UD queue pairs only.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`]; [`PostError::HeaderTooLong`]; [`PostError::NotDatagram`] on other queue pairs.
    ///
    /// # Safety
    /// Those of [`SendBatch::send_tso`].
    pub unsafe fn send_tso_to(
        &mut self,
        wr: WorkRequest,
        to: UdTarget<'_>,
        segments: Segments<'_>,
        stream: impl Scatter,
    ) -> Result<(), PostError> {
        // SAFETY: the caller's contract.
        unsafe { self.add_tso(Destination::Datagram(to), wr, segments, stream) }
    }

    /// # Safety
    /// Those of [`SendBatch::send_tso`].
    unsafe fn add_tso(
        &mut self,
        to: Destination<'_>,
        wr: WorkRequest,
        segments: Segments<'_>,
        stream: impl Scatter,
    ) -> Result<(), PostError> {
        let Segments { header, mss } = segments;
        let (len, max) = (header.len(), self.queue.max_tso_header);
        if len > usize::from(max) {
            rare();
            return Err(PostError::HeaderTooLong { len, max });
        }
        // The provider only reads the header, whose length fits in 16 bits.
        let (hdr, hdr_sz) = (header.as_ptr().cast_mut().cast(), len as u16);
        let slot = self.begin(SendOps::TSO, to, wr, &stream)?;
        // SAFETY: the queue pair has the operation; the caller's contract.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_send_tso(qp, hdr, hdr_sz, mss),
                Slot::Classic(wr) => {
                    set_none(&mut *wr, IBV_WR_TSO);
                    (*wr).__bindgen_anon_2.tso = ibv_send_wr__bindgen_ty_4__bindgen_ty_2 { hdr, hdr_sz, mss };
                }
            }
            self.finish(slot, to, stream);
        }
        Ok(())
    }
}
