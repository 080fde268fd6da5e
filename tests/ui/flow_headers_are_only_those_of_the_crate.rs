//! What a flow matches is laid out for the provider, which trusts its sizes.

use rdma_safe::{FlowHeader, FlowRule};

#[derive(Clone, Copy)]
struct Mine;

impl FlowHeader for Mine {}

fn main() {
    let _ = FlowRule::new(1).matching(Mine, Mine);
}
