//! What is taken over is destroyed: whoever hands it over answers for its being there, and for its parts.

use std::ptr::NonNull;

use rdma_safe::{Context, Counters, Flow, QueuePair, sys};

fn take(context: &Context, qp: &QueuePair, flow: NonNull<sys::ibv_flow>, counters: NonNull<sys::ibv_counters>) {
    let counters = Counters::from_raw(context, counters);
    let _ = Flow::from_raw(flow, qp, &[], &[counters]);
}

fn main() {}
