//! Two cursors on one queue would deadlock on its lock.

use rdma_safe::CompletionQueue;

fn main() {}

fn two(cq: &mut CompletionQueue) {
    let mut first = cq.poll();
    let mut second = cq.poll(); //~ E0499 cq
    let _ = (first.next().is_ok(), second.next().is_ok());
}

fn shared(cq: &CompletionQueue) {
    let _ = cq.poll(); //~ E0596
}
