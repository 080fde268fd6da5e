//! Completion queues.
//!
//! The `ibv_wc_read_*` functions need the matching flag in `wc_flags` when the queue is created: without it their
//! pointer is null.

use core::ffi::{c_int, c_uint};

use super::{extended, object, set};
use crate::bindings::*;

/// The classic view of an extended completion queue, with which it starts.
#[inline]
#[must_use]
pub const fn ibv_cq_ex_to_cq(cq: *mut ibv_cq_ex) -> *mut ibv_cq {
    cq.cast()
}

object! {
    /// Opens a batch of completions and reads the first: 0, `ENOENT` when there is none, or an errno. Only after 0 must
    /// [`ibv_end_poll`] follow.
    fn ibv_start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int = start_poll;

    /// Reads the next completion of the batch: 0, `ENOENT` when there is none, or an errno.
    fn ibv_next_poll(cq: *mut ibv_cq_ex) -> c_int = next_poll;

    /// Closes the batch.
    fn ibv_end_poll(cq: *mut ibv_cq_ex) = end_poll;

    /// What was completed.
    fn ibv_wc_read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode = read_opcode;

    /// The vendor's own word on an error.
    fn ibv_wc_read_vendor_err(cq: *mut ibv_cq_ex) -> u32 = read_vendor_err;

    /// Bytes that were received or read.
    fn ibv_wc_read_byte_len(cq: *mut ibv_cq_ex) -> u32 = read_byte_len;

    /// Immediate data, in network byte order.
    fn ibv_wc_read_imm_data(cq: *mut ibv_cq_ex) -> __be32 = read_imm_data;

    /// The key that the peer's send invalidated. It shares its place with the immediate data, and is in host byte
    /// order.
    fn ibv_wc_read_invalidated_rkey(cq: *mut ibv_cq_ex) -> u32 = read_imm_data;

    /// The local queue pair's number.
    fn ibv_wc_read_qp_num(cq: *mut ibv_cq_ex) -> u32 = read_qp_num;

    /// The sender's queue pair number.
    fn ibv_wc_read_src_qp(cq: *mut ibv_cq_ex) -> u32 = read_src_qp;

    /// Or-ed [`ibv_wc_flags`].
    fn ibv_wc_read_wc_flags(cq: *mut ibv_cq_ex) -> c_uint = read_wc_flags;

    /// The sender's LID.
    fn ibv_wc_read_slid(cq: *mut ibv_cq_ex) -> u32 = read_slid;

    /// The service level.
    fn ibv_wc_read_sl(cq: *mut ibv_cq_ex) -> u8 = read_sl;

    /// The path bits of the destination LID.
    fn ibv_wc_read_dlid_path_bits(cq: *mut ibv_cq_ex) -> u8 = read_dlid_path_bits;

    /// When the device completed the request, in ticks of its clock.
    fn ibv_wc_read_completion_ts(cq: *mut ibv_cq_ex) -> u64 = read_completion_ts;

    /// When the device completed the request, in nanoseconds of wall-clock time.
    fn ibv_wc_read_completion_wallclock_ns(
        cq: *mut ibv_cq_ex,
    ) -> u64 = read_completion_wallclock_ns;

    /// The customer's VLAN tag.
    fn ibv_wc_read_cvlan(cq: *mut ibv_cq_ex) -> u16 = read_cvlan;

    /// The tag of the flow rule that matched.
    fn ibv_wc_read_flow_tag(cq: *mut ibv_cq_ex) -> u32 = read_flow_tag;

    /// Writes what tag matching knows to `tm_info`.
    fn ibv_wc_read_tm_info(cq: *mut ibv_cq_ex, tm_info: *mut ibv_wc_tm_info) = read_tm_info;
}

extended! {
    /// Creates an extended completion queue: `ibv_create_cq_ex(3)`.
    fn ibv_create_cq_ex(
        context: *mut ibv_context,
        cq_attr: *mut ibv_cq_init_attr_ex,
    ) -> *mut ibv_cq_ex = create_cq_ex of context;
}

/// Takes up to `num_entries` completions: `ibv_poll_cq(3)`. Returns how many, or a negative number.
///
/// # Safety
/// `cq` must exist, `wc` must have room for `num_entries`, and the context must have the operation, as every context of
/// rdma-core does.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller vouches for the queue, its context's operation and the room.
    unsafe { set((*(*cq).context).ops.poll_cq)(cq, num_entries, wc) }
}

/// Asks for an event at the next completion: `ibv_req_notify_cq(3)`. Returns 0 or an errno.
///
/// # Safety
/// `cq` must exist, and its context must have the operation, as every context of rdma-core does.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller vouches for the queue and its context's operation.
    unsafe { set((*(*cq).context).ops.req_notify_cq)(cq, solicited_only) }
}

extended! {
    /// Moderates completion events: `ibv_modify_cq(3)`.
    fn ibv_modify_cq(
        cq: *mut ibv_cq,
        attr: *mut ibv_modify_cq_attr,
    ) -> c_int = modify_cq of (*cq).context;
}
