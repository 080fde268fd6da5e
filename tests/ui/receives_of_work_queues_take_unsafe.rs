//! A receive of a work queue names memory by address. The caller must guarantee that the device may write to it.

use rdma_safe::Sge;
use rdma_safe::wq::WorkQueue;

fn post(wq: &mut WorkQueue, sge: Sge) {
    wq.receive(1, sge).unwrap(); //~ E0133 receive
    let mut batch = wq.recv_batch().unwrap();
    batch.receive(2, &[sge]).unwrap(); //~ E0133 receive
    batch.post().unwrap();
}

fn main() {}
