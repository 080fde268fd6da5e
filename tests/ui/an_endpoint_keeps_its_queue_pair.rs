//! What is in flight is known to the endpoint alone: work posted to its queue pair, or a reset, behind its back would
//! release buffers that the device still has.

use rdma_safe::{Endpoint, QueuePairAttributes, QueuePairState};

fn main() {}

fn reset(endpoint: &mut Endpoint) {
    endpoint.queue_pair().modify(&QueuePairAttributes::new().set_state(QueuePairState::RESET)).unwrap();
}

fn post(endpoint: &mut Endpoint) {
    endpoint.queue_pair().send_batch().unwrap().post().unwrap();
}

fn take(endpoint: Endpoint) -> rdma_safe::QueuePair {
    endpoint.qp
}
