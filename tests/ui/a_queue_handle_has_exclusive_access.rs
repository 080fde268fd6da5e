//! A handle with a fixed interface needs exclusive access: nothing else may poll, post or change the state meanwhile.

use rdma_safe::cq::Poller;
use rdma_safe::interface::{Classic, Extended};
use rdma_safe::post::SendQueue;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{CompletionQueue, Endpoint, QueuePair};

fn main() {}

fn two_pollers(cq: &mut CompletionQueue) {
    let mut first = cq.poller_with_interface::<Extended>().unwrap();
    let mut second = cq.poller_with_interface::<Extended>().unwrap(); //~ E0499 cq
    let _ = (first.poll_one(|_| ()), second.poll_one(|_| ()));
}

fn a_cursor_beside_a_poller(cq: &mut CompletionQueue) {
    let mut poller = cq.poller_with_interface::<Classic>().unwrap();
    let cursor = cq.poll(); //~ E0499 cq
    let _ = poller.poll_one(|_| ());
    drop(cursor);
}

fn a_nested_poll(cq: &mut CompletionQueue) {
    let mut poller = cq.poller_with_interface::<Extended>().unwrap();
    let _ = poller.poll_one(|_| poller.poll_one(|_| ())); //~ E0499 poller
}

fn modified(qp: &mut QueuePair) {
    let mut sends = qp.split().0.with_interface::<Extended>().unwrap();
    qp.modify(&QueuePairAttributes::new()).unwrap(); //~ E0499 qp
    sends.post(|_| Ok(())).unwrap();
}

fn queried(qp: &mut QueuePair) {
    let mut sends = qp.split().0.with_interface::<Classic>().unwrap();
    qp.query().unwrap(); //~ E0502 qp
    sends.post(|_| Ok(())).unwrap();
}

fn a_batch_beside_a_handle(qp: &mut QueuePair) {
    let mut sends = qp.split().0.with_interface::<Extended>().unwrap();
    let batch = qp.send_batch().unwrap(); //~ E0499 qp
    sends.post(|_| Ok(())).unwrap();
    drop(batch);
}

fn two_fixed_handles(qp: &mut QueuePair) {
    let sends = qp.split().0;
    let extended = sends.with_interface::<Extended>();
    let classic = sends.with_interface::<Classic>(); //~ E0382 sends
    drop((extended, classic));
}

fn fixed_beside_a_batch(qp: &mut QueuePair) {
    let mut sends = qp.split().0;
    let batch = sends.batch().unwrap();
    let fixed = sends.with_interface::<Extended>(); //~ E0505 sends
    drop((batch, fixed));
}

fn a_nested_post(sends: &mut SendQueue<'_, Extended>) {
    let _ = sends.post(|_| sends.post(|_| Ok(()))); //~ E0501 //~ E0500
}

fn a_nested_poll_of_an_endpoint(endpoint: &mut Endpoint) {
    let _ = endpoint.poll_with(|_| endpoint.poll().is_ok()); //~ E0501 //~ E0500
}

fn another_interface<'q>(sends: SendQueue<'q, Extended>) -> SendQueue<'q, Classic> {
    sends //~ E0308
}

fn longer<'q>(sends: SendQueue<'q>) -> SendQueue<'static> {
    sends //~ error lifetime
}

fn a_longer_poller<'q>(poller: Poller<'q, Classic>) -> Poller<'static, Classic> {
    poller //~ error lifetime
}
