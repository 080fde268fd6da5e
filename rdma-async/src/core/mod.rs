//! What the crate is without input and output: operations in flight, and tasks that wait in order.

mod slots;
mod waiters;

pub(crate) use slots::{Finished, Slot, Slots};
pub(crate) use waiters::{Ticket, Waiters};

#[cfg(test)]
mod random {
    use std::ops::RangeInclusive;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    /// Miri is a thousand times slower.
    pub(super) const SEEDS: RangeInclusive<u64> = 1..=if cfg!(miri) { 3 } else { 50 };
    pub(super) const STEPS: usize = if cfg!(miri) { 100 } else { 300 };

    /// Numbers for random tests.
    pub(super) struct Random(pub(super) u64);

    impl Random {
        pub(super) fn below(&mut self, end: usize) -> usize {
            // xorshift64*
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
        }
    }

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
