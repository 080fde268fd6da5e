//! Any thread may drop a buffer, so its memory is lent only if threads may share it.

use std::cell::Cell;
use std::ptr::NonNull;

use rdma_safe::mr::{Backing, Pages, Returned};

fn main() {}

struct Counted(Pages, Cell<u32>);

// SAFETY: `Pages` keeps the contract.
unsafe impl Backing for Counted {
    fn address(&self) -> NonNull<u8> {
        self.0.address()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn take_back(buffer: Returned<Counted>) {
        let count = &buffer.memory().1; //~ E0277
        count.set(count.get() + 1);
    }
}
