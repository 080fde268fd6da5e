//! Creating shared receive queues.

use std::sync::Arc;

use rdma_sys::*;

use super::completing::Parts;
use super::{SharedReceiveQueue, SharedReceiveQueueAttributes, Slab};
use crate::errno::check_ptr;
use crate::id::SrqId;
use crate::post::RecvChain;
use crate::{Errno, Error, ProtectionDomain, Result};

/// Describes a shared receive queue: `ibv_create_srq(3)`. Made by [`ProtectionDomain::shared_receive_queue`].
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `build`"]
pub struct SharedReceiveQueueBuilder<'a> {
    pub(super) pd: &'a ProtectionDomain,
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) limit: u32,
    pub(super) max_batch: u32,
    pub(super) completing: Option<Parts<'a>>,
}

impl<'a> SharedReceiveQueueBuilder<'a> {
    pub(crate) fn new(pd: &'a ProtectionDomain, max_wr: u32) -> Self {
        SharedReceiveQueueBuilder { pd, max_wr, max_sge: 1, limit: 0, max_batch: 64, completing: None }
    }

    pub(super) fn completing(mut self, parts: Parts<'a>) -> Self {
        self.completing = Some(parts);
        self
    }

    /// Scatter/gather elements in a receive, at least 1; 1 unless set.
    pub fn sges(mut self, elements: u32) -> Self {
        self.max_sge = elements.max(1);
        self
    }

    /// As [`SharedReceiveQueue::set_limit`] right after creation; 0, for no event, unless set. The queue is empty then, and
    /// devices that report at once what is below its limit do so.
    pub fn limit(mut self, limit: u32) -> Self {
        self.limit = limit;
        self
    }

    /// Receives in one batch; 64 unless set, and no more than the queue holds at creation.
    pub fn max_batch(mut self, work_requests: u32) -> Self {
        self.max_batch = work_requests.max(1);
        self
    }

    /// Creates the queue.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has no shared receive queues; [`Error::CreateSharedReceiveQueue`] names what
    /// was asked for and the device's limits; those of [`SharedReceiveQueue::set_limit`].
    #[doc(alias = "ibv_create_srq")]
    #[doc(alias = "ibv_create_srq_ex")]
    pub fn build(self) -> Result<SharedReceiveQueue> {
        self.build_with(|_| None)
    }

    /// As [`SharedReceiveQueueBuilder::build`], with what keeps buffers of its receives until it is destroyed. That is made when
    /// the device has found the queue not too long.
    pub(crate) fn build_with(self, slab: impl FnOnce(u32) -> Option<Slab>) -> Result<SharedReceiveQueue> {
        let (context, id) = (self.pd.context(), SrqId::next());
        if let Some(parts) = &self.completing {
            parts.check(context)?;
        }
        let mut init = ibv_srq_init_attr_ex::zeroed();
        init.srq_context = id.to_context();
        // What a limit is set to at creation is ignored.
        init.attr = ibv_srq_attr { max_wr: self.max_wr, max_sge: self.max_sge, srq_limit: 0 };
        init.srq_type = IBV_SRQT_BASIC;
        init.pd = self.pd.as_raw();
        init.comp_mask = (IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD).0;
        if let Some(parts) = &self.completing {
            parts.set(&mut init);
        }
        // A basic one is made by `ibv_create_srq`.
        // SAFETY: the context and all that is named are valid, and `init` is for the duration of the call.
        let raw = check_ptr(|| unsafe { ibv_create_srq_ex(context.as_raw(), &mut init) })
            .map_err(|errno| self.error(errno))?;
        // SAFETY: just created as described here, and given to nobody else.
        let mut shared = unsafe { self.share(raw, id) };
        shared.ask_number()?;
        shared.object.slab = slab(self.max_wr);
        let shared = Arc::new(shared);
        // Some providers write what they granted, and some nothing.
        let granted = SharedReceiveQueueAttributes::from_raw(&init.attr);
        let capacity = SharedReceiveQueueAttributes {
            max_wr: granted.max_wr.max(self.max_wr),
            max_sge: granted.max_sge.max(self.max_sge),
            limit: 0,
        };
        let max_batch = self.max_batch.min(capacity.max_wr);
        // SAFETY: `shared`, which is kept beside it, owns the queue.
        let chain = unsafe { RecvChain::new(raw, capacity.max_sge, max_batch) };
        let mut srq = SharedReceiveQueue { chain, capacity, shared };
        if self.limit > 0 {
            srq.set_limit(self.limit)?;
        }
        Ok(srq)
    }

    fn error(&self, errno: Errno) -> Error {
        let device = self.pd.context().attributes();
        if errno.is_unsupported() {
            let feature = self.completing.as_ref().map_or("shared receive queues", Parts::feature);
            return self.pd.context().unsupported(feature);
        }
        Error::CreateSharedReceiveQueue {
            work_requests: self.max_wr,
            elements: self.max_sge,
            max_work_requests: device.max_srq_wr(),
            max_elements: device.max_srq_sge(),
            max_queues: device.max_srq(),
            errno,
        }
    }
}
