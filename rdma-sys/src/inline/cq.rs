//! Inline functions of completion queues.
//!
//! The `ibv_wc_read_*` functions require the matching flag in `wc_flags` when the queue is created. Without it, their
//! pointer is null.

use core::ffi::{c_int, c_uint};

use super::{extended, object, set};
use crate::bindings::*;

/// The classic completion queue at the start of an extended one.
#[inline]
#[must_use]
pub const fn ibv_cq_ex_to_cq(cq: *mut ibv_cq_ex) -> *mut ibv_cq {
    cq.cast()
}

object! {
    /// Starts polling and reads the first completion. Returns 0, `ENOENT` if there is none, or an errno.
    /// [`ibv_end_poll`] must follow after 0, and only then.
    fn ibv_start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int = start_poll;

    /// Reads the next completion. Returns 0, `ENOENT` if there is none, or an errno.
    fn ibv_next_poll(cq: *mut ibv_cq_ex) -> c_int = next_poll;

    /// Ends polling.
    fn ibv_end_poll(cq: *mut ibv_cq_ex) = end_poll;

    /// Opcode: the operation that completed.
    fn ibv_wc_read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode = read_opcode;

    /// Vendor-specific error code.
    fn ibv_wc_read_vendor_err(cq: *mut ibv_cq_ex) -> u32 = read_vendor_err;

    /// Bytes received or read.
    fn ibv_wc_read_byte_len(cq: *mut ibv_cq_ex) -> u32 = read_byte_len;

    /// Immediate data, in network byte order.
    fn ibv_wc_read_imm_data(cq: *mut ibv_cq_ex) -> __be32 = read_imm_data;

    /// The key that the peer's send invalidated, in host byte order. It shares a field with the immediate data.
    fn ibv_wc_read_invalidated_rkey(cq: *mut ibv_cq_ex) -> u32 = read_imm_data;

    /// Number of the local queue pair.
    fn ibv_wc_read_qp_num(cq: *mut ibv_cq_ex) -> u32 = read_qp_num;

    /// Queue pair number of the sender.
    fn ibv_wc_read_src_qp(cq: *mut ibv_cq_ex) -> u32 = read_src_qp;

    /// Or-ed [`ibv_wc_flags`].
    fn ibv_wc_read_wc_flags(cq: *mut ibv_cq_ex) -> c_uint = read_wc_flags;

    /// LID of the sender.
    fn ibv_wc_read_slid(cq: *mut ibv_cq_ex) -> u32 = read_slid;

    /// Service level.
    fn ibv_wc_read_sl(cq: *mut ibv_cq_ex) -> u8 = read_sl;

    /// Path bits of the destination LID.
    fn ibv_wc_read_dlid_path_bits(cq: *mut ibv_cq_ex) -> u8 = read_dlid_path_bits;

    /// Completion time in ticks of the device's clock.
    fn ibv_wc_read_completion_ts(cq: *mut ibv_cq_ex) -> u64 = read_completion_ts;

    /// Completion time in nanoseconds of the wall clock.
    fn ibv_wc_read_completion_wallclock_ns(
        cq: *mut ibv_cq_ex,
    ) -> u64 = read_completion_wallclock_ns;

    /// Customer VLAN tag.
    fn ibv_wc_read_cvlan(cq: *mut ibv_cq_ex) -> u16 = read_cvlan;

    /// Tag of the matching flow rule.
    fn ibv_wc_read_flow_tag(cq: *mut ibv_cq_ex) -> u32 = read_flow_tag;

    /// Writes the tag matching information to `tm_info`.
    fn ibv_wc_read_tm_info(cq: *mut ibv_cq_ex, tm_info: *mut ibv_wc_tm_info) = read_tm_info;
}

extended! {
    /// Creates an extended completion queue: `ibv_create_cq_ex(3)`.
    fn ibv_create_cq_ex(
        context: *mut ibv_context,
        cq_attr: *mut ibv_cq_init_attr_ex,
    ) -> *mut ibv_cq_ex = create_cq_ex of context;
}

/// Polls up to `num_entries` completions: `ibv_poll_cq(3)`. Returns their number, or a negative number.
///
/// # Safety
/// `cq` must exist and `wc` must have space for `num_entries`. The context must have the operation, as all contexts of
/// rdma-core do.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller vouches for the queue, the operation of its context and the space.
    unsafe { set((*(*cq).context).ops.poll_cq)(cq, num_entries, wc) }
}

/// Requests an event for the next completion: `ibv_req_notify_cq(3)`. Returns 0 or an errno.
///
/// # Safety
/// `cq` must exist, and its context must have the operation, as all contexts of rdma-core do.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller vouches for the queue and the operation of its context.
    unsafe { set((*(*cq).context).ops.req_notify_cq)(cq, solicited_only) }
}

extended! {
    /// Moderates completion events: `ibv_modify_cq(3)`.
    fn ibv_modify_cq(
        cq: *mut ibv_cq,
        attr: *mut ibv_modify_cq_attr,
    ) -> c_int = modify_cq of (*cq).context;
}
