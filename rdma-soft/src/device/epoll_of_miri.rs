//! A set of one descriptor, for tests under Miri. Miri cannot wait for an epoll set that contains another set.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use super::signal::is_readable;

/// A duplicate of the only descriptor of the set, so both are readable at the same time.
#[derive(Debug)]
pub(crate) struct Epoll(OnceLock<(OwnedFd, u64)>);

impl Epoll {
    pub(crate) fn new() -> io::Result<Epoll> {
        Ok(Epoll(OnceLock::new()))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.get().map_or(-1, |(only, _)| only.as_raw_fd())
    }

    /// Adds a descriptor, which [`ready`](Epoll::ready) reports as `name`.
    ///
    /// # Errors
    /// The set already has a descriptor.
    pub(crate) fn add(&self, fd: RawFd, name: u64) -> io::Result<()> {
        // SAFETY: it takes no pointers.
        let duplicate = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
        if duplicate < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened, and nothing else uses it.
        let only = unsafe { OwnedFd::from_raw_fd(duplicate) };
        self.0.set((only, name)).map_err(|_| io::ErrorKind::Unsupported.into())
    }

    /// Does nothing. Callers remove only descriptors that [`add`](Epoll::add) has refused as a second one.
    pub(super) fn remove(&self, _fd: RawFd) {}

    /// Returns the names of readable descriptors. Never waits.
    pub(super) fn ready(&self) -> impl Iterator<Item = u64> + use<> {
        let only = self.0.get().filter(|(only, _)| matches!(is_readable(only.as_raw_fd(), 0), Ok(true)));
        only.map(|(_, name)| *name).into_iter()
    }
}
