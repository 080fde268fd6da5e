//! What only `ibv_create_qp_ex` takes.

use rdma_sys::*;

use super::QueuePairBuilder;

/// Of a queue pair that has none of them, `ibv_create_qp` can be asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Options {
    pub(super) max_tso_header: u16,
}

impl Options {
    pub(super) fn is_none(&self) -> bool {
        *self == Options::default()
    }

    pub(super) fn set(&self, attr: &mut ibv_qp_init_attr_ex) {
        if self.max_tso_header > 0 {
            attr.max_tso_header = self.max_tso_header;
            attr.comp_mask |= IBV_QP_INIT_ATTR_MAX_TSO_HEADER.0;
        }
    }
}

impl QueuePairBuilder<'_> {
    /// Bytes of the headers before what the device segments, with [`SendBatch::send_tso`](crate::SendBatch::send_tso); 0 unless
    /// set, which leaves [`SendOps::TSO`](crate::SendOps::TSO) out. Of types that
    /// [`SegmentationOffload`](crate::SegmentationOffload) has.
    pub fn tso_header(mut self, bytes: u16) -> Self {
        self.options.max_tso_header = bytes;
        self
    }
}
