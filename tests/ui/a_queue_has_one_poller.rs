//! Two cursors on one queue would wait for each other's lock for ever.

use rdma_safe::CompletionQueue;

fn main() {}

fn two(cq: &mut CompletionQueue) {
    let mut first = cq.poll();
    let mut second = cq.poll();
    let _ = (first.next().is_ok(), second.next().is_ok());
}

fn shared(cq: &CompletionQueue) {
    let _ = cq.poll();
}
