//! A batch is open on a queue pair, whose destruction would wait for the batch's lock, or free what it writes to.

use rdma_safe::{Batch, Endpoint, QueuePair, RecvBatch, SendBatch};

fn main() {}

fn returned(mut qp: QueuePair) -> SendBatch<'static> {
    qp.send_batch().unwrap()
}

fn receives(mut qp: QueuePair) -> RecvBatch<'static> {
    qp.recv_batch().unwrap()
}

fn destroyed(mut qp: QueuePair) {
    let batch = qp.send_batch().unwrap();
    qp.destroy().unwrap();
    batch.post().unwrap();
}

fn closed(mut endpoint: Endpoint) {
    let batch: Batch<'_> = endpoint.batch().unwrap();
    endpoint.close().unwrap();
    batch.post().unwrap();
}
