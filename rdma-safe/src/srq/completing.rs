//! What shared receive queues are made from, a completion queue of their own among it.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use super::{Shared, SharedReceiveQueue, SharedReceiveQueueBuilder, Slab, TagListSize};
use crate::errno::check;
use crate::id::SrqId;
use crate::object::{Object, Parents};
use crate::{CompletionQueue, Context, ProtectionDomain, Result, XrcDomain, cq};

/// What a queue was made from.
pub(super) struct MadeFrom {
    pub(super) pd: ProtectionDomain,
    /// Of one that completes receives itself, instead of the queue pairs that take from it.
    completing: Option<Completing>,
    /// Buffers of its receives, which the device may write until it is destroyed.
    pub(super) slab: Option<Slab>,
}

/// What a queue that completes receives itself was made with.
struct Completing {
    /// It must outlive the queue.
    cq: Arc<cq::Shared>,
    /// Of an XRC one: its domain, and its number there.
    xrc: Option<(XrcDomain, u32)>,
    tags: bool,
}

/// What to make such a queue of.
#[derive(Clone, Debug)]
pub(super) struct Parts<'a> {
    pub(super) cq: &'a CompletionQueue,
    pub(super) xrcd: Option<XrcDomain>,
    pub(super) tags: Option<TagListSize>,
}

impl Parts<'_> {
    pub(super) fn check(&self, context: &Context) -> Result<()> {
        context.require_same(self.cq.context(), "completion queue")?;
        if let Some(size) = self.tags {
            size.check(context)?;
        }
        match &self.xrcd {
            Some(xrcd) => context.require_same(xrcd.context(), "XRC domain"),
            None => Ok(()),
        }
    }

    /// What the device lacks that cannot make one.
    pub(super) fn feature(&self) -> &'static str {
        match self.tags {
            Some(_) => super::tag_matching::FEATURE,
            None => "shared receive queues of extended reliable connections (XRC)",
        }
    }

    pub(super) fn set(&self, attr: &mut ibv_srq_init_attr_ex) {
        attr.cq = self.cq.as_raw();
        attr.comp_mask |= IBV_SRQ_INIT_ATTR_CQ.0;
        if let Some(xrcd) = &self.xrcd {
            attr.srq_type = IBV_SRQT_XRC;
            attr.xrcd = xrcd.as_raw();
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD.0;
        }
        if let Some(TagListSize { tags, ops }) = self.tags {
            attr.srq_type = IBV_SRQT_TM;
            attr.tm_cap = ibv_tm_cap { max_num_tags: tags, max_ops: ops };
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_TM.0;
        }
    }

    fn kept(&self) -> Completing {
        let xrc = self.xrcd.clone().map(|xrcd| (xrcd, 0));
        Completing { cq: self.cq.shared().clone(), xrc, tags: self.tags.is_some() }
    }
}

impl SharedReceiveQueueBuilder<'_> {
    /// # Safety
    /// `raw` must have been created as this says, with the name `id`, and be the result's alone to destroy.
    pub(super) unsafe fn share(&self, raw: NonNull<ibv_srq>, id: SrqId) -> Shared {
        let completing = self.completing.as_ref().map(Parts::kept);
        // SAFETY: the caller's contract; a queue pair that takes from it holds an `Arc` of it.
        let object = unsafe { Object::new(raw, MadeFrom { pd: self.pd.clone(), completing, slab: None }) };
        Shared { object, id }
    }
}

impl XrcDomain {
    /// Starts describing a shared receive queue of this domain for at least `max_wr` work requests, whose memory is of `pd`:
    /// `ibv_create_srq_ex(3)` of type XRC. Its receives complete to `cq`, where [`WcFields::QP_NUM`](crate::WcFields::QP_NUM) is
    /// that of the [`XrcTarget`](crate::XrcTarget) that a message came by.
    ///
    /// Senders name it by [`SharedReceiveQueue::xrc_number`]. The rights to memory of `pd` are what counts for what they read and
    /// write, too.
    #[doc(alias = "ibv_create_srq_ex")]
    pub fn shared_receive_queue<'a>(
        &self,
        pd: &'a ProtectionDomain,
        cq: &'a CompletionQueue,
        max_wr: u32,
    ) -> SharedReceiveQueueBuilder<'a> {
        pd.shared_receive_queue(max_wr).completing(Parts { cq, xrcd: Some(self.clone()), tags: None })
    }
}

impl SharedReceiveQueue {
    /// The number by which senders of XRC name it: `ibv_get_srq_num(3)`. `None` for queues that were not made by
    /// [`XrcDomain::shared_receive_queue`].
    #[doc(alias = "ibv_get_srq_num")]
    #[must_use]
    pub fn xrc_number(&self) -> Option<u32> {
        self.shared().xrc_number()
    }
}

impl Shared {
    /// See [`SharedReceiveQueue::xrc_number`].
    pub(crate) fn xrc_number(&self) -> Option<u32> {
        self.object.completing.as_ref()?.xrc.as_ref().map(|(_, number)| *number)
    }

    pub(super) fn matches_tags(&self) -> bool {
        self.object.completing.as_ref().is_some_and(|completing| completing.tags)
    }

    /// Asks for the number, once, of an XRC queue.
    pub(super) fn ask_number(&mut self) -> Result<()> {
        let raw = self.as_raw();
        let Some(Completing { xrc: Some((xrcd, number)), .. }) = &mut self.object.completing else { return Ok(()) };
        // SAFETY: the queue is valid, and `number` a valid out pointer.
        check(unsafe { ibv_get_srq_num(raw, number) })
            .map_err(|errno| xrcd.context().verb_error("ibv_get_srq_num", errno))
    }
}

impl Parents for MadeFrom {
    type Raw = ibv_srq;

    const VERB: &'static str = "ibv_destroy_srq";

    fn context(&self) -> &Context {
        self.pd.context()
    }

    /// mlx4 takes the lock of the queue that it completes to.
    fn polled_here(&self) -> Option<&Arc<cq::Shared>> {
        self.completing.as_ref().map(|completing| &completing.cq).filter(|cq| cq.is_polled_here())
    }

    unsafe fn destroy(&self, raw: *mut ibv_srq) -> std::ffi::c_int {
        // SAFETY: the caller's contract. Every asynchronous event was acknowledged as it was read (`AsyncEvents`), so this does not
        // block for long.
        unsafe { (self.context().verbs().ibv_destroy_srq)(raw) }
    }
}
