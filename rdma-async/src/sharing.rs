//! How the parts of a driver are shared: between threads, or on one thread without locks.

use std::cell::RefCell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};

use rdma_safe::fork::Creator;

use crate::sync::Mutex;

/// How connections and their driver are shared: [`Threads`] or [`Local`].
pub trait Sharing: sealed::Sealed + fmt::Debug + Sized + 'static {
    /// `Arc` or `Rc`.
    #[doc(hidden)]
    type Rc<T: 'static>: Clone + Deref<Target = T>;
    /// The weak reference of `Rc`.
    #[doc(hidden)]
    type Weak<T: 'static>: Clone;
    /// `Mutex` or `RefCell`.
    #[doc(hidden)]
    type Cell<T: 'static>;

    #[doc(hidden)]
    fn rc<T>(value: T) -> Self::Rc<T>;
    #[doc(hidden)]
    fn downgrade<T>(value: &Self::Rc<T>) -> Self::Weak<T>;
    #[doc(hidden)]
    fn upgrade<T>(value: &Self::Weak<T>) -> Option<Self::Rc<T>>;
    #[doc(hidden)]
    fn cell<T>(value: T) -> Self::Cell<T>;
    /// Calls `f` with exclusive access. Neither wakes tasks nor drops buffers inside, since both can run code of the user.
    #[doc(hidden)]
    fn with<T, R>(cell: &Self::Cell<T>, f: impl FnOnce(&mut T) -> R) -> R;
}

/// Connections that any thread can use. They are `Send` and `Sync`.
#[derive(Clone, Copy, Debug)]
pub enum Threads {}

/// Connections of one thread, without locks and atomic operations. They are neither `Send` nor `Sync`.
#[derive(Clone, Copy, Debug)]
pub enum Local {}

/// A mutex. A forked child forgets the value that it has inherited, since another thread may have been changing it.
#[derive(Debug)]
pub struct Lock<T> {
    value: ManuallyDrop<Mutex<T>>,
    creator: Creator,
}

impl<T> Lock<T> {
    /// Whether the value belongs to the parent of this process.
    pub(crate) fn is_inherited(&self) -> bool {
        self.creator.is_parent()
    }
}

impl<T> Drop for Lock<T> {
    #[inline]
    fn drop(&mut self) {
        if !self.is_inherited() {
            // SAFETY: the value is dropped here alone, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl Sharing for Threads {
    type Rc<T: 'static> = Arc<T>;
    type Weak<T: 'static> = std::sync::Weak<T>;
    type Cell<T: 'static> = Lock<T>;

    #[inline(always)]
    fn rc<T>(value: T) -> Arc<T> {
        Arc::new(value)
    }

    #[inline(always)]
    fn downgrade<T>(value: &Arc<T>) -> std::sync::Weak<T> {
        Arc::downgrade(value)
    }

    #[inline(always)]
    fn upgrade<T>(value: &std::sync::Weak<T>) -> Option<Arc<T>> {
        value.upgrade()
    }

    #[inline(always)]
    fn cell<T>(value: T) -> Lock<T> {
        Lock { value: ManuallyDrop::new(Mutex::new(value)), creator: Creator::current() }
    }

    #[inline(always)]
    fn with<T, R>(cell: &Lock<T>, f: impl FnOnce(&mut T) -> R) -> R {
        // No code of the user runs inside, so nothing is left half-changed by a panic.
        f(&mut cell.value.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Sharing for Local {
    type Rc<T: 'static> = Rc<T>;
    type Weak<T: 'static> = std::rc::Weak<T>;
    type Cell<T: 'static> = RefCell<T>;

    #[inline(always)]
    fn rc<T>(value: T) -> Rc<T> {
        Rc::new(value)
    }

    #[inline(always)]
    fn downgrade<T>(value: &Rc<T>) -> std::rc::Weak<T> {
        Rc::downgrade(value)
    }

    #[inline(always)]
    fn upgrade<T>(value: &std::rc::Weak<T>) -> Option<Rc<T>> {
        value.upgrade()
    }

    #[inline(always)]
    fn cell<T>(value: T) -> RefCell<T> {
        RefCell::new(value)
    }

    #[inline(always)]
    fn with<T, R>(cell: &RefCell<T>, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut cell.borrow_mut())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Threads {}
    impl Sealed for super::Local {}
}
