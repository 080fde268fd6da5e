//! Thread domains.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::error::Verb;
use crate::object::{Object, Parents};
use crate::{Context, Result};

/// A thread domain: `struct ibv_td`. Clones share it.
///
/// It declares that no two threads use certain objects at the same time, so that the provider can omit its locks.
/// [`ProtectionDomain::with_thread_domain`](crate::ProtectionDomain::with_thread_domain) puts objects into it.
#[derive(Clone)]
pub struct ThreadDomain {
    inner: Arc<Object<MadeFrom>>,
}

// No two threads may use objects in a thread domain at the same time. The callers of `with_thread_domain` guarantee that.
struct MadeFrom(Context);

impl Parents for MadeFrom {
    type Raw = ibv_td;

    const VERB: Verb = Verb::DeallocTd;

    fn context(&self) -> &Context {
        &self.0
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_td) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { ibv_dealloc_td(raw) }
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
        // SAFETY: the context is valid, and `attr` is valid during the call.
        let raw = check_ptr(|| unsafe { ibv_alloc_td(self.as_raw(), &mut attr) })
            .map_err(|errno| self.feature_error(Verb::AllocTd, "thread domains", errno))?;
        // SAFETY: the domain was just allocated, and nobody else has it.
        Ok(unsafe { ThreadDomain::from_raw(self, raw) })
    }
}

impl ThreadDomain {
    /// Adopts a thread domain that other code has allocated. It is deallocated with the last parent domain that uses
    /// it.
    ///
    /// # Safety
    /// `raw` must be a thread domain of `context` that nobody else deallocates. Parent domains of other code that use
    /// it must be deallocated before it.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_td>) -> ThreadDomain {
        // SAFETY: the caller's contract. Each parent domain that uses the thread domain holds an `Arc` of it.
        ThreadDomain { inner: Arc::new(unsafe { Object::new(raw, MadeFrom(context.clone())) }) }
    }

    /// The context that the domain belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.inner.context()
    }

    /// The C object, valid while this domain or anything created with it exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_td {
        self.inner.as_raw()
    }
}

impl fmt::Debug for ThreadDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadDomain").field("device", &self.context().device_name()).finish_non_exhaustive()
    }
}
