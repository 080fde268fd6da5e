//! The fields of a completion are those that the cursor is on; after it moved, they are of another one, or of none.

use rdma_safe::CompletionQueue;

fn main() {}

fn keep(cq: &mut CompletionQueue) -> u64 {
    let mut poll = cq.poll();
    let first = poll.next().unwrap().unwrap();
    let _second = poll.next().unwrap();
    first.wr_id()
}

fn past_the_end(cq: &mut CompletionQueue) -> u64 {
    let mut poll = cq.poll();
    let first = poll.next().unwrap().unwrap();
    drop(poll);
    first.wr_id()
}
