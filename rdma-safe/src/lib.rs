//! Safe RDMA verbs.
#![deny(missing_docs)]

mod access;
mod address;
mod channel;
mod context;
mod cq;
mod device;
mod device_attributes;
mod endpoint;
mod errno;
mod error;
mod gid;
mod mr;
mod named;
mod pd;
mod port;
mod post;
mod qp;
mod quirks;

pub use rdma_sys as sys;

pub use access::Access;
pub use address::{AddressVector, GlobalRoute};
pub use channel::CompletionChannel;
pub use context::Context;
pub use cq::{
    CompletionError, CompletionQueue, CompletionQueueBuilder, CqId, Poll, PollError, WcFields, WcFlags, WcOpcode,
    WcStatus, WorkCompletion,
};
pub use device::{Device, NodeType, TransportType, devices};
pub use device_attributes::DeviceAttributes;
pub use endpoint::{
    Batch, Completion, ConnectOptions, Endpoint, EndpointBuilder, FailedWork, Operation, QueuePairAddress, Rejected,
    Work, WorkId,
};
pub use errno::Errno;
pub use error::{Error, Result};
pub use gid::{Gid, GidEntry, GidType, Guid};
pub use mr::{Backing, Buffer, ExposedRegion, HugePages, Pages, RawMemoryRegion, RemoteMemory};
pub use pd::ProtectionDomain;
pub use port::{InvalidMtu, LinkLayer, Mtu, PortAttributes, PortState};
pub use post::{
    Gather, Inline, InlineList, Payload, PostError, RecvBatch, RecvQueue, Remote, SendBatch, SendFlags, SendOps,
    SendQueue, Sge, WorkRequest,
};
pub use qp::{
    AttributeMask, ModifyError, QueuePair, QueuePairAttributes, QueuePairBuilder, QueuePairCapacity, QueuePairState,
    QueuePairType, Transition,
};
pub use quirks::Quirks;
