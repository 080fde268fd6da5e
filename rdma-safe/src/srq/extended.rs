//! Shared receive queues with a completion queue: XRC and tag matching.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use super::{Shared, SharedReceiveQueue, SharedReceiveQueueBuilder, Slab, TagListSize};
use crate::errno::check;
use crate::error::Verb;
use crate::id::SrqId;
use crate::object::{Object, Parents};
use crate::xrc::XrcDomain;
use crate::{CompletionQueue, Context, ProtectionDomain, Result, cq};

/// Objects that a queue depends on.
pub(super) struct MadeFrom {
    pub(super) pd: ProtectionDomain,
    /// Set if receives complete to a completion queue of the queue itself, not of its queue pairs.
    extended: Option<Extended>,
    /// Buffers of its receives, which the device may write to until the queue is destroyed.
    pub(super) slab: Option<Slab>,
}

/// Objects that a queue with a completion queue depends on.
struct Extended {
    /// Must outlive the queue.
    cq: Arc<cq::Shared>,
    /// For XRC: the domain, and the number of the queue in it.
    xrc: Option<(XrcDomain, u32)>,
    tags: bool,
}

/// Parameters to create a queue with a completion queue.
#[derive(Clone, Debug)]
pub(super) struct ExtendedParams<'a> {
    pub(super) cq: &'a CompletionQueue,
    pub(super) xrcd: Option<XrcDomain>,
    pub(super) tags: Option<TagListSize>,
}

impl ExtendedParams<'_> {
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

    /// Name of the feature, for a device that lacks it.
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

    fn parents(&self) -> Extended {
        let xrc = self.xrcd.clone().map(|xrcd| (xrcd, 0));
        Extended { cq: self.cq.shared().clone(), xrc, tags: self.tags.is_some() }
    }
}

impl SharedReceiveQueueBuilder<'_> {
    /// # Safety
    /// `raw` must have been created with these parameters and the name `id`, and the result must be its only owner.
    pub(super) unsafe fn share(&self, raw: NonNull<ibv_srq>, id: SrqId) -> Shared {
        let extended = self.extended.as_ref().map(ExtendedParams::parents);
        // SAFETY: the caller's contract. Each queue pair that uses the queue holds an `Arc` of the queue.
        let object = unsafe { Object::new(raw, MadeFrom { pd: self.pd.clone(), extended, slab: None }) };
        Shared { object, id }
    }
}

impl XrcDomain {
    /// Starts building a shared receive queue of this domain: `ibv_create_srq_ex(3)` of type XRC.
    ///
    /// It has room for at least `max_wr` work requests, whose memory belongs to `pd`. Its receives complete to `cq`,
    /// where [`WcFields::QP_NUM`](crate::WcFields::QP_NUM) is the number of the [`XrcTarget`](crate::xrc::XrcTarget) that
    /// the message arrived at.
    ///
    /// Senders address it by [`SharedReceiveQueue::xrc_number`]. Their reads and writes are checked against `pd`, too.
    #[doc(alias = "ibv_create_srq_ex")]
    pub fn shared_receive_queue<'a>(
        &self,
        pd: &'a ProtectionDomain,
        cq: &'a CompletionQueue,
        max_wr: u32,
    ) -> SharedReceiveQueueBuilder<'a> {
        pd.shared_receive_queue(max_wr).extended(ExtendedParams { cq, xrcd: Some(self.clone()), tags: None })
    }
}

impl SharedReceiveQueue {
    /// The number by which XRC senders address the queue: `ibv_get_srq_num(3)`.
    ///
    /// `None` unless the queue was made by [`XrcDomain::shared_receive_queue`].
    #[doc(alias = "ibv_get_srq_num")]
    #[must_use]
    pub fn xrc_number(&self) -> Option<u32> {
        self.shared().xrc_number()
    }
}

impl Shared {
    /// See [`SharedReceiveQueue::xrc_number`].
    pub(crate) fn xrc_number(&self) -> Option<u32> {
        self.object.extended.as_ref()?.xrc.as_ref().map(|(_, number)| *number)
    }

    pub(super) fn matches_tags(&self) -> bool {
        self.object.extended.as_ref().is_some_and(|extended| extended.tags)
    }

    /// Queries the number of an XRC queue. Called once.
    pub(super) fn query_number(&mut self) -> Result<()> {
        let raw = self.as_raw();
        let Some(Extended { xrc: Some((xrcd, number)), .. }) = &mut self.object.extended else { return Ok(()) };
        // SAFETY: the queue is valid, and `number` a valid out pointer.
        check(unsafe { ibv_get_srq_num(raw, number) })
            .map_err(|errno| xrcd.context().verb_error(Verb::GetSrqNum, errno))
    }
}

impl Parents for MadeFrom {
    type Raw = ibv_srq;

    const VERB: Verb = Verb::DestroySrq;

    fn context(&self) -> &Context {
        self.pd.context()
    }

    /// mlx4 locks the completion queue of the shared receive queue.
    fn polled_by_this_thread(&self) -> Option<&Arc<cq::Shared>> {
        self.extended.as_ref().map(|extended| &extended.cq).filter(|cq| cq.is_polled_by_this_thread())
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_srq) -> std::ffi::c_int {
        // SAFETY: the caller's contract. Every asynchronous event is acknowledged as it is read (`AsyncEvents`), so
        // this does not block for long.
        unsafe { (self.context().verbs().ibv_destroy_srq)(raw) }
    }
}
