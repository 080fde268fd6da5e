//! What the crate is without input and output: operations in flight, and tasks that wait in order.

mod slots;
mod waiters;

pub(crate) use slots::{Slot, Slots};
pub(crate) use waiters::{Ticket, Waiters};

#[cfg(test)]
mod random;

/// Parts of the random tests.
#[cfg(test)]
mod testing {
    use std::ops::RangeInclusive;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    /// Miri is a thousand times slower.
    pub(super) const SEEDS: RangeInclusive<u64> = 1..=if cfg!(miri) { 3 } else { 50 };
    pub(super) const STEPS: usize = if cfg!(miri) { 100 } else { 300 };

    /// Counts how often it is woken.
    #[derive(Default)]
    pub(super) struct Task(AtomicUsize);

    impl Task {
        pub(super) fn new() -> (Arc<Task>, Waker) {
            let task = Arc::<Task>::default();
            (task.clone(), Waker::from(task))
        }

        pub(super) fn wakes(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}
