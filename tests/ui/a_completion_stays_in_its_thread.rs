//! A completion is read from the provider's cursor, under a lock that this thread holds: another thread must not read it.

use rdma_safe::CompletionQueue;

fn main() {}

fn other_thread(cq: &mut CompletionQueue) {
    let mut poll = cq.poll();
    let completion = poll.next().unwrap().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| completion.wr_id());
    });
}
