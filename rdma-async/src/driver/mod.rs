//! The driver: takes completions and events, and wakes the tasks that wait for them.

pub(crate) mod batch;
mod connections;
pub(crate) mod events;
mod groups;
pub(crate) mod look;
pub(crate) mod lookups;
pub(crate) mod member;
mod poller;
pub(crate) mod queue;
mod room;
mod run;
mod spin;
pub(crate) mod state;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_pool::{Budget, Pool};
use rdma_safe::cm::Devices;
use rdma_safe::{Context, EndpointBuilder, EndpointKey, EndpointSet, ProtectionDomain};

use crate::effects::Effects;
use crate::receives::Receives;
use crate::{Error, Result, Sharing, Threads};
use connections::Counts;
use events::Events;
use look::Looks;
use queue::Queue;

#[cfg(feature = "tokio")]
pub(crate) use run::yield_now;
pub use run::{Runner, Turn};
pub use spin::Idle;

/// Takes the completions of connections, and wakes the tasks that await them.
///
/// A driver has one completion queue for each device, and further ones when there is no room for another connection. It
/// works only while its [`Runner`] runs, as a task of a runtime or on a separate thread.
///
/// | runs | made by |
/// |---|---|
/// | as a task of the current tokio runtime | `Driver::tokio` |
/// | as a task of smol | [`DriverBuilder::build`] and `Runner::run_async_io` |
/// | on a separate thread, for any runtime | [`Driver::thread`] |
/// | as the program decides | [`DriverBuilder::build`] |
///
/// Cloning gives another handle. The driver ends with its last handle, connector, listener and connection. If it ends earlier,
/// for example because its runtime is dropped, all its operations fail with [`Error::DriverStopped`].
pub struct Driver<S: Sharing = Threads> {
    pub(crate) shared: S::Rc<Shared<S>>,
    /// Tells the runner when the last handle is gone.
    alive: S::Rc<Alive<S>>,
}

/// A handle that does not keep its driver.
pub(crate) struct WeakDriver<S: Sharing> {
    shared: S::Weak<Shared<S>>,
    alive: S::Weak<Alive<S>>,
}

impl<S: Sharing> WeakDriver<S> {
    /// The driver, unless it has stopped or belongs to the parent of this process.
    pub(crate) fn upgrade(&self) -> Option<Driver<S>> {
        let driver = Driver::<S> { shared: S::upgrade(&self.shared)?, alive: S::upgrade(&self.alive)? };
        (!driver.is_stopped() && !driver.shared.events.is_inherited()).then_some(driver)
    }
}

impl<S: Sharing> Clone for Driver<S> {
    fn clone(&self) -> Self {
        Driver { shared: self.shared.clone(), alive: self.alive.clone() }
    }
}

/// Options of a driver.
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until it is built"]
pub struct DriverBuilder {
    idle: Idle,
    completions: u32,
    memory: usize,
}

/// What the handles and the runner share.
pub(crate) struct Shared<S: Sharing> {
    pub(crate) events: S::Rc<Events<S>>,
    /// Connections and sockets on the same device share a domain, and with it queues, memory and peers.
    pub(crate) devices: Devices,
    queues: S::Cell<Vec<S::Rc<Queue<S>>>>,
    pools: S::Cell<Vec<(ProtectionDomain, Pool)>>,
    completions: u32,
    memory: usize,
    pub(crate) stopped: AtomicBool,
    pub(crate) has_handles: AtomicBool,
    pub(crate) turns: TurnCounts,
    /// Whether tasks look for the completions of their operations.
    looks: bool,
}

/// Counts of the runner.
#[derive(Default)]
pub(crate) struct TurnCounts {
    pub(crate) sleeps: AtomicU64,
    pub(crate) wakes: AtomicU64,
    pub(crate) spins: AtomicU64,
}

pub(crate) struct Alive<S: Sharing>(S::Rc<Shared<S>>);

impl<S: Sharing> Drop for Alive<S> {
    fn drop(&mut self) {
        self.0.has_handles.store(false, Ordering::Release);
        self.0.events.poller.wake();
    }
}

/// Counts of a driver since it was made. Made by [`Driver::statistics`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Connections, and sockets for datagrams. A connection counts from the start of its handshake until it is closed.
    pub connections: usize,
    /// Operations in flight, or completed and not taken yet.
    pub operations: usize,
    /// Operations posted.
    pub posted: u64,
    /// Operations that have succeeded.
    pub completed: u64,
    /// Of these, the ones that their tasks have found completed as soon as they were posted, without the driver.
    pub found: u64,
    /// Operations and receives that have failed.
    pub failed: u64,
    /// Messages received.
    pub received: u64,
    /// Operations that had to wait for room in the send queue.
    pub waited: u64,
    /// Times that a reader waited while it kept all messages that the connection has receives for.
    pub starved: u64,
    /// Messages beyond the [shared receives](crate::SharedReceives) that their connections had reserved.
    pub exceeded: u64,
    /// Times that the driver slept.
    pub sleeps: u64,
    /// Times that it was woken.
    pub wakes: u64,
    /// Sweeps that found nothing.
    pub spins: u64,
}

