//! Completed and rejected work of endpoints.

use std::fmt;

use super::poll::Outcome;
use crate::cm::{Cause, CmError, ConnectError, Step};
use crate::mr::{Gather, Piece};
use crate::{Buffer, CompletionError, PostError, WcFlags, WcStatus};

/// Identifies posted work of one endpoint.
///
/// Numbers increase with each posting, separately for sends and receives. A number is reused only if its work was never
/// posted, for example when a batch was dropped.
///
/// The work request has the number as its `wr_id`, which reports of soft0's checker and errors of providers name. See
/// [`WorkId::wr_id`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkId(pub(super) u64);

/// Marks receives: the highest bit of the sequence number, which is the `wr_id`.
pub(super) const RECEIVE: u64 = 1 << 63;

impl WorkId {
    /// The number of the work: consecutive for the sends of one endpoint, and for its receives unless a pool has them.
    ///
    /// Receives of a [`ReceivePool`](crate::ReceivePool) have the number of their ticket instead.
    #[must_use]
    #[inline(always)]
    pub fn sequence(self) -> u64 {
        self.0 & !RECEIVE
    }

    /// The `wr_id` of the work request, to find it in reports of soft0's checker or in a trace of the provider.
    ///
    /// Bit 63 marks receives; [`FailedWork::error`] leaves it out. Bit 62 without bit 63 marks probes of a
    /// [keepalive](crate::EndpointBuilder::keepalive). Endpoints use the same numbers, so the number of the queue pair tells their
    /// work apart ([`Endpoint::address`](crate::Endpoint::address)).
    #[must_use]
    #[inline]
    pub fn wr_id(self) -> u64 {
        self.0
    }

    /// Whether the work is a receive.
    #[must_use]
    #[inline(always)]
    pub fn is_receive(self) -> bool {
        self.0 & RECEIVE != 0
    }
}

/// The operation that completed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Operation {
    /// A send.
    Send,
    /// An RDMA write.
    Write,
    /// An RDMA read: the buffer holds the data.
    Read,
    /// An atomic operation: the buffer holds the old value, see [`Completion::atomic_result`].
    Atomic,
    /// A message arrived: the buffer holds it.
    Receive,
    /// An RDMA write with immediate by the peer.
    ///
    /// The write consumed a posted receive, whose buffer is returned with length 0. [`Completion::byte_len`] is the
    /// number of bytes written. Their location is not reported: the immediate data or the protocol has to tell it.
    ReceiveWrite,
    /// The binding of a memory window: [`Endpoint::bind_window`](crate::Endpoint::bind_window).
    BindWindow,
    /// The invalidation of a memory window: [`Endpoint::invalidate_window`](crate::Endpoint::invalidate_window).
    InvalidateWindow,
    /// The keepalive of an idle connection has failed: the peer is gone. See [`Completion::connection_lost`].
    ///
    /// Only an endpoint with [`EndpointBuilder::keepalive`](crate::EndpointBuilder::keepalive) reports this, at most once.
    Keepalive,
}

/// Completed work, with its buffer.
#[derive(Debug)]
#[non_exhaustive]
#[must_use = "dropping a completion drops its buffer"]
pub struct Completion {
    /// Identifier that posting returned.
    pub id: WorkId,
    /// The operation. For a receive that failed, [`Operation::Receive`].
    pub operation: Operation,
    /// Status of the work.
    pub status: WcStatus,
    /// Vendor-specific error code.
    pub vendor_error: u32,
    /// The buffer; `None` for inline data and lists. After a receive its length is the message length.
    pub buffer: Option<Buffer>,
    /// The list, if the work was posted with a list. A receive sets the length of each buffer to the bytes that it received.
    pub list: Option<Gather>,
    /// Number of bytes received, read, or written by the peer with immediate.
    pub byte_len: u32,
    /// The number that [`Work::user_data`](crate::Work::user_data) has set. 0 if none was set, and for receives.
    pub user_data: u32,
    /// Time of completion in ticks of the device's clock, with
    /// [`EndpointBuilder::timestamps`](crate::EndpointBuilder::timestamps).
    pub timestamp: Option<u64>,
    pub(super) extra: Extra,
}

