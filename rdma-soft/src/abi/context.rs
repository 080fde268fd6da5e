//! The memory of a context.

use core::mem::offset_of;

use rdma_sys::*;

/// The memory of an `ibv_context`, which is the last field of `verbs`.
#[repr(C)]
pub(super) struct ContextObject {
    pub(super) verbs: verbs_context,
    /// Number of the context in the device.
    pub(super) number: u32,
}

/// Returns the object that contains a context.
pub(super) fn context_object(context: *mut ibv_context) -> *mut ContextObject {
    context.cast::<u8>().wrapping_sub(offset_of!(ContextObject, verbs) + offset_of!(verbs_context, context)).cast()
}

/// Returns the number of a context in the device.
///
/// # Safety
/// [`ibv_open_device`](super::ibv_open_device) created the context, and it is open.
pub(super) unsafe fn context_number(context: *mut ibv_context) -> u32 {
    // SAFETY: the caller keeps the contract above.
    unsafe { (*context_object(context)).number }
}
