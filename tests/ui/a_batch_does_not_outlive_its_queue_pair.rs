//! A batch holds the lock of its queue pair and writes to its send queue, so it must not outlive the queue pair.

use rdma_safe::{Endpoint, QueuePair, RecvBatch, SendBatch};
use rdma_safe::endpoint::Batch;

fn main() {}

fn returned(mut qp: QueuePair) -> SendBatch<'static> {
    qp.send_batch().unwrap() //~ E0515 qp
}

fn receives(mut qp: QueuePair) -> RecvBatch<'static> {
    qp.recv_batch().unwrap() //~ E0515 qp
}

fn destroyed(mut qp: QueuePair) {
    let batch = qp.send_batch().unwrap();
    qp.destroy().unwrap(); //~ E0505 qp
    batch.post().unwrap();
}

fn closed(mut endpoint: Endpoint) {
    let batch: Batch<'_> = endpoint.batch().unwrap();
    endpoint.close().unwrap(); //~ E0505 endpoint
    batch.post().unwrap();
}
