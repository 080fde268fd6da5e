//! Safe RDMA verbs over libibverbs, which is loaded at run time. Building needs no part of rdma-core.
//!
//! # Two APIs
//!
//! | | owned API | raw API |
//! |---|---|---|
//! | types | [`Endpoint`], [`EndpointSet`], [`DatagramEndpoint`] | [`QueuePair`], [`CompletionQueue`] |
//! | memory | [`Buffer`]s move in with posted work and come back with its completion | addresses and keys: [`Sge`] |
//! | post | [`Endpoint::post`] a [`Work`]; [`Endpoint::receive`] | [`QueuePair::send_batch`]; [`QueuePair::recv_batch`] |
//! | poll | [`Endpoint::poll`], [`Endpoint::wait`] | [`CompletionQueue::poll`] |
//! | loops where instructions count | [`Endpoint::with_interface`] | [`post::SendQueue::with_interface`], [`cq::Poller`] |
//! | `unsafe` | none | posting memory |
//! | for | services, messaging, tests | storage engines and tools with their own memory management |
//!
//! The other methods that post are shorthands of these. Each shorthand's documentation says when to use it.
//!
//! Both APIs use the same objects. Each object keeps the objects alive that it was created from, so they can be dropped
//! in any order:
//!
//! ```text
//! Device ── Context ─┬─ AsyncEvents
//!                    ├─ ThreadDomain, DmaHandle, Counters, CompletionCounter, FlowAction
//!                    ├─ DeviceMemory ── DeviceRegion
//!                    ├─ XrcDomain ── XrcTarget
//!                    ├─ ProtectionDomain ─┬─ Buffer, SharedBuffer, ReadableRegion, ExposedRegion
//!                    │                    ├─ NullRegion, RawMemoryRegion, ImportedRegion
//!                    │                    ├─ MemoryWindow
//!                    │                    ├─ AddressHandle
//!                    │                    ├─ SharedReceiveQueue, ReceivePool
//!                    │                    ├─ WorkQueue ── IndirectionTable ── RssQueuePair ── Flow
//!                    │                    └─ QueuePair, Endpoint, DatagramEndpoint
//!                    └─ CompletionChannel ── CompletionQueue, EndpointSet ──┘
//!
//! cm::Connector, cm::Listener ── cm::Connection, an Endpoint connected by address; cm::Id for a QueuePair
//! ```
//!
//! # Names
//!
//! Every type lives in a module of its topic: [`flow::VxlanHeader`], [`device::Quirks`]. The root also has those that
//! most programs need.
//!
//! # First steps
//!
//! [`Endpoint`] has an example of a whole connection. A peer needs the [`QueuePairAddress`] to connect. Programs
//! exchange addresses in their own way (the feature `serde` helps).
//!
//! | task | items |
//! |---|---|
//! | find a device and its capabilities | [`devices`], [`Device::by_name`], [`Context::attributes`], [`Context::query_port`] |
//! | send messages to one peer | [`Endpoint`]: [`Endpoint::send`], [`Endpoint::receive`], [`Endpoint::wait`] |
//! | send to many peers from one queue pair | [`DatagramEndpoint`] |
//! | join a multicast group, or send to one | [`DatagramEndpoint::attach_mcast`], [`DatagramEndpoint::multicast_peer`] |
//! | connect by IP address, without a TCP connection | [`cm::Connector`], [`cm::Listener`]; [`cm::Id`] for a [`QueuePair`] |
//! | connect and accept in an event loop or an async runtime | [`cm::Handshake`] |
//! | allocate memory to send and receive | [`ProtectionDomain::allocate`], [`Buffer::into_chunks`] |
//! | use memory of the program, and get it back | [`ProtectionDomain::register`] a [`mr::Memory`], [`Buffer::into_memory`] |
//! | send one payload to many peers | [`ProtectionDomain::share`], [`Buffer::freeze`], [`SharedBuffer::slice`] |
//! | send a header and a payload as one message | [`Endpoint::send_list`] of a [`Gather`]; [`Endpoint::receive_list`] |
//! | cut memory, and join it again | [`Buffer::split_to`], [`Buffer::join_all`] |
//! | let a peer access memory | [`ProtectionDomain::expose`] at the owner, [`Endpoint::write`], [`Endpoint::read`] at the peer |
//! | let one peer access memory, and revoke it | [`Endpoint::bind_window`], [`Endpoint::invalidate_window`] |
//! | serve many connections with one poll | [`EndpointSet`] of endpoints, a [`CompletionQueue`] of queue pairs |
//! | share receives among connections | [`ReceivePool`] of endpoints, [`SharedReceiveQueue`] of queue pairs |
//! | sleep until work completes | [`EndpointBuilder::events`], [`endpoint::EndpointSetBuilder::events`], a [`CompletionChannel`] |
//! | get events of ports, errors and limits | [`Context::async_events`] |
//! | manage memory by address and key | [`QueuePair`], [`SendBatch`], [`RawMemoryRegion`] |
//! | set more options of memory | [`ProtectionDomain::registration`], [`dmah`], [`mr::ProviderMemory`], [`mr::HugePages`] |
//! | register memory of a GPU | [`ProtectionDomain::register_dmabuf`] |
//! | learn that a peer is gone | [`EndpointBuilder::keepalive`], [`Completion::connection_lost`] |
//! | close a connection | [`Endpoint::close`], [`EndpointSet::remove`], [`QueuePair::drain`] |
//! | run without an RDMA device | `soft::install_by_default`, with the feature `soft` |
//! | find the cause of a failure | [`Endpoint::explain`], [`QueuePair::explain`], [`Error::explain`] |
//! | share a domain and its regions with another process | [`Context::command_fd`] at the owner, [`Context::import`] at the other |
//! | exchange objects with other code | `from_raw`, `as_raw` of each type |
//!
//! # Cargo features
//!
//! None is enabled by default.
//!
//! | feature | adds |
//! |---|---|
//! | `bytes` | `Bytes` from received buffers without a copy, and `Bytes` as [`mr::ReadOnly`] memory to send |
//! | `memmap2` | file mappings as memory: `MmapMut` as [`mr::Memory`], `Mmap` as [`mr::ReadOnly`] |
//! | `serde` | `Serialize` and `Deserialize` for [`QueuePairAddress`], [`RemoteMemory`], [`Gid`], [`Mtu`] and [`qp::Ece`] |
//! | `soft` | the module `soft`: a software RNIC in the process, and its checker |
//!
//! # Errors
//!
//! Control-path calls return [`Error`], which names the function ([`error::Verb`]), its `errno` and what to change. A
//! plain `EINVAL` of `ibv_modify_qp` becomes a [`qp::ModifyError`]. Posting returns the small [`PostError`], polling
//! returns [`PollError`], and a failed work request is a [`CompletionError`]. [`Error::explain`] returns the usual cause
//! of an `errno` of a verb. [`Endpoint::explain`] and [`QueuePair::explain`] return the likely causes of failed work by
//! operation, type of queue pair and network.
//!
//! # Requirements
//!
//! 64-bit Linux. A program that runs on soft0 (feature `soft`) needs nothing else.
//!
//! Other devices need, at run time, libibverbs of rdma-core 44 or newer (packages `libibverbs1` and `ibverbs-providers` on
//! Debian, `libibverbs` elsewhere). Without it every entry point returns [`Error::Load`], which lists the names that
//! were tried. With them, [`cm`] also needs librdmacm (`librdmacm1`).
#![deny(missing_docs)]

