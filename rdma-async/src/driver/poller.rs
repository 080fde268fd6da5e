//! The descriptor of a driver: an epoll(7) instance with a timer and a way to wake it.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::{Errno, read, write};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime};

use rdma_safe::fork::{self, Creator};

use crate::Result;

/// Waits for any of its descriptors, edge-triggered. Its own descriptor becomes readable when there is an event.
#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
    wake: OwnedFd,
    timer: OwnedFd,
    creator: Creator,
}

/// Token of the events that the poller handles itself.
const OWN: u64 = u64::MAX;

/// Events to take with one call.
const EVENTS: usize = 64;

impl Poller {
    pub(crate) fn new() -> Result<Self> {
        fork::watch().map_err(std::io::Error::from)?;
        let poller = Poller {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            timer: timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?,
            creator: Creator::current(),
        };
        for own in [&poller.wake, &poller.timer] {
            poller.add(own.as_fd(), OWN)?;
        }
        Ok(poller)
    }

    /// Whether this process was forked after the poller was made. The events then belong to the parent.
    #[inline(always)]
    pub(crate) fn is_inherited(&self) -> bool {
        self.creator.is_parent()
    }

    /// Reports each edge of `fd` with `token`, the first if it is readable already.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> Result<(), Errno> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)
    }

    /// Reports `fd` once more if it is readable.
    pub(crate) fn report_again(&self, fd: BorrowedFd<'_>, token: u64) {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        // It fails only if `fd` was not added.
        let _ = epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token), flags);
    }

    /// From now on, reports only errors of `fd`.
    #[cfg(feature = "tokio")]
    pub(crate) fn report_errors(&self, fd: BorrowedFd<'_>, token: u64) {
        // It fails only if `fd` was not added.
        let _ = epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::ET);
    }

    /// Stops reports about `fd`.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        // It fails only if `fd` was not added.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Makes the descriptor readable, and ends a call of [`Poller::wait`].
    pub(crate) fn wake(&self) {
        if self.is_inherited() {
            return;
        }
        // A full counter wakes as well.
        let _ = write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor readable at `time`.
    pub(crate) fn set_timer(&self, time: Instant) -> Result<(), Errno> {
        // Zero would disarm the timer.
        let left = time.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let (it_value, it_interval) = (timespec(left), timespec(Duration::ZERO));
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &Itimerspec { it_interval, it_value })?;
        Ok(())
    }

    /// Adds the tokens of all events to `tokens`. Waits for one, at most for `timeout`; without a timeout, as long as it takes.
    pub(crate) fn wait(&self, timeout: Option<Duration>, tokens: &mut Vec<u64>) -> Result<(), Errno> {
        let mut timeout = timeout.map(timespec);
        loop {
            let mut events = [const { MaybeUninit::uninit() }; EVENTS];
            let found = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
                Ok((found, _)) => found,
                // A signal handler has run, and the caller looks for work again.
                Err(Errno::INTR) => return Ok(()),
                Err(errno) => return Err(errno),
            };
            let is_full = found.len() == EVENTS;
            for event in found {
                match event.data.u64() {
                    OWN => self.clear(),
                    token => tokens.push(token),
                }
            }
            if !is_full {
                return Ok(());
            }
            timeout = Some(timespec(Duration::ZERO));
        }
    }

    /// Resets the timer's and the waker's descriptors.
    fn clear(&self) {
        let mut count = [0; 8];
        for own in [&self.wake, &self.timer] {
            // EAGAIN if the other one had the event.
            let _ = read(own, &mut count);
        }
    }
}

/// The time, or the longest that the kernel has.
fn timespec(time: Duration) -> Timespec {
    Timespec::try_from(time).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(all(test, feature = "tokio"))]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no Unix sockets")]
    fn only_errors_of_a_descriptor_that_a_runtime_watches_are_reported() {
        let (poller, mut tokens) = (Poller::new().unwrap(), Vec::new());
        let mut look = || {
            tokens.clear();
            poller.wait(Some(Duration::ZERO), &mut tokens).unwrap();
            tokens.clone()
        };
        let (socket, peer) = std::os::unix::net::UnixStream::pair().unwrap();
        poller.add(socket.as_fd(), 7).unwrap();
        poller.report_errors(socket.as_fd(), 7);
        write(&peer, b"readable").unwrap();
        assert_eq!(look(), []);
        drop(peer);
        assert_eq!(look(), [7]);
    }
}
