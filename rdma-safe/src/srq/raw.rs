//! Adopting shared receive queues of other code.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use super::{SharedReceiveQueue, SharedReceiveQueueAttributes, SharedReceiveQueueBuilder};
use crate::error::Verb;
use crate::id::SrqId;
use crate::post::RecvChain;
use crate::{Error, Result};

impl SharedReceiveQueueBuilder<'_> {
    /// Adopts a queue that other code has created, for example by a vendor's API.
    ///
    /// It is destroyed when the handle and all queue pairs that use it are dropped. Its capacity is queried by
    /// `ibv_query_srq(3)`. Of the builder, only the domain and [`max_batch`](SharedReceiveQueueBuilder::max_batch)
    /// apply. This sets `srq_context` to [`SharedReceiveQueue::id`].
    ///
    /// # Errors
    /// [`Error::WrongParent`] when the queue belongs to another domain than the builder; [`Error::Verb`] when it cannot
    /// be queried. The queue is then unchanged and still owned by the caller.
    ///
    /// # Safety
    /// `raw` must be a shared receive queue that no other code destroys or posts to from now on. Its type must match
    /// the builder: an XRC queue of the same domain and completion queue for a builder from an
    /// [`XrcDomain`](crate::xrc::XrcDomain), a tag matching queue with the same completion queue for one from
    /// [`ProtectionDomain::tag_matching_queue`](crate::ProtectionDomain::tag_matching_queue), and a basic queue
    /// otherwise. Queue pairs of other code that use it must be destroyed before it. No code may read its asynchronous
    /// events ([`AsyncEvents`](crate::AsyncEvents)) before this returns.
    pub unsafe fn from_raw(self, raw: NonNull<ibv_srq>) -> Result<SharedReceiveQueue> {
        let pd = self.pd;
        // SAFETY: the queue is valid by the caller's contract.
        if unsafe { (*raw.as_ptr()).pd } != pd.as_raw() {
            return Err(Error::WrongParent { object: "protection domain" });
        }
        if let Some(params) = &self.extended {
            params.check(pd.context())?;
        }
        let id = SrqId::next();
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: 0 };
        // SAFETY: as above, and `attr` is a valid out pointer.
        crate::errno::check(unsafe { (pd.context().verbs().ibv_query_srq)(raw.as_ptr(), &mut attr) })
            .map_err(|errno| pd.context().verb_error(Verb::QuerySrq, errno))?;
        // SAFETY: the caller's contract.
        let mut shared = unsafe { self.share(raw, id) };
        if let Err(error) = shared.query_number() {
            let _ = shared.object.disown();
            return Err(error);
        }
        // SAFETY: the queue is valid, and no other code reads the field now, by the caller's contract.
        unsafe { (*raw.as_ptr()).srq_context = id.to_context() };
        let shared = Arc::new(shared);
        let capacity = SharedReceiveQueueAttributes::from_raw(&attr);
        // SAFETY: `shared`, which is kept alongside, owns the queue.
        let chain = unsafe { RecvChain::new(raw, capacity.max_sge, self.max_batch.min(capacity.max_wr)) };
        Ok(SharedReceiveQueue { chain, capacity, shared })
    }
}
