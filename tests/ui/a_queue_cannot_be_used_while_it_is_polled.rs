//! An open cursor holds the queue's lock, so the queue must not be armed or dropped.

use rdma_safe::CompletionQueue;

fn main() {}

fn arm(cq: &mut CompletionQueue) {
    let mut poll = cq.poll();
    cq.arm(false).unwrap(); //~ E0499 cq
    let _ = poll.next().is_ok();
}

fn dropped(mut cq: CompletionQueue) {
    let mut poll = cq.poll();
    drop(cq); //~ E0505 cq
    let _ = poll.next().is_ok();
}
