//! The provider holds a lock during a poll, which only the thread that took it may release.

use rdma_safe::CompletionQueue;

fn main() {}

fn other_thread(cq: &mut CompletionQueue) {
    let mut poll = cq.poll();
    std::thread::scope(|scope| {
        scope.spawn(move || poll.next().is_ok()); //~ E0277 sent
    });
}
