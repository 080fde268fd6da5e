//! The primitives of synchronisation of the model checker.

use std::marker::PhantomData;
use std::sync::PoisonError;
use std::time::Instant;

pub(crate) use loom::sync::atomic::Ordering;
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Deadlines do not pass in a model.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>, _: Option<Instant>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap()
}

pub(crate) fn pause() {
    loom::thread::yield_now();
}

/// A cell whose accesses loom checks for races.
pub(crate) struct Cell<T>(loom::cell::UnsafeCell<T>);

impl<T> Cell<T> {
    pub(crate) fn new(value: T) -> Self {
        Cell(loom::cell::UnsafeCell::new(value))
    }

    pub(crate) fn get_mut(&self) -> CellMut<'_, T> {
        CellMut(self.0.get_mut(), PhantomData)
    }
}

/// An access to a cell, which lasts until it is dropped.
pub(crate) struct CellMut<'a, T>(loom::cell::MutPtr<T>, PhantomData<&'a T>);

impl<T> CellMut<'_, T> {
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.with(|value| value)
    }
}

/// A flag of the spin lock.
///
/// loom does not order the write of a `swap` that found `true` before the store of `false` that follows it. It therefore explores
/// executions in which the flag stays set for ever, which the atomicity of `swap` excludes. A failed `compare_exchange` leaves the
/// same value without a write.
pub(crate) struct AtomicBool(loom::sync::atomic::AtomicBool);

impl AtomicBool {
    pub(crate) fn new(value: bool) -> Self {
        AtomicBool(loom::sync::atomic::AtomicBool::new(value))
    }

    pub(crate) fn swap(&self, value: bool, order: Ordering) -> bool {
        assert!(value, "the lock swaps in `true` only");
        self.0.compare_exchange(false, true, order, Ordering::Relaxed).unwrap_or(true)
    }

    pub(crate) fn store(&self, value: bool, order: Ordering) {
        self.0.store(value, order);
    }
}
