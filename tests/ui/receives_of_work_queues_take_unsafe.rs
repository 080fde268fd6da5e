//! The device writes to memory that is only named.

use rdma_safe::{Sge, WorkQueue};

fn post(wq: &mut WorkQueue, sge: Sge) {
    wq.receive(1, sge).unwrap();
    let mut batch = wq.recv_batch().unwrap();
    batch.receive(2, &[sge]).unwrap();
    batch.post().unwrap();
}

fn main() {}
