//! Drivers as tasks of tokio.

use std::collections::HashMap;
use std::future::poll_fn;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use rdma_safe::CompletionChannel;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Handle, Id};

use crate::driver::{WeakDriver, yield_now};
use crate::{Driver, DriverBuilder, Result, Runner, Sharing, Threads, Turn};

/// The drivers that [`of_runtime`] has made.
static DRIVERS: Mutex<Option<HashMap<Id, WeakDriver<Threads>>>> = Mutex::new(None);

/// The driver of the current tokio runtime, which all callers share; `None` outside of tokio.
pub(crate) fn of_runtime() -> Option<Result<Driver>> {
    let id = Handle::try_current().ok()?.id();
    let mut drivers = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
    let drivers = drivers.get_or_insert_default();
    if let Some(driver) = drivers.get(&id).and_then(WeakDriver::upgrade) {
        return Some(Ok(driver));
    }
    drivers.retain(|_, driver| driver.upgrade().is_some());
    let driver = Driver::tokio();
    if let Ok(driver) = &driver {
        drivers.insert(id, driver.downgrade());
    }
    Some(driver)
}

impl Driver {
    /// A driver with default options, as a task of the current tokio runtime.
    ///
    /// [`connect`](crate::connect) and [`Listener::bind`](crate::Listener::bind) use one driver for each runtime. Further ones
    /// help only on a runtime with several workers.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) when there are no file descriptors.
    ///
    /// # Panics
    /// Outside of a runtime, and if the runtime has no I/O driver: build it with `enable_io` or `enable_all`.
    pub fn tokio() -> Result<Self> {
        Driver::builder().tokio()
    }
}

impl DriverBuilder {
    /// Makes a driver that runs as a task of the current tokio runtime.
    ///
    /// # Errors
    /// Like [`Driver::tokio`].
    ///
    /// # Panics
    /// Like [`Driver::tokio`].
    pub fn tokio(self) -> Result<Driver> {
        let (driver, runner) = self.build()?;
        let descriptors = Descriptors::new(&runner)?;
        tokio::spawn(run(runner, descriptors));
        Ok(driver)
    }
}

impl<S: Sharing> Runner<S> {
    /// Runs the driver on tokio until it ends, also on a `LocalSet`.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) when the descriptor cannot be registered.
    ///
    /// # Panics
    /// Like [`Driver::tokio`].
    pub async fn run_tokio(self) -> Result<()> {
        let descriptors = Descriptors::new(&self)?;
        run(self, descriptors).await;
        Ok(())
    }
}

async fn run<S: Sharing>(mut runner: Runner<S>, mut descriptors: Descriptors) {
    // `tokio::task::yield_now` makes tokio look for events, by a system call. With several workers, a plain yield would wake
    // another one.
    let has_one_worker = descriptors.runtime.metrics().num_workers() == 1;
    let mut has_just_slept = false;
    loop {
        match runner.turn() {
            // After a sleep, only the tasks that were just woken have to run.
            Turn::Again if has_one_worker && std::mem::take(&mut has_just_slept) => yield_now().await,
            Turn::Again => tokio::task::yield_now().await,
            Turn::Sleep => {
                has_just_slept = true;
                descriptors.add_channels(&runner);
                match poll_fn(|context| descriptors.poll(context)).await {
                    Ok(Woken::ByChannels) => runner.skip_check_of_events(),
                    Ok(Woken::ByRunner) => {}
                    // The runtime shuts down.
                    Err(_) => return,
                }
            }
            Turn::Stopped => return,
        }
    }
}

/// What a sleeping driver waits for.
///
/// The descriptor of a runner contains all others. Tokio watches the channels of completion queues itself: fewer epoll instances
/// are then between a completion and the driver, which also need not ask which descriptor has an event.
struct Descriptors {
    runner: AsyncFd<Watched>,
    /// The channels of its queues, in order. `None` if tokio cannot watch one. It then stays in the descriptor of the runner.
    channels: Vec<Option<AsyncFd<Watched>>>,
    /// The runtime that watches them.
    runtime: Handle,
}

/// A descriptor, with its owner.
enum Watched {
    Runner(OwnedFd),
    Channel(CompletionChannel),
}

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Watched::Runner(descriptor) => descriptor.as_raw_fd(),
            Watched::Channel(channel) => channel.as_fd().as_raw_fd(),
        }
    }
}

impl Watched {
    /// Lets tokio watch it.
    fn register(self) -> Result<AsyncFd<Self>> {
        // SAFETY: both kinds own their descriptor, which stays open and the same until the `AsyncFd` drops them. Nothing takes
        // them out of it.
        let watched = unsafe { AsyncFd::register_with_interest(self, Interest::READABLE) };
        Ok(watched.map_err(std::io::Error::from)?)
    }
}

/// Why a sleeping driver goes on.
enum Woken {
    /// Only channels of completion queues are readable.
    ByChannels,
    /// The descriptor of the runner is readable. Channels may be, too.
    ByRunner,
}

impl Descriptors {
    fn new<S: Sharing>(runner: &Runner<S>) -> Result<Self> {
        let runner = Watched::Runner(runner.as_fd().try_clone_to_owned()?).register()?;
        Ok(Descriptors { runner, channels: Vec::new(), runtime: Handle::current() })
    }

    /// Watches the channels of queues that are new.
    fn add_channels<S: Sharing>(&mut self, runner: &Runner<S>) {
        let _context = self.runtime.enter();
        for queue in runner.queues().iter().skip(self.channels.len()) {
            let watched = queue.channel().and_then(|channel| Watched::Channel(channel).register().ok());
            if watched.is_some() {
                queue.unwatch_channel();
            }
            self.channels.push(watched);
        }
    }

    /// Waits until any of them is readable.
    fn poll(&self, context: &mut Context<'_>) -> Poll<std::io::Result<Woken>> {
        let mut woken = Poll::Pending;
        // Cleared before the driver looks for completions and events, so one that comes in between makes it readable again.
        for channel in self.channels.iter().flatten() {
            if let Poll::Ready(guard) = channel.poll_read_ready(context) {
                guard?.clear_ready();
                woken = Poll::Ready(Ok(Woken::ByChannels));
            }
        }
        if let Poll::Ready(guard) = self.runner.poll_read_ready(context) {
            guard?.clear_ready();
            woken = Poll::Ready(Ok(Woken::ByRunner));
        }
        woken
    }
}
