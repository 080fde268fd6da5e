//! What a queue pair needs of the device that it is in.

use crate::wire::RemoteRange;

/// What a peer may do with memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read it.
    Read,
    /// Write to it.
    Write,
    /// Do atomic operations on it.
    Atomic,
}

/// Where memory is, as its host knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place(pub u64);

/// A receive that was taken out of its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceiveId(pub u64);

/// How work has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// Well.
    Success,
    /// The message was longer than the receive, or the receive than may be.
    LocalLength,
    /// Local memory could not be reached.
    LocalProtection,
    /// The queue pair is in the error state.
    Flushed,
    /// The peer finds the request invalid.
    RemoteInvalidRequest,
    /// The peer does not let its memory be reached.
    RemoteAccess,
    /// The peer could not do it.
    RemoteOperation,
    /// No answer came, however often it was sent.
    RetryExceeded,
    /// The peer had no receive, however often it was sent.
    ReceiverNotReadyExceeded,
    /// An answer came that makes no sense.
    BadResponse,
}

/// What becomes of a message that has arrived, or of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Completion {
    /// Work of the send queue.
    Sent {
        /// As it was given.
        id: u64,
        /// How it ended.
        status: Status,
    },
    /// A receive.
    Received {
        /// Which.
        id: ReceiveId,
        /// How it ended.
        status: Status,
        /// Bytes that have arrived, or were written.
        len: u32,
        /// Whether the peer has written them to memory that it has named.
        is_write: bool,
        /// In host byte order.
        imm: Option<u32>,
        /// A key that the peer has invalidated.
        invalidated: Option<u32>,
        /// Whether it wakes who waits for solicited events.
        solicited: bool,
    },
}

/// What has come into a receive.
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
    /// Of a receive into which nothing has come. It wakes everybody who waits.
    pub(super) fn failed_receive(id: ReceiveId, status: Status) -> Self {
        Completion::Received { id, status, len: 0, is_write: false, imm: None, invalidated: None, solicited: true }
    }
}

/// The device that a queue pair is in, as it appears to this queue pair.
pub trait Host {
    /// Where these bytes are, if the key opens all of them to the peer.
    fn open(&self, range: &RemoteRange, access: Access) -> Option<Place>;

    /// Writes to memory that [`Host::open`] has just opened.
    fn store(&mut self, place: Place, data: &[u8]);

    /// Replaces the word there, which [`Host::open`] has just opened and which is aligned, by what `change` makes of it; what it
    /// was.
    fn update(&mut self, place: Place, change: &dyn Fn(u64) -> u64) -> u64;

    /// Takes the next receive, if there is one.
    fn receive(&mut self) -> Option<ReceiveId>;

    /// Writes to the buffers of a receive.
    ///
    /// # Errors
    /// [`Status::LocalLength`] or [`Status::LocalProtection`].
    fn fill(&mut self, receive: ReceiveId, offset: u32, data: &[u8]) -> Result<(), Status>;

    /// Invalidates a key that the peer has named; whether it could be.
    fn invalidate(&mut self, rkey: u32) -> bool;

    /// Writes what came back for work to its buffers.
    ///
    /// # Errors
    /// [`Status::LocalProtection`].
    fn returned(&mut self, work: u64, offset: u32, data: &[u8]) -> Result<(), Status>;

    /// Work or a receive has ended. Work that is done well is told of whether it asked for that or not.
    fn complete(&mut self, completion: Completion);
}
