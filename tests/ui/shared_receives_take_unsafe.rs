//! A raw shared receive names memory by address. The caller must guarantee that the device may write to it.

use rdma_safe::{SharedReceiveQueue, Sge};

fn one(srq: &mut SharedReceiveQueue, sge: Sge) {
    let _ = srq.receive(1, sge); //~ E0133 receive
}

fn several(srq: &mut SharedReceiveQueue, sge: Sge) {
    let _ = srq.recv_batch().receive(1, &[sge]); //~ E0133 receive
}

fn main() {}
