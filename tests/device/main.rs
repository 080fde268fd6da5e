//! Tests of `rdma-safe` on a real device: kernel SoftRoCE or an RNIC.
//!
//! | variable | meaning |
//! |---|---|
//! | `RDMA_DEVICE` | name of the device; the first one unless set, and soft0 where there is none |
//! | `RDMA_PORT` | its port; 1 unless set |
//! | `RDMA_GID_INDEX` | the GID to connect from; the recommended one unless set |
//! | `RDMA_REQUIRE_DEVICE=1` | a test that would be skipped fails |
//!
//! Both ends of every connection are in this process, so one port that can reach itself is enough. On SoftRoCE the tests
//! also hold the device to its known deviations, so that a change of those is noticed.

mod access_flags;
mod allocation;
mod async_events;
mod atomics;
mod attributes;
mod changes;
mod channel;
mod cm;
mod cm_addresses;
mod cm_connections;
mod cm_datagram;
mod cm_failures;
mod cm_names;
mod cm_pools;
mod cm_refused;
mod cm_services;
mod cm_stale;
mod cm_unplug;
mod cmtime;
mod cq;
mod creation;
mod datagrams;
mod device_memory;
mod devices;
mod drain;
mod drop_order;
mod endpoint_sets;
mod explanations;
mod file_transfer;
mod floods;
mod imports;
mod memory;
mod memory_windows;
mod modify;
mod modify_errors;
mod multicast;
mod newer_memory;
mod newer_operations;
mod owned;
mod owned_failures;
mod owned_lifecycle;
mod owned_unreliable;
mod pingpong;
mod quirks;
mod raw;
mod raw_failures;
mod raw_handles;
mod raw_limits;
mod raw_packets;
mod rping;
mod shared_channel;
mod shared_receives;
mod soft;
mod steering;
mod support;
mod tag_matching;
mod unreliable;
mod xrc;

#[global_allocator]
static ALLOCATOR: allocation::Counting = allocation::Counting;
