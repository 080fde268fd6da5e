//! A completion reads the current entry of the cursor, so it must not outlive that position.

use rdma_safe::CompletionQueue;

fn main() {}

fn keep(cq: &mut CompletionQueue) -> u64 {
    let mut poll = cq.poll();
    let first = poll.next().unwrap().unwrap();
    let _second = poll.next().unwrap(); //~ E0499 poll
    first.wr_id()
}

fn past_the_end(cq: &mut CompletionQueue) -> u64 {
    let mut poll = cq.poll();
    let first = poll.next().unwrap().unwrap();
    drop(poll); //~ E0505 poll
    first.wr_id()
}
