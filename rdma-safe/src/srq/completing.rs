//! Shared receive queues that have a completion queue of their own, and the end of every one.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use super::{Shared, SharedReceiveQueue, SharedReceiveQueueBuilder, TagListSize};
use crate::errno::check;
use crate::{CompletionQueue, Context, Error, ProtectionDomain, Result, XrcDomain, cq};

/// What a queue that completes receives itself was made with.
pub(super) struct Completing {
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
        if !self.cq.context().is_same(context) {
            return Err(Error::ForeignContext { object: "completion queue" });
        }
        if let Some(size) = self.tags {
            size.check(context)?;
        }
        match &self.xrcd {
            Some(xrcd) if !xrcd.context().is_same(context) => Err(Error::ForeignContext { object: "XRC domain" }),
            _ => Ok(()),
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

    pub(super) fn kept(&self) -> Completing {
        let xrc = self.xrcd.clone().map(|xrcd| (xrcd, 0));
        Completing { cq: self.cq.shared().clone(), xrc, tags: self.tags.is_some() }
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
        self.completing.as_ref()?.xrc.as_ref().map(|(_, number)| *number)
    }

    pub(super) fn matches_tags(&self) -> bool {
        self.completing.as_ref().is_some_and(|completing| completing.tags)
    }

    /// Asks for the number, once, of an XRC queue.
    pub(super) fn ask_number(&mut self) -> Result<()> {
        let Some(Completing { xrc: Some((xrcd, number)), .. }) = &mut self.completing else { return Ok(()) };
        // SAFETY: the queue is valid, and `number` a valid out pointer.
        check(unsafe { ibv_get_srq_num(self.raw.as_ptr(), number) })
            .map_err(|errno| xrcd.context().verb_error("ibv_get_srq_num", errno))
    }
}

/// A queue that nothing refers to any more.
pub(super) struct Doomed {
    raw: NonNull<ibv_srq>,
    /// Taken by the destruction.
    parents: Option<(ProtectionDomain, Option<Completing>)>,
}

// SAFETY: libibverbs objects may be used from any thread (see `Context`).
unsafe impl Send for Doomed {}

impl Doomed {
    pub(super) fn new(raw: NonNull<ibv_srq>, pd: ProtectionDomain, completing: Option<Completing>) -> Self {
        Doomed { raw, parents: Some((pd, completing)) }
    }

    /// Destroys it now or, if that would wait for the lock of a completion queue that this very thread holds (mlx4 takes it), when
    /// the lock is released. On failure all it depends on is leaked, since the device may still use it.
    pub(super) fn destroy(mut self) -> Result<()> {
        let Some((pd, completing)) = self.parents.take() else { return Ok(()) };
        let polled = completing.as_ref().map(|completing| &completing.cq).filter(|cq| cq.is_polled_here()).cloned();
        if let Some(cq) = polled {
            cq.defer(Box::new(Doomed::new(self.raw, pd, completing)));
            return Err(Error::PolledHere { verb: "ibv_destroy_srq" });
        }
        // SAFETY: the parents were just taken, so this happens once, and nothing refers to the queue. Every asynchronous event was
        // acknowledged as it was read (`AsyncEvents`), so this does not block for long.
        check(unsafe { (pd.context().verbs().ibv_destroy_srq)(self.raw.as_ptr()) }).map_err(|errno| {
            let error = pd.context().verb_error("ibv_destroy_srq", errno);
            // The queue still exists: what it belongs to must outlive it.
            std::mem::forget((pd, completing));
            error
        })
    }
}

impl Drop for Doomed {
    fn drop(&mut self) {
        // Deferred before, and now dropped: `destroy` leaves nothing behind to drop again.
        if let Some((pd, completing)) = self.parents.take() {
            let _ = Doomed::new(self.raw, pd, completing).destroy();
        }
    }
}
