//! A model of a completion queue with one operation.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use rdma_safe::EndpointKey;

use super::poller::Poller;
use crate::Sharing;
use crate::core::{Slot, Slots};
use crate::effects::Effects;
use crate::sync::{Mutex, lock};

pub(crate) struct Queue<S: Sharing> {
    slots: S::Cell<Slots<()>>,
    /// Neither software nor the driver holds the lock of the queue when the device completes work.
    device: Mutex<Device>,
    poller: Arc<Poller>,
}

#[derive(Default)]
struct Device {
    completed: Vec<Slot>,
    is_armed: bool,
    has_event: bool,
}

impl<S: Sharing> Queue<S> {
    pub(crate) fn new(poller: &Arc<Poller>) -> Self {
        Queue { slots: S::cell(Slots::with_capacity(1)), device: Mutex::default(), poller: poller.clone() }
    }

    pub(crate) fn post(&self, context: &Context<'_>) -> Slot {
        let waker = context.waker().clone();
        S::with(&self.slots, |slots| slots.insert(0, waker))
    }

    pub(crate) fn take(&self, slot: Slot, context: &Context<'_>) -> Poll<()> {
        S::with(&self.slots, |slots| slots.take(slot, context.waker())).map_or(Poll::Pending, Poll::Ready)
    }

    /// What the device does when work completes.
    pub(crate) fn complete(&self, slot: Slot) {
        let mut device = lock(&self.device);
        device.completed.push(slot);
        let raises = device.is_armed;
        device.is_armed = false;
        device.has_event |= raises;
        drop(device);
        if raises {
            self.poller.complete();
        }
    }

    pub(crate) fn sweep(&self, effects: &mut Effects) -> usize {
        let swept = S::with(&self.slots, |slots| {
            let completed = std::mem::take(&mut lock(&self.device).completed);
            for slot in &completed {
                if let Ok(waker) = slots.complete(*slot, ()) {
                    effects.wake(waker);
                }
            }
            completed.len()
        });
        effects.run();
        swept
    }

    /// The device may complete work between any two steps of this.
    pub(crate) fn arm(&self, _: &mut Effects) -> (bool, Option<Instant>) {
        S::with(&self.slots, |_| {
            lock(&self.device).has_event = false;
            lock(&self.device).is_armed = true;
            (lock(&self.device).completed.is_empty(), None)
        })
    }

    pub(crate) fn check_connection(&self, _: EndpointKey) {}

    pub(crate) fn advance_leaving(&self, _: &mut Effects) {}

    pub(crate) fn population(&self) -> (usize, usize) {
        (0, 0)
    }
}
