//! From its start to its post a batch holds the send queue's lock, which only this thread may release.

use rdma_safe::{Endpoint, QueuePair};

fn main() {}

fn raw(qp: &mut QueuePair) {
    let batch = qp.send_batch().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || batch.post());
    });
}

fn owned(endpoint: &mut Endpoint) {
    let batch = endpoint.batch().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || batch.post());
    });
}
