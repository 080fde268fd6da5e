//! Posting work: the raw door.

mod chain;
mod payload;
mod receives;
mod recv;
mod send;
mod work_request;

use rdma_sys::ibv_sge;

use crate::{Errno, QueuePairState};

pub(crate) use payload::Short;
pub use payload::{Inline, InlineList, Payload, Scatter};
pub(crate) use receives::RecvChain;
pub use receives::{Receives, RecvBatch};
pub use recv::RecvQueue;
pub(crate) use recv::RecvState;
pub(crate) use send::{EXTENDED_ONLY, SendState, Sizes};
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
    /// No bytes.
    pub const EMPTY: Sge = Sge { address: 0, len: 0, lkey: 0 };

    #[inline(always)]
    pub(crate) fn to_raw(self) -> ibv_sge {
        ibv_sge { addr: self.address, length: self.len, lkey: self.lkey }
    }
}

// `&[Sge]` is handed to C as an array of `struct ibv_sge`.
const _: () = {
    assert!(size_of::<Sge>() == size_of::<ibv_sge>() && align_of::<Sge>() == align_of::<ibv_sge>());
    assert!(std::mem::offset_of!(Sge, address) == std::mem::offset_of!(ibv_sge, addr));
    assert!(std::mem::offset_of!(Sge, len) == std::mem::offset_of!(ibv_sge, length));
    assert!(std::mem::offset_of!(Sge, lkey) == std::mem::offset_of!(ibv_sge, lkey));
};

