//! Posting work requests through a queue pair: the raw API of the data path.
//!
//! Start with [`QueuePair::send_batch`](crate::QueuePair::send_batch), which makes a [`SendBatch`], and
//! [`QueuePair::recv_batch`](crate::QueuePair::recv_batch).

mod chain;
mod payload;
mod receives;
mod recv;
mod send;
mod work_request;

use rdma_sys::ibv_sge;

use crate::{Errno, QueuePairState};

pub(crate) use payload::BufferPayload;
pub use payload::{Inline, InlineList, Payload, Scatter};
pub(crate) use receives::RecvChain;
pub use receives::{ReceiveQueue, RecvBatch};
pub use recv::RecvQueue;
pub(crate) use recv::RecvState;
pub(crate) use send::{EXTENDED_ONLY, SendMemory, SendState};
pub use send::{FlushPlacement, FlushRange, Segments, SendBatch, SendQueue, UdTarget, XrcBatch};
pub use work_request::{Remote, SendFlags, SendOps, WorkRequest};

/// A scatter/gather element: `len` bytes at `address`, registered under `lkey`. Layout of `struct ibv_sge`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct Sge {
    /// Address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub len: u32,
    /// Local key of the region that covers them.
    pub lkey: u32,
}

impl Sge {
    /// An element without bytes.
    pub const EMPTY: Sge = Sge { address: 0, len: 0, lkey: 0 };

    #[inline(always)]
    pub(crate) fn to_raw(self) -> ibv_sge {
        ibv_sge { addr: self.address, length: self.len, lkey: self.lkey }
    }
}

// `&[Sge]` is passed to C as an array of `struct ibv_sge`.
const _: () = {
    assert!(size_of::<Sge>() == size_of::<ibv_sge>() && align_of::<Sge>() == align_of::<ibv_sge>());
    assert!(std::mem::offset_of!(Sge, address) == std::mem::offset_of!(ibv_sge, addr));
    assert!(std::mem::offset_of!(Sge, len) == std::mem::offset_of!(ibv_sge, length));
    assert!(std::mem::offset_of!(Sge, lkey) == std::mem::offset_of!(ibv_sge, lkey));
};

