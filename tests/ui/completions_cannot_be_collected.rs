//! All completions of a poll are one cursor: a collection of them would be the same one many times.

use rdma_safe::CompletionQueue;

fn main() {}

fn collect(cq: &mut CompletionQueue) {
    let mut all = Vec::new();
    let mut poll = cq.poll();
    while let Some(completion) = poll.next().unwrap() {
        all.push(completion);
    }
}

fn iterate(cq: &mut CompletionQueue) {
    let _last = cq.poll().last();
}
