//! Timers of an engine.

use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use rdma_async::Deadline;

/// A timer that runs the engine when it fires.
pub(super) struct Timer {
    deadline: Deadline,
    waker: Waker,
    /// `None` if it is not armed.
    at: Option<Instant>,
}

impl Timer {
    /// A timer that calls `waker` when it fires.
    pub(super) fn new(deadline: Deadline, waker: Waker) -> Self {
        Timer { deadline, waker, at: None }
    }

    pub(super) fn is_armed(&self) -> bool {
        self.at.is_some()
    }

    /// Arms it unless it is armed. `after` must be much longer than a system call.
    pub(super) fn arm(&mut self, after: Duration) {
        if self.is_armed() {
            return;
        }
        loop {
            let at = Instant::now() + after;
            // Ready if the thread was preempted for as long. Then no waker is stored.
            if self.deadline.poll(at, &mut Context::from_waker(&self.waker)).is_pending() {
                self.at = Some(at);
                return;
            }
        }
    }

    /// Whether it has fired. Disarms it then.
    pub(super) fn take_fired(&mut self) -> bool {
        self.at.take_if(|at| Instant::now() >= *at).is_some()
    }
}
