//! An adopted object is destroyed on drop. The caller must guarantee that the object and its parts are valid.

use std::ptr::NonNull;

use rdma_safe::{Context, QueuePair, sys};
use rdma_safe::counters::Counters;
use rdma_safe::flow::Flow;

fn take(context: &Context, qp: &QueuePair, flow: NonNull<sys::ibv_flow>, counters: NonNull<sys::ibv_counters>) {
    let counters = Counters::from_raw(context, counters); //~ E0133 from_raw
    let _ = Flow::from_raw(flow, qp, &[], &[counters]); //~ E0133 from_raw
}

fn main() {}
