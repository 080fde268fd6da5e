//! Send operations that queue pairs support.

use rdma_sys::ibv_qp_ex;

use super::QueuePairType;
use crate::Context;
use crate::device::DeviceCapabilities;
use crate::post::{EXTENDED_ONLY, SendOps};

/// Operations that queue pairs of the type support.
///
/// These are the operations that every device has according to ibv_post_send(3) and ibv_wr_post(3), and the optional
/// ones that the device reports. `None` for types that cannot be built.
pub(super) fn available(context: &Context, qp_type: QueuePairType) -> Option<SendOps> {
    let basic = basic(qp_type)?;
    let device = context.attributes();
    let can = |capability| device.capabilities().intersects(capability);
    let mut ops = basic;
    if is_reliable(qp_type) {
        let flush = DeviceCapabilities::FLUSH_GLOBAL | DeviceCapabilities::FLUSH_PERSISTENT;
        ops.set(SendOps::FLUSH, can(flush));
        let atomic_write = qp_type == QueuePairType::RC && can(DeviceCapabilities::ATOMIC_WRITE);
        ops.set(SendOps::ATOMIC_WRITE, atomic_write);
    }
    if matches!(qp_type, QueuePairType::RC | QueuePairType::UC) {
        let windows = DeviceCapabilities::MEM_WINDOW_TYPE_2A | DeviceCapabilities::MEM_WINDOW_TYPE_2B;
        ops.set(SendOps::WINDOWS, can(windows));
    }
    if matches!(qp_type, QueuePairType::UD | QueuePairType::RAW_PACKET) {
        ops.set(SendOps::TSO, device.segmentation_offload().is_some_and(|tso| tso.qp_types.contains(qp_type)));
    }
    Some(ops)
}

/// The sets of operations to try, from all `available` ones down to the basic ones. Not every provider has all
/// operations in the extended interface, and a provider that lacks one refuses the whole set.
pub(super) fn fallback_sets(available: SendOps, qp_type: QueuePairType) -> Vec<SendOps> {
    let mut sets = vec![available, available - EXTENDED_ONLY];
    sets.extend(basic(qp_type));
    if is_reliable(qp_type) {
        sets.extend([SendOps::RC.difference(SendOps::SEND_WITH_INV), SendOps::BASIC]);
    }
    sets.dedup();
    sets
}

fn is_reliable(qp_type: QueuePairType) -> bool {
    matches!(qp_type, QueuePairType::RC | QueuePairType::XRC_SEND)
}

/// The operations that queue pairs of the type have on every device; `None` for types that cannot be built.
#[inline(always)]
pub(super) fn basic(qp_type: QueuePairType) -> Option<SendOps> {
    match qp_type {
        QueuePairType::RC | QueuePairType::XRC_SEND => Some(SendOps::RC),
        QueuePairType::UC => Some(SendOps::UC),
        QueuePairType::UD => Some(SendOps::UD),
        QueuePairType::RAW_PACKET => Some(SendOps::RAW_PACKET),
        _ => None,
    }
}

/// The operations of `asked` whose functions exist; none if a function that all operations need is missing.
///
/// # Safety
///
/// `qp` must be valid and must have been created with `asked`.
#[inline]
pub(super) unsafe fn present(qp: *const ibv_qp_ex, qp_type: QueuePairType, asked: SendOps) -> SendOps {
    // SAFETY: the caller's contract. Only single fields are read, because the structure may be shorter than in our
    // headers. A library that does not know an operation did not create the queue pair with it, so its field is not
    // read.
    unsafe {
        let common = (*qp).wr_start.is_some()
            && (*qp).wr_complete.is_some()
            && (*qp).wr_abort.is_some()
            && (*qp).wr_set_sge.is_some()
            && (*qp).wr_set_sge_list.is_some()
            && (*qp).wr_set_inline_data.is_some()
            && (*qp).wr_set_inline_data_list.is_some()
            && (qp_type != QueuePairType::UD || (*qp).wr_set_ud_addr.is_some())
            && (qp_type != QueuePairType::XRC_SEND || (*qp).wr_set_xrc_srqn.is_some());
        if !common {
            return SendOps::empty();
        }
        let is_there = |op| match op {
            SendOps::SEND => (*qp).wr_send.is_some(),
            SendOps::SEND_WITH_IMM => (*qp).wr_send_imm.is_some(),
            SendOps::SEND_WITH_INV => (*qp).wr_send_inv.is_some(),
            SendOps::RDMA_WRITE => (*qp).wr_rdma_write.is_some(),
            SendOps::RDMA_WRITE_WITH_IMM => (*qp).wr_rdma_write_imm.is_some(),
            SendOps::RDMA_READ => (*qp).wr_rdma_read.is_some(),
            SendOps::ATOMIC_CMP_AND_SWP => (*qp).wr_atomic_cmp_swp.is_some(),
            SendOps::ATOMIC_FETCH_AND_ADD => (*qp).wr_atomic_fetch_add.is_some(),
            SendOps::BIND_MW => (*qp).wr_bind_mw.is_some(),
            SendOps::LOCAL_INV => (*qp).wr_local_inv.is_some(),
            SendOps::TSO => (*qp).wr_send_tso.is_some(),
            SendOps::FLUSH => (*qp).wr_flush.is_some(),
            SendOps::ATOMIC_WRITE => (*qp).wr_atomic_write.is_some(),
            _ => false,
        };
        let (mut present, mut left) = (asked, asked.bits());
        while left != 0 {
            let lowest = SendOps::from_bits_retain(left & left.wrapping_neg());
            if !is_there(lowest) {
                present -= lowest;
            }
            left &= left - 1;
        }
        present
    }
}
