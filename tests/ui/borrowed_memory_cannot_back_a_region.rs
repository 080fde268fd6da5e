//! A borrow cannot protect registered memory: a forgotten region stays registered after the borrow has ended.

use std::ptr::NonNull;

use rdma_safe::ProtectionDomain;
use rdma_safe::mr::Backing;

fn main() {}

struct Borrowed<'a>(&'a mut [u8]);

// SAFETY: none; it must not compile.
unsafe impl Backing for Borrowed<'_> { //~ E0478 //~ E0803|E0495
    fn address(&self) -> NonNull<u8> {
        NonNull::from(&*self.0).cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

fn slice(pd: &ProtectionDomain, bytes: &mut [u8]) {
    pd.register(bytes).unwrap(); //~ E0277 Memory
}
