//! C objects and their end.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
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
    fn polled_here(&self) -> Option<&Arc<cq::Shared>> {
        None
    }

    /// Calls the verb.
    ///
    /// # Safety
    /// `raw` must be a valid object that was made from these and that nothing refers to. It is gone after success.
    unsafe fn destroy(&self, raw: *mut Self::Raw) -> c_int;
}

/// A C object with what it was made from, to which it dereferences. Dropping destroys it and then lets go of that.
///
/// What is made from the object in turn holds the one that owns this, mostly by an `Arc`, so nothing refers to it any more when it
/// is dropped. One that could not be destroyed keeps all that it depends on until the process ends, since the device may still use
/// it.
pub(crate) struct Object<P: Parents> {
    raw: NonNull<P::Raw>,
    parents: ManuallyDrop<P>,
}

// SAFETY: libibverbs objects may be used from any thread (see `Context`), and the parents are `Send`.
unsafe impl<P: Parents> Send for Object<P> {}
// SAFETY: as above; a shared reference gives a pointer, and the parents, which are `Sync`.
unsafe impl<P: Parents + Sync> Sync for Object<P> {}

impl<P: Parents> Object<P> {
    /// # Safety
    /// `raw` must be a valid object that was made from `parents` and is this one's alone to destroy. Whoever makes something from
    /// it must see to it that this is dropped after that, and not at all where that stays.
    pub(crate) unsafe fn new(raw: NonNull<P::Raw>, parents: P) -> Self {
        Object { raw, parents: ManuallyDrop::new(parents) }
    }

    #[inline(always)]
    pub(crate) fn as_raw(&self) -> *mut P::Raw {
        self.raw.as_ptr()
    }

    #[inline(always)]
    pub(crate) fn raw(&self) -> NonNull<P::Raw> {
        self.raw
    }

    /// Destroys it, and gives back what it was made from. If that would wait for a lock that this very thread holds, it is put off
    /// until the lock is released.
    pub(crate) fn destroy(self) -> Result<P> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used again, nor dropped.
        unsafe { this.end() }
    }

    /// As [`Object::destroy`], of one that may have other owners: `by`, which then go on to own it.
    pub(crate) fn destroy_last(this: Arc<Self>, object: &'static str, by: &'static str) -> Result<P> {
        Arc::into_inner(this).ok_or(Error::InUse { object, by })?.destroy()
    }

    /// Leaves it to others to destroy, and lets go of what it was made from.
    pub(crate) fn disown(self) -> NonNull<P::Raw> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used again, nor dropped.
        unsafe { ManuallyDrop::drop(&mut this.parents) }
        this.raw
    }

    /// # Safety
    /// The object must not be used again, but for the pointer.
    unsafe fn end(&mut self) -> Result<P> {
        // SAFETY: taken once, says the caller.
        let parents = ManuallyDrop::new(unsafe { ManuallyDrop::take(&mut self.parents) });
        if let Some(cq) = parents.polled_here().cloned() {
            cq.defer(Box::new(Object { raw: self.raw, parents }));
            return Err(Error::PolledHere { verb: P::VERB });
        }
        // SAFETY: the contract of `new`, by which nothing refers to it, and of this, by which it is destroyed once.
        match check(unsafe { parents.destroy(self.raw.as_ptr()) }) {
            Ok(()) => Ok(ManuallyDrop::into_inner(parents)),
            // It still exists, and so do they, which are not dropped.
            Err(errno) => Err(parents.context().verb_error(P::VERB, errno)),
        }
    }
}

impl<P: Parents> Drop for Object<P> {
    fn drop(&mut self) {
        // SAFETY: nothing uses it after its drop.
        let _ = unsafe { self.end() };
    }
}

impl<P: Parents> Deref for Object<P> {
    type Target = P;

    #[inline(always)]
    fn deref(&self) -> &P {
        &self.parents
    }
}

impl<P: Parents> DerefMut for Object<P> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut P {
        &mut self.parents
    }
}
