//! Type 1 windows are bound through the queue pair. Type 2 windows are bound in a batch, which does not keep the window alive.

use rdma_safe::{QueuePair, WorkRequest};
use rdma_safe::mw::{BindInfo, MemoryWindow, Type1, Type2};

fn a_batch_binds_no_window_of_type_1(qp: &mut QueuePair, window: &mut MemoryWindow<Type1>, info: BindInfo<'_>) {
    let mut batch = qp.send_batch().unwrap();
    let _ = unsafe { batch.bind(WorkRequest::new(1), window, info) }; //~ E0308
}

fn a_queue_pair_binds_no_window_of_type_2(qp: &mut QueuePair, window: &mut MemoryWindow<Type2>, info: BindInfo<'_>) {
    let _ = qp.bind_window(WorkRequest::new(1), window, info); //~ E0308
}

fn binding_in_a_batch_takes_unsafe(qp: &mut QueuePair, window: &mut MemoryWindow<Type2>, info: BindInfo<'_>) {
    let mut batch = qp.send_batch().unwrap();
    let _ = batch.bind(WorkRequest::new(1), window, info); //~ E0133 bind
}

fn a_window_has_one_owner(window: &MemoryWindow<Type1>) -> MemoryWindow<Type1> {
    window.clone() //~ E0308
}

fn main() {}
