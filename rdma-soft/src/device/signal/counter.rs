//! A descriptor that counts: an eventfd.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::net::eventfd;
/// Takes one event from the count. Waits for it unless the descriptor is non-blocking.
pub(in crate::device) use crate::net::eventfd::read;

/// A descriptor that is readable while its count is not zero.
#[derive(Debug)]
pub(super) struct Counter(OwnedFd);

impl Counter {
    pub(super) fn new() -> io::Result<Counter> {
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened, and nothing else owns it.
        Ok(Counter(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(super) fn add(&self, count: u32) {
        let count = u64::from(count);
        // SAFETY: the call reads eight bytes, the size of `count`. The count cannot reach its maximum of 2⁶⁴ − 2 in practice.
        unsafe { libc::write(self.fd(), (&raw const count).cast(), 8) };
    }
}

/// Takes one event from the count without waiting, and returns whether there was any.
///
/// Returns `None` before Linux 5.8, where a blocking eventfd cannot be read like this.
pub(in crate::device) fn read_now(fd: RawFd) -> Option<bool> {
    match eventfd::read_now(fd) {
        Ok(()) => Some(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Some(false),
        Err(_) => None,
    }
}
