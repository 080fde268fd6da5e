//! Posting fills memory of the handle, so a batch has it to itself, and lives no longer.

use rdma_safe::{RecvBatch, SharedReceiveQueue};

fn main() {}

fn returned(mut srq: SharedReceiveQueue) -> RecvBatch<'static, SharedReceiveQueue> {
    srq.recv_batch()
}

fn two(srq: &mut SharedReceiveQueue) {
    let first = srq.recv_batch();
    let second = srq.recv_batch();
    first.post().unwrap();
    second.post().unwrap();
}

fn resized(srq: &mut SharedReceiveQueue) {
    let batch = srq.recv_batch();
    srq.resize(8).unwrap();
    batch.post().unwrap();
}

fn shared(srq: &SharedReceiveQueue) {
    drop(srq.recv_batch());
}

fn cloned(srq: &SharedReceiveQueue) -> SharedReceiveQueue {
    srq.clone()
}
