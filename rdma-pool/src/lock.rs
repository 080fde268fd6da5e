//! A lock that its usual owner takes with one atomic exchange and never waits for.

use crate::sync::{AtomicBool, Cell, Ordering, pause};

/// A value that its owner accesses for a few instructions at a time, and others only when memory is short.
pub(crate) struct SpinLock<T> {
    locked: AtomicBool,
    value: Cell<T>,
}

// SAFETY: the lock gives access to the value to one thread at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

/// Unlocks on drop, also after a panic.
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

    /// Calls `access` unless the value is locked, also by this thread.
    #[inline(always)]
    pub(crate) fn try_with<R>(&self, access: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.locked.swap(true, Ordering::Acquire) {
            return None;
        }
        let _unlock = Unlock(&self.locked);
        // SAFETY: `locked` was false, so no other call is between its exchange and its `Unlock`. The exchange acquires what the
        // previous call wrote before it released the lock. The reference ends before `_unlock` is dropped.
        Some(self.value.with_mut(|value| access(unsafe { &mut *value })))
    }

    /// Calls `access` as soon as the value is unlocked. A thread that has it locked must not call this.
    pub(crate) fn with<R>(&self, access: impl FnOnce(&mut T) -> R) -> R {
        let mut access = Some(access);
        loop {
            let locked = self.try_with(|value| access.take().map(|access| access(value)));
            if let Some(result) = locked.flatten() {
                return result;
            }
            pause();
        }
    }
}
