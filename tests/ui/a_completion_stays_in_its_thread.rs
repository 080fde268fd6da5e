//! A completion reads the provider's cursor, whose lock is held by one thread. Other threads must not read it.

use rdma_safe::CompletionQueue;

fn main() {}

fn other_thread(cq: &mut CompletionQueue) {
    let mut poll = cq.poll();
    let completion = poll.next().unwrap().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| completion.wr_id()); //~ E0277 shared
    });
}
