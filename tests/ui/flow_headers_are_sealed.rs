//! The provider trusts the layout and sizes of flow headers, so `FlowHeader` is sealed.

use rdma_safe::flow::{FlowHeader, FlowRule};

#[derive(Clone, Copy)]
struct Mine;

impl FlowHeader for Mine {} //~ E0277 Header

fn main() {
    let _ = FlowRule::new(1).matching(Mine, Mine);
}
