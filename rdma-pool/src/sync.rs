//! The primitives of synchronisation that the allocator uses. The model checker replaces this module.

use std::cell::UnsafeCell;
use std::sync::PoisonError;
use std::time::Instant;

pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// An `UnsafeCell` with the interface of the model checker.
pub(crate) struct Cell<T>(UnsafeCell<T>);

impl<T> Cell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Cell(UnsafeCell::new(value))
    }

    #[inline(always)]
    pub(crate) fn get_mut(&self) -> CellMut<'_, T> {
        CellMut(&self.0)
    }
}

/// An access to a cell.
pub(crate) struct CellMut<'a, T>(&'a UnsafeCell<T>);

impl<T> CellMut<'_, T> {
    #[inline(always)]
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.get()
    }
}

/// Locks a mutex whose holders leave its value consistent even if they panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until notified, or until `deadline` if there is one. May return early.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>, deadline: Option<Instant>) -> MutexGuard<'a, T> {
    match deadline {
        None => condvar.wait(guard).unwrap_or_else(PoisonError::into_inner),
        Some(deadline) => {
            let left = deadline.saturating_duration_since(Instant::now());
            condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
        }
    }
}

/// Lets other threads run before the next attempt to lock.
pub(crate) fn pause() {
    std::thread::yield_now();
}
