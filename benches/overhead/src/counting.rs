//! An allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator, with a count of its calls.
#[derive(Debug)]
pub(crate) struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);

/// How often this program has allocated or freed; what the stub does, which has an allocator of its own, does not count.
pub(crate) fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

// SAFETY: each method does what the system's allocator does; counting allocates nothing.
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
