//! Thread domains.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::object::{Object, Parents};
use crate::{Context, Result};

/// A thread domain: `struct ibv_td`. Clones share it.
///
/// It says of objects that no two threads use them at the same time, so that the provider can leave out its locks. By itself
/// it does nothing: [`ProtectionDomain::with_thread_domain`](crate::ProtectionDomain::with_thread_domain) takes it.
#[derive(Clone)]
pub struct ThreadDomain {
    inner: Arc<Object<MadeFrom>>,
}

// What is made in a thread domain is not for any thread; whoever puts something in has answered for that.
struct MadeFrom(Context);

impl Parents for MadeFrom {
    type Raw = ibv_td;

    const VERB: &'static str = "ibv_dealloc_td";

    fn context(&self) -> &Context {
        &self.0
    }

    unsafe fn destroy(&self, raw: *mut ibv_td) -> c_int {
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
        // SAFETY: the context is valid, and `attr` is for the duration of the call.
        let raw = check_ptr(|| unsafe { ibv_alloc_td(self.as_raw(), &mut attr) })
            .map_err(|errno| self.feature_error("ibv_alloc_td", "thread domains", errno))?;
        // SAFETY: just allocated, and given to nobody else.
        Ok(unsafe { ThreadDomain::from_raw(self, raw) })
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
        // SAFETY: the caller's contract; a parent domain with it holds an `Arc` of it.
        ThreadDomain { inner: Arc::new(unsafe { Object::new(raw, MadeFrom(context.clone())) }) }
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.inner.context()
    }

    /// The C object, valid while this domain or anything made with it is.
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
