//! The interface between a queue pair's transport and its device.

use crate::wire::{Data, RemoteRange};

/// Operation that a peer requests on memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// RDMA read.
    Read,
    /// RDMA write.
    Write,
    /// Atomic operation.
    Atomic,
}

/// Position in the host's memory. Only the host interprets it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place(pub u64);

/// Handle of a receive that was taken from its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceiveId(pub u64);

/// Completion status of work or of a receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// Completed without an error.
    Success,
    /// The message was longer than the receive, or the receive was longer than the maximum.
    LocalLength,
    /// Local memory was not accessible.
    LocalProtection,
    /// The queue pair entered the error state.
    Flushed,
    /// NAK: invalid request.
    RemoteInvalidRequest,
    /// NAK: remote access error.
    RemoteAccess,
    /// NAK: remote operational error.
    RemoteOperation,
    /// No ACK arrived after all retries.
    RetryExceeded,
    /// RNR NAKs arrived after all RNR retries.
    ReceiverNotReadyExceeded,
    /// A response was malformed.
    BadResponse,
}

/// Completion of work or of a receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Completion {
    /// Completion of work from the send queue.
    Sent {
        /// Identifier from [`Work`](super::Work).
        id: u64,
        /// Result.
        status: Status,
    },
    /// Completion of a receive.
    Received {
        /// Completed receive.
        id: ReceiveId,
        /// Result.
        status: Status,
        /// Bytes received or written.
        len: u32,
        /// Whether the data came by RDMA write with immediate.
        is_write: bool,
        /// Immediate data in host byte order.
        imm: Option<u32>,
        /// Remote key that the peer invalidated.
        invalidated: Option<u32>,
        /// Whether the completion is solicited.
        solicited: bool,
    },
}

/// Content of a [`Completion::Received`] without its receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    pub(super) len: u32,
    pub(super) is_write: bool,
    pub(super) imm: Option<u32>,
    pub(super) invalidated: Option<u32>,
    pub(super) solicited: bool,
}

impl Received {
    pub(super) fn into_completion(self, id: ReceiveId) -> Completion {
        let Received { len, is_write, imm, invalidated, solicited } = self;
        Completion::Received { id, status: Status::Success, len, is_write, imm, invalidated, solicited }
    }
}

impl Completion {
    /// Completion of a receive that got no message. It counts as solicited.
    pub(super) fn failed_receive(id: ReceiveId, status: Status) -> Self {
        Completion::Received { id, status, len: 0, is_write: false, imm: None, invalidated: None, solicited: true }
    }
}

/// The device, as seen by the transport of one queue pair.
pub trait Host {
    /// Whether the peer has this access to the queue pair. A request for zero bytes needs it, but no key.
    fn allows(&self, access: Access) -> bool;

    /// Returns the position of `range`, if its key grants the peer this access to all of it.
    fn open(&self, range: &RemoteRange, access: Access) -> Option<Place>;

    /// Writes to memory that the last [`Host::open`] has returned.
    fn store(&mut self, place: Place, data: Data<'_>);

    /// Replaces an aligned word that the last [`Host::open`] has returned by the result of `change`. Returns the old value.
    fn update(&mut self, place: Place, change: &dyn Fn(u64) -> u64) -> u64;

    /// Takes the next receive from the queue, if there is one.
    fn receive(&mut self) -> Option<ReceiveId>;

    /// Writes to the buffers of a receive.
    ///
    /// # Errors
    /// [`Status::LocalLength`] or [`Status::LocalProtection`].
    fn fill(&mut self, receive: ReceiveId, offset: u32, data: Data<'_>) -> Result<(), Status>;

    /// Invalidates the remote key that a peer has named. Returns whether it was valid for that.
    fn invalidate(&mut self, rkey: u32) -> bool;

    /// Writes data of a read or atomic response to the buffers of the work.
    ///
    /// # Errors
    /// [`Status::LocalProtection`].
    fn returned(&mut self, work: u64, offset: u32, data: Data<'_>) -> Result<(), Status>;

    /// Reports a completion. The transport reports all work, unsignaled work too.
    fn complete(&mut self, completion: Completion);
}
