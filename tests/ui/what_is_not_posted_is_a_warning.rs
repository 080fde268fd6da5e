//! Dropping a batch aborts it, so one that is made and never posted is most likely a mistake.
#![deny(unused_must_use)]

use rdma_safe::{CompletionQueue, Endpoint, QueuePair, QueuePairAttributes, Work, WorkRequest};

fn main() {}

fn unused(qp: &mut QueuePair, endpoint: &mut Endpoint, cq: &mut CompletionQueue) {
    qp.send_batch().unwrap();
    qp.recv_batch().unwrap();
    qp.send_batch().unwrap().post();
    endpoint.batch().unwrap();
    endpoint.wait(std::time::Duration::ZERO).unwrap();
    cq.poll();
    Work::send_inline(b"x");
    WorkRequest::new(1);
    QueuePairAttributes::new();
}
