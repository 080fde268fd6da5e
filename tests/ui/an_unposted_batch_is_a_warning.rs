//! Dropping a batch aborts it, so a batch that is not posted is probably a mistake. So are other unused results.
#![deny(unused_must_use)]

use rdma_safe::{CompletionQueue, Endpoint, QueuePair, Work, WorkRequest};
use rdma_safe::qp::QueuePairAttributes;

fn main() {}

fn unused(qp: &mut QueuePair, endpoint: &mut Endpoint, cq: &mut CompletionQueue) {
    qp.send_batch().unwrap(); //~ unused_must_use SendBatch
    qp.recv_batch().unwrap(); //~ unused_must_use RecvBatch
    qp.send_batch().unwrap().post(); //~ unused_must_use Result
    endpoint.batch().unwrap(); //~ unused_must_use Batch
    endpoint.wait(std::time::Duration::ZERO).unwrap(); //~ unused_must_use Completion
    cq.poll(); //~ unused_must_use Poll
    Work::send_inline(b"x"); //~ unused_must_use Work
    WorkRequest::new(1); //~ unused_must_use WorkRequest
    QueuePairAttributes::new(); //~ unused_must_use QueuePairAttributes
}
