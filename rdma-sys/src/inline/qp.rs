//! Inline functions of queue pairs.

use core::ffi::c_int;

use super::{Unsupported as _, extended, op, set};
use crate::bindings::*;
use crate::load::verbs;

/// Creates a queue pair: `ibv_create_qp_ex(3)`. Returns null and sets errno on failure.
///
/// If `comp_mask` is exactly `IBV_QP_INIT_ATTR_PD`, the exported `ibv_create_qp` creates it, and it has no extended
/// interface.
///
/// # Safety
/// `context` must exist, and the fields in the `comp_mask` of `qp_init_attr_ex` must be initialized.
#[inline]
pub unsafe fn ibv_create_qp_ex(context: *mut ibv_context, qp_init_attr_ex: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: the caller vouches for the context and the attributes, which start with those of ibv_create_qp.
    unsafe {
        if (*qp_init_attr_ex).comp_mask == IBV_QP_INIT_ATTR_PD.0 {
            return match verbs() {
                Ok(verbs) => (verbs.ibv_create_qp)((*qp_init_attr_ex).pd, qp_init_attr_ex.cast()),
                Err(_) => <*mut ibv_qp>::unsupported(),
            };
        }
        match op!(context, create_qp_ex) {
            Some(op) => op(context, qp_init_attr_ex),
            None => <*mut ibv_qp>::unsupported(),
        }
    }
}

extended! {
    /// Opens a shared queue pair: `ibv_open_qp(3)`.
    fn ibv_open_qp(
        context: *mut ibv_context,
        qp_open_attr: *mut ibv_qp_open_attr,
    ) -> *mut ibv_qp = open_qp of context;

    /// Limits the rate of a queue pair: `ibv_modify_qp_rate_limit(3)`.
    fn ibv_modify_qp_rate_limit(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_rate_limit_attr,
    ) -> c_int = modify_qp_rate_limit of (*qp).context;
}

/// Posts a list of sends: `ibv_post_send(3)`. Returns 0 or an errno.
///
/// # Safety
/// `qp` must exist. The list must be initialized, and its memory must stay registered until the sends complete.
/// `bad_wr` must be writable. The context must have the operation, as all contexts of rdma-core do.
#[inline]
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the caller vouches for all pointers and for the operation.
    unsafe { set((*(*qp).context).ops.post_send)(qp, wr, bad_wr) }
}

/// Posts a list of receives: `ibv_post_recv(3)`. Returns 0 or an errno.
///
/// # Safety
/// `qp` must exist. The list must be initialized, and its memory must stay registered until the receives complete.
/// `bad_wr` must be writable. The context must have the operation, as all contexts of rdma-core do.
#[inline]
pub unsafe fn ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the caller vouches for all pointers and for the operation.
    unsafe { set((*(*qp).context).ops.post_recv)(qp, wr, bad_wr) }
}

/// Returns 1 if a `supported_qpts` mask has a queue pair type, otherwise 0. Types from 32 on have no bit and give 0; in
/// C they are undefined.
#[inline]
#[must_use]
pub const fn ibv_is_qpt_supported(caps: u32, qpt: ibv_qp_type) -> c_int {
    match caps.checked_shr(qpt.0) {
        Some(bits) => (bits & 1) as c_int,
        None => 0,
    }
}

/// The UDP source port that RoCE v2 derives from a flow label.
#[inline]
#[must_use]
pub const fn ibv_flow_label_to_udp_sport(fl: u32) -> u16 {
    let folded = (fl & 0x3fff) ^ ((fl & 0xf_c000) >> 14);
    folded as u16 | IB_ROCE_UDP_ENCAP_VALID_PORT_MIN as u16
}
