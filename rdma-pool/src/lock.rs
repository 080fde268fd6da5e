//! A lock that its usual owner takes with one atomic exchange and never waits for.

use std::ops::{Deref, DerefMut};

use crate::sync::{AtomicBool, Cell, CellMut, Ordering, pause};

/// A value that its owner accesses for a few instructions at a time, and others only when memory is short.
pub(crate) struct SpinLock<T> {
    locked: AtomicBool,
    value: Cell<T>,
}

// SAFETY: the lock gives access to the value to one thread at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

/// Exclusive access to the value. Unlocks on drop, also after a panic.
pub(crate) struct Guard<'a, T> {
    // Ends before the lock is unlocked.
    value: CellMut<'a, T>,
    _unlock: Unlock<'a>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: no other guard exists before this one is dropped.
        unsafe { &*self.value.as_ptr() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.value.as_ptr() }
    }
}

struct Unlock<'a>(&'a AtomicBool);

impl Drop for Unlock<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> SpinLock<T> {
    pub(crate) fn new(value: T) -> Self {
        SpinLock { locked: AtomicBool::new(false), value: Cell::new(value) }
    }

    /// Locks if it is free. Returns `None` if any thread has locked it, also this one.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        if self.locked.swap(true, Ordering::Acquire) {
            return None;
        }
        // `locked` was false, so no other guard exists. The exchange acquires what the last one wrote before it released the lock.
        Some(Guard { value: self.value.get_mut(), _unlock: Unlock(&self.locked) })
    }

    /// Locks as soon as it is unlocked. A thread that has it locked must not call this.
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            pause();
        }
    }
}
