//! Completion queues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_sys::{IBV_EVENT_CQ_ERR, IBV_WC_SUCCESS, ibv_wc};

use super::events::Events;

/// A completion queue, as the device has it.
pub(crate) struct Cq {
    pub(crate) completions: Arc<Completions>,
    pub(crate) context: u32,
    pub(crate) channel: Option<u32>,
    /// The address of its object in the program.
    pub(crate) object: usize,
    /// Queue pairs that use it.
    pub(crate) users: u32,
    /// Events of it that were taken from its channel, and those of them that were acknowledged.
    pub(crate) events: (u32, u32),
}

/// For which completions an event is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Armed {
    Solicited,
    Any,
}

/// What is in a completion queue. It has a lock of its own, so that whoever takes a completion does not wait for the device.
pub(crate) struct Completions {
    state: Mutex<Waiting>,
    len: AtomicUsize,
}

struct Waiting {
    queue: VecDeque<ibv_wc>,
    capacity: usize,
    armed: Option<Armed>,
    has_overrun: bool,
}

impl Completions {
    pub(crate) fn new(capacity: usize) -> Completions {
        // Of a large one, what few programs ever leave there at once.
        let queue = VecDeque::with_capacity(capacity.min(1024));
        let state = Mutex::new(Waiting { queue, capacity, armed: None, has_overrun: false });
        Completions { state, len: AtomicUsize::new(0) }
    }

    /// Nothing that can panic is done with the lock held.
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    /// Takes as many as there are, at most so many, the earliest first.
    pub(crate) fn take(&self, most: usize, mut each: impl FnMut(ibv_wc)) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut state = self.lock();
        let count = most.min(state.queue.len());
        state.queue.drain(..count).for_each(&mut each);
        self.len.store(state.queue.len(), Ordering::Release);
        count
    }

    /// Wants an event.
    pub(crate) fn arm(&self, armed: Armed) {
        let mut state = self.lock();
        // Arming for more is not undone by arming for less.
        if state.armed != Some(Armed::Any) {
            state.armed = Some(armed);
        }
    }

    /// Changes how many there may be; `false` when there are more.
    pub(crate) fn resize(&self, capacity: usize) -> bool {
        let mut state = self.lock();
        let fits = state.queue.len() <= capacity;
        if fits {
            state.capacity = capacity;
        }
        fits
    }
}

impl Cq {
    /// Adds a completion. When there is no room it is lost, and the queue is of no more use.
    pub(crate) fn push(&self, number: u32, wc: ibv_wc, is_solicited: bool, events: &mut Events) {
        let mut state = self.completions.lock();
        if state.queue.len() >= state.capacity {
            if !std::mem::replace(&mut state.has_overrun, true) {
                events.raise(self.context, IBV_EVENT_CQ_ERR, self.object);
            }
            return;
        }
        let is_urgent = is_solicited || wc.status != IBV_WC_SUCCESS;
        state.queue.push_back(wc);
        self.completions.len.store(state.queue.len(), Ordering::Release);
        let wakes = match state.armed {
            None => false,
            Some(Armed::Any) => true,
            Some(Armed::Solicited) => is_urgent,
        };
        if wakes && let Some(channel) = self.channel {
            state.armed = None;
            events.notify(channel, number);
        }
    }

    /// Throws away what is of a queue pair that goes.
    pub(crate) fn sweep(&self, qp: u32) {
        let mut state = self.completions.lock();
        state.queue.retain(|wc| wc.qp_num != qp);
        self.completions.len.store(state.queue.len(), Ordering::Release);
    }
}
