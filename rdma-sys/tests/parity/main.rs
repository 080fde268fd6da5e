//! Compares every shim with its C inline function: return value, errno, calls with their arguments, and every byte that
//! it writes.
//!
//! Needs a C compiler, and the headers of the bindings' rdma-core release in the folder that `RDMA_CORE_INCLUDE` names.
#![allow(clippy::undocumented_unsafe_blocks, missing_debug_implementations, unreachable_pub)]

mod beyond;
mod c;
mod case;
mod constants;
mod cq;
mod flow;
mod inventory;
mod memory;
mod newer;
mod query;
mod queues;
mod rdma;
mod recorder;
mod world;
mod wr;

/// All cases, by topic.
fn topics() -> [(&'static str, Vec<case::Case>); 7] {
    [
        ("work requests", wr::cases()),
        ("completion queues", cq::cases()),
        ("flows, counters and domains", flow::cases()),
        ("memory", memory::cases()),
        ("queue pairs and other queues", queues::cases()),
        ("queries", query::cases()),
        ("connection helpers and addresses", rdma::cases()),
    ]
}

#[test]
fn shims_behave_like_the_c_inlines() {
    let (mut inlines, mut situations) = (0, 0);
    for (topic, cases) in topics() {
        let Some(compared) = case::compare(&cases) else { return };
        println!("{topic}: {} shims alike in {compared} situations", cases.len());
        inlines += cases.len();
        situations += compared;
    }
    println!("{inlines} shims alike in {situations} situations");
}
