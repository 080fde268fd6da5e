//! A descriptor that counts, under Miri: a socket with as many bytes.
//!
//! Miri has neither `EFD_SEMAPHORE` nor `preadv2(2)`, and cannot change the flags of an eventfd.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

use super::{is_nonblocking, is_readable};

/// A descriptor that is readable while its count is not zero.
#[derive(Debug)]
pub(super) struct Counter {
    ready: UnixStream,
    notify: UnixStream,
}

impl Counter {
    pub(super) fn new() -> io::Result<Counter> {
        let (ready, notify) = UnixStream::pair()?;
        Ok(Counter { ready, notify })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.ready.as_raw_fd()
    }

    pub(super) fn add(&self, count: u32) {
        for _ in 0..count {
            // SAFETY: the byte is there.
            unsafe { libc::write(self.notify.as_raw_fd(), [0_u8].as_ptr().cast(), 1) };
        }
    }
}

/// Takes one from the count without waiting, and returns whether there was any.
#[expect(clippy::unnecessary_wraps, reason = "kernels may lack the call that is used elsewhere")]
pub(in crate::device) fn read_now(fd: RawFd) -> Option<bool> {
    Some(take(fd))
}

/// Takes one from the count. Waits for it unless the descriptor is non-blocking.
pub(in crate::device) fn read(fd: RawFd) -> io::Result<()> {
    let timeout = if is_nonblocking(fd)? { 0 } else { -1 };
    loop {
        if take(fd) {
            return Ok(());
        }
        if !is_readable(fd, timeout)? {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
    }
}

/// Reads a byte if there is one. Miri cannot read a blocking socket without waiting.
fn take(fd: RawFd) -> bool {
    /// No other thread reads between the two calls.
    static READER: Mutex<()> = Mutex::new(());
    let _reader = READER.lock().unwrap_or_else(PoisonError::into_inner);
    let mut byte = 0_u8;
    // SAFETY: one byte goes where one is.
    matches!(is_readable(fd, 0), Ok(true)) && unsafe { libc::read(fd, (&raw mut byte).cast(), 1) } == 1
}
