//! Shared receive queues with tag matching in the device.

use std::ptr::{NonNull, null_mut};

use rdma_sys::*;

use super::extended::ExtendedParams;
use super::{SharedReceiveQueue, SharedReceiveQueueBuilder};
use crate::id::SrqId;
use crate::{CompletionQueue, Context, Error, PostError, ProtectionDomain, Result, Sge};

pub(super) const FEATURE: &str = "matching of tags by shared receive queues";

/// Size of a tag list: `struct ibv_tm_cap`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TagListSize {
    /// Maximum number of entries.
    pub tags: u32,
    /// Maximum number of outstanding operations on the list.
    pub ops: u32,
}

impl TagListSize {
    pub(super) fn check(self, context: &Context) -> Result<()> {
        let caps = context.attributes().tag_matching().ok_or_else(|| context.unsupported(FEATURE))?;
        if self.tags > caps.max_tags || self.ops > caps.max_ops {
            return Err(Error::TagList { requested: self, max_tags: caps.max_tags, max_ops: caps.max_ops });
        }
        Ok(())
    }
}

impl ProtectionDomain {
    /// Starts building a shared receive queue that matches messages by tag: `ibv_create_srq_ex(3)` of type TM.
    ///
    /// It has room for at least `max_wr` work requests. All receives of the queue, and of the queue pairs that use it,
    /// complete to `cq`.
    ///
    /// A message that matches an entry of the [`TagList`] goes to the memory of that entry. Any other message consumes
    /// a receive of the queue, including its [`TagHeader`]. Both complete as
    /// [`WcOpcode::TM_RECV`](crate::WcOpcode::TM_RECV), the former with
    /// [`WcFlags::TM_MATCH`](crate::WcFlags::TM_MATCH).
    ///
    /// # Errors
    /// The errors of [`SharedReceiveQueueBuilder::build`]; [`Error::Unsupported`] if the device reports no
    /// [`TagMatching`](crate::device::TagMatching); [`Error::TagList`] beyond its limits.
    #[doc(alias = "ibv_create_srq_ex")]
    pub fn tag_matching_queue<'a>(
        &'a self,
        cq: &'a CompletionQueue,
        max_wr: u32,
        size: TagListSize,
    ) -> SharedReceiveQueueBuilder<'a> {
        self.shared_receive_queue(max_wr).extended(ExtendedParams { cq, xrcd: None, tags: Some(size) })
    }
}

impl SharedReceiveQueue {
    /// The tag list; `None` unless the queue was made by [`ProtectionDomain::tag_matching_queue`].
    #[must_use]
    pub fn tag_list(&mut self) -> Option<TagList<'_>> {
        self.shared().matches_tags().then_some(TagList { srq: self })
    }
}

/// The tag list of a shared receive queue. Lent by [`SharedReceiveQueue::tag_list`].
#[derive(Debug)]
pub struct TagList<'q> {
    srq: &'q mut SharedReceiveQueue,
}

/// Parameters of an operation on a tag list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct TagOperation {
    id: u64,
    signaled: bool,
    unexpected: Option<u32>,
}

impl TagOperation {
    /// An operation with the identifier `id` that reports a completion only if it fails.
    pub fn new(id: u64) -> Self {
        TagOperation { id, signaled: false, unexpected: None }
    }

    /// Requests a completion in the completion queue of the list.
    pub fn signaled(self) -> Self {
        TagOperation { signaled: true, ..self }
    }

    /// Reports the number of unexpected messages that the program has handled since the queue was created.
    ///
    /// Without this report, the device does not match entries that were added after an unexpected message.
    /// [`WcFlags::TM_SYNC_REQ`](crate::WcFlags::TM_SYNC_REQ) requests it.
    pub fn unexpected(self, count: u32) -> Self {
        TagOperation { unexpected: Some(count), ..self }
    }

