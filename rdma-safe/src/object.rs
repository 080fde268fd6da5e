//! Ownership and destruction of C objects.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::errno::check;
use crate::error::Verb;
use crate::{Context, Errno, Error, Result, cq};

/// The objects that a C object was created from, which it keeps until it is destroyed.
pub(crate) trait Parents: Send + Sized + 'static {
    /// The C object.
    type Raw;

    /// The verb that destroys the object.
    const VERB: Verb;

    fn context(&self) -> &Context;

    /// The completion queue that this thread is polling, if the verb needs its lock on some devices.
    fn polled_by_this_thread(&self) -> Option<&Arc<cq::Shared>> {
        None
    }

    /// Destroys the object.
    ///
    /// # Safety
    /// `raw` must be a valid object that was created from these parents. Nothing may refer to it. After success it no
    /// longer exists.
    unsafe fn destroy(&mut self, raw: *mut Self::Raw) -> c_int;
}

/// A C object with its parents, to which it dereferences. Dropping destroys the object, then drops the parents.
///
/// Everything that is created from the object keeps its owner alive, usually with an `Arc`. So nothing refers to the
/// object when it is dropped. If it cannot be destroyed, it and its parents are leaked, since the device may still use
/// them. The same holds in a process that has inherited them by `fork(3)`.
pub(crate) struct Object<P: Parents> {
    /// `None` once the object is destroyed, leaked, deferred or moved out. The parents are then dropped, leaked or moved.
    raw: Option<NonNull<P::Raw>>,
    parents: ManuallyDrop<P>,
}

// SAFETY: libibverbs objects may be used from any thread (see `Context`), and the parents are `Send`.
unsafe impl<P: Parents> Send for Object<P> {}
// SAFETY: as for `Send`. A shared reference gives access to the pointer, and to the parents, which are `Sync`.
unsafe impl<P: Parents + Sync> Sync for Object<P> {}

impl<P: Parents> Object<P> {
    /// # Safety
    /// `raw` must be a valid object that was created from `parents` and that nobody else destroys. Code that creates
    /// something from it must drop this after the created object, and must leak it if it leaks the created object.
    pub(crate) unsafe fn new(raw: NonNull<P::Raw>, parents: P) -> Self {
        Object { raw: Some(raw), parents: ManuallyDrop::new(parents) }
    }

    #[inline(always)]
    pub(crate) fn as_raw(&self) -> *mut P::Raw {
        self.raw().as_ptr()
    }

    #[inline(always)]
    pub(crate) fn raw(&self) -> NonNull<P::Raw> {
        // SAFETY: it is `None` only after `destroy_once`, whose caller does not use the object again.
        unsafe { self.raw.unwrap_unchecked() }
    }

    /// Destroys the object and returns its parents. If that needs a lock that this thread holds, it is deferred until
    /// the lock is released.
    pub(crate) fn destroy(self) -> Result<P> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither destroyed again nor dropped.
        match unsafe { this.destroy_once(|_| ()) } {
            // SAFETY: they exist after success, and `this` is not used again.
            Ok(()) => Ok(unsafe { ManuallyDrop::take(&mut this.parents) }),
            Err(failure) => Err(this.error(failure)),
        }
    }

    /// Like [`Object::destroy`], but where it is. Calls `deferring` with the parents if the destruction is deferred.
    ///
    /// # Safety
    /// `self` must only be dropped afterwards. [`Object::error`] may be called before.
    #[inline]
    pub(crate) unsafe fn destroy_in_place(&mut self, deferring: impl FnOnce(&P)) -> Result<(), Failure> {
        // SAFETY: the caller's contract. After success the parents exist, and nothing uses them later.
        unsafe {
            self.destroy_once(deferring)?;
            ManuallyDrop::drop(&mut self.parents);
        }
        Ok(())
    }

    /// Moves the object out.
    ///
    /// # Safety
    /// `self` must only be dropped afterwards.
    pub(crate) unsafe fn take(&mut self) -> Self {
        // SAFETY: the caller's contract: the parents are not used here again.
        let parents = unsafe { ManuallyDrop::take(&mut self.parents) };
        Object { raw: self.raw.take(), parents: ManuallyDrop::new(parents) }
    }

    /// Whether the object is here: it was neither destroyed nor moved out.
    #[inline(always)]
    pub(crate) fn exists(&self) -> bool {
        self.raw.is_some()
    }

    /// Like [`Object::destroy`], if this is the last owner. Otherwise returns an error that names the other owners,
    /// `users`.
    pub(crate) fn destroy_last(this: Arc<Self>, object: &'static str, users: &'static str) -> Result<P> {
        Arc::into_inner(this).ok_or(Error::InUse { object, users })?.destroy()
    }

    /// Gives up ownership of the C object and drops the parents.
    pub(crate) fn disown(self) -> NonNull<P::Raw> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used again nor dropped.
        unsafe { ManuallyDrop::drop(&mut this.parents) }
        this.raw()
    }

    /// Destroys the object.
    ///
    /// # Safety
    /// Must be called once. The object must not be used again, and its parents only if they were not [moved](Failure::Deferred).
    #[inline]
    unsafe fn destroy_once(&mut self, deferring: impl FnOnce(&P)) -> Result<(), Failure> {
        // SAFETY: this is the only call, so the object exists.
        let raw = unsafe { self.raw.take().unwrap_unchecked() };
        if self.parents.context().is_inherited() {
            return Err(Failure::Inherited);
        }
        if let Some(cq) = self.parents.polled_by_this_thread() {
            let cq = Arc::clone(cq);
            deferring(&self.parents);
            // SAFETY: the caller's contract.
            unsafe { self.defer(raw, &cq) }
            return Err(Failure::Deferred);
        }
        // SAFETY: nothing refers to the object by the contract of `new`, and it is destroyed once.
        check(unsafe { self.parents.destroy(raw.as_ptr()) }).map_err(Failure::Verb)
    }

    /// Lets `cq` destroy the object once it is not polled.
    ///
    /// # Safety
    /// `raw` must be the object, and neither it nor its parents may be used again.
    #[cold]
    unsafe fn defer(&mut self, raw: NonNull<P::Raw>, cq: &cq::Shared) {
        // SAFETY: the caller's contract.
        let parents = unsafe { ManuallyDrop::take(&mut self.parents) };
        // SAFETY: this object takes the place of `self`.
        cq.defer(Box::new(unsafe { Object::new(raw, parents) }));
    }

    /// The error for a failure of this object.
    #[cold]
    pub(crate) fn error(&self, failure: Failure) -> Error {
        match failure {
            Failure::Inherited => self.parents.context().inherited(),
            Failure::Deferred => Error::PollInProgress { verb: P::VERB },
            Failure::Verb(errno) => self.parents.context().verb_error(P::VERB, errno),
        }
    }
}

/// Why an object was not destroyed.
pub(crate) enum Failure {
    /// It belongs to the parent process. It and its parents are leaked.
    Inherited,
    /// This thread holds a lock that the verb needs. A completion queue destroys it later, and has its parents.
    Deferred,
    /// The verb failed, so the object still exists. It and its parents are leaked.
    Verb(Errno),
}

impl<P: Parents> Drop for Object<P> {
    #[inline]
    fn drop(&mut self) {
        if self.raw.is_some() {
            // SAFETY: nothing uses the object after its drop.
            let _ = unsafe { self.destroy_in_place(|_| ()) };
        }
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
