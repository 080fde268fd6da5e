//! The end of an object that completion queues have to do with.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::errno::check;
use crate::{Context, Error, Result, cq};

/// What an object was made from, and keeps until it is destroyed.
pub(crate) trait Parents: Send + Sized + 'static {
    /// The C object.
    type Raw;

    /// What destroys it.
    const VERB: &'static str;

    fn context(&self) -> &Context;

    /// The completion queue whose lock the verb needs on some devices and this thread holds, if there is one.
    fn polled_here(&self) -> Option<&Arc<cq::Shared>>;

    /// Calls the verb.
    ///
    /// # Safety
    /// `raw` must be a valid object that was made from these and that nothing refers to. It is gone after success.
    unsafe fn destroy(&self, raw: *mut Self::Raw) -> c_int;
}

/// An object that nothing refers to any more.
pub(crate) struct Doomed<P: Parents> {
    raw: NonNull<P::Raw>,
    /// Taken by the destruction.
    parents: Option<P>,
}

// SAFETY: libibverbs objects may be used from any thread (see `Context`), and the parents are `Send`.
unsafe impl<P: Parents> Send for Doomed<P> {}

impl<P: Parents> Doomed<P> {
    /// # Safety
    /// `raw` must be a valid object that was made from `parents`, and that nothing refers to or destroys any more.
    pub(crate) unsafe fn new(raw: NonNull<P::Raw>, parents: P) -> Self {
        Doomed { raw, parents: Some(parents) }
    }

    /// Destroys it now or, if that would wait for a lock that this very thread holds, when the lock is released. On failure all it
    /// depends on is leaked, since the device may still use it.
    pub(crate) fn destroy(mut self) -> Result<()> {
        let Some(parents) = self.parents.take() else { return Ok(()) };
        if let Some(cq) = parents.polled_here().cloned() {
            cq.defer(Box::new(Doomed { raw: self.raw, parents: Some(parents) }));
            return Err(Error::PolledHere { verb: P::VERB });
        }
        // SAFETY: the contract of `new`; `parents` were just taken, so this happens once.
        check(unsafe { parents.destroy(self.raw.as_ptr()) }).map_err(|errno| {
            let error = parents.context().verb_error(P::VERB, errno);
            // It still exists: what it belongs to must outlive it.
            std::mem::forget(parents);
            error
        })
    }
}

impl<P: Parents> Drop for Doomed<P> {
    fn drop(&mut self) {
        // Deferred before, and now dropped: `destroy` leaves nothing behind to drop again.
        if let Some(parents) = self.parents.take() {
            let _ = Doomed { raw: self.raw, parents: Some(parents) }.destroy();
        }
    }
}
