//! Inline functions of work queues and their indirection tables.

use core::ffi::c_int;
use core::ptr;

use super::{Unsupported as _, extended, object, op};
use crate::bindings::*;

object! {
    /// Posts a list of receives to a work queue: `ibv_post_wq_recv(3)`. Returns 0 or an errno.
    fn ibv_post_wq_recv(
        wq: *mut ibv_wq,
        recv_wr: *mut ibv_recv_wr,
        bad_recv_wr: *mut *mut ibv_recv_wr,
    ) -> c_int = post_recv;
}

/// Creates a work queue: `ibv_create_wq(3)`. Returns null and sets errno on failure; `EOPNOTSUPP` if the provider or
/// the library lacks the operation.
///
/// # Safety
/// `context` must exist, and `wq_init_attr` must be initialized.
#[inline]
pub unsafe fn ibv_create_wq(context: *mut ibv_context, wq_init_attr: *mut ibv_wq_init_attr) -> *mut ibv_wq {
    // SAFETY: the caller vouches for the context and the attributes. A work queue that the provider returns is new, and
    // nobody else uses it.
    unsafe {
        let Some(op) = op!(context, create_wq) else {
            return <*mut ibv_wq>::unsupported();
        };
        let wq = op(context, wq_init_attr);
        if !wq.is_null() {
            // Providers leave these fields to the header. ibv_ack_async_event locks the mutex.
            (*wq).wq_context = (*wq_init_attr).wq_context;
            (*wq).events_completed = 0;
            libc::pthread_mutex_init(&raw mut (*wq).mutex, ptr::null());
            libc::pthread_cond_init(&raw mut (*wq).cond, ptr::null());
        }
        wq
    }
}

extended! {
    /// Modifies a work queue: `ibv_modify_wq(3)`.
    fn ibv_modify_wq(
        wq: *mut ibv_wq,
        wq_attr: *mut ibv_wq_attr,
    ) -> c_int = modify_wq of (*wq).context;

    /// Destroys a work queue: `ibv_destroy_wq(3)`.
    fn ibv_destroy_wq(wq: *mut ibv_wq) -> c_int = destroy_wq of (*wq).context;

    /// Creates an indirection table, which distributes packets over work queues: `ibv_create_rwq_ind_table(3)`.
    fn ibv_create_rwq_ind_table(
        context: *mut ibv_context,
        init_attr: *mut ibv_rwq_ind_table_init_attr,
    ) -> *mut ibv_rwq_ind_table = create_rwq_ind_table of context;

    /// Destroys an indirection table: `ibv_destroy_rwq_ind_table(3)`.
    fn ibv_destroy_rwq_ind_table(
        rwq_ind_table: *mut ibv_rwq_ind_table,
    ) -> c_int = destroy_rwq_ind_table of (*rwq_ind_table).context;
}