/// Work that was not posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The state of the queue pair does not allow it.
    #[error(
        "the queue pair is in {state}: sends need RTS, receives need INIT or later; see QueuePair::init, connect and \
         init_datagrams"
    )]
    NotReady {
        /// The state it is in.
        state: QueuePairState,
    },

    /// The state of the work queue does not allow it.
    #[error("the work queue is in {state}: call WorkQueue::ready first")]
    WorkQueueNotReady {
        /// The state it is in.
        state: crate::WorkQueueState,
    },

    /// The queue pair has no receive queue of its own.
    #[error("the queue pair takes its receives from a shared receive queue: post them to that")]
    SharedReceives,

    /// Queue pairs of this type receive nothing.
    #[error(
        "an XRC_SEND queue pair has no receive queue: what its peer sends comes by an XrcTarget to a shared receive queue, see \
         XrcDomain::shared_receive_queue"
    )]
    NoReceiveQueue,

    /// The queue pair was created without this operation, or is of a type that has it not.
    #[error(
        "{op:?} was not enabled when the queue pair was created, or its type or ibv_post_send has no such operation; see \
         QueuePairBuilder::operations"
    )]
    NotEnabled {
        /// The operation.
        op: SendOps,
    },

    /// A datagram without a destination.
    #[error("a send on a UD queue pair needs a destination: use SendBatch::send_to and SendBatch::send_imm_to")]
    NoDestination,

    /// A destination on a queue pair that is connected to its peer.
    #[error("only UD queue pairs send to a destination: use SendBatch::send and SendBatch::send_imm")]
    NotDatagram,

    /// Work of an XRC queue pair that names no shared receive queue.
    #[error("work on an XRC_SEND queue pair names a shared receive queue of the peer: use SendBatch::to_srq")]
    NoRemoteQueue,

    /// A shared receive queue of the peer, on a queue pair that has none.
    #[error("only XRC_SEND queue pairs name a shared receive queue of the peer: use the methods of SendBatch itself")]
    NotXrc,

    /// Headers before a segmented stream that are longer than the queue pair was created for.
    #[error("headers of {len} bytes, but the queue pair was created for {max}; see QueuePairBuilder::tso_header")]
    HeaderTooLong {
        /// How many bytes.
        len: usize,
        /// How many they can be.
        max: u16,
    },

    /// A datagram is one packet.
    #[error(
        "a datagram of {len} bytes, but the MTU of the port is {max}; see Buffer::set_len, DatagramEndpoint::max_datagram \
         and QueuePair::max_datagram"
    )]
    DatagramTooLong {
        /// How many bytes.
        len: u64,
        /// How many it can be.
        max: u32,
    },

    /// More scatter/gather elements than the queue pair was created for.
    #[error(
        "{count} scatter/gather elements, but the queue was created for {max}; see QueuePairBuilder::send_sges, \
         QueuePairBuilder::recv_sges and SharedReceiveQueueBuilder::sges"
    )]
    TooManySges {
        /// How many.
        count: usize,
        /// How many it can have.
        max: u32,
    },

    /// More inline data than the queue pair was created for.
    #[error(
        "{len} bytes of inline data, but the queue pair was created for {max}; see QueuePairBuilder::inline_data and \
         EndpointBuilder::inline_data"
    )]
    InlineTooLong {
        /// How many.
        len: usize,
        /// How many it can have.
        max: u32,
    },

    /// More work requests than fit in one batch.
    #[error(
        "a batch holds {max} work requests; see QueuePairBuilder::max_batch and SharedReceiveQueueBuilder::max_batch"
    )]
    BatchFull {
        /// How many.
        max: u32,
    },

    /// The queue has no room: take completions first. Back-pressure, not a fault.
    #[error(
        "the queue is full after {posted} work requests of the batch: take completions first, those of unsignaled work come \
         with later signaled work; a batch that is longer than the queue never fits: make shorter ones, or the queue deeper, see \
         QueuePairBuilder::send_depth, recv_depth and EndpointBuilder::recv_depth"
    )]
    QueueFull {
        /// Work requests of the batch that were posted, from its start.
        posted: u32,
    },

    /// An endpoint has no room for more sends: take completions first. Back-pressure, not a fault.
    #[error(
        "the endpoint of queue pair {qp_num:#x} is full: its {send_depth} sends are in flight or not polled, and {pending_sends} \
         may wait beside them; take completions first, or build it with more: EndpointBuilder::send_depth, \
         EndpointBuilder::pending_sends"
    )]
    EndpointFull {
        /// The number of its queue pair, 24 bits.
        qp_num: u32,
        /// Sends that may be in flight, or done and not polled: `EndpointBuilder::send_depth`.
        send_depth: u32,
        /// Sends that may wait for room: `EndpointBuilder::pending_sends`.
        pending_sends: u32,
    },

    /// The provider refused a work request.
    #[error("the provider refused work request {posted} of the batch, counted from 0: {errno}")]
    Refused {
        /// Work requests of the batch that were posted, from its start.
        posted: u32,
        /// As reported.
        errno: Errno,
    },

    /// An atomic operation needs eight bytes at an address that is a multiple of eight.
    #[error("an atomic operation needs 8 bytes at an address that is a multiple of 8")]
    AtomicOperand,

    /// The buffer is registered in another protection domain.
    #[error("the buffer is registered in another protection domain than the endpoint's")]
    ForeignBuffer,

    /// The address handle belongs to another protection domain.
    #[error("the peer was made in another protection domain than the endpoint's; see DatagramEndpoint::peer")]
    ForeignPeer,

    /// An entry of a list of tags is another queue's.
    #[error("the entry is of the tag list of another shared receive queue")]
    ForeignTag,

    /// A memory window or region of another protection domain than the queue pair's.
    #[error("the {object} is in another protection domain than the queue pair")]
    ForeignDomain {
        /// What.
        object: &'static str,
    },

    /// The last binding of the memory window was neither confirmed nor reverted.
    #[error(
        "the last binding of the memory window was neither confirmed nor reverted; call MemoryWindow::confirm when it has \
         completed with success, else MemoryWindow::revert"
    )]
    WindowPending,

    /// The memory window was bound to too many different regions, all of which it keeps.
    #[error(
        "the memory window already keeps {max} regions and takes no more: allocate another window and drop \
         this one, or see MemoryWindow::release_former"
    )]
    WindowRegions {
        /// Regions that a window keeps at most: `MemoryWindow::MAX_REGIONS`.
        max: usize,
    },

    /// A memory window that is not bound cannot be unbound.
    #[error("the memory window is not bound")]
    NotBound,

    /// A memory window of type 1 was to begin at the address 0.
    #[error("a memory window of type 1 cannot be zero-based: leave out BindInfo::zero_based")]
    ZeroBased,

    /// The peer's memory is shorter than the message.
    #[error("{len} bytes to transfer, but the peer's memory has {remote}; see RemoteMemory::slice and Buffer::set_len")]
    RemoteTooShort {
        /// How many bytes.
        len: usize,
        /// How many there are.
        remote: u64,
    },

    /// An earlier posting of this endpoint is in doubt.
    #[error("an earlier posting failed and left the endpoint in error; drop it and make another")]
    Poisoned,

    /// The message is longer than a work request can carry.
    #[error("a message of {len} bytes, but the device carries at most {max}")]
    MessageTooLong {
        /// How many bytes.
        len: usize,
        /// How many it can be.
        max: u32,
    },

    /// The provider failed. How much of the batch it took is not known, so memory that was posted may still be in use:
    /// only destroying the queue pair ends that.
    #[error(
        "the provider refused the work ({errno}) and may have taken part of it; destroy the queue pair, or call \
         Endpoint::close, before the memory is used again"
    )]
    InDoubt {
        /// As reported.
        errno: Errno,
    },
}

impl PostError {
    /// Whether, of a single work request, the provider has surely nothing.
    #[inline(always)]
    pub(crate) fn surely_not_posted(&self) -> bool {
        !matches!(self, PostError::InDoubt { .. })
    }

    /// From an `errno` of `ibv_post_send`, `ibv_post_recv`, `ibv_post_srq_recv` or `ibv_wr_complete`, where `posted` is what the
    /// provider says of how far it got.
    // Inlined: a call that could unwind would keep every guard of the caller in memory.
    #[inline(always)]
    pub(crate) fn from_provider(errno: i32, posted: Option<u32>) -> Self {
        match (errno, posted) {
            (libc::ENOMEM | libc::ENOSPC, Some(posted)) => PostError::QueueFull { posted },
            (errno, Some(posted)) => PostError::Refused { posted, errno: Errno(errno) },
            (errno, None) => PostError::InDoubt { errno: Errno(errno) },
        }
    }
}
