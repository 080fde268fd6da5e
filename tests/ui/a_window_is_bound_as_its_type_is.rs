//! Windows of type 1 are bound through the queue pair, those of type 2 in a batch, which does not see to it that the window stays.

use rdma_safe::{BindInfo, MemoryWindow, QueuePair, Type1, Type2, WorkRequest};

fn a_batch_binds_no_window_of_type_1(qp: &mut QueuePair, window: &mut MemoryWindow<Type1>, info: BindInfo<'_>) {
    let mut batch = qp.send_batch().unwrap();
    let _ = unsafe { batch.bind(WorkRequest::new(1), window, info) };
}

fn a_queue_pair_binds_no_window_of_type_2(qp: &mut QueuePair, window: &mut MemoryWindow<Type2>, info: BindInfo<'_>) {
    let _ = qp.bind_window(WorkRequest::new(1), window, info);
}

fn binding_in_a_batch_takes_unsafe(qp: &mut QueuePair, window: &mut MemoryWindow<Type2>, info: BindInfo<'_>) {
    let mut batch = qp.send_batch().unwrap();
    let _ = batch.bind(WorkRequest::new(1), window, info);
}

fn a_window_has_one_owner(window: &MemoryWindow<Type1>) -> MemoryWindow<Type1> {
    window.clone()
}

fn main() {}
