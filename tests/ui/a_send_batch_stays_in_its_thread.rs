//! A batch holds the send queue's lock until it is posted, and only the thread that took the lock may release it.

use rdma_safe::{Endpoint, QueuePair};

fn main() {}

fn raw(qp: &mut QueuePair) {
    let batch = qp.send_batch().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || batch.post()); //~ E0277 sent
    });
}

fn owned(endpoint: &mut Endpoint) {
    let batch = endpoint.batch().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || batch.post()); //~ E0277 sent
    });
}