    fn raw(self, opcode: ibv_ops_wr_opcode) -> ibv_ops_wr {
        let mut flags = 0;
        if self.signaled {
            flags |= IBV_OPS_SIGNALED.0;
        }
        if self.unexpected.is_some() {
            flags |= IBV_OPS_TM_SYNC.0;
        }
        let mut wr = ibv_ops_wr::zeroed();
        (wr.wr_id, wr.opcode, wr.flags) = (self.id, opcode, flags as i32);
        wr.tm.unexpected_cnt = self.unexpected.unwrap_or(0);
        wr
    }
}

/// Matching rule of an entry: a message matches if its tag equals `tag` in the bits of `mask`.
///
/// A plain value that gets no further fields.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tag {
    /// Expected tag.
    pub tag: u64,
    /// Bits to compare.
    pub mask: u64,
}

/// A handle to remove an entry of a tag list.
#[derive(PartialEq, Eq, Debug)]
pub struct TagHandle {
    srq: SrqId,
    raw: u32,
}

impl TagList<'_> {
    /// Adds an entry: `ibv_post_srq_ops(3)` with `IBV_WR_TAG_ADD`.
    ///
    /// The next message that matches `tag`, and no earlier entry of the list, goes to `sges` without its [`TagHeader`],
    /// and completes with `receive_id`.
    ///
    /// # Errors
    /// [`PostError::TooManySges`] for more than [`TagMatching::max_sge`](crate::device::TagMatching::max_sge);
    /// [`PostError::QueueFull`] when the list is full or too many operations are outstanding; [`PostError::Refused`]
    /// and [`PostError::MaybePosted`].
    ///
    /// # Safety
    /// The contract of a receive applies, see [`RecvBatch`](crate::RecvBatch). It ends when `receive_id` has completed
    /// with [`WcFlags::TM_DATA_VALID`](crate::WcFlags::TM_DATA_VALID), when the removal of the entry has completed with
    /// success, or when the queue is destroyed.
    #[doc(alias = "ibv_post_srq_ops")]
    pub unsafe fn add(
        &mut self,
        op: TagOperation,
        receive_id: u64,
        tag: Tag,
        sges: &[Sge],
    ) -> Result<TagHandle, PostError> {
        let max = self.srq.context().attributes().tag_matching().map_or(0, |caps| caps.max_sge);
        if sges.len() > max as usize {
            return Err(PostError::TooManySges { count: sges.len(), max });
        }
        let mut wr = op.raw(IBV_WR_TAG_ADD);
        wr.tm.add = ibv_ops_wr__bindgen_ty_1__bindgen_ty_1 {
            recv_wr_id: receive_id,
            sg_list: sges.as_ptr().cast_mut().cast(),
            num_sge: sges.len() as i32,
            tag: tag.tag,
            mask: tag.mask,
        };
        // SAFETY: the caller's contract. `Sge` has the layout of `struct ibv_sge`, and the call only reads the list.
        unsafe { self.post(&mut wr) }?;
        Ok(TagHandle { srq: self.srq.id(), raw: wr.tm.handle })
    }

    /// Removes an entry: `ibv_post_srq_ops(3)` with `IBV_WR_TAG_DEL`.
    ///
    /// If a message has consumed it in the meantime, the operation completes with
    /// [`WcStatus::TM_ERR`](crate::WcStatus::TM_ERR).
    ///
    /// # Errors
    /// [`PostError::ForeignTag`] for an entry of another queue; the errors of [`TagList::add`].
    ///
    /// # Safety
    /// The entry must not have been removed, and no completion of it may have been polled: providers do not check that
    /// the handle is still valid.
    #[doc(alias = "ibv_post_srq_ops")]
    pub unsafe fn remove(&mut self, op: TagOperation, entry: &TagHandle) -> Result<(), PostError> {
        if entry.srq != self.srq.id() {
            return Err(PostError::ForeignTag);
        }
        let mut wr = op.raw(IBV_WR_TAG_DEL);
        wr.tm.handle = entry.raw;
        // SAFETY: the caller's contract: the provider has issued the handle, and it is still valid.
        unsafe { self.post(&mut wr) }
    }

    /// Carries a [`TagOperation::unexpected`] count without changing the list: `ibv_post_srq_ops(3)` with
    /// `IBV_WR_TAG_SYNC`.
    ///
    /// # Errors
    /// Like [`TagList::add`].
    #[doc(alias = "ibv_post_srq_ops")]
    pub fn sync(&mut self, op: TagOperation) -> Result<(), PostError> {
        // SAFETY: the operation names no memory and no entry.
        unsafe { self.post(&mut op.raw(IBV_WR_TAG_SYNC)) }
    }

    /// # Safety
    /// The contract of [`TagList::add`] or [`TagList::remove`], according to the opcode.
    unsafe fn post(&mut self, wr: &mut ibv_ops_wr) -> Result<(), PostError> {
        let (raw, mut bad) = (NonNull::from(wr).as_ptr(), null_mut());
        // SAFETY: the queue is valid and matches tags. The work request is complete, and not used after the call.
        match unsafe { ibv_post_srq_ops(self.srq.as_raw(), raw, &mut bad) } {
            0 => Ok(()),
            errno => Err(PostError::from_provider(errno, (bad == raw).then_some(0))),
        }
    }
}

