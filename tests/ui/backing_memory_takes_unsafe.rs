//! A region is freed and reached by what its backing says of itself: who implements it has to vouch for that.

use std::ptr::NonNull;

use rdma_safe::Backing;

fn main() {}

struct Mine([u8; 8]);

impl Backing for Mine {
    fn address(&self) -> NonNull<u8> {
        NonNull::from(&self.0).cast()
    }

    fn len(&self) -> usize {
        8
    }
}
