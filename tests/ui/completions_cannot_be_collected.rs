//! All completions of a poll are views of one cursor, so they cannot be collected.

use rdma_safe::CompletionQueue;

fn main() {}

fn collect(cq: &mut CompletionQueue) {
    let mut all = Vec::new();
    let mut poll = cq.poll();
    while let Some(completion) = poll.next().unwrap() { //~ E0499 poll
        all.push(completion);
    }
}

fn iterate(cq: &mut CompletionQueue) {
    let _last = cq.poll().last(); //~ E0599
}
