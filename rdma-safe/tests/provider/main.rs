//! Tests of rdma-safe over a fake provider in the test process.

// The tests forget guards regardless of whether a guard implements `Drop`.
#![allow(clippy::forget_non_drop)]

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
mod domains;
mod drop_orders;
mod endpoint_fast_path;
mod endpoint_operations;
mod endpoint_removal;
mod endpoint_sets;
mod events;
mod failing_destruction;
mod fake;
mod flows;
mod imports;
mod known_interface;
mod modify;
mod multicast;
mod newer_operations;
mod panics;
mod pending_sends;
mod poll_each;
mod queries;
mod queue_pair_options;
mod quirks;
mod raw_handles;
mod raw_operations;
mod raw_packets;
mod receive_shares;
mod registration;
mod rings;
mod send_many;
mod shared_receives;
mod size_limits;
mod support;
mod tag_matching;
mod threads;
mod transfer_and_poll;
mod unreliable;
mod unreliable_endpoint;
mod user_data;
mod work_queues;
mod xrc;
mod xsrq_pingpong;

/// Whether the library has the functions of rdma-core 59 and 64, by which rdma-safe distinguishes releases.
const NEWER_LIBRARY: bool = false;
