//! A borrow cannot guard memory that a device uses: a region that is forgotten is registered after the borrow has ended.

use std::ptr::NonNull;

use rdma_safe::{Backing, ProtectionDomain};

fn main() {}

struct Borrowed<'a>(&'a mut [u8]);

// SAFETY: none; it must not compile.
unsafe impl Backing for Borrowed<'_> {
    fn address(&self) -> NonNull<u8> {
        NonNull::from(&*self.0).cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

fn slice(pd: &ProtectionDomain, bytes: &mut [u8]) {
    pd.register(bytes).unwrap();
}
