//! Building shared receive queues.

use std::sync::Arc;

use rdma_sys::*;

use super::extended::ExtendedParams;
use super::{SharedReceiveQueue, SharedReceiveQueueAttributes, Slab};
use crate::errno::check_ptr;
use crate::id::SrqId;
use crate::post::RecvChain;
use crate::{Errno, Error, ProtectionDomain, Result};

/// Builds a shared receive queue: `ibv_create_srq(3)`. Made by [`ProtectionDomain::shared_receive_queue`].
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `build`"]
pub struct SharedReceiveQueueBuilder<'a> {
    pub(super) pd: &'a ProtectionDomain,
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) limit: u32,
    pub(super) max_batch: u32,
    pub(super) extended: Option<ExtendedParams<'a>>,
}

impl<'a> SharedReceiveQueueBuilder<'a> {
    pub(crate) fn new(pd: &'a ProtectionDomain, max_wr: u32) -> Self {
        SharedReceiveQueueBuilder { pd, max_wr, max_sge: 1, limit: 0, max_batch: 64, extended: None }
    }

    pub(super) fn extended(mut self, params: ExtendedParams<'a>) -> Self {
        self.extended = Some(params);
        self
    }

    /// Scatter/gather elements per receive, at least 1; 1 by default.
    pub fn sges(mut self, elements: u32) -> Self {
        self.max_sge = elements.max(1);
        self
    }

    /// Limit that is set right after creation, see [`SharedReceiveQueue::set_limit`]; 0, no event, by default.
    ///
    /// The queue is then empty, so some devices raise the event immediately.
    pub fn limit(mut self, limit: u32) -> Self {
        self.limit = limit;
        self
    }

    /// Maximum number of receives in one batch; 64 by default, limited to the initial capacity of the queue.
    pub fn max_batch(mut self, work_requests: u32) -> Self {
        self.max_batch = work_requests.max(1);
        self
    }

    /// Creates the queue.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no shared receive queues; [`Error::CreateSharedReceiveQueue`] with the
    /// requested values and the device's limits; the errors of [`SharedReceiveQueue::set_limit`].
    #[doc(alias = "ibv_create_srq")]
    #[doc(alias = "ibv_create_srq_ex")]
    pub fn build(self) -> Result<SharedReceiveQueue> {
        self.build_with(|_| None)
    }

    /// Like [`SharedReceiveQueueBuilder::build`], with a slab that keeps the buffers until the queue is destroyed.
    ///
    /// `slab` is called after the device has accepted the depth.
    pub(crate) fn build_with(self, slab: impl FnOnce(u32) -> Option<Slab>) -> Result<SharedReceiveQueue> {
        let (context, id) = (self.pd.context(), SrqId::next());
        if let Some(params) = &self.extended {
            params.check(context)?;
        }
        let mut init = ibv_srq_init_attr_ex::zeroed();
        init.srq_context = id.to_context();
        // A limit at creation is ignored by verbs.
        init.attr = ibv_srq_attr { max_wr: self.max_wr, max_sge: self.max_sge, srq_limit: 0 };
        init.srq_type = IBV_SRQT_BASIC;
        init.pd = self.pd.as_raw();
        init.comp_mask = (IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD).0;
        if let Some(params) = &self.extended {
            params.set(&mut init);
        }
        // SAFETY: the context and all objects in `init` are valid, and so is `init` during the call. For a basic queue,
        // the shim calls `ibv_create_srq`.
        let raw = check_ptr(|| unsafe { ibv_create_srq_ex(context.as_raw(), &mut init) })
            .map_err(|errno| self.error(errno))?;
        // SAFETY: just created with these parameters, and not shared with anything.
        let mut shared = unsafe { self.share(raw, id) };
        shared.query_number()?;
        shared.object.slab = slab(self.max_wr);
        let shared = Arc::new(shared);
        // Some providers report the actual capacity, and some do not write it.
        let granted = SharedReceiveQueueAttributes::from_raw(&init.attr);
        let capacity = SharedReceiveQueueAttributes {
            max_wr: granted.max_wr.max(self.max_wr),
            max_sge: granted.max_sge.max(self.max_sge),
            limit: 0,
        };
        let max_batch = self.max_batch.min(capacity.max_wr);
        // SAFETY: `shared`, which is kept alongside, owns the queue.
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
            let feature = self.extended.as_ref().map_or("shared receive queues", ExtendedParams::feature);
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
