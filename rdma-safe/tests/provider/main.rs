//! The safe interface over a provider that runs inside this process.

#![allow(clippy::forget_non_drop)] // Whether a guard has a `Drop` is not what these tests are to know.

mod async_events;
mod attributes;
mod batches;
mod changes;
mod clocks;
mod completion_counters;
mod contexts;
mod creation;
mod datagram_endpoint;
mod datagrams;
mod device_memory;
mod disorder;
mod domains;
mod drain;
mod drop_orders;
mod endpoint_operations;
mod endpoint_set_ends;
mod endpoint_sets;
mod endpoint_turns;
mod endpoint_ways;
mod events;
mod extremes;
mod failing_destruction;
mod failing_posts;
mod fake;
mod flows;
mod gates;
mod imports;
mod known_interface;
mod lies;
// Tables and texts, which hold nothing for Miri to find and take it minutes.
mod memory;
mod memory_windows;
#[cfg(not(miri))]
mod modify;
mod multicast;
mod newer_operations;
mod panics;
mod pending_sends;
mod polling;
mod queries;
mod queue_pair_options;
mod quirks;
mod raw_handles;
mod raw_operations;
mod raw_packets;
mod receive_pool;
mod registration;
mod rings;
mod shared_receives;
mod support;
mod tag_matching;
mod threads;
mod unreliable;
mod unreliable_endpoint;
mod work_queues;
mod xrc;
mod xsrq_pingpong;

/// Whether the library has what came with rdma-core 59 and 64, by which rdma-safe tells releases apart.
const NEWER_LIBRARY: bool = false;
