//! Inline functions of shared receive queues.

use core::ffi::c_int;

use super::{Unsupported as _, extended, op, set};
use crate::bindings::*;
use crate::load::verbs;

/// Creates a shared receive queue of any type: `ibv_create_srq_ex(3)`. Returns null and sets errno on failure.
///
/// A basic queue with a protection domain and no other attributes is created by the exported `ibv_create_srq`.
///
/// # Safety
/// `context` must exist, and the fields in the `comp_mask` of `srq_init_attr_ex` must be initialized.
#[inline]
pub unsafe fn ibv_create_srq_ex(
    context: *mut ibv_context,
    srq_init_attr_ex: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: the caller vouches for the context and the attributes, which start with those of ibv_create_srq.
    unsafe {
        let mask = ibv_srq_init_attr_mask((*srq_init_attr_ex).comp_mask);
        let has = |flag: ibv_srq_init_attr_mask| (mask & flag).0 != 0;
        if !has(!(IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE))
            && has(IBV_SRQ_INIT_ATTR_PD)
            && (!has(IBV_SRQ_INIT_ATTR_TYPE) || (*srq_init_attr_ex).srq_type == IBV_SRQT_BASIC)
        {
            return match verbs() {
                Ok(verbs) => (verbs.ibv_create_srq)((*srq_init_attr_ex).pd, srq_init_attr_ex.cast()),
                Err(_) => <*mut ibv_srq>::unsupported(),
            };
        }
        match op!(context, create_srq_ex) {
            Some(op) => op(context, srq_init_attr_ex),
            None => <*mut ibv_srq>::unsupported(),
        }
    }
}

extended! {
    /// Writes the number by which peers address an XRC shared receive queue: `ibv_get_srq_num(3)`.
    fn ibv_get_srq_num(
        srq: *mut ibv_srq,
        srq_num: *mut u32,
    ) -> c_int = get_srq_num of (*srq).context;
}

/// Posts a list of receives: `ibv_post_srq_recv(3)`. Returns 0 or an errno.
///
/// # Safety
/// `srq` must exist. The list must be initialized, and its memory must stay registered until the receives complete.
/// `bad_recv_wr` must be writable. The context must have the operation, as all contexts of rdma-core do.
#[inline]
pub unsafe fn ibv_post_srq_recv(
    srq: *mut ibv_srq,
    recv_wr: *mut ibv_recv_wr,
    bad_recv_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller vouches for all pointers and for the operation.
    unsafe { set((*(*srq).context).ops.post_srq_recv)(srq, recv_wr, bad_recv_wr) }
}

/// Changes a tag matching list: `ibv_post_srq_ops(3)`. Returns 0 or an errno.
///
/// If the provider or the library lacks the operation, it returns `EOPNOTSUPP` and sets `bad_op` to `op`.
///
/// # Safety
/// `srq` must exist. The list must be initialized and its memory registered. `bad_op` must be writable.
#[inline]
pub unsafe fn ibv_post_srq_ops(srq: *mut ibv_srq, op: *mut ibv_ops_wr, bad_op: *mut *mut ibv_ops_wr) -> c_int {
    // SAFETY: the caller vouches for all pointers.
    unsafe {
        match op!((*srq).context, post_srq_ops) {
            Some(post) => post(srq, op, bad_op),
            None => {
                *bad_op = op;
                libc::EOPNOTSUPP
            }
        }
    }
}
