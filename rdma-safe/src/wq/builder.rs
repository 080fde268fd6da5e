//! Building work queues.

use rdma_sys::*;

use super::{Parents, Shared, WorkQueue, WorkQueueFlags, WorkQueueState};
use crate::errno::check_ptr;
use crate::id::WqId;
use crate::object::Object;
use crate::{CompletionQueue, Error, ProtectionDomain, Result};

/// Builds a receive work queue: `ibv_create_wq(3)`. Made by [`ProtectionDomain::work_queue`].
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `build`"]
pub struct WorkQueueBuilder<'a> {
    pd: &'a ProtectionDomain,
    cq: &'a CompletionQueue,
    max_wr: u32,
    max_sge: u32,
    max_batch: u32,
    flags: WorkQueueFlags,
}

impl ProtectionDomain {
    /// Starts building a receive work queue of `max_wr` work requests, which complete on `cq`.
    pub fn work_queue<'a>(&'a self, cq: &'a CompletionQueue, max_wr: u32) -> WorkQueueBuilder<'a> {
        WorkQueueBuilder { pd: self, cq, max_wr, max_sge: 1, max_batch: 64, flags: WorkQueueFlags::empty() }
    }
}

impl WorkQueueBuilder<'_> {
    /// Scatter/gather elements per receive, at least 1; 1 by default.
    pub fn sges(mut self, elements: u32) -> Self {
        self.max_sge = elements.max(1);
        self
    }

    /// Maximum number of receives in one batch; 64 by default, limited to the capacity of the queue.
    pub fn max_batch(mut self, work_requests: u32) -> Self {
        self.max_batch = work_requests.max(1);
        self
    }

    /// Options; none by default.
    pub fn flags(mut self, flags: WorkQueueFlags) -> Self {
        self.flags = flags;
        self
    }

    /// Creates the queue, in the state RESET.
    ///
    /// # Errors
    /// [`Error::ForeignContext`] when the completion queue belongs to another context; [`Error::Unsupported`] if
    /// [`DeviceAttributes::max_receive_work_queues`](crate::device::DeviceAttributes::max_receive_work_queues) is 0;
    /// [`Error::CreateWorkQueue`] with the requested values.
    #[doc(alias = "ibv_create_wq")]
    pub fn build(self) -> Result<WorkQueue> {
        let context = self.pd.context();
        context.require_same(self.cq.context(), "completion queue")?;
        let unsupported = || context.unsupported("work queues");
        let max_queues = context.attributes().max_receive_work_queues();
        if max_queues == 0 {
            return Err(unsupported());
        }
        let id = WqId::next();
        let mut attr = ibv_wq_init_attr {
            wq_context: id.to_context(),
            wq_type: IBV_WQT_RQ,
            max_wr: self.max_wr,
            max_sge: self.max_sge,
            pd: self.pd.as_raw(),
            cq: self.cq.as_raw(),
            ..ibv_wq_init_attr::zeroed()
        };
        if !self.flags.is_empty() {
            attr.create_flags = self.flags.bits();
            attr.comp_mask = IBV_WQ_INIT_ATTR_FLAGS.0;
        }
        // SAFETY: the context, the domain and the queue are valid, and so is `attr` during the call.
        let raw = check_ptr(|| unsafe { ibv_create_wq(context.as_raw(), &mut attr) }).map_err(|errno| {
            match errno.is_unsupported() {
                true => unsupported(),
                false => Error::CreateWorkQueue {
                    work_requests: self.max_wr,
                    elements: self.max_sge,
                    flags: self.flags,
                    max_queues,
                    errno,
                },
            }
        })?;
        // SAFETY: the queue was just created from this domain and completion queue, and is not shared. Each table that
        // contains the queue holds an `Arc` of the queue. From now on, returning an error destroys the queue.
        let object = unsafe { Object::new(raw, Parents { pd: self.pd.clone(), cq: self.cq.shared().clone() }) };
        let shared = Shared { object, id };
        // SAFETY: the queue is valid, and the field is set at creation. Posting calls it without a check.
        if unsafe { (*raw.as_ptr()).post_recv }.is_none() {
            return Err(unsupported());
        }
        // Some providers report the actual capacity, and some do not write it.
        let granted = (attr.max_wr.max(self.max_wr), attr.max_sge.max(self.max_sge));
        // SAFETY: just created, with this capacity.
        Ok(unsafe { WorkQueue::new(shared, granted, self.max_batch, WorkQueueState::RESET) })
    }
}