pub mod address;
pub mod async_event;
mod bounds;
mod branch;
pub mod cm;
pub mod counters;
pub mod cq;
pub mod device;
pub mod dm;
pub mod dmah;
pub mod endpoint;
mod errno;
pub mod error;
pub mod explain;
pub mod flow;
pub mod fork;
mod id;
pub mod interface;
pub mod mr;
pub mod mw;
mod named;
mod object;
pub mod pd;
pub mod port;
pub mod post;
pub mod qp;
mod readiness;
#[cfg(feature = "soft")]
pub mod soft;
pub mod srq;
pub mod wq;
pub mod xrc;

pub use rdma_sys as sys;

// The items that most programs need. All other items are in the modules of their topics.
pub use address::{AddressHandle, Gid, GidType};
pub use async_event::AsyncEvents;
pub use cq::{
    CompletionChannel, CompletionError, CompletionQueue, Poll, PollError, WcFields, WcFlags, WcOpcode, WcStatus,
    WorkCompletion,
};
pub use device::{Context, Device, devices};
pub use endpoint::{
    Completion, DatagramCompletion, DatagramEndpoint, Endpoint, EndpointBuilder, EndpointKey, EndpointSet, Operation,
    Peer, ReceivePool, Work, WorkId,
};
pub use error::{Errno, Error, Result};
pub use mr::{Access, Buffer, ExposedRegion, Gather, RawMemoryRegion, ReadableRegion, RemoteMemory, SharedBuffer};
pub use pd::ProtectionDomain;
pub use port::{LinkLayer, Mtu, PortState};
pub use post::{Inline, PostError, RecvBatch, Remote, SendBatch, SendFlags, SendOps, Sge, UdTarget, WorkRequest};
pub use qp::{
    ConnectOptions, InitOptions, QueuePair, QueuePairAddress, QueuePairBuilder, QueuePairState, QueuePairType,
};
pub use srq::SharedReceiveQueue;

/// Compiles the example of the README as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
