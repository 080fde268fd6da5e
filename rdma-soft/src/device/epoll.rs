//! Sets of descriptors: `epoll(7)`.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// A set of descriptors. Its own descriptor is readable while any of them is.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

impl Epoll {
    pub(crate) fn new() -> io::Result<Epoll> {
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened, and nothing else owns it.
        Ok(Epoll(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Adds a descriptor, which [`ready`](Epoll::ready) reports as `name`.
    pub(crate) fn add(&self, fd: RawFd, name: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: name };
        // SAFETY: the structure is valid.
        let added = unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) };
        if added == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Removes a descriptor, if it is in the set.
    pub(super) fn remove(&self, fd: RawFd) {
        // SAFETY: removal takes no structure.
        unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
    }

    /// Returns the names of readable descriptors, at most 16. Never waits.
    pub(super) fn ready(&self) -> impl Iterator<Item = u64> + use<> {
        const MOST: usize = 16;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MOST];
        // SAFETY: the kernel writes at most `MOST` events, the length of the array.
        let count = unsafe { libc::epoll_wait(self.fd(), events.as_mut_ptr(), MOST as libc::c_int, 0) };
        events.into_iter().take(count.max(0) as usize).map(|event| event.u64)
    }
}