impl Default for DriverBuilder {
    fn default() -> Self {
        DriverBuilder { idle: Idle::default(), completions: 16 << 10, memory: 256 << 20 }
    }
}

impl DriverBuilder {
    /// What to do while there are no completions: [`Idle::Adaptive`] by default.
    pub fn idle(mut self, idle: Idle) -> Self {
        self.idle = idle;
        self
    }

    /// Entries of each completion queue: 16 384 by default, or what the device allows.
    ///
    /// Each connection needs one for each send and receive of its queues.
    pub fn completions(mut self, entries: u32) -> Self {
        self.completions = entries;
        self
    }

    /// Limits the memory for messages of each device to `bytes`: 256 MiB by default. It is registered as needed.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = bytes;
        self
    }

    /// Makes a driver, and its runner.
    ///
    /// # Errors
    /// [`Error::Driver`] when there are no file descriptors.
    pub fn build<S: Sharing>(self) -> Result<(Driver<S>, Runner<S>)> {
        let DriverBuilder { idle, completions, memory } = self;
        let shared = S::rc(Shared {
            events: S::rc(Events::new()?),
            devices: Devices::default(),
            queues: S::cell(Vec::new()),
            pools: S::cell(Vec::new()),
            completions,
            memory,
            stopped: AtomicBool::new(false),
            has_handles: AtomicBool::new(true),
            turns: TurnCounts::default(),
            looks: idle != Idle::Sleep,
        });
        let driver = Driver { shared: shared.clone(), alive: S::rc(Alive(shared.clone())) };
        Ok((driver, Runner::new(shared, idle)))
    }
}

impl Driver {
    /// A driver on a new thread, with default options.
    ///
    /// # Errors
    /// [`Error::Driver`] when the thread cannot be started.
    pub fn thread() -> Result<Self> {
        let (driver, runner) = Driver::builder().build()?;
        std::thread::Builder::new().name("rdma-async".to_owned()).spawn(move || runner.run())?;
        Ok(driver)
    }
}

/// The driver that [`Driver::current`] has made for programs without a runtime that it knows.
static ON_THREAD: Mutex<Option<WeakDriver<Threads>>> = Mutex::new(None);

impl Driver<Threads> {
    /// Starts building a driver.
    pub fn builder() -> DriverBuilder {
        DriverBuilder::default()
    }

    /// The driver of the current tokio runtime. Outside of tokio, a driver on a separate thread. All callers share it.
    ///
    /// # Errors
    /// [`Error::Driver`] when there are no file descriptors, or the thread cannot be started.
    pub fn current() -> Result<Self> {
        #[cfg(feature = "tokio")]
        if let Some(driver) = crate::tokio::of_runtime() {
            return driver;
        }
        let mut on_thread = ON_THREAD.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = on_thread.as_ref().and_then(WeakDriver::upgrade) {
            return Ok(driver);
        }
        let driver = Driver::thread()?;
        *on_thread = Some(driver.downgrade());
        Ok(driver)
    }
}

