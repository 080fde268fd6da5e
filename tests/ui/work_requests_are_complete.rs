//! A work request cannot be created without its payload, because an incomplete one would still be posted.

use rdma_safe::{QueuePair, Remote, SendBatch, WorkRequest};

fn main() {}

fn without_data(batch: &mut SendBatch<'_>) {
    // SAFETY: none; it must not compile.
    let _ = unsafe { batch.send(WorkRequest::new(1)) }; //~ E0061
}

fn without_target(batch: &mut SendBatch<'_>, data: rdma_safe::Inline<'_>) {
    // SAFETY: none; it must not compile.
    let _ = unsafe { batch.write(WorkRequest::new(1), data) }; //~ E0277 From //~ E0061
}

fn result_into_inline_data(batch: &mut SendBatch<'_>, remote: Remote) {
    // SAFETY: none; it must not compile.
    let _ = unsafe { batch.read(WorkRequest::new(1), remote, rdma_safe::Inline(&[0; 8])) }; //~ E0277 Scatter
}

fn outside_of_a_batch(qp: &mut QueuePair) {
    let _ = qp.send(WorkRequest::new(1)); //~ E0599 send
}
