//! Drivers as tasks of smol and other programs on async-io.

use std::os::fd::{AsFd, OwnedFd};

use async_io::Async;

use crate::{Result, Runner, Sharing};

impl<S: Sharing> Runner<S> {
    /// Runs the driver on async-io until it ends: `smol::spawn(runner.run_async_io()).detach()`.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) when the descriptor cannot be registered.
    pub async fn run_async_io(self) -> Result<()> {
        let descriptor: OwnedFd = self.as_fd().try_clone_to_owned()?;
        let readable = Async::new_nonblocking(descriptor)?;
        self.run_with(|| readable.readable()).await
    }
}
