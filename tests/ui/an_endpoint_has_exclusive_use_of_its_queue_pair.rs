//! An endpoint tracks the work in flight. Posting to its queue pair or resetting it directly would release buffers that the device
//! still uses.

use rdma_safe::{Endpoint, QueuePairState};
use rdma_safe::qp::QueuePairAttributes;

fn main() {}

fn reset(endpoint: &mut Endpoint) {
    endpoint.queue_pair().modify(&QueuePairAttributes::new().set_state(QueuePairState::RESET)).unwrap(); //~ E0596
}

fn post(endpoint: &mut Endpoint) {
    endpoint.queue_pair().send_batch().unwrap().post().unwrap(); //~ E0596
}

fn take(endpoint: Endpoint) -> rdma_safe::QueuePair {
    endpoint.qp //~ E0609
}
