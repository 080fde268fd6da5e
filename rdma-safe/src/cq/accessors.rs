//! The provider functions that poll an extended queue and read its completions.

use rdma_sys::ibv_cq_ex;

use super::WcFields;
use crate::{Context, Error};

/// Functions that polling would call and an extended queue lacks.
pub(super) enum MissingFunctions {
    /// A function that every extended queue needs.
    Polling,
    /// The accessors of these fields.
    Fields(WcFields),
}

impl MissingFunctions {
    pub(super) fn into_error(self, context: &Context) -> Error {
        match self {
            MissingFunctions::Polling => context.unsupported("extended completion queues"),
            MissingFunctions::Fields(fields) => Error::CompletionFields { fields },
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
pub(super) unsafe fn check(cq: *const ibv_cq_ex, asked: WcFields) -> Result<(), MissingFunctions> {
    // SAFETY: the queue is valid, and the structure has these fields in rdma-core 44, the oldest supported release, and
    // later. There is no reference to the whole queue, because other threads may lock the mutex in it.
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
            return Err(MissingFunctions::Polling);
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
        if lacking.is_empty() { Ok(()) } else { Err(MissingFunctions::Fields(lacking)) }
    }
}
