//! Posting writes to memory of the handle, so a batch borrows the handle exclusively and must not outlive it.

use rdma_safe::{RecvBatch, SharedReceiveQueue};

fn main() {}

fn returned(mut srq: SharedReceiveQueue) -> RecvBatch<'static, SharedReceiveQueue> {
    srq.recv_batch() //~ E0515 srq
}

fn two(srq: &mut SharedReceiveQueue) {
    let first = srq.recv_batch();
    let second = srq.recv_batch(); //~ E0499 srq
    first.post().unwrap();
    second.post().unwrap();
}

fn resized(srq: &mut SharedReceiveQueue) {
    let batch = srq.recv_batch();
    srq.resize(8).unwrap(); //~ E0499 srq
    batch.post().unwrap();
}

fn shared(srq: &SharedReceiveQueue) {
    drop(srq.recv_batch()); //~ E0596
}

fn cloned(srq: &SharedReceiveQueue) -> SharedReceiveQueue {
    srq.clone() //~ E0308
}
