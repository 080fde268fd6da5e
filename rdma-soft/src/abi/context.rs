//! What is behind a context.

use core::mem::offset_of;

use rdma_sys::*;

/// What is behind an `ibv_context`, which is the end of `verbs`.
#[repr(C)]
pub(super) struct ContextObject {
    pub(super) verbs: verbs_context,
    /// Its number in the device.
    pub(super) number: u32,
}

/// What is behind a context.
pub(super) fn object(context: *mut ibv_context) -> *mut ContextObject {
    context.cast::<u8>().wrapping_sub(offset_of!(ContextObject, verbs) + offset_of!(verbs_context, context)).cast()
}

/// The number of a context in the device.
///
/// # Safety
/// It is one that [`ibv_open_device`](super::ibv_open_device) has made, and is open.
pub(super) unsafe fn number(context: *mut ibv_context) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { (*object(context)).number }
}
