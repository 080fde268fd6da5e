//! A driver over models of its descriptor and of a completion queue.

#[path = "../../../src/driver/events.rs"]
#[allow(dead_code, reason = "there are no handshakes")]
pub(crate) mod events;
pub(crate) mod poller;
pub(crate) mod queue;
#[path = "../../../src/driver/run.rs"]
#[allow(dead_code, reason = "runtimes use more of it")]
mod run;
mod spin;
pub(crate) mod state;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::sync::{AtomicBool, Ordering};
use crate::{Result, Sharing, Threads};
use events::Events;
use queue::Queue;

pub(crate) use run::Runner;
pub(crate) use spin::Idle;

/// What the handles and the runner share.
pub(crate) struct Shared<S: Sharing> {
    pub(crate) events: S::Rc<Events<S>>,
    queues: S::Cell<Vec<S::Rc<Queue<S>>>>,
    pub(crate) stopped: AtomicBool,
    pub(crate) has_handles: AtomicBool,
    pub(crate) turns: TurnCounts,
}

#[derive(Default)]
pub(crate) struct TurnCounts {
    pub(crate) sleeps: AtomicU64,
    pub(crate) wakes: AtomicU64,
    pub(crate) spins: AtomicU64,
}

impl<S: Sharing> Shared<S> {
    pub(crate) fn queues(&self, into: &mut Vec<S::Rc<Queue<S>>>) {
        S::with(&self.queues, |queues| {
            if queues.len() != into.len() {
                into.clone_from(queues);
            }
        });
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }
}

/// The handle of a driver.
pub(crate) struct Driver(pub(crate) Arc<Shared<Threads>>);

impl Driver {
    pub(crate) fn new() -> Result<(Driver, Runner<Threads>)> {
        let shared = Arc::new(Shared {
            events: Arc::new(Events::new()?),
            queues: Threads::cell(Vec::new()),
            stopped: AtomicBool::new(false),
            has_handles: AtomicBool::new(true),
            turns: TurnCounts::default(),
        });
        Ok((Driver(shared.clone()), Runner::new(shared, Idle)))
    }

    /// Adds a queue, like `Driver::queue` of the crate.
    pub(crate) fn add_queue(&self) -> Arc<Queue<Threads>> {
        let queue = Arc::new(Queue::new(&self.0.events.poller));
        Threads::with(&self.0.queues, |queues| queues.push(queue.clone()));
        self.0.events.poller.wake();
        queue
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.has_handles.store(false, Ordering::Release);
        self.0.events.poller.wake();
    }
}
