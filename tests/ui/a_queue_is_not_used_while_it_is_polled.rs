//! While a cursor is open the provider holds the queue's lock: the queue can be neither armed nor dropped.

use rdma_safe::CompletionQueue;

fn main() {}

fn arm(cq: &mut CompletionQueue) {
    let mut poll = cq.poll();
    cq.arm(false).unwrap();
    let _ = poll.next().is_ok();
}

fn dropped(mut cq: CompletionQueue) {
    let mut poll = cq.poll();
    drop(cq);
    let _ = poll.next().is_ok();
}