impl<S: Sharing> Driver<S> {
    /// Counts of the driver.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let queues = S::with(&self.shared.queues, |queues| queues.clone());
        let turns = &self.shared.turns;
        let mut sum = Statistics {
            sleeps: turns.sleeps.load(Ordering::Relaxed),
            wakes: turns.wakes.load(Ordering::Relaxed),
            spins: turns.spins.load(Ordering::Relaxed),
            ..Statistics::default()
        };
        for queue in queues {
            let (connections, operations) = queue.population();
            let Counts { posted, found, completed, failed, received, waited, starved, exceeded } = queue.counts();
            sum.connections += connections;
            sum.operations += operations;
            sum.posted += posted + found;
            sum.completed += completed + found;
            sum.found += found;
            sum.failed += failed;
            sum.received += received;
            sum.waited += waited;
            sum.starved += starved;
            sum.exceeded += exceeded;
        }
        sum
    }

    /// Records [`Driver::statistics`] with the recorder of the crate metrics: `rdma_async_posted`, `rdma_async_sleeps` and so
    /// on.
    ///
    /// Call it at the interval at which the metrics are read.
    #[cfg(feature = "metrics")]
    pub fn record_metrics(&self) {
        let statistics = self.statistics();
        let Statistics { connections, operations, posted, completed, failed, received, .. } = statistics;
        let Statistics { found, waited, starved, exceeded, sleeps, wakes, spins, .. } = statistics;
        metrics::gauge!("rdma_async_connections").set(connections as f64);
        metrics::gauge!("rdma_async_operations").set(operations as f64);
        metrics::counter!("rdma_async_posted").absolute(posted);
        metrics::counter!("rdma_async_completed").absolute(completed);
        metrics::counter!("rdma_async_found").absolute(found);
        metrics::counter!("rdma_async_failed").absolute(failed);
        metrics::counter!("rdma_async_received").absolute(received);
        metrics::counter!("rdma_async_waited").absolute(waited);
        metrics::counter!("rdma_async_starved").absolute(starved);
        metrics::counter!("rdma_async_exceeded").absolute(exceeded);
        metrics::counter!("rdma_async_sleeps").absolute(sleeps);
        metrics::counter!("rdma_async_wakes").absolute(wakes);
        metrics::counter!("rdma_async_spins").absolute(spins);
    }

    /// Whether the runner has stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.shared.stopped.load(Ordering::Acquire)
    }

    pub(crate) fn downgrade(&self) -> WeakDriver<S> {
        WeakDriver { shared: S::downgrade(&self.shared), alive: S::downgrade(&self.alive) }
    }

    /// The driver's pool of memory in this domain.
    pub(crate) fn pool(&self, pd: &ProtectionDomain) -> Result<Pool> {
        let find = |pools: &mut Vec<(ProtectionDomain, Pool)>| {
            pools.iter().find(|(other, _)| other.is_same(pd)).map(|(_, pool)| pool.clone())
        };
        if let Some(pool) = S::with(&self.shared.pools, find) {
            return Ok(pool);
        }
        let pool = Pool::builder(pd)
            .share(Budget::Control, 64 << 10)
            .share(Budget::Bulk, 64 << 10)
            .common(self.shared.memory)
            .build()?;
        Ok(S::with(&self.shared.pools, |pools| match find(pools) {
            // Another thread was faster.
            Some(other) => other,
            None => {
                pools.push((pd.clone(), pool.clone()));
                pool
            }
        }))
    }

    /// Adds a connection to a queue on the device that has room for its endpoint, or to a new one. `start` builds the endpoint.
    pub(crate) fn open<T>(
        &self,
        builder: &EndpointBuilder<'_>,
        context: &Context,
        sends: u32,
        receives: Receives<S>,
        start: impl FnOnce(&mut EndpointSet) -> rdma_safe::Result<(EndpointKey, T)>,
    ) -> Result<(S::Rc<Queue<S>>, EndpointKey, T)> {
        if self.is_stopped() {
            return Err(Error::DriverStopped);
        }
        let (mut start, mut receives) = (Some(start), Some(receives));
        for queue in S::with(&self.shared.queues, |queues| queues.clone()) {
            // Other threads can take the room, so both happens under the lock of the queue.
            let opened = queue.open(sends, &mut receives, |set| {
                let has_room = set.context().is_same(context) && set.has_room_for(builder);
                start.take_if(|_| has_room).map(|start| start(set))
            });
            if let Some(opened) = opened {
                let (key, started) = opened?;
                return Ok((queue, key, started));
            }
        }
        let entries = self.shared.completions.min(context.attributes().max_cqe());
        let set = EndpointSet::builder(context, entries).events(true).keep_leftovers(true).build()?;
        let queue = S::rc(Queue::new(set, &self.shared.events, Looks::new(self.shared.looks))?);
        // The queue is kept only if it is large enough for a connection.
        let opened = queue.open(sends, &mut receives, |set| start.take().map(|start| start(set)));
        let (key, started) = opened.ok_or(Error::Closed)??;
        S::with(&self.shared.queues, |queues| queues.push(queue.clone()));
        // The runner arms only the queues that it knows.
        self.shared.events.poller.wake();
        if self.is_stopped() {
            // The driver has stopped in the meantime.
            queue.stop();
            return Err(Error::DriverStopped);
        }
        Ok((queue, key, started))
    }
}

impl<S: Sharing> Shared<S> {
    /// Ends all connections and handshakes. Their operations fail.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let mut effects = Effects::default();
        self.events.stop(&mut effects);
        effects.run();
        let queues = S::with(&self.queues, std::mem::take);
        for queue in queues {
            queue.stop();
        }
    }

    pub(crate) fn queues(&self, into: &mut Vec<S::Rc<Queue<S>>>) {
        S::with(&self.queues, |queues| {
            if queues.len() != into.len() {
                into.clone_from(queues);
            }
        });
    }
}

impl<S: Sharing> fmt::Debug for Driver<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("statistics", &self.statistics()).finish_non_exhaustive()
    }
}

const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<Driver>();
    is_shared::<Arc<Queue<Threads>>>();
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Connector, Listener, Local};

    #[test]
    #[cfg_attr(miri, ignore = "soft0 needs sockets")]
    fn queues_that_are_too_small_are_not_kept() {
        rdma_safe::soft::install().unwrap();
        let (driver, mut runner) = DriverBuilder::default().completions(4).build::<Local>().unwrap();
        let listener = runner.block_on(Listener::builder().driver(&driver).bind("127.0.0.1:0")).unwrap();
        let connector = Connector::with_driver(&driver).sends(4);
        for _ in 0..2 {
            let error = runner.block_on(connector.connect(listener.local_address())).unwrap_err();
            assert!(matches!(error, Error::Rdma(full) if matches!(*full, rdma_safe::Error::EndpointSetFull { .. })));
        }
        assert_eq!(Local::with(&driver.shared.queues, |queues| queues.len()), 0);
    }
}