/// Header of a message with a tag: `struct ibv_tmh`.
///
/// The header precedes the payload. The receiver gets it only if no entry matched the message. It has the fields of the wire
/// format, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TagHeader {
    /// Type of the message.
    pub kind: TagMessage,
    /// Data for the application.
    pub private: u32,
    /// Tag to match.
    pub tag: u64,
}

crate::named::named! {
    /// Type of a message with a tag: `enum ibv_tmh_op`.
    pub struct TagMessage(u8) as "tag message" {
        /// Not matched. Completes as [`WcOpcode::TM_NO_TAG`](crate::WcOpcode::TM_NO_TAG).
        NO_TAG = 0 => "NO_TAG",
        /// The payload contains the location to read the data from.
        RENDEZVOUS = 1 => "RENDEZVOUS",
        /// End of a rendezvous.
        FINISHED = 2 => "FINISHED",
        /// The message contains its data.
        EAGER = 3 => "EAGER",
    }
}

impl TagHeader {
    /// Length in bytes.
    pub const LEN: usize = 16;

    /// The header in wire format.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = self.kind.0;
        bytes[4..8].copy_from_slice(&self.private.to_be_bytes());
        bytes[8..].copy_from_slice(&self.tag.to_be_bytes());
        bytes
    }

    /// Parses the header of an unmatched message; `None` if the message is too short.
    #[must_use]
    pub fn parse(message: &[u8]) -> Option<Self> {
        let (bytes, _) = message.split_first_chunk::<{ Self::LEN }>()?;
        let [kind, _, _, _, p0, p1, p2, p3, tag @ ..] = *bytes;
        Some(TagHeader {
            kind: TagMessage(kind),
            private: u32::from_be_bytes([p0, p1, p2, p3]),
            tag: u64::from_be_bytes(tag),
        })
    }
}

/// Tag information in a completion: `struct ibv_wc_tm_info`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct TagInfo {
    /// The tag.
    pub tag: u64,
    /// Data for the application, from the header.
    pub private: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_layout_of_c_and_round_trips() {
        let header = TagHeader { kind: TagMessage::EAGER, private: 0x0102_0304, tag: 0x1112_1314_1516_1718 };
        let bytes = header.to_bytes();
        assert_eq!(bytes, *b"\x03\0\0\0\x01\x02\x03\x04\x11\x12\x13\x14\x15\x16\x17\x18");
        assert_eq!(TagHeader::parse(&[&bytes[..], b"payload"].concat()), Some(header));
        assert_eq!(TagHeader::parse(&bytes[..15]), None);
    }
}