/// Work with one buffer that has succeeded. A message that was received has no immediate data.
///
/// [`Completion`] has further fields, and can be made from it: [`Completion::from`].
#[derive(Debug)]
#[non_exhaustive]
#[must_use = "dropping completed work drops its buffer"]
pub struct Succeeded {
    /// Identifier that posting returned.
    pub id: WorkId,
    /// The operation.
    pub operation: Operation,
    /// The number that [`Work::user_data`](crate::Work::user_data) has set. 0 if none was set, and for receives.
    pub user_data: u32,
    /// The buffer. It has the bytes that were received or read.
    pub buffer: Buffer,
}

impl From<Succeeded> for Completion {
    #[inline(always)]
    fn from(work: Succeeded) -> Self {
        let Succeeded { id, operation, user_data, buffer } = work;
        // Reads and atomics fill the whole buffer, and a receive has set its length.
        let byte_len = match operation {
            Operation::Read | Operation::Atomic | Operation::Receive => buffer.len() as u32,
            _ => 0,
        };
        let outcome = Outcome { byte_len, ..Outcome::DONE };
        Completion { user_data, ..Completion::new(id.0, operation, Some(buffer), outcome) }
    }
}

/// Immediate data or an invalidated key of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extra {
    pub(super) flags: WcFlags,
    /// Immediate data in network byte order, or a key.
    pub(super) number: u32,
}

impl Extra {
    pub(super) const NONE: Extra = Extra { flags: WcFlags::empty(), number: 0 };
    /// Marks `number` as the share that was exceeded. Verbs define no such flag, and other failed work has no flags.
    const EXCEEDED: WcFlags = WcFlags::from_bits_retain(1 << 31);
    /// Marks `number` as the time limit of a keepalive that has failed, in milliseconds.
    const LOST: WcFlags = WcFlags::from_bits_retain(1 << 30);

    /// Marks work that was flushed because the peer has ended the connection.
    pub(super) const PEER_LEFT: Extra = Extra { flags: WcFlags::from_bits_retain(1 << 29), number: 0 };

    /// A connection was lost after this number of milliseconds.
    pub(super) const fn lost(millis: u32) -> Self {
        Extra { flags: Extra::LOST, number: millis }
    }

    /// The number of [`Extra::lost`].
    pub(super) fn lost_after(self) -> Option<u32> {
        (self.flags == Extra::LOST).then_some(self.number)
    }
}

impl Completion {
    /// Immediate data from the peer, in host byte order.
    #[must_use]
    #[inline(always)]
    pub fn imm(&self) -> Option<u32> {
        if self.extra.flags.contains(WcFlags::WITH_IMM) { Some(u32::from_be(self.extra.number)) } else { None }
    }

    /// Whether the work was flushed because the peer has ended the connection by address ([`cm`](crate::cm)).
    ///
    /// This is how receives come back that were posted for further messages. Nothing has failed: close the connection, or
    /// connect again. Converted to [`Error`](crate::Error), such work has the cause
    /// [`Disconnected`](crate::cm::Cause::Disconnected).
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        self.extra == Extra::PEER_LEFT
    }

    /// The value before an atomic operation, in host byte order; `None` for other and for failed work.
    #[must_use]
    #[inline]
    pub fn atomic_result(&self) -> Option<u64> {
        if self.operation != Operation::Atomic || self.status != WcStatus::SUCCESS {
            return None;
        }
        self.buffer.as_ref()?.first_chunk().copied().map(u64::from_ne_bytes)
    }

    /// The key that the peer's send invalidated.
    #[must_use]
    #[inline(always)]
    pub fn invalidated_rkey(&self) -> Option<u32> {
        if self.extra.flags.contains(WcFlags::WITH_INV) { Some(self.extra.number) } else { None }
    }

    /// The [`EndpointBuilder::receive_share`](crate::EndpointBuilder::receive_share) that this message exceeded, if it did.
    ///
    /// The connection is then in error. The message is in the buffer, and the status is [`WcStatus::GENERAL_ERR`].
    #[must_use]
    #[inline]
    pub fn exceeded_share(&self) -> Option<u32> {
        let exceeded = self.status == WcStatus::GENERAL_ERR && self.extra.flags == Extra::EXCEEDED;
        exceeded.then_some(self.extra.number)
    }

    /// Marks the message as the one that exceeded the share of its endpoint.
    pub(super) fn with_exceeded_share(self, share: u32) -> Completion {
        let extra = Extra { flags: Extra::EXCEEDED, number: share };
        Completion { status: WcStatus::GENERAL_ERR, extra, ..self }
    }

    /// The buffer, or the buffers of the list.
    pub(super) fn into_buffers(self) -> impl Iterator<Item = Buffer> {
        let listed = self.list.into_iter().flatten().filter_map(Piece::into_buffer);
        self.buffer.into_iter().chain(listed)
    }

    /// Returns the completion if it succeeded.
    ///
    /// # Errors
    /// [`FailedWork`], which holds the completion with its buffer.
    #[inline(always)]
    pub fn ok(self) -> Result<Completion, FailedWork> {
        if self.status == WcStatus::SUCCESS { Ok(self) } else { Err(FailedWork(Box::new(self))) }
    }
}

