//! Shared receive queues that other code has created.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use super::{SharedReceiveQueue, SharedReceiveQueueAttributes, SharedReceiveQueueBuilder};
use crate::id::SrqId;
use crate::post::RecvChain;
use crate::{Error, Result};

impl SharedReceiveQueueBuilder<'_> {
    /// Adopts a queue that other code has created, for instance by calls of the vendor's. It is destroyed when it and the queue
    /// pairs that take from it are gone. What it holds is what `ibv_query_srq(3)` says; of the builder, the domain and
    /// [`max_batch`](SharedReceiveQueueBuilder::max_batch) count. Its `srq_context` is set anew, to what [`SharedReceiveQueue::id`]
    /// returns.
    ///
    /// # Errors
    /// [`Error::WrongParent`] when it is of another domain than the builder; [`Error::Verb`] when it cannot be queried. It then is
    /// as before, and the caller's.
    ///
    /// # Safety
    /// `raw` must be a shared receive queue that is this one's alone to destroy and to post to: a basic one or, if the builder
    /// comes of an [`XrcDomain`](crate::XrcDomain), one that was made with that domain and completion queue, or, if it comes of
    /// [`ProtectionDomain::tag_matching_queue`](crate::ProtectionDomain::tag_matching_queue), one that matches tags and was made
    /// with that completion queue. Queue pairs of other code that take from it must be gone before it. Nobody may read an event of
    /// it, such as [`AsyncEvents`](crate::AsyncEvents) takes, before this returns.
    pub unsafe fn from_raw(self, raw: NonNull<ibv_srq>) -> Result<SharedReceiveQueue> {
        let pd = self.pd;
        // SAFETY: the queue is valid, says the caller.
        if unsafe { (*raw.as_ptr()).pd } != pd.as_raw() {
            return Err(Error::WrongParent { object: "protection domain" });
        }
        if let Some(parts) = &self.completing {
            parts.check(pd.context())?;
        }
        let id = SrqId::next();
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: 0 };
        // SAFETY: as above, and `attr` is a valid out pointer.
        crate::errno::check(unsafe { (pd.context().verbs().ibv_query_srq)(raw.as_ptr(), &mut attr) })
            .map_err(|errno| pd.context().verb_error("ibv_query_srq", errno))?;
        // SAFETY: the caller's contract.
        let mut shared = unsafe { self.share(raw, id) };
        if let Err(error) = shared.ask_number() {
            let _ = shared.object.disown();
            return Err(error);
        }
        // SAFETY: the queue is valid, and nobody reads the field meanwhile, says the caller.
        unsafe { (*raw.as_ptr()).srq_context = id.to_context() };
        let shared = Arc::new(shared);
        let capacity = SharedReceiveQueueAttributes::from_raw(&attr);
        // SAFETY: `shared`, which is kept beside it, owns the queue.
        let chain = unsafe { RecvChain::new(raw, capacity.max_sge, self.max_batch.min(capacity.max_wr)) };
        Ok(SharedReceiveQueue { chain, capacity, shared })
    }
}
