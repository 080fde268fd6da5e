//! An allocator that counts its calls.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// The system allocator with a count of its calls.
#[derive(Debug)]
pub(crate) struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);

/// Number of allocations and deallocations of this program.
///
/// The stub provider is not included, because it has a separate allocator.
pub(crate) fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

// SAFETY: each method forwards to the system allocator, and counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}
