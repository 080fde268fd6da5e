//! What comes back from an endpoint.

use std::fmt;

use crate::{Buffer, CompletionError, PostError, WcFlags, WcStatus};

/// Identifies posted work of one endpoint; increases with each posting of a direction. Only work that was never posted, such
/// as that of a dropped batch, has its number used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkId(pub(super) u64);

/// In which queue work was: the highest bit of the sequence number, which is the `wr_id`.
pub(super) const RECEIVE: u64 = 1 << 63;

impl WorkId {
    fn sequence(self) -> u64 {
        self.0 & !RECEIVE
    }

    /// Whether it is of a receive.
    #[must_use]
    #[inline(always)]
    pub fn is_receive(self) -> bool {
        self.0 & RECEIVE != 0
    }
}

/// What completed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Operation {
    /// A send.
    Send,
    /// An RDMA write.
    Write,
    /// An RDMA read: the buffer holds what was read.
    Read,
    /// An atomic operation: the buffer holds the old value, see [`Completion::atomic_result`].
    Atomic,
    /// A message arrived: the buffer holds it.
    Receive,
    /// The peer wrote with immediate: that took a posted receive, whose buffer comes back with length 0.
    /// [`Completion::byte_len`] says how much was written; where is for the immediate data or the protocol to say.
    ReceiveWrite,
}

/// Work that is done, and the buffer that was in it.
#[derive(Debug)]
#[non_exhaustive]
#[must_use = "dropping a completion drops its buffer"]
pub struct Completion {
    /// As returned when it was posted.
    pub id: WorkId,
    /// What it was. For a receive that failed, [`Operation::Receive`].
    pub operation: Operation,
    /// How it ended.
    pub status: WcStatus,
    /// The vendor's own code for an error.
    pub vendor_error: u32,
    /// The buffer; `None` for data that was sent inline. After a receive its length is that of the message.
    pub buffer: Option<Buffer>,
    /// Bytes received, written by the peer with immediate, or read.
    pub byte_len: u32,
    /// When it completed, in ticks of the device's clock, with [`EndpointBuilder::timestamps`](crate::EndpointBuilder::timestamps).
    pub timestamp: Option<u64>,
    pub(super) extra: Extra,
}

/// What may come with a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extra {
    pub(super) flags: WcFlags,
    /// Immediate data in network byte order, or a key.
    pub(super) number: u32,
}

impl Extra {
    pub(super) const NONE: Extra = Extra { flags: WcFlags::empty(), number: 0 };
    /// Not a flag of verbs. Marks `number` as the share that was exceeded. Other failed work has no flags.
    const EXCEEDED: WcFlags = WcFlags::from_bits_retain(1 << 31);
}

impl Completion {
    /// Immediate data of the peer, in host byte order.
    #[must_use]
    #[inline(always)]
    pub fn imm(&self) -> Option<u32> {
        if self.extra.flags.contains(WcFlags::WITH_IMM) { Some(u32::from_be(self.extra.number)) } else { None }
    }

    /// What an atomic operation has found, the value before it, in host byte order; `None` of other work and of what failed.
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
    /// The connection is then in error. The message is in the buffer, and its status is [`WcStatus::GENERAL_ERR`].
    #[must_use]
    #[inline]
    pub fn exceeded_share(&self) -> Option<u32> {
        let exceeded = self.status == WcStatus::GENERAL_ERR && self.extra.flags == Extra::EXCEEDED;
        exceeded.then_some(self.extra.number)
    }

    /// Marks the message as one that exceeded the share of its endpoint.
    pub(super) fn exceeding(self, share: u32) -> Completion {
        let extra = Extra { flags: Extra::EXCEEDED, number: share };
        Completion { status: WcStatus::GENERAL_ERR, extra, ..self }
    }

    /// The completion if it succeeded.
    ///
    /// # Errors
    /// [`FailedWork`], which holds the completion and with it the buffer.
    #[inline(always)]
    pub fn ok(self) -> Result<Completion, FailedWork> {
        if self.status == WcStatus::SUCCESS { Ok(self) } else { Err(FailedWork(Box::new(self))) }
    }
}

/// Work that failed, with the buffer that was in it.
pub struct FailedWork(pub Box<Completion>);

impl FailedWork {
    /// What happened, without the buffer. It names the work by the number of its [`WorkId`].
    #[must_use]
    pub fn error(&self) -> CompletionError {
        let Completion { status, vendor_error, id, .. } = *self.0;
        CompletionError { status, vendor_error, wr_id: id.sequence(), qp_num: None }
    }
}

impl fmt::Display for FailedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.exceeded_share() {
            None => write!(f, "{:?}: {}", self.0.operation, self.error()),
            Some(share) => write!(
                f,
                "{:?}: the peer has sent more than the {share} messages that may wait for it: it keeps more requests \
                 unanswered than it may, or EndpointBuilder::receive_share is too small",
                self.0.operation
            ),
        }
    }
}

impl fmt::Debug for FailedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FailedWork").field(&self.0).finish()
    }
}

impl std::error::Error for FailedWork {}

/// Work that was not posted, and its buffer back.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Rejected {
    /// Why.
    pub error: PostError,
    /// The buffer, unless the work had none, or the provider may have it ([`PostError::InDoubt`]): then it comes back
    /// from [`Endpoint::close`](crate::Endpoint::close).
    pub buffer: Option<Buffer>,
}

/// A batch that was not posted, or not wholly.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Unposted {
    /// Why.
    pub error: PostError,
    /// Buffers of the work that was surely not posted, in the order in which it was added.
    pub buffers: Vec<Buffer>,
}

impl From<FailedWork> for crate::Error {
    /// Drops the buffer.
    fn from(failed: FailedWork) -> Self {
        failed.error().into()
    }
}

impl From<Unposted> for crate::Error {
    /// Drops the buffers.
    fn from(unposted: Unposted) -> Self {
        unposted.error.into()
    }
}

impl From<Rejected> for crate::Error {
    /// Drops the buffer.
    fn from(rejected: Rejected) -> Self {
        rejected.error.into()
    }
}
