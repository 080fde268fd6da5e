//! What has to happen once no lock is held.

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
    wakers: VecDeque<Waker>,
    completions: Vec<Completion>,
    done: Vec<Done>,
    buffers: Vec<Buffer>,
    dropped_wakers: Vec<Waker>,
    /// Why connections have failed. A subscriber of events is code of the user, too.
    failures: Vec<Arc<rdma_safe::Error>>,
}

impl Effects {
    #[inline(always)]
    pub(crate) fn wake(&mut self, waker: Waker) {
        match self.first {
            None => self.first = Some(waker),
            Some(_) => self.wakers.push_back(waker),
        }
    }

    pub(crate) fn drop_completion(&mut self, completion: Completion) {
        self.completions.push(completion);
    }

    #[inline(always)]
    pub(crate) fn drop_done(&mut self, done: Done) {
        self.done.push(done);
    }

    pub(crate) fn drop_buffers(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        self.buffers.extend(buffers);
    }

    /// A connection has failed.
    pub(crate) fn note_failure(&mut self, error: Arc<rdma_safe::Error>) {
        self.failures.push(error);
    }

    pub(crate) fn drop_waker(&mut self, waker: Option<Waker>) {
        self.dropped_wakers.extend(waker);
    }

    /// Drops the memory, and wakes the tasks in order. Keeps its own allocations.
    #[inline(always)]
    pub(crate) fn run(&mut self) {
        // First, so that a task that waits for the end of its connection finds its memory in the pool.
        if !self.done.is_empty() {
            self.done.clear();
        }
        if !self.is_usual() {
            self.run_unusual();
        }
        if let Some(first) = self.first.take() {
            first.wake();
        }
        if !self.wakers.is_empty() {
            self.wake_others();
        }
    }

    #[inline(never)]
    fn wake_others(&mut self) {
        while let Some(waker) = self.wakers.pop_front() {
            waker.wake();
        }
    }

    #[inline(always)]
    fn is_usual(&self) -> bool {
        let Effects { completions, buffers, dropped_wakers, failures, .. } = self;
        completions.is_empty() && buffers.is_empty() && dropped_wakers.is_empty() && failures.is_empty()
    }

    #[cold]
    #[inline(never)]
    fn run_unusual(&mut self) {
        self.failures.drain(..).for_each(|error| trace::failed(&error));
        self.completions.clear();
        self.buffers.clear();
        self.dropped_wakers.clear();
    }
}

impl Drop for Effects {
    fn drop(&mut self) {
        if let Some(first) = self.first.take() {
            self.wakers.push_front(first);
        }
        self.wake_others();
    }
}
