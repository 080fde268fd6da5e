//! Tests of `rdma-perf` on a real device, or on soft0 if there is none.
//!
//! They choose their device like the tests of the root package, by `RDMA_DEVICE`, `RDMA_PORT` and `RDMA_GID_INDEX`. A
//! test that cannot run says why it is skipped, which is a failure under `RDMA_REQUIRE_DEVICE=1`. Both ends are on this
//! host. Runs are short, because SoftRoCE on an emulated machine carries only a thousand messages of 64 KiB per second.

mod clients;
mod connection;
mod failures;
mod limits;
mod posting;
mod processors;
mod rdmacm;
mod results;
mod support;
mod transports;
mod verbs;
