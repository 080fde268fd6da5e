//! A model of the descriptor of a driver: edges that one call of `wait` takes.

use std::io::Stdin;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::sync::{Condvar, Mutex, lock};

#[derive(Debug)]
pub(crate) struct Poller {
    edges: Mutex<Edges>,
    readable: Condvar,
}

#[derive(Default, Debug)]
struct Edges {
    /// The counter that [`Poller::wake`] increments is not zero.
    is_woken: bool,
    /// The channel of a completion queue has become readable.
    has_completed: bool,
    timer: Option<Instant>,
}

impl Poller {
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Poller { edges: Mutex::default(), readable: Condvar::new() })
    }

    pub(crate) fn is_inherited(&self) -> bool {
        false
    }

    pub(crate) fn add(&self, _: BorrowedFd<'_>, _: u64) -> Result<(), Errno> {
        unreachable!("there are no other descriptors")
    }

    pub(crate) fn report_again(&self, _: BorrowedFd<'_>, _: u64) {
        unreachable!("there are no other descriptors")
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn report_errors(&self, _: BorrowedFd<'_>, _: u64) {
        unreachable!("there are no other descriptors")
    }

    pub(crate) fn remove(&self, _: BorrowedFd<'_>) {
        unreachable!("there are no other descriptors")
    }

    pub(crate) fn wake(&self) {
        lock(&self.edges).is_woken = true;
        self.readable.notify_one();
    }

    /// The channel of a completion queue becomes readable.
    pub(crate) fn complete(&self) {
        lock(&self.edges).has_completed = true;
        self.readable.notify_one();
    }

    pub(crate) fn set_timer(&self, time: Instant) -> Result<(), Errno> {
        lock(&self.edges).timer = Some(time);
        Ok(())
    }

    /// The time that the timer is set to.
    pub(crate) fn timer(&self) -> Option<Instant> {
        lock(&self.edges).timer
    }

    /// Deadlines do not pass in a model.
    pub(crate) fn wait(&self, timeout: Option<Duration>, _: &mut Vec<u64>) -> Result<(), Errno> {
        let mut edges = lock(&self.edges);
        while timeout.is_none() && !edges.is_woken && !edges.has_completed {
            edges = self.readable.wait(edges).unwrap();
        }
        (edges.is_woken, edges.has_completed) = (false, false);
        Ok(())
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        static STDIN: OnceLock<Stdin> = OnceLock::new();
        STDIN.get_or_init(std::io::stdin).as_fd()
    }
}
