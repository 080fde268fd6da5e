//! The primitives of synchronisation of the model checker.

use loom::sync::atomic::fence;

pub(crate) use loom::sync::atomic::Ordering;
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

/// A flag.
///
/// loom takes sequentially consistent accesses for acquiring and releasing ones, and explores executions that they exclude. A fence
/// between the store and the load of each thread excludes the same ones here.
pub(crate) struct AtomicBool(loom::sync::atomic::AtomicBool);

impl AtomicBool {
    pub(crate) fn new(value: bool) -> Self {
        AtomicBool(loom::sync::atomic::AtomicBool::new(value))
    }

    pub(crate) fn load(&self, order: Ordering) -> bool {
        self.0.load(order)
    }

    pub(crate) fn store(&self, value: bool, order: Ordering) {
        if order != Ordering::SeqCst {
            return self.0.store(value, order);
        }
        self.0.store(value, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    pub(crate) fn swap(&self, value: bool, order: Ordering) -> bool {
        self.0.swap(value, order)
    }
}
