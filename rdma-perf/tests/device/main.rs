//! Tests of `rdma-perf` on a real device: kernel SoftRoCE or an RNIC.
//!
//! They find their device as those of the root package do: by `RDMA_DEVICE`, `RDMA_PORT` and `RDMA_GID_INDEX`; without one
//! they say why they are skipped, which fails under `RDMA_REQUIRE_DEVICE=1`. Both ends are on this host. Runs are short,
//! because an emulated machine under SoftRoCE carries a thousand messages of 64 KiB a second.

mod bounds;
mod clients;
mod connection;
mod endings;
mod means;
mod processors;
mod rdmacm;
mod results;
mod support;
mod transports;
mod verbs;