/// Why work was not posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The queue pair is in a state that does not allow posting.
    #[error(
        "the queue pair is in {state}: sends need RTS, receives need INIT or later; see Endpoint::connect, or for a \
         QueuePair init, connect and init_datagrams"
    )]
    NotReady {
        /// Current state.
        state: QueuePairState,
    },

    /// The work queue is in a state that does not allow posting.
    #[error("the work queue is in {state}: call WorkQueue::ready first")]
    WorkQueueNotReady {
        /// Current state.
        state: crate::wq::WorkQueueState,
    },

    /// The queue pair uses a shared receive queue.
    #[error(
        "the queue pair takes its receives from a shared receive queue: post them with ReceivePool::receive or \
             SharedReceiveQueue::receive"
    )]
    SharedReceives,

    /// Queue pairs of this type have no receive queue.
    #[error(
        "an XRC_SEND queue pair has no receive queue: messages of its peer arrive through an XrcTarget at a shared receive \
         queue, see XrcDomain::shared_receive_queue"
    )]
    NoReceiveQueue,

    /// The queue pair was created without this operation, or its type does not have it.
    #[error(
        "{op:?} was not enabled when the queue pair was created, or its type or ibv_post_send has no such operation; see \
         QueuePairBuilder::operations"
    )]
    NotEnabled {
        /// The refused operation.
        op: SendOps,
    },

    /// A datagram without a destination.
    #[error("a send on a UD queue pair needs a destination: use SendBatch::send_to and SendBatch::send_imm_to")]
    NoDestination,

    /// A destination on a queue pair that is not UD.
    #[error("only UD queue pairs send to a destination: use SendBatch::send and SendBatch::send_imm")]
    NotDatagram,

    /// XRC work without a shared receive queue of the peer.
    #[error("work on an XRC_SEND queue pair names a shared receive queue of the peer: use SendBatch::to_srq")]
    NoRemoteQueue,

    /// A shared receive queue of the peer on a queue pair that is not XRC_SEND.
    #[error("only XRC_SEND queue pairs name a shared receive queue of the peer: use the methods of SendBatch itself")]
    NotXrc,

    /// The headers before a TCP stream exceed the limit of the queue pair.
    #[error("headers of {len} bytes, but the queue pair was created for {max}; see QueuePairBuilder::tso_header")]
    HeaderTooLong {
        /// Length of the headers in bytes.
        len: usize,
        /// Largest length in bytes.
        max: u16,
    },

    /// The datagram does not fit in one packet.
    #[error(
        "a datagram of {len} bytes, but the MTU of the port is {max}; see Buffer::set_len, DatagramEndpoint::max_datagram \
         and QueuePair::max_datagram"
    )]
    DatagramTooLong {
        /// Length of the datagram in bytes.
        len: u64,
        /// Largest length in bytes.
        max: u32,
    },

    /// More scatter/gather elements than the queue pair was created for.
    #[error(
        "{count} scatter/gather elements, but the queue was created for {max}; see send_sges and recv_sges of \
         EndpointBuilder and QueuePairBuilder, and SharedReceiveQueueBuilder::sges"
    )]
    TooManySges {
        /// Number of elements.
        count: usize,
        /// Largest number of elements.
        max: u32,
    },

    /// More inline data than the queue pair was created for.
    #[error(
        "{len} bytes of inline data, but the queue pair was created for {max}; see QueuePairBuilder::inline_data and \
         EndpointBuilder::inline_data"
    )]
    InlineTooLong {
        /// Length of the data in bytes.
        len: usize,
        /// Largest length in bytes.
        max: u32,
    },

    /// More work requests than fit in one batch.
    #[error(
        "a batch holds {max} work requests; see QueuePairBuilder::max_batch and SharedReceiveQueueBuilder::max_batch"
    )]
    BatchFull {
        /// Largest number of work requests in a batch.
        max: u32,
    },

    /// The queue is full: take completions first. This is back-pressure, not a fault.
    #[error(
        "the queue is full after {posted} work requests of the batch: take completions first (the completion of later signaled \
         work also releases unsignaled work); a batch that is longer than the queue never fits: use shorter batches or a deeper \
         queue, see QueuePairBuilder::send_depth, recv_depth and EndpointBuilder::recv_depth"
    )]
    QueueFull {
        /// Number of work requests of the batch that were posted, from its start.
        posted: u32,
    },

    /// The endpoint has no room for more sends: take completions first. This is back-pressure, not a fault.
    #[error(
        "the endpoint of queue pair {qp_num:#x} is full: its {send_depth} sends are in flight or not polled, and at most \
         {pending_sends} more may be pending; take completions first, or raise EndpointBuilder::send_depth or \
         EndpointBuilder::pending_sends"
    )]
    EndpointFull {
        /// Queue pair number of the endpoint, 24 bits.
        qp_num: u32,
        /// Limit of sends in flight or not polled: `EndpointBuilder::send_depth`.
        send_depth: u32,
        /// Limit of sends that wait for room: `EndpointBuilder::pending_sends`.
        pending_sends: u32,
    },

    /// The provider refused a work request.
    #[error("the provider refused work request {posted} of the batch, counted from 0: {errno}")]
    Refused {
        /// Number of work requests of the batch that were posted, from its start.
        posted: u32,
        /// The errno that the provider reported.
        errno: Errno,
    },

    /// The operand of an atomic operation is not eight bytes at a multiple of eight.
    #[error("an atomic operation needs 8 bytes at an address that is a multiple of 8")]
    AtomicOperand,

    /// The buffer is registered in another protection domain.
    #[error("the buffer is registered in another protection domain than the endpoint's")]
    ForeignBuffer,

    /// A receive or read names memory that must not be written.
    #[error("a receive or read cannot write to a SharedBuffer: use a Buffer")]
    ReadOnly,

    /// The address handle belongs to another protection domain.
    #[error("the peer was made in another protection domain than the endpoint's; see DatagramEndpoint::peer")]
    ForeignPeer,

    /// The tag list entry belongs to another shared receive queue.
    #[error("the entry belongs to the tag list of another shared receive queue")]
    ForeignTag,

    /// The memory window or region belongs to another protection domain than the queue pair.
    #[error("the {object} is in another protection domain than the queue pair")]
    ForeignDomain {
        /// Kind of the object.
        object: &'static str,
    },

    /// The outcome of the last binding of the memory window is not recorded yet.
    #[error(
        "the last binding of the memory window was neither confirmed nor reverted; call MemoryWindow::confirm after it has \
         completed successfully, otherwise MemoryWindow::revert"
    )]
    WindowPending,

    /// The memory window was bound to too many different regions, which it all keeps.
    #[error(
        "the memory window already keeps {max} regions and takes no more: allocate another window and drop \
         this one, or see MemoryWindow::release_unused_regions"
    )]
    WindowRegions {
        /// Largest number of regions that a window keeps: `MemoryWindow::MAX_REGIONS`.
        max: usize,
    },

    /// The memory window is not bound.
    #[error("the memory window is not bound")]
    NotBound,

    /// The memory window was bound by another endpoint.
    #[error("the memory window was bound by another endpoint: invalidate it there")]
    ForeignWindow,

    /// A memory window of type 1 cannot be zero-based.
    #[error("a memory window of type 1 cannot be zero-based: leave out BindInfo::zero_based")]
    ZeroBased,

    /// The peer's memory region is shorter than the message.
    #[error("{len} bytes to transfer, but the peer's memory has {remote}; see RemoteMemory::slice and Buffer::set_len")]
    RemoteTooShort {
        /// Length of the message in bytes.
        len: usize,
        /// Length of the peer's memory in bytes.
        remote: u64,
    },

    /// An earlier post or poll failed, or the peer is gone. The endpoint accepts no more work.
    #[error(
        "an earlier post or poll failed, or the keepalive found that the peer is gone, and the endpoint is in error; take the \
         buffers back with Endpoint::close or EndpointSet::remove, and connect another"
    )]
    EndpointFailed,

    /// The message exceeds the limit of the device.
    #[error("a message of {len} bytes, but the device carries at most {max}")]
    MessageTooLong {
        /// Length of the message in bytes.
        len: usize,
        /// Largest length in bytes.
        max: u32,
    },

    /// The provider failed, and it is not known how much of the batch it took. Memory that was posted may still be in
    /// use until the queue pair is destroyed.
    #[error(
        "the provider refused the work ({errno}) but may have taken part of it; destroy the queue pair, or call \
         Endpoint::close, before reusing the memory"
    )]
    MaybePosted {
        /// The errno that the provider reported.
        errno: Errno,
    },
}

impl PostError {
    /// Whether a single work request was certainly not taken by the provider.
    #[inline(always)]
    pub(crate) fn surely_not_posted(&self) -> bool {
        !matches!(self, PostError::MaybePosted { .. })
    }

    /// Converts an `errno` of `ibv_post_send`, `ibv_post_recv`, `ibv_post_srq_recv` or `ibv_wr_complete`. `posted` is
    /// the number of work requests that the provider reports as posted.
    // Inlined: a call that could unwind would keep every guard of the caller in memory instead of registers.
    #[inline(always)]
    pub(crate) fn from_provider(errno: i32, posted: Option<u32>) -> Self {
        match (errno, posted) {
            (libc::ENOMEM | libc::ENOSPC, Some(posted)) => PostError::QueueFull { posted },
            (errno, Some(posted)) => PostError::Refused { posted, errno: Errno(errno) },
            (errno, None) => PostError::MaybePosted { errno: Errno(errno) },
        }
    }
}
