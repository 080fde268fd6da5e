//! Whoever posts memory by address answers for it.

use rdma_safe::{SharedReceiveQueue, Sge};

fn one(srq: &mut SharedReceiveQueue, sge: Sge) {
    let _ = srq.receive(1, sge);
}

fn several(srq: &mut SharedReceiveQueue, sge: Sge) {
    let _ = srq.recv_batch().receive(1, &[sge]);
}

fn main() {}
