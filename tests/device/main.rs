//! Tests of `rdma-safe` on a real device: kernel SoftRoCE or an RNIC.
//!
//! | variable | meaning |
//! |---|---|
//! | `RDMA_DEVICE` | name of the device; by default the first one, or soft0 if there is none |
//! | `RDMA_PORT` | port number; 1 by default |
//! | `RDMA_GID_INDEX` | index of the local GID; the recommended GID by default |
//! | `RDMA_REQUIRE_DEVICE=1` | skipping a test is a failure |
//!
//! Both ends of every connection are in this process, so a port that can reach itself is enough. On SoftRoCE the tests also
//! check the known deviations of the device, so a change of a deviation is noticed.
//!
//! The tests also run under Miri, on soft0 with packets in memory. Tests that start programs and tests of connections by
//! address are left out: `cargo +nightly miri test -p rdma-tests --test device`, with the flags of `xtask/src/test/miri.rs`.

mod access_flags;
mod allocation;
mod async_events;
#[cfg(not(miri))]
mod atomics;
mod attributes;
#[cfg(not(miri))]
mod awaiting;
#[cfg(not(miri))]
mod awaiting_datagrams;
mod changes;
mod channel;
#[cfg(not(miri))]
mod cm;
#[cfg(not(miri))]
mod cm_addresses;
#[cfg(not(miri))]
mod cm_connections;
#[cfg(not(miri))]
mod cm_datagram;
#[cfg(not(miri))]
mod cm_failures;
#[cfg(not(miri))]
mod cm_handshakes;
#[cfg(not(miri))]
mod cm_keepalive;
#[cfg(not(miri))]
mod cm_many;
#[cfg(not(miri))]
mod cm_names;
#[cfg(not(miri))]
mod cm_networks;
#[cfg(not(miri))]
mod cm_pools;
#[cfg(not(miri))]
mod cm_services;
#[cfg(not(miri))]
mod cm_soft;
#[cfg(not(miri))]
mod cm_stale;
#[cfg(not(miri))]
mod cm_unplug;
#[cfg(not(miri))]
mod cmtime;
mod connect;
mod cq;
mod creation;
mod datagrams;
mod device_memory;
mod devices;
mod drain;
mod drop_order;
mod endpoint_set_faults;
mod endpoint_sets;
mod endpoint_windows;
mod explanations;
mod failing_destruction;
mod failing_posts;
mod false_completions;
#[cfg(not(miri))]
mod file_transfer;
#[cfg(not(miri))]
mod floods;
#[cfg(not(miri))]
mod forks;
mod hello;
#[cfg(not(miri))]
mod hello_service;
mod imports;
mod keepalive;
mod keepalive_faults;
mod keepalive_sets;
#[cfg(not(miri))]
mod key_value;
mod memory;
#[cfg(not(miri))]
mod memory_schedules;
mod memory_windows;
#[cfg(not(miri))]
mod messages;
mod modify;
mod modify_errors;
mod multicast;
mod newer_memory;
mod newer_operations;
mod owned;
mod owned_failures;
mod owned_lifecycle;
mod owned_unreliable;
#[cfg(not(miri))]
mod pingpong;
mod polling;
mod quirk_workarounds;
mod quirks;
mod random_faults;
mod raw;
mod raw_failures;
mod raw_handles;
mod raw_limits;
mod raw_packets;
mod receive_pool;
mod refused_work;
mod registration_cache;
#[cfg(not(miri))]
mod rping;
mod set_datagrams;
mod shared_channel;
mod shared_payloads;
mod shared_receives;
#[cfg(not(miri))]
mod soft;
mod steering;
mod support;
mod tag_matching;
mod unreliable;
mod user_memory;
mod window_regions;
mod xrc;

#[global_allocator]
static ALLOCATOR: allocation::Counting = allocation::Counting;
