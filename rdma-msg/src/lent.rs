//! What tasks use without the engine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A part of the engine that tasks use while the engine is not locked.
///
/// The engine lends it before it is unlocked, and takes it back after it is locked. So its own code does not know of it.
///
/// The driver waits for a task that uses the value, as for one that posts work. So that takes a few microseconds at most.
pub(crate) struct Lent<T> {
    /// Whether there is a value, to know without its lock. Changes only while the engine is locked.
    is_lent: AtomicBool,
    value: Mutex<Option<T>>,
}

impl<T> Lent<T> {
    pub(crate) const fn new() -> Self {
        Lent { is_lent: AtomicBool::new(false), value: Mutex::new(None) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends a value. The engine is locked.
    pub(crate) fn lend(&self, value: T) {
        *self.lock() = Some(value);
        self.is_lent.store(true, Ordering::Relaxed);
    }

    /// Takes the value back, if there is one. The engine is locked.
    pub(crate) fn recall(&self) -> Option<T> {
        if !self.is_lent() {
            return None;
        }
        self.is_lent.store(false, Ordering::Relaxed);
        self.lock().take()
    }

    /// Takes the value without a lock. In a forked child, a thread of the parent may hold the lock for ever.
    pub(crate) fn take_exclusive(&mut self) -> Option<T> {
        self.value.get_mut().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether there is probably a value.
    #[inline]
    pub(crate) fn is_lent(&self) -> bool {
        self.is_lent.load(Ordering::Relaxed)
    }

    /// Calls `f` with the value, if there is one.
    #[inline]
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> Option<R>) -> Option<R> {
        self.lock().as_mut().and_then(f)
    }
}
