//! A handle that knows the interface relies on nobody else's polling or posting, or changing the state, meanwhile.

use rdma_safe::{CompletionQueue, QueuePair, QueuePairAttributes};

fn main() {}

fn two_pollers(cq: &mut CompletionQueue) {
    let mut first = cq.extended_poller().unwrap();
    let mut second = cq.extended_poller().unwrap();
    let _ = (first.take(|_| ()), second.take(|_| ()));
}

fn a_cursor_beside_a_poller(cq: &mut CompletionQueue) {
    let mut poller = cq.classic_poller().unwrap();
    let cursor = cq.poll();
    let _ = poller.take(|_| ());
    drop(cursor);
}

fn polled_while_it_is_polled(cq: &mut CompletionQueue) {
    let mut poller = cq.poller();
    let _ = poller.take(|_| poller.take(|_| ()));
}

fn modified(qp: &mut QueuePair) {
    let mut sends = qp.split().0.extended().unwrap();
    qp.modify(&QueuePairAttributes::new()).unwrap();
    sends.post(|_| Ok(())).unwrap();
}

fn queried(qp: &mut QueuePair) {
    let mut sends = qp.split().0.classic().unwrap();
    qp.query().unwrap();
    sends.post(|_| Ok(())).unwrap();
}

fn a_batch_beside_a_handle(qp: &mut QueuePair) {
    let mut sends = qp.split().0.extended().unwrap();
    let batch = qp.send_batch().unwrap();
    sends.post(|_| Ok(())).unwrap();
    drop(batch);
}
