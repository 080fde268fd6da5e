//! Safe RDMA verbs over libibverbs, which is loaded at run time: nothing of rdma-core is needed to build.
//!
//! # Two doors
//!
//! | | [`Endpoint`], [`DatagramEndpoint`], the owned door | [`QueuePair`], the raw door |
//! |---|---|---|
//! | memory | [`Buffer`]s move in with work and come back with its completion | addresses and keys: [`Sge`] |
//! | `unsafe` | none | posting memory |
//! | for | services, messaging, tests | storage engines and tools with a memory manager of their own |
//!
//! Both stand on the same objects, each of which keeps alive what it was made from, so that no order of dropping them is
//! wrong:
//!
//! ```text
//! Device ── Context ─┬─ AsyncEvents
//!                    ├─ ThreadDomain, DmaHandle, Counters, CompletionCounter, FlowAction
//!                    ├─ DeviceMemory ── DeviceRegion
//!                    ├─ XrcDomain ── XrcTarget
//!                    ├─ ProtectionDomain ─┬─ Buffer, ExposedRegion, NullRegion, RawMemoryRegion, ImportedRegion
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
//! # First steps
//!
//! [`Endpoint`] has an example of a whole connection. What a peer needs to connect is its [`QueuePairAddress`]; how the two
//! get it to each other is up to the program (the feature `serde` helps).
//!
//! | to | take |
//! |---|---|
//! | find a device, see what it can | [`devices`], [`Device::by_name`], [`Context::attributes`], [`Context::query_port`] |
//! | send messages to one peer | [`Endpoint`]: [`Endpoint::send`], [`Endpoint::receive`], [`Endpoint::wait`] |
//! | send to many peers from one queue pair | [`DatagramEndpoint`] |
//! | be in a multicast group, or send to one | [`DatagramEndpoint::attach_mcast`], [`DatagramEndpoint::multicast_peer`] |
//! | connect by IP address, without TCP beside it | [`cm::Connector`], [`cm::Listener`]; [`cm::Id`] for a [`QueuePair`] |
//! | get memory to send and receive with | [`ProtectionDomain::allocate`], [`Buffer::into_chunks`] |
//! | let a peer write to memory, or read it | [`ProtectionDomain::expose`] there, [`Endpoint::write`] or [`Endpoint::read`] here |
//! | serve many connections by one poll | [`EndpointSet`] of endpoints, a [`CompletionQueue`] of queue pairs |
//! | share receives among connections | [`ReceivePool`] of endpoints, [`SharedReceiveQueue`] of queue pairs |
//! | sleep until there is something to do | [`EndpointBuilder::events`], [`EndpointSetBuilder::events`], a [`CompletionChannel`] |
//! | hear of ports that go down, and of limits | [`Context::async_events`] |
//! | manage memory by address and key | [`QueuePair`], [`SendBatch`], [`RawMemoryRegion`] |
//! | say more of memory | [`ProtectionDomain::registration`], [`DmaHandle`], [`ProviderMemory`], [`HugePages`] |
//! | register memory of a GPU | [`ProtectionDomain::register_dmabuf`] |
//! | poll and post in a loop at the least cost | [`Poller`], [`SendQueue::extended`], [`Endpoint::extended`] |
//! | end a connection | [`Endpoint::close`], [`EndpointSet::remove`], [`QueuePair::drain`] |
//! | run where there is no RDMA device | `soft::install_by_default`, with the feature `soft` |
//! | know why something failed | [`Endpoint::explain`], [`QueuePair::explain`], [`Error::explain`] |
//! | share a domain and its regions with another process | [`Context::command_fd`] there, [`Context::import`] here |
//! | use objects of other code, or show them to it | `from_raw`, `as_raw` of each type |
//!
//! # Errors
//!
//! Control-path calls return [`Error`], which names the verb, its `errno` and what to change; the kernel's bare `EINVAL` of
//! `ibv_modify_qp` becomes a [`ModifyError`]. Posting returns the small [`PostError`], polling [`PollError`], and a failed
//! work request is a [`CompletionError`]. [`Error::explain`] says what usually is behind an `errno` of a verb;
//! [`Endpoint::explain`] and [`QueuePair::explain`] name the likely causes of failed work by operation, type of queue pair and
//! network.
//!
//! # Requirements
//!
//! 64-bit Linux, and at run time libibverbs of rdma-core 44 or newer (package `libibverbs1` and `ibverbs-providers` on
//! Debian, `libibverbs` elsewhere). Without it every entry point returns [`Error::Load`], which says what was tried. [`cm`] needs
//! librdmacm, too (`librdmacm1`).
#![deny(missing_docs)]

