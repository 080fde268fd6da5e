//! A posted datagram has a pointer to its address handle, so a target must not outlive the handle.

use rdma_safe::{AddressHandle, Inline, SendBatch, UdTarget, WorkRequest};

fn main() {}

fn returned(handle: AddressHandle) -> UdTarget<'static> {
    UdTarget::new(&handle, 1, 2) //~ E0515 handle
}

fn destroyed(handle: AddressHandle, batch: &mut SendBatch<'_>) {
    let target = UdTarget::new(&handle, 1, 2);
    handle.destroy().unwrap(); //~ E0505 handle
    let _ = unsafe { batch.send_to(WorkRequest::new(1), target, Inline(b"x")) };
}

fn safely(target: UdTarget<'_>, batch: &mut SendBatch<'_>) {
    let _ = batch.send_to(WorkRequest::new(1), target, Inline(b"x")); //~ E0133 send_to
}
