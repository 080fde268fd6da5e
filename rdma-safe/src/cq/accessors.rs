//! The functions by which an extended queue is polled and its completions are read.

use rdma_sys::ibv_cq_ex;

use super::WcFields;
use crate::{Context, Error};

/// Functions that an extended queue lacks and polling would call.
pub(super) enum Lacking {
    /// One that every extended queue needs.
    Polling,
    /// The accessors of these fields.
    Fields(WcFields),
}

impl Lacking {
    pub(super) fn into_error(self, context: &Context) -> Error {
        match self {
            Lacking::Polling => context.unsupported("extended completion queues"),
            Lacking::Fields(fields) => Error::CompletionFields { fields },
        }
    }
}

/// Checks that a queue has the functions for polling and for the fields `asked`.
///
/// Polling then calls them without a check.
///
/// # Safety
///
/// `cq` must be a valid extended queue.
pub(super) unsafe fn check(cq: *const ibv_cq_ex, asked: WcFields) -> Result<(), Lacking> {
    // SAFETY: the queue is valid, and the structure has had these fields since rdma-core 44, the oldest that is loaded. No
    // reference to the whole queue is made: it has a mutex, which other threads may lock.
    unsafe {
        let common = [
            (*cq).start_poll.is_some(),
            (*cq).next_poll.is_some(),
            (*cq).end_poll.is_some(),
            (*cq).read_opcode.is_some(),
            (*cq).read_vendor_err.is_some(),
            (*cq).read_wc_flags.is_some(),
        ];
        if common.contains(&false) {
            return Err(Lacking::Polling);
        }
        let is_there = |field| match field {
            WcFields::BYTE_LEN => (*cq).read_byte_len.is_some(),
            WcFields::IMM => (*cq).read_imm_data.is_some(),
            WcFields::QP_NUM => (*cq).read_qp_num.is_some(),
            WcFields::SRC_QP => (*cq).read_src_qp.is_some(),
            WcFields::SLID => (*cq).read_slid.is_some(),
            WcFields::SL => (*cq).read_sl.is_some(),
            WcFields::DLID_PATH_BITS => (*cq).read_dlid_path_bits.is_some(),
            WcFields::COMPLETION_TIMESTAMP => (*cq).read_completion_ts.is_some(),
            WcFields::CVLAN => (*cq).read_cvlan.is_some(),
            WcFields::FLOW_TAG => (*cq).read_flow_tag.is_some(),
            WcFields::TM_INFO => (*cq).read_tm_info.is_some(),
            WcFields::COMPLETION_TIMESTAMP_WALLCLOCK => (*cq).read_completion_wallclock_ns.is_some(),
            // This crate reads no other field.
            _ => true,
        };
        let lacking: WcFields = asked.iter().filter(|field| !is_there(*field)).collect();
        if lacking.is_empty() { Ok(()) } else { Err(Lacking::Fields(lacking)) }
    }
}
