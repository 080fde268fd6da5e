//! Waiting for a descriptor with something to read, and a deadline.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::errno::check_neg;
use crate::{Errno, Error, Result};

/// Whether reading waits until there is something: the flag `O_NONBLOCK`, of all duplicates of the descriptor.
pub(crate) fn set_blocking(fd: &impl AsFd, blocking: bool) -> Result<(), Errno> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: fcntl on a descriptor that is open; it has no argument.
    let flags = check_neg(|| unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    let flags = if blocking { flags & !libc::O_NONBLOCK } else { flags | libc::O_NONBLOCK };
    // SAFETY: likewise; the flags are an integer.
    check_neg(|| unsafe { libc::fcntl(fd, libc::F_SETFL, flags) }).map(drop)
}

/// Waits until `take` finds something, at most for `timeout`; `None` when it passed. `take` is not to wait itself. `error` makes an
/// error of a failed `poll(2)`.
pub(crate) fn wait<T>(
    fd: &impl AsFd,
    timeout: Duration,
    take: impl Fn() -> Result<Option<T>>,
    error: impl Fn(Errno) -> Error,
) -> Result<Option<T>> {
    let start = Instant::now();
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        let [ready] = poll([fd.as_fd()], left).map_err(&error)?;
        if ready != 0 {
            // Another thread may be faster: then there is none.
            if let Some(found) = take()? {
                return Ok(Some(found));
            }
            if ready & libc::POLLIN == 0 {
                // Nothing to read, now or ever: the device is gone, or the descriptor is.
                return Err(error(Errno(libc::EIO)));
            }
        }
        if left.is_zero() {
            return Ok(None);
        }
    }
}

/// Waits until one of them can be read or never will be, at most for `timeout`, or until a signal comes: `poll(2)`, with what it
/// found of each.
pub(crate) fn poll<const N: usize>(fds: [BorrowedFd<'_>; N], timeout: Duration) -> Result<[libc::c_short; N], Errno> {
    let mut polled = fds.map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    // Rounded up, so that the last fraction of a millisecond is waited for and not spun through.
    let millis = i32::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    // SAFETY: as many valid `pollfd` as it says, for the duration of the call.
    match check_neg(|| unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, millis) }) {
        Ok(_) => Ok(polled.map(|polled| polled.revents)),
        Err(Errno(libc::EINTR)) => Ok([0; N]),
        Err(errno) => Err(errno),
    }
}
