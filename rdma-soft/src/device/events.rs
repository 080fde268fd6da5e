//! Events that the program has not taken.

use std::collections::{HashMap, VecDeque};

use rdma_sys::ibv_event_type;

use super::channel::{Channel, Pending};
use super::signal::Signal;
use super::slab::Slab;
use super::wakeups::Wakeups;

/// An open context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) signal: Signal,
    /// Asynchronous events, each with the address of its C object. Port and device raise none, as they never change.
    pub(crate) queue: VecDeque<(ibv_event_type, usize)>,
}

/// Pending events of all contexts and completion channels.
#[derive(Debug)]
pub(crate) struct Events {
    pub(crate) contexts: Slab<Context>,
    pub(crate) channels: Slab<Channel>,
    /// Asynchronous events that were taken and not acknowledged, by the address of the object.
    pub(crate) unacknowledged: HashMap<usize, u32>,
    /// Completion queues that have overrun, until their queue pairs are in the error state.
    overruns: Vec<u32>,
    completion_events: u64,
    wakeups: Wakeups,
}

impl Events {
    pub(crate) fn new() -> Self {
        Events {
            contexts: Slab::new(1),
            channels: Slab::new(1),
            unacknowledged: HashMap::new(),
            overruns: Vec::new(),
            completion_events: 0,
            wakeups: Wakeups::default(),
        }
    }

    pub(crate) fn raise(&mut self, context: u32, kind: ibv_event_type, object: usize) {
        if let Some(context) = self.contexts.get_mut(context) {
            context.queue.push_back((kind, object));
            context.signal.raise();
        }
    }

    /// Takes the oldest asynchronous event of a context, with the address of its object.
    pub(crate) fn take(&mut self, context: u32) -> Option<(ibv_event_type, usize)> {
        let context = self.contexts.get_mut(context)?;
        let taken = context.queue.pop_front()?;
        context.signal.lower();
        Some(taken)
    }

    /// Takes an event of a completion channel, and returns its completion queue.
    pub(crate) fn take_completion_event(&mut self, channel: u32, pending: Pending) -> Option<u32> {
        self.channels.get_mut(channel)?.take(pending)
    }

    /// Completion events raised since the device was opened.
    pub(super) fn completion_events(&self) -> u64 {
        self.completion_events
    }

    /// Queues an event of a completion queue. Threads are woken after the device is unlocked.
    pub(crate) fn notify(&mut self, channel: u32, cq: u32) {
        self.completion_events += 1;
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.queue.push_back(cq);
            self.wakeups.add(&channel.signal);
        }
    }

    /// Records that a completion queue has overrun.
    pub(crate) fn add_overrun(&mut self, cq: u32) {
        if !self.overruns.contains(&cq) {
            self.overruns.push(cq);
        }
    }

    /// Drops the overrun of a completion queue that is destroyed, since its number may be reused.
    pub(crate) fn clear_overrun(&mut self, cq: u32) {
        self.overruns.retain(|of| *of != cq);
    }

    /// Takes a completion queue that has overrun.
    pub(crate) fn take_overrun(&mut self) -> Option<u32> {
        self.overruns.pop()
    }

    /// Whether a completion channel has an event that was not taken.
    pub(super) fn has_completion_event(&self, channel: u32) -> bool {
        self.channels.get(channel).is_some_and(|channel| !channel.queue.is_empty())
    }

    /// Takes an event of a completion channel that is held, or whose signal is not raised yet. Returns whether there was one.
    pub(super) fn take_unraised(&mut self, channel: u32) -> bool {
        let Some(channel) = self.channels.get_mut(channel) else { return false };
        if channel.held > 0 {
            channel.held -= 1;
            return true;
        }
        self.wakeups.take(&channel.signal)
    }

    /// Holds the last event of a completion channel, if it is of `cq` and its signal is not raised yet. Returns whether it does.
    ///
    /// The signal of a held event is raised by [`release`](Events::release), unless [`take_unraised`](Events::take_unraised) takes
    /// the event before.
    pub(super) fn hold(&mut self, channel: u32, cq: u32) -> bool {
        let Some(channel) = self.channels.get_mut(channel) else { return false };
        let is_held = channel.queue.back() == Some(&cq) && self.wakeups.take(&channel.signal);
        channel.held += u32::from(is_held);
        is_held
    }

    /// Raises the signal of a completion channel for the events that were held.
    pub(super) fn release(&mut self, channel: u32) {
        let Some(channel) = self.channels.get_mut(channel) else { return };
        for _ in 0..std::mem::take(&mut channel.held) {
            self.wakeups.add(&channel.signal);
        }
    }

    /// Whether there are signals to raise after the device is unlocked.
    #[inline]
    pub(super) fn has_wakeups(&self) -> bool {
        !self.wakeups.is_empty()
    }

    /// Takes the signals to raise after the device is unlocked.
    pub(super) fn take_wakeups(&mut self) -> Wakeups {
        std::mem::take(&mut self.wakeups)
    }

    /// Removes the pending asynchronous events of an object that is destroyed.
    pub(crate) fn remove_object(&mut self, context: u32, object: usize) {
        if let Some(context) = self.contexts.get_mut(context) {
            let before = context.queue.len();
            context.queue.retain(|(_, of)| *of != object);
            (context.queue.len()..before).for_each(|_| _ = context.signal.lower());
        }
    }
}
