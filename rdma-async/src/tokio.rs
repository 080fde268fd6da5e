//! Drivers as tasks of tokio.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Handle, Id};

use crate::driver::WeakDriver;
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
    /// [`connect`](crate::connect) and [`Listener::bind`](crate::Listener::bind) use one driver for each runtime. Make further
    /// ones to spread connections over several tasks.
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
        let readable = readable(&runner)?;
        tokio::spawn(run(runner, readable));
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
        let readable = readable(&self)?;
        run(self, readable).await;
        Ok(())
    }
}

fn readable<S: Sharing>(runner: &Runner<S>) -> Result<AsyncFd<OwnedFd>> {
    let descriptor = runner.as_fd().try_clone_to_owned()?;
    // SAFETY: the owned descriptor stays open until the `AsyncFd` is dropped, and is not taken out of it.
    let registered = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
    Ok(registered.map_err(std::io::Error::from)?)
}

async fn run<S: Sharing>(mut runner: Runner<S>, readable: AsyncFd<OwnedFd>) {
    loop {
        match runner.turn() {
            Turn::Again => tokio::task::yield_now().await,
            Turn::Sleep => match readable.readable().await {
                // Cleared before the driver looks for events, so an event in between makes it readable again.
                Ok(mut guard) => guard.clear_ready(),
                // The runtime shuts down.
                Err(_) => return,
            },
            Turn::Stopped => return,
        }
    }
}
