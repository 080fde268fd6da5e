//! Between the start and the end of a poll the provider holds a lock that only this thread may release.

use rdma_safe::CompletionQueue;

fn main() {}

fn other_thread(cq: &mut CompletionQueue) {
    let mut poll = cq.poll();
    std::thread::scope(|scope| {
        scope.spawn(move || poll.next().is_ok());
    });
}
