//! Protection domains.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::ibv_pd;

use crate::errno::check_ptr;
use crate::{CompletionQueue, Context, Error, QueuePairBuilder, Result};

/// A protection domain: queue pairs and memory regions work together only within one. Clones share it.
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<Inner>,
}

struct Inner {
    raw: NonNull<ibv_pd>,
    context: ManuallyDrop<Context>,
}

// SAFETY: libibverbs objects may be used from any thread (see `Context`).
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: every region, address handle and queue pair in this domain holds an `Arc` of it, so none is left; those whose
        // destruction failed leak their `Arc`, so the domain then stays.
        if unsafe { (self.context.verbs().ibv_dealloc_pd)(self.raw.as_ptr()) } == 0 {
            // SAFETY: dropped here only, and not used after. Otherwise it stays, as the domain does.
            unsafe { ManuallyDrop::drop(&mut self.context) }
        }
    }
}

impl ProtectionDomain {
    pub(crate) fn new(context: &Context) -> Result<Self> {
        // SAFETY: the context is valid.
        let raw = check_ptr(|| unsafe { (context.verbs().ibv_alloc_pd)(context.as_raw()) })
            .map_err(|errno| Error::AllocPd { errno })?;
        Ok(ProtectionDomain { inner: Arc::new(Inner { raw, context: ManuallyDrop::new(context.clone()) }) })
    }

    /// The device that the domain belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Starts describing a queue pair, of a reliable connection unless its type is set, whose sends complete on `send_cq` and
    /// receives on `recv_cq`. The two may be the same queue.
    pub fn queue_pair<'a>(
        &'a self,
        send_cq: &'a CompletionQueue,
        recv_cq: &'a CompletionQueue,
    ) -> QueuePairBuilder<'a> {
        QueuePairBuilder::new(self, send_cq, recv_cq)
    }

    /// Whether the two are the same domain.
    #[must_use]
    #[inline(always)]
    pub fn is_same(&self, other: &ProtectionDomain) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Tells it from others, as long as it or anything made from it exists; never 0.
    #[inline(always)]
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }

    /// The C object, valid while this domain or anything made from it is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_pd {
        self.inner.raw.as_ptr()
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain").field("device", &self.inner.context.device_name()).finish_non_exhaustive()
    }
}
