//! Two users of one queue would write the same work requests or deadlock on its lock.

use rdma_safe::{Endpoint, QueuePair, Work};
use rdma_safe::qp::QueuePairAttributes;

fn main() {}

fn two_batches(qp: &mut QueuePair) {
    let first = qp.send_batch().unwrap();
    let second = qp.send_batch().unwrap(); //~ E0499 qp
    drop((first, second));
}

fn two_splits(qp: &mut QueuePair) {
    let (mut first, _) = qp.split();
    let (mut second, _) = qp.split(); //~ E0499 qp
    drop((first.batch().unwrap(), second.batch().unwrap()));
}

fn two_batches_of_a_half(qp: &mut QueuePair) {
    let (mut send, _recv) = qp.split();
    let first = send.batch().unwrap();
    let second = send.batch().unwrap(); //~ E0499 send
    drop((first, second));
}

fn beside_a_half(qp: &mut QueuePair) {
    let (mut send, _recv) = qp.split();
    qp.modify(&QueuePairAttributes::new()).unwrap(); //~ E0499 qp
    drop(send.batch().unwrap());
}

fn beside_a_batch(endpoint: &mut Endpoint) {
    let batch = endpoint.batch().unwrap();
    endpoint.post(Work::send_inline(b"now")).unwrap(); //~ E0499 endpoint
    endpoint.poll().unwrap(); //~ E0499 endpoint
    batch.post().unwrap();
}
