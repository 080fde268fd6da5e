//! Drivers as tasks of smol and other programs on async-io.

use std::future::poll_fn;
use std::os::fd::{AsFd, OwnedFd};
use std::task::Poll;

use async_io::Async;

use crate::{Result, Runner, Sharing, Turn};

impl<S: Sharing> Runner<S> {
    /// Runs the driver on async-io until it ends: `smol::spawn(runner.run_async_io()).detach()`.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) when the descriptor cannot be registered.
    pub async fn run_async_io(mut self) -> Result<()> {
        let descriptor: OwnedFd = self.as_fd().try_clone_to_owned()?;
        let readable = Async::new_nonblocking(descriptor)?;
        loop {
            match self.turn() {
                Turn::Again => yield_now().await,
                Turn::Sleep => readable.readable().await?,
                Turn::Stopped => return Ok(()),
            }
            self.awake();
        }
    }
}

/// Lets other tasks run.
async fn yield_now() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
