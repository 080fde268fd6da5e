//! Shared receive queues whose device matches messages to receives by tag.

use std::ptr::{NonNull, null_mut};

use rdma_sys::*;

use super::completing::Parts;
use super::{SharedReceiveQueue, SharedReceiveQueueBuilder};
use crate::id::SrqId;
use crate::{CompletionQueue, Context, Error, PostError, ProtectionDomain, Result, Sge};

pub(super) const FEATURE: &str = "matching of tags by shared receive queues";

/// How long a list of tags is: `struct ibv_tm_cap`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TagListSize {
    /// Entries of the list.
    pub tags: u32,
    /// Operations on the list that can be outstanding.
    pub ops: u32,
}

impl TagListSize {
    pub(super) fn check(self, context: &Context) -> Result<()> {
        let caps = context.attributes().tag_matching().ok_or_else(|| context.unsupported(FEATURE))?;
        if self.tags > caps.max_tags || self.ops > caps.max_ops {
            return Err(Error::TagList { asked: self, max_tags: caps.max_tags, max_ops: caps.max_ops });
        }
        Ok(())
    }
}

impl ProtectionDomain {
    /// Starts describing a shared receive queue for at least `max_wr` work requests that matches messages by tag:
    /// `ibv_create_srq_ex(3)` of type TM. What it and the queue pairs that take from it receive completes to `cq`.
    ///
    /// A message that matches an entry of its [`TagList`] goes to the memory of that; any other takes a receive of the queue, as it
    /// is, with its [`TagHeader`]. Both complete as [`WcOpcode::TM_RECV`](crate::WcOpcode::TM_RECV), the former with
    /// [`WcFlags::TM_MATCH`](crate::WcFlags::TM_MATCH).
    ///
    /// # Errors
    /// Those of [`SharedReceiveQueueBuilder::build`]; [`Error::Unsupported`] where the device reports no
    /// [`TagMatching`](crate::TagMatching), and [`Error::TagList`] beyond its limits.
    #[doc(alias = "ibv_create_srq_ex")]
    pub fn tag_matching_queue<'a>(
        &'a self,
        cq: &'a CompletionQueue,
        max_wr: u32,
        size: TagListSize,
    ) -> SharedReceiveQueueBuilder<'a> {
        self.shared_receive_queue(max_wr).completing(Parts { cq, xrcd: None, tags: Some(size) })
    }
}

impl SharedReceiveQueue {
    /// Its list of tags; `None` for queues that were not made by [`ProtectionDomain::tag_matching_queue`].
    #[must_use]
    pub fn tag_list(&mut self) -> Option<TagList<'_>> {
        self.shared().matches_tags().then_some(TagList { srq: self })
    }
}

/// The tags that a shared receive queue matches. Lent by [`SharedReceiveQueue::tag_list`].
#[derive(Debug)]
pub struct TagList<'q> {
    srq: &'q mut SharedReceiveQueue,
}

/// An operation on a list of tags: its identifier, and whether it completes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct TagOperation {
    id: u64,
    signaled: bool,
    unexpected: Option<u32>,
}

impl TagOperation {
    /// One that completes silently unless it fails.
    pub fn new(id: u64) -> Self {
        TagOperation { id, signaled: false, unexpected: None }
    }

    /// Completes with an entry in the completion queue of the list.
    pub fn signaled(self) -> Self {
        TagOperation { signaled: true, ..self }
    }

    /// Tells the device how many unexpected messages the program has dealt with since the queue was made. Without that, it matches
    /// none of what is added after an unexpected message: [`WcFlags::TM_SYNC_REQ`](crate::WcFlags::TM_SYNC_REQ) asks for it.
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

/// What an entry of a list matches: a message whose tag, as far as `mask` has bits, is `tag`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tag {
    /// Bits to be found.
    pub tag: u64,
    /// Bits to look at.
    pub mask: u64,
}

/// An entry of a list of tags, to remove it by.
#[derive(PartialEq, Eq, Debug)]
pub struct TagHandle {
    srq: SrqId,
    raw: u32,
}

