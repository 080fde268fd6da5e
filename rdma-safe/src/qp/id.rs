//! Names of queue pairs that are not reused.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

/// Tells queue pairs apart in asynchronous events; never used twice in a process, while numbers of queue pairs are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct QpId(u64);

impl QpId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        QpId(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// As `qp_context`, which is read back with an event and never dereferenced.
    pub(crate) fn to_context(self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0 as usize)
    }

    pub(crate) fn from_context(context: *mut c_void) -> Self {
        QpId(context.addr() as u64)
    }
}
