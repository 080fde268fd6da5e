//! Counts the bytes that a thread has allocated.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static BYTES: Cell<isize> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that this thread has allocated and not freed.
pub(crate) fn bytes() -> isize {
    BYTES.with(Cell::get)
}

fn add(bytes: isize) {
    // A thread that ends may free memory after its thread-local variables are gone.
    _ = BYTES.try_with(|of| of.set(of.get() + bytes));
}

// SAFETY: all calls go to the system's allocator unchanged. Counting allocates nothing: the thread-local variable has a constant
// initial value and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: `memory` is from `alloc` or `realloc` above, so from the system's allocator, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size as isize - layout.size() as isize);
        // SAFETY: `memory` is from `alloc` or `realloc` above, with this layout, and the caller keeps the contract for `size`.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[test]
fn allocations_are_counted() {
    let before = bytes();
    let memory = vec![0_u8; 1000];
    assert_eq!(bytes() - before, 1000);
    drop(memory);
    assert_eq!(bytes(), before);
}