impl TagList<'_> {
    /// Adds an entry: the next message that matches `tag`, and none before it in the list, goes to `sges`, without its
    /// [`TagHeader`], and completes with `receive_id`: `ibv_post_srq_ops(3)` with `IBV_WR_TAG_ADD`.
    ///
    /// # Errors
    /// [`PostError::TooManySges`] for more than [`TagMatching::max_sge`](crate::TagMatching::max_sge); [`PostError::QueueFull`]
    /// when the list is full or too many operations are outstanding; [`PostError::Refused`] and [`PostError::InDoubt`].
    ///
    /// # Safety
    /// As for a receive, see [`RecvBatch`](crate::RecvBatch), until `receive_id` has completed with
    /// [`WcFlags::TM_DATA_VALID`](crate::WcFlags::TM_DATA_VALID), the entry was removed and that has completed with success, or the
    /// queue was destroyed.
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
        // SAFETY: the caller's contract; `Sge` has the layout of `struct ibv_sge`, and the list is read only.
        unsafe { self.post(&mut wr) }?;
        Ok(TagHandle { srq: self.srq.id(), raw: wr.tm.handle })
    }

    /// Removes an entry: `ibv_post_srq_ops(3)` with `IBV_WR_TAG_DEL`. When a message has taken it meanwhile, the operation
    /// completes with [`WcStatus::TM_ERR`](crate::WcStatus::TM_ERR).
    ///
    /// # Errors
    /// [`PostError::ForeignTag`] for an entry of another queue; as [`TagList::add`].
    ///
    /// # Safety
    /// No completion of the entry may have been polled, and it not be removed already: providers do not check that the handle still
    /// stands for it.
    #[doc(alias = "ibv_post_srq_ops")]
    pub unsafe fn remove(&mut self, op: TagOperation, entry: &TagHandle) -> Result<(), PostError> {
        if entry.srq != self.srq.id() {
            return Err(PostError::ForeignTag);
        }
        let mut wr = op.raw(IBV_WR_TAG_DEL);
        wr.tm.handle = entry.raw;
        // SAFETY: the caller's contract: the handle is one that the provider has given out and that stands for something.
        unsafe { self.post(&mut wr) }
    }

    /// Changes nothing of the list, for the sake of [`TagOperation::unexpected`]: `ibv_post_srq_ops(3)` with `IBV_WR_TAG_SYNC`.
    ///
    /// # Errors
    /// As [`TagList::add`].
    #[doc(alias = "ibv_post_srq_ops")]
    pub fn sync(&mut self, op: TagOperation) -> Result<(), PostError> {
        // SAFETY: no memory and no entry is named.
        unsafe { self.post(&mut op.raw(IBV_WR_TAG_SYNC)) }
    }

    /// # Safety
    /// As of [`TagList::add`] and [`TagList::remove`], by its opcode.
    unsafe fn post(&mut self, wr: &mut ibv_ops_wr) -> Result<(), PostError> {
        let (raw, mut bad) = (NonNull::from(wr).as_ptr(), null_mut());
        // SAFETY: the queue is valid and matches tags, and the work request is one that is whole, and is not kept.
        match unsafe { ibv_post_srq_ops(self.srq.as_raw(), raw, &mut bad) } {
            0 => Ok(()),
            errno => Err(PostError::from_provider(errno, (bad == raw).then_some(0))),
        }
    }
}

/// What stands before the payload of a message that is matched by its tag: `struct ibv_tmh`. Sent as part of the message; of a
/// matched one it is not received.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TagHeader {
    /// What kind of message it is.
    pub kind: TagMessage,
    /// For the program.
    pub private: u32,
    /// What is matched.
    pub tag: u64,
}

crate::named::named! {
    /// Kind of a message with a tag: `enum ibv_tmh_op`.
    pub struct TagMessage(u8) as "tag message" {
        /// Not to be matched: it completes as [`WcOpcode::TM_NO_TAG`](crate::WcOpcode::TM_NO_TAG).
        NO_TAG = 0 => "NO_TAG",
        /// Its payload says where the data is to be read from.
        RENDEZVOUS = 1 => "RENDEZVOUS",
        /// The end of a rendezvous.
        FINISHED = 2 => "FINISHED",
        /// With its data.
        EAGER = 3 => "EAGER",
    }
}

impl TagHeader {
    /// Bytes that it has.
    pub const LEN: usize = 16;

    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = self.kind.0;
        bytes[4..8].copy_from_slice(&self.private.to_be_bytes());
        bytes[8..].copy_from_slice(&self.tag.to_be_bytes());
        bytes
    }

    /// From the start of a message that was not matched; `None` when it is too short.
    #[must_use]
    pub fn of(message: &[u8]) -> Option<Self> {
        let (bytes, _) = message.split_first_chunk::<{ Self::LEN }>()?;
        let [kind, _, _, _, p0, p1, p2, p3, tag @ ..] = *bytes;
        Some(TagHeader {
            kind: TagMessage(kind),
            private: u32::from_be_bytes([p0, p1, p2, p3]),
            tag: u64::from_be_bytes(tag),
        })
    }
}

/// What a completion says of the tag of its message: `struct ibv_wc_tm_info`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TagInfo {
    /// The tag.
    pub tag: u64,
    /// What the header had for the program.
    pub private: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_bytes_of_c_and_comes_back_from_them() {
        let header = TagHeader { kind: TagMessage::EAGER, private: 0x0102_0304, tag: 0x1112_1314_1516_1718 };
        let bytes = header.to_bytes();
        assert_eq!(bytes, *b"\x03\0\0\0\x01\x02\x03\x04\x11\x12\x13\x14\x15\x16\x17\x18");
        assert_eq!(TagHeader::of(&[&bytes[..], b"payload"].concat()), Some(header));
        assert_eq!(TagHeader::of(&bytes[..15]), None);
    }
}
