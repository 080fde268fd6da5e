//! Statistics of many samples.

mod histogram;
pub(crate) mod perftest;
pub(crate) mod values;

pub(crate) use histogram::Latencies;
pub(crate) use values::{Bandwidth, Latency, Perftest};