/// Failed work, with its buffer.
pub struct FailedWork(pub Box<Completion>);

impl FailedWork {
    /// The error without the buffer. Its `wr_id` is [`WorkId::sequence`], without the bit that marks receives.
    #[must_use]
    pub fn error(&self) -> CompletionError {
        let Completion { status, vendor_error, id, .. } = *self.0;
        CompletionError { status, vendor_error, wr_id: id.sequence(), qp_num: None }
    }
}

impl fmt::Display for FailedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operation = self.0.operation;
        match (self.0.exceeded_share(), self.0.connection_lost()) {
            (_, Some(lost)) => write!(f, "{operation:?}: {lost}"),
            (Some(share), _) => write!(
                f,
                "{operation:?}: the peer exceeded its share of {share} waiting messages: it has more requests unanswered than the \
                 protocol allows, or EndpointBuilder::receive_share is too small"
            ),
            _ if self.0.is_disconnected() => write!(f, "{operation:?}: {}", disconnected()),
            _ => write!(f, "{operation:?}: {}", self.error()),
        }
    }
}

/// The peer has ended the connection. The completion does not know the addresses.
fn disconnected() -> CmError {
    let (step, cause) = (Step::Transfer, Cause::Disconnected);
    CmError::Connect(Box::new(ConnectError { step, cause, local: None, peer: None }))
}

impl fmt::Debug for FailedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FailedWork").field(&self.0).finish()
    }
}

impl std::error::Error for FailedWork {}

/// Work that was not posted, with its buffer.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Rejected {
    /// Reason for the rejection.
    pub error: PostError,
    /// The buffer.
    ///
    /// `None` if the work had none, or if the provider may have it ([`PostError::MaybePosted`]).
    /// [`Endpoint::close`](crate::Endpoint::close) then returns it.
    pub buffer: Option<Buffer>,
    /// The list of work that was to be posted with one. `None` as above.
    pub list: Option<Gather>,
}

/// Work of a batch, or of [`Endpoint::send_many`](crate::Endpoint::send_many), that was posted only in part, or not at all.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct BatchError {
    /// Reason for the failure.
    pub error: PostError,
    /// Number of pieces of work that were posted, counted from the first. For [`PostError::MaybePosted`], it includes those that
    /// may have been posted. The number in `error` counts from the last doorbell.
    pub posted: usize,
    /// Buffers of the work that surely was not posted, in the order in which it was added.
    pub buffers: Vec<Buffer>,
    /// Lists of the work that surely was not posted, in the order in which it was added.
    pub lists: Vec<Gather>,
}

impl BatchError {
    /// The error of a batch of one piece of work.
    pub(super) fn single(self) -> Rejected {
        let BatchError { error, mut buffers, mut lists, .. } = self;
        Rejected { error, buffer: buffers.pop(), list: lists.pop() }
    }
}

impl From<FailedWork> for crate::Error {
    /// Drops the buffer.
    fn from(failed: FailedWork) -> Self {
        match failed.0.connection_lost() {
            Some(lost) => lost.into(),
            None if failed.0.is_disconnected() => disconnected().into(),
            None => failed.error().into(),
        }
    }
}

impl From<BatchError> for crate::Error {
    /// Drops the buffers.
    fn from(unposted: BatchError) -> Self {
        unposted.error.into()
    }
}

impl From<Rejected> for crate::Error {
    /// Drops the buffer.
    fn from(rejected: Rejected) -> Self {
        rejected.error.into()
    }
}