mod access;
mod address;
mod ah;
mod async_event;
mod bounds;
mod channel;
mod clock;
pub mod cm;
mod comp_cntr;
mod context;
mod counters;
mod cq;
mod device;
mod device_attributes;
mod dm;
mod dmah;
mod endpoint;
mod errno;
mod error;
mod ethernet;
mod explain;
mod flow;
mod fork;
mod gid;
mod grh;
mod id;
mod import;
mod interface;
mod mr;
mod mw;
mod named;
mod object;
mod pd;
mod port;
mod post;
mod qp;
mod quirks;
mod rate;
mod readiness;
mod rss;
#[cfg(feature = "soft")]
pub mod soft;
mod srq;
mod td;
mod wq;
mod xrc;

pub use rdma_sys as sys;

pub use access::Access;
pub use address::{AddressError, AddressVector, GlobalRoute};
pub use ah::AddressHandle;
pub use async_event::{AsyncEvent, AsyncEventType, AsyncEvents, AsyncSource};
pub use channel::CompletionChannel;
pub use clock::{ClockReading, DeviceClock};
pub use comp_cntr::{CompletionCount, CompletionCounter, CompletionCounterCaps, CountedOperations};
pub use context::Context;
pub use counters::{CounterDescription, Counters};
pub use cq::{
    CompletionError, CompletionQueue, CompletionQueueBuilder, Poll, PollError, Poller, StandardFields, WcFields,
    WcFlags, WcOpcode, WcStatus, WorkCompletion,
};
pub use device::{Device, NodeType, TransportType, devices};
pub use device_attributes::{
    AtomicCapability, CqModeration, DeviceAttributes, DeviceCapabilities, OdpCapabilities, OdpOperations,
    OnDemandPaging, PacketPacing, PciAtomicSizes, PciAtomics, QueuePairTypes, RawPacketCapabilities,
    ReceiveSideScaling, RxHashFields, RxHashFunctions, SegmentationOffload, TagMatching, TagMatchingFlags,
};
pub use dm::{DeviceMemory, DeviceRegion};
pub use dmah::{DmaHandle, DmaHandleBuilder, ProcessingHint, TphMemoryType};
pub use endpoint::{
    Armed, Batch, Completion, DatagramBatch, DatagramCompletion, DatagramEndpoint, Endpoint, EndpointBuilder,
    EndpointKey, EndpointMut, EndpointSet, EndpointSetBuilder, FailedWork, Operation, Peer, ReceivePool, Rejected,
    Sender, Unposted, Work, WorkId,
};
pub use errno::Errno;
pub use error::{Error, HugePagesError, Result};
pub use ethernet::EthernetAddress;
pub use explain::{Circumstances, Explanation, Network};
pub use flow::{
    AesKey, EspAction, EspEncapsulation, EspFlags, EspHeader, EthernetHeader, Flow, FlowAction, FlowFlags, FlowHeader,
    FlowRule, FlowTarget, FlowType, GreHeader, Ipv4ExtHeader, Ipv4Header, Ipv6Header, MplsHeader, TcpHeader, UdpHeader,
    VxlanHeader,
};
pub use fork::{ForkStatus, fork_init, fork_status};
pub use gid::{Gid, GidEntry, GidType, Guid, InvalidGuid};
pub use grh::Grh;
pub use id::{CqId, QpId, SrqId, WqId};
pub use interface::{Any, Classic, Extended, Interface, Known};
pub use mr::{
    Advice, Backing, Buffer, ExposedRegion, HugePages, ImportedRegion, NullRegion, Pages, ProviderMemory,
    RawMemoryRegion, RegistrationBuilder, RemoteMemory, ReregisterError, Reregistration,
};
pub use mw::{BindInfo, MemoryWindow, Type1, Type2, WindowType};
pub use pd::ProtectionDomain;
pub use port::{
    InvalidMtu, LinkLayer, LinkSpeed, LinkWidth, Mtu, PhysicalState, PortAttributes, PortCapabilities,
    PortCapabilities2, PortState,
};
pub use post::{
    FlushPlacement, FlushRange, Inline, InlineList, Payload, PostError, Receives, RecvBatch, RecvQueue, Remote,
    Scatter, Segments, SendBatch, SendFlags, SendOps, SendQueue, Sge, UdTarget, WorkRequest, XrcBatch,
};
pub use qp::{
    AttributeMask, ConnectOptions, DataInOrder, Ece, InitOptions, ModifyError, QueuePair, QueuePairAddress,
    QueuePairAttributes, QueuePairBuilder, QueuePairCapacity, QueuePairFlags, QueuePairState, QueuePairType, RateLimit,
    Transition, WrOpcode, XrcTarget,
};
pub use quirks::Quirks;
pub use rate::Rate;
pub use rss::{RssQueuePair, RssQueuePairBuilder};
pub use srq::{
    SharedReceiveQueue, SharedReceiveQueueAttributes, SharedReceiveQueueBuilder, Tag, TagHandle, TagHeader, TagInfo,
    TagList, TagListSize, TagMessage, TagOperation,
};
pub use td::ThreadDomain;
pub use wq::{IndirectionTable, WorkQueue, WorkQueueBuilder, WorkQueueFlags, WorkQueueState};
pub use xrc::{XrcDomain, XrcOpen};

/// Keeps the example of the README compiling.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
