//! Flushing: earlier writes to a peer made visible, or persistent.

use bitflags::bitflags;
use rdma_sys::*;

use super::super::payload::NoData;
use super::super::{PostError, Remote, SendOps, WorkRequest};
use super::SendBatch;
use super::batch::set_rdma;
use crate::interface::Interface;
use crate::named::named;

bitflags! {
    /// How far the bytes have to come that a flush waits for: `enum ibv_placement_type`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct FlushPlacement: u8 {
        /// Visible to everyone who looks at the memory. The region and the queue pair of the peer need
        /// [`Access::FLUSH_GLOBAL`](crate::Access::FLUSH_GLOBAL).
        const GLOBAL = IBV_FLUSH_GLOBAL.0 as u8;
        /// Persistent: there after a power failure. The region and the queue pair of the peer need
        /// [`Access::FLUSH_PERSISTENT`](crate::Access::FLUSH_PERSISTENT).
        const PERSISTENT = IBV_FLUSH_PERSISTENT.0 as u8;
    }
}

named! {
    /// What a flush is about: `enum ibv_selectivity_level`.
    pub struct FlushRange(u8) as "flush level" {
        /// The bytes that it names.
        RANGE = IBV_FLUSH_RANGE.0 as u8 => "RANGE",
        /// The whole region of the key; the address and the length do not matter.
        REGION = IBV_FLUSH_MR.0 as u8 => "REGION",
    }
}

impl<I: Interface> SendBatch<'_, I> {
    /// Completes when what was written to `len` bytes of the peer, at `remote`, has come as far as `placement` says:
    /// `ibv_wr_flush`. Writes before it in this queue are waited for; nothing is transferred.
    ///
    /// Devices that have it report [`DeviceCapabilities::FLUSH_GLOBAL`](crate::DeviceCapabilities::FLUSH_GLOBAL) and
    /// [`FLUSH_PERSISTENT`](crate::DeviceCapabilities::FLUSH_PERSISTENT).
    ///
    /// # Errors
    /// As [`SendBatch::send`]. Work that is posted by `ibv_post_send` does not have it: [`PostError::NotEnabled`].
    #[doc(alias = "ibv_wr_flush")]
    #[inline(always)]
    pub fn flush(
        &mut self,
        wr: WorkRequest,
        remote: impl Into<Remote>,
        len: usize,
        placement: FlushPlacement,
        range: FlushRange,
    ) -> Result<(), PostError> {
        let Remote { address, rkey } = remote.into();
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_flush(qp, rkey, address, len, placement.bits(), range.0) }
        };
        let classic = |wr: &mut ibv_send_wr| set_rdma(wr, address, rkey);
        // SAFETY: no memory is named here, and none of the peer is written. The operation and its builder belong together. No
        // queue pair that is posted to by `ibv_post_send` has the operation.
        unsafe { self.add(SendOps::FLUSH, IBV_WR_FLUSH, wr, NoData, extended, classic) }
    }
}
