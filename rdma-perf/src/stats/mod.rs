//! What many samples come to.

mod histogram;
pub(crate) mod perftest;

pub(crate) use histogram::Latencies;
