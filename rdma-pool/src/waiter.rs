//! Callers that wait for a block.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use crate::block::Taken;
use crate::sync::{Condvar, Mutex, lock, wait};

/// One caller that waits for a block of a class.
pub(crate) struct Waiter<B> {
    pub(crate) class: usize,
    /// Order of arrival among all budgets.
    pub(crate) ticket: u64,
    slot: Mutex<Slot<B>>,
    served: Condvar,
}

struct Slot<B> {
    block: Option<Taken<B>>,
    /// The task to wake.
    waker: Option<Waker>,
}

impl<B> Waiter<B> {
    pub(crate) fn new(class: usize, ticket: u64, waker: Option<Waker>) -> Arc<Self> {
        Arc::new(Waiter { class, ticket, slot: Mutex::new(Slot { block: None, waker }), served: Condvar::new() })
    }

    /// Gives the waiter its block. The caller wakes the returned task after it has released its locks.
    pub(crate) fn serve(&self, block: Taken<B>) -> Option<Waker> {
        let mut slot = lock(&self.slot);
        slot.block = Some(block);
        self.served.notify_one();
        slot.waker.take()
    }

    /// The block, if the waiter has been served.
    pub(crate) fn take(&self) -> Option<Taken<B>> {
        lock(&self.slot).block.take()
    }

    /// Like [`Waiter::take`], or registers the task to wake.
    pub(crate) fn take_or_register(&self, waker: &Waker) -> Option<Taken<B>> {
        let mut slot = lock(&self.slot);
        let block = slot.block.take();
        if block.is_none() && !slot.waker.as_ref().is_some_and(|old| old.will_wake(waker)) {
            let old = slot.waker.replace(waker.clone());
            // The last reference to a task may drop a buffer, which is handed to this waiter.
            drop(slot);
            drop(old);
        }
        block
    }

    /// Blocks the thread until the waiter is served or `deadline` has passed.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Option<Taken<B>> {
        let mut slot = lock(&self.slot);
        loop {
            if let Some(found) = slot.block.take() {
                return Some(found);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
            slot = wait(&self.served, slot, deadline);
        }
    }
}

/// Wakes tasks, also those after one whose waker panics.
pub(crate) fn wake_all(wakers: Vec<Waker>) {
    struct Rest(std::vec::IntoIter<Waker>);

    impl Drop for Rest {
        fn drop(&mut self) {
            for waker in self.0.by_ref() {
                // The first panic goes on.
                let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
            }
        }
    }

    let mut rest = Rest(wakers.into_iter());
    for waker in rest.0.by_ref() {
        waker.wake();
    }
}

/// The waiters of each budget in order of arrival.
pub(crate) struct Queues<B> {
    queues: Vec<VecDeque<Arc<Waiter<B>>>>,
    next: u64,
}

impl<B> Queues<B> {
    pub(crate) fn new(budgets: usize) -> Self {
        Queues { queues: (0..budgets).map(|_| VecDeque::new()).collect(), next: 0 }
    }

    /// Whether nobody of `budget` waits.
    pub(crate) fn is_empty(&self, budget: usize) -> bool {
        self.queues[budget].is_empty()
    }

    /// Adds a waiter at the end.
    pub(crate) fn push(&mut self, budget: usize, class: usize, waker: Option<Waker>) -> Arc<Waiter<B>> {
        let waiter = Waiter::new(class, self.next, waker);
        self.next += 1;
        self.queues[budget].push_back(Arc::clone(&waiter));
        waiter
    }

    /// Removes a waiter. Returns whether it was still waiting.
    pub(crate) fn remove(&mut self, budget: usize, waiter: &Arc<Waiter<B>>) -> bool {
        let queue = &mut self.queues[budget];
        let position = queue.iter().position(|other| Arc::ptr_eq(other, waiter));
        position.and_then(|position| queue.remove(position)).is_some()
    }

    /// Serves the first waiter of each budget as long as `take` has a block for it, the older ones first. Calls `served` for each.
    /// Returns the smallest class that a first waiter still waits for.
    pub(crate) fn serve(
        &mut self,
        mut take: impl FnMut(usize, usize) -> Option<Taken<B>>,
        mut served: impl FnMut(Option<Waker>),
    ) -> Option<usize> {
        // Classes of the first waiters that must wait on.
        let mut waits_on = vec![None; self.queues.len()];
        loop {
            let first = |budget: usize| self.queues[budget].front().map(|waiter| (waiter.ticket, waiter.class, budget));
            let budgets = (0..self.queues.len()).filter(|budget| waits_on[*budget].is_none());
            let Some((_, class, budget)) = budgets.filter_map(first).min() else {
                return waits_on.into_iter().flatten().min();
            };
            match take(budget, class) {
                Some(block) => {
                    let waiter = self.queues[budget].pop_front();
                    served(waiter.and_then(|waiter| waiter.serve(block)));
                }
                None => waits_on[budget] = Some(class),
            }
        }
    }
}
