//! Completion queues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_sys::{IBV_EVENT_CQ_ERR, IBV_WC_SUCCESS, ibv_wc};

use super::events::Events;
use crate::check;

/// A completion queue.
pub(crate) struct Cq {
    pub(crate) completions: Arc<Completions>,
    pub(crate) context: u32,
    pub(crate) channel: Option<u32>,
    /// Address of the `ibv_cq`.
    pub(crate) object: usize,
    /// Queue pairs that use it.
    pub(crate) users: u32,
    /// Its events in the queue of its channel.
    pub(crate) queued_events: u32,
    /// Numbers of events taken from the channel, and of events acknowledged.
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

/// A completion did not fit into its queue, which fails all later polls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Overrun;

/// The entries of a completion queue. They have a lock of their own, so polls do not wait for the device's lock.
pub(crate) struct Completions {
    state: Mutex<Entries>,
    len: AtomicUsize,
    has_overrun: AtomicBool,
}

struct Entries {
    queue: VecDeque<Entry>,
    capacity: usize,
    armed: Option<Armed>,
    /// Number of completions that were taken.
    taken: u64,
}

struct Entry {
    wc: ibv_wc,
    /// Whether it is solicited or an error. Such a completion raises an event even if the queue is armed only for solicited ones.
    is_urgent: bool,
}

impl Entries {
    /// Whether any entry raises an event for a queue that is armed like this.
    fn has(&self, armed: Armed) -> bool {
        match armed {
            Armed::Any => !self.queue.is_empty(),
            Armed::Solicited => self.queue.iter().any(|entry| entry.is_urgent),
        }
    }
}

impl Completions {
    pub(crate) fn new(capacity: usize) -> Completions {
        // Few programs leave more completions than this in a large queue.
        let queue = VecDeque::with_capacity(capacity.min(1024));
        let state = Mutex::new(Entries { queue, capacity, armed: None, taken: 0 });
        Completions { state, len: AtomicUsize::new(0), has_overrun: AtomicBool::new(false) }
    }

    /// Locks the entries. A poisoned lock is used, since nothing panics with the lock held.
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    /// Takes at most `most` completions, the oldest first, and returns their number.
    ///
    /// # Errors
    /// [`Overrun`], once all completions from before the overrun are taken.
    pub(crate) fn take(&self, most: usize, mut each: impl FnMut(ibv_wc)) -> Result<usize, Overrun> {
        // Read the flag before the length: nothing is added after the flag is set, so an empty queue then stays empty.
        let has_overrun = self.has_overrun.load(Ordering::Acquire);
        if self.is_empty() {
            return if has_overrun { Err(Overrun) } else { Ok(0) };
        }
        let mut state = self.lock();
        let count = most.min(state.queue.len());
        state.queue.drain(..count).for_each(|entry| each(entry.wc));
        state.taken += count as u64;
        self.len.store(state.queue.len(), Ordering::Release);
        Ok(count)
    }

    /// Arms the queue, unless an event is due at once. Returns whether one is.
    ///
    /// An event is due if the queue already has a matching completion or has overrun.
    pub(crate) fn arm(&self, armed: Armed) -> bool {
        let mut state = self.lock();
        let is_due = state.has(armed) || self.has_overrun.load(Ordering::Relaxed);
        if is_due {
            state.armed = None;
        } else if state.armed != Some(Armed::Any) {
            // Arming for solicited completions does not disarm a queue that is armed for all.
            state.armed = Some(armed);
        }
        is_due
    }

    /// Numbers of waiting completions and of entries.
    pub(crate) fn usage(&self) -> (usize, usize) {
        let state = self.lock();
        (state.queue.len(), state.capacity)
    }

    /// Number of completions that were taken.
    pub(crate) fn taken(&self) -> u64 {
        self.lock().taken
    }

    /// Whether the next completion, or the next solicited one, raises an event.
    pub(crate) fn is_armed(&self) -> bool {
        self.lock().armed.is_some()
    }

    /// Changes the capacity. Returns `false` if the queue has more completions.
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
    /// Adds a completion, or overruns the queue if it is full.
    ///
    /// After an overrun, polls fail once the entries are taken, and `IBV_EVENT_CQ_ERR` is raised. [`Events`] lists the queue until
    /// its queue pairs are in the error state.
    pub(crate) fn push(&mut self, number: u32, wc: ibv_wc, is_solicited: bool, events: &mut Events) {
        let mut state = self.completions.lock();
        let has_overrun = self.completions.has_overrun.load(Ordering::Relaxed);
        let is_raised = if has_overrun || state.queue.len() >= state.capacity {
            self.completions.has_overrun.store(true, Ordering::Release);
            events.add_overrun(number);
            if !has_overrun {
                check::with(|check| check.cq_overrun(number, state.capacity, wc.qp_num, wc.wr_id));
                events.raise(self.context, IBV_EVENT_CQ_ERR, self.object);
            }
            // A program that waits for an event is woken. Its next poll fails.
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

    /// Raises the event that is due at arming, unless the channel already has one of this queue. That one may be held.
    pub(crate) fn notify_armed(&mut self, number: u32, events: &mut Events) {
        match self.channel {
            Some(channel) if self.queued_events > 0 => events.release(channel),
            _ => self.notify(number, events),
        }
    }

    fn notify(&mut self, number: u32, events: &mut Events) {
        if let Some(channel) = self.channel {
            self.queued_events += 1;
            events.notify(channel, number);
        }
    }

    /// Removes the completions of a queue pair that is destroyed or reset.
    pub(crate) fn remove_qp(&self, qp: u32) {
        let mut state = self.completions.lock();
        state.queue.retain(|entry| entry.wc.qp_num != qp);
        self.completions.len.store(state.queue.len(), Ordering::Release);
    }
}
