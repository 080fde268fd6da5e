//! Wake-ups and drops, for after the lock is released.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;

use rdma_safe::{Buffer, Completion};

use crate::driver::state::Done;
use crate::trace;

/// Tasks to wake and memory to drop. Both can run code of the user, so they wait until no lock is held.
///
/// Dropping it does what is left to do, also if a waker panics.
#[derive(Default)]
pub(crate) struct Effects {
    /// The first task to wake. Most sweeps wake only one.
    first: Option<Waker>,
    /// The others, in order.
    wakers: VecDeque<Waker>,
    completions: Vec<Completion>,
    done: Vec<Done>,
    buffers: Vec<Buffer>,
    dropped_wakers: Vec<Waker>,
    /// Why connections have failed. A subscriber of events is code of the user, too.
    failures: Vec<Arc<rdma_safe::Error>>,
    /// Whether any of the lists above may have entries.
    has_others: bool,
}

impl Effects {
    #[inline(always)]
    pub(crate) fn wake(&mut self, waker: Waker) {
        match self.first {
            None => self.first = Some(waker),
            Some(_) => self.list().wakers.push_back(waker),
        }
    }

    pub(crate) fn drop_completion(&mut self, completion: Completion) {
        self.list().completions.push(completion);
    }

    pub(crate) fn drop_done(&mut self, done: Done) {
        self.list().done.push(done);
    }

    pub(crate) fn drop_buffers(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        self.list().buffers.extend(buffers);
    }

    /// A connection has failed.
    pub(crate) fn note_failure(&mut self, error: Arc<rdma_safe::Error>) {
        self.list().failures.push(error);
    }

    pub(crate) fn drop_waker(&mut self, waker: Option<Waker>) {
        self.list().dropped_wakers.extend(waker);
    }

    #[inline(always)]
    fn list(&mut self) -> &mut Self {
        self.has_others = true;
        self
    }

    /// Drops the memory, and wakes the tasks in order. Keeps its own allocations.
    #[inline(always)]
    pub(crate) fn run(&mut self) {
        if self.has_others {
            return self.run_lists();
        }
        if let Some(first) = self.first.take() {
            first.wake();
        }
    }

    #[inline(never)]
    fn run_lists(&mut self) {
        self.has_others = false;
        // First, so that a task that waits for the end of its connection finds its memory in the pool.
        self.done.clear();
        self.failures.drain(..).for_each(|error| trace::failed(&error));
        self.completions.clear();
        self.buffers.clear();
        self.dropped_wakers.clear();
        self.wake_all();
    }

    fn wake_all(&mut self) {
        if let Some(first) = self.first.take() {
            first.wake();
        }
        while let Some(waker) = self.wakers.pop_front() {
            waker.wake();
        }
    }
}

impl Drop for Effects {
    fn drop(&mut self) {
        self.wake_all();
    }
}
