//! Shared bytes may be in flight to several peers, so they can neither be changed nor borrowed from an owner that changes them.

use std::sync::{Arc, Mutex};

use rdma_safe::mr::ReadOnly;
use rdma_safe::{Buffer, ProtectionDomain, SharedBuffer};

fn main() {}

fn write(mut shared: SharedBuffer) {
    shared[0] = 1; //~ E0594
    let _: &mut [u8] = &mut shared; //~ E0596
}

fn keep(buffer: Buffer) {
    let shared = buffer.freeze();
    drop(buffer); //~ E0382 buffer
    drop(shared);
}

fn borrow(pd: &ProtectionDomain, bytes: &[u8]) {
    pd.share(bytes).unwrap(); //~ E0521
}

fn change(pd: &ProtectionDomain, bytes: Arc<Mutex<Vec<u8>>>) {
    pd.share(bytes).unwrap(); //~ E0277 ReadOnly
}

struct Mine(Vec<u8>);

impl ReadOnly for Mine { //~ E0200 ReadOnly
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}
