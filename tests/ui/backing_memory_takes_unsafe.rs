//! A region trusts the address and length that its backing reports, so implementing `Backing` is unsafe.

use std::ptr::NonNull;

use rdma_safe::mr::Backing;

fn main() {}

struct Mine([u8; 8]);

impl Backing for Mine { //~ E0200
    fn address(&self) -> NonNull<u8> {
        NonNull::from(&self.0).cast()
    }

    fn len(&self) -> usize {
        8
    }
}
