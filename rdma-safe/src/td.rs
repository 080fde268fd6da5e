//! Thread domains.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::{Context, Result};

/// A thread domain: `struct ibv_td`. Clones share it.
///
/// It says of objects that no two threads use them at the same time, so that the provider can leave out its locks. By itself
/// it does nothing: [`ProtectionDomain::with_thread_domain`](crate::ProtectionDomain::with_thread_domain) takes it.
#[derive(Clone)]
pub struct ThreadDomain {
    inner: Arc<Inner>,
}

struct Inner {
    raw: NonNull<ibv_td>,
    context: ManuallyDrop<Context>,
}

// SAFETY: the domain itself may be used from any thread (see `Context`); what is made in it, may not, and whoever puts
// something in has answered for that.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: every parent domain with it holds an `Arc` of it, so none is left; one whose destruction failed has leaked its
        // `Arc`.
        if unsafe { ibv_dealloc_td(self.raw.as_ptr()) } == 0 {
            // SAFETY: dropped here only, and not used after. Otherwise it stays, as the domain does.
            unsafe { ManuallyDrop::drop(&mut self.context) }
        }
    }
}

impl Context {
    /// Allocates a thread domain: `ibv_alloc_td(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_alloc_td")]
    pub fn alloc_td(&self) -> Result<ThreadDomain> {
        let mut attr = ibv_td_init_attr::zeroed();
        // SAFETY: the context is valid, and `attr` is for the duration of the call.
        let raw = check_ptr(|| unsafe { ibv_alloc_td(self.as_raw(), &mut attr) })
            .map_err(|errno| self.feature_error("ibv_alloc_td", "thread domains", errno))?;
        Ok(ThreadDomain { inner: Arc::new(Inner { raw, context: ManuallyDrop::new(self.clone()) }) })
    }
}

impl ThreadDomain {
    /// Adopts a thread domain that other code has allocated. It is deallocated when the last parent domain made with it is gone.
    ///
    /// # Safety
    /// `raw` must be a thread domain of `context`, and be this one's alone to deallocate. Parent domains of other code with it
    /// must be gone before that.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_td>) -> ThreadDomain {
        ThreadDomain { inner: Arc::new(Inner { raw, context: ManuallyDrop::new(context.clone()) }) }
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, valid while this domain or anything made with it is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_td {
        self.inner.raw.as_ptr()
    }
}

impl fmt::Debug for ThreadDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadDomain").field("device", &self.context().device_name()).finish_non_exhaustive()
    }
}
