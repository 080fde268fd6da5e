//! Sets of descriptors: `epoll(7)`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use super::socket::{check_neg, owned};

/// Maximum events of one call of [`Poll::ready`].
pub(super) const EVENTS: usize = 16;

/// A set of descriptors, each with a token. Its own descriptor is readable while any of them has an event.
pub(super) struct Poll(OwnedFd);

/// A descriptor with an event.
#[derive(Clone, Copy)]
pub(super) struct Ready {
    /// Token passed to [`add`](Poll::add).
    pub(super) token: u64,
    /// Whether the peer has closed the connection.
    pub(super) has_ended: bool,
}

impl Poll {
    pub(super) fn new() -> io::Result<Poll> {
        // SAFETY: the argument is a number, and the descriptor is new.
        unsafe { owned(libc::epoll_create1(libc::EPOLL_CLOEXEC)) }.map(Poll)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Adds a descriptor for these events.
    pub(super) fn add(&self, fd: BorrowedFd<'_>, token: u64, events: libc::c_int) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, events)
    }

    /// Changes the events of a descriptor. A pending event is reported again.
    pub(super) fn modify(&self, fd: BorrowedFd<'_>, token: u64, events: libc::c_int) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, events)
    }

    fn control(&self, operation: libc::c_int, fd: BorrowedFd<'_>, token: u64, events: libc::c_int) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: the event is valid.
        let result = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), operation, fd.as_raw_fd(), &raw mut event) };
        check_neg(result).map(drop)
    }

    /// Removes a descriptor. Closing it is not enough, because a child process may hold it.
    pub(super) fn remove(&self, fd: BorrowedFd<'_>) {
        // SAFETY: the arguments are numbers, and no event is passed.
        unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_DEL, fd.as_raw_fd(), ptr::null_mut()) };
    }

    /// Returns descriptors with events, without blocking.
    pub(super) fn ready(&self) -> impl Iterator<Item = Ready> + use<> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        // SAFETY: the array has room for that many events.
        let count = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), EVENTS as libc::c_int, 0) };
        events.into_iter().take(usize::try_from(count).unwrap_or(0)).map(|event| Ready {
            token: event.u64,
            has_ended: event.events & (libc::EPOLLHUP | libc::EPOLLRDHUP | libc::EPOLLERR) as u32 != 0,
        })
    }
}
