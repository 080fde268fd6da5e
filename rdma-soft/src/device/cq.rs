//! Completion queues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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
    /// Events that are in its channel.
    pub(crate) queued_events: u32,
    /// Events taken from its channel, and events acknowledged.
    pub(crate) events: (u32, u32),
}

/// Which completions raise an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Armed {
    /// Completions of solicited messages, and errors.
    Solicited,
    /// All completions.
    Any,
}

/// A completion did not fit into its queue, which stays failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Overrun;

/// The entries of a completion queue. They have their own lock, so that a poll does not wait for the device.
pub(crate) struct Completions {
    state: Mutex<Entries>,
    len: AtomicUsize,
    has_overrun: AtomicBool,
}

struct Entries {
    queue: VecDeque<Entry>,
    capacity: usize,
    armed: Option<Armed>,
}

struct Entry {
    wc: ibv_wc,
    /// Solicited, or an error: raises an event even if the queue is armed for solicited completions only.
    is_urgent: bool,
}

impl Entries {
    /// Whether there is a completion that raises an event of a queue armed in this way.
    fn has(&self, armed: Armed) -> bool {
        match armed {
            Armed::Any => !self.queue.is_empty(),
            Armed::Solicited => self.queue.iter().any(|entry| entry.is_urgent),
        }
    }
}

impl Completions {
    pub(crate) fn new(capacity: usize) -> Completions {
        // Few programs leave more than that in a large queue.
        let queue = VecDeque::with_capacity(capacity.min(1024));
        let state = Mutex::new(Entries { queue, capacity, armed: None });
        Completions { state, len: AtomicUsize::new(0), has_overrun: AtomicBool::new(false) }
    }

    /// Nothing that can panic is done with the lock held.
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    /// Takes at most `most` completions, the earliest first, and returns their number.
    ///
    /// # Errors
    /// [`Overrun`], after the completions from before the overrun have been taken.
    pub(crate) fn take(&self, most: usize, mut each: impl FnMut(ibv_wc)) -> Result<usize, Overrun> {
        // Read the flag before the length: nothing is added after the flag is set, so an empty queue is then really drained.
        let has_overrun = self.has_overrun.load(Ordering::Acquire);
        if self.is_empty() {
            return if has_overrun { Err(Overrun) } else { Ok(0) };
        }
        let mut state = self.lock();
        let count = most.min(state.queue.len());
        state.queue.drain(..count).for_each(|entry| each(entry.wc));
        self.len.store(state.queue.len(), Ordering::Release);
        Ok(count)
    }

    /// Arms the queue, unless an event is due at once; returns whether it is.
    ///
    /// An event is due if the queue has such a completion already, or has overrun.
    pub(crate) fn arm(&self, armed: Armed) -> bool {
        let mut state = self.lock();
        let is_due = state.has(armed) || self.has_overrun.load(Ordering::Relaxed);
        if is_due {
            state.armed = None;
        } else if state.armed != Some(Armed::Any) {
            // Arming for solicited completions does not disarm the others.
            state.armed = Some(armed);
        }
        is_due
    }

    /// Changes the capacity; returns `false` when there are more completions.
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
    /// Adds a completion. Without room for it the queue overruns: polls fail once the entries are taken, `IBV_EVENT_CQ_ERR`
    /// is raised, and [`Events::overruns`] has the queue until its queue pairs are in the error state.
    pub(crate) fn push(&mut self, number: u32, wc: ibv_wc, is_solicited: bool, events: &mut Events) {
        let mut state = self.completions.lock();
        let had_overrun = self.completions.has_overrun.load(Ordering::Relaxed);
        let is_raised = if had_overrun || state.queue.len() >= state.capacity {
            self.completions.has_overrun.store(true, Ordering::Release);
            events.overrun(number);
            if !had_overrun {
                events.raise(self.context, IBV_EVENT_CQ_ERR, self.object);
            }
            // A program that waits for an event is woken, and its next poll fails.
            state.armed.is_some()
        } else {
            let is_urgent = is_solicited || wc.status != IBV_WC_SUCCESS;
            state.queue.push_back(Entry { wc, is_urgent });
            self.completions.len.store(state.queue.len(), Ordering::Release);
            match state.armed {
                None => false,
                Some(Armed::Any) => true,
                Some(Armed::Solicited) => is_urgent,
            }
        };
        if is_raised && self.channel.is_some() {
            state.armed = None;
            drop(state);
            self.notify(number, events);
        }
    }

    /// Raises the event that is due at arming, unless the channel has one of this queue already.
    pub(crate) fn notify_armed(&mut self, number: u32, events: &mut Events) {
        if self.queued_events == 0 {
            self.notify(number, events);
        }
    }

    fn notify(&mut self, number: u32, events: &mut Events) {
        if let Some(channel) = self.channel {
            self.queued_events += 1;
            events.notify(channel, number);
        }
    }

    /// Removes the completions of a queue pair that is destroyed or reset.
    pub(crate) fn sweep(&self, qp: u32) {
        let mut state = self.completions.lock();
        state.queue.retain(|entry| entry.wc.qp_num != qp);
        self.completions.len.store(state.queue.len(), Ordering::Release);
    }
}
