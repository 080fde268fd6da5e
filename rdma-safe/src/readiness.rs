//! Waiting until a descriptor is readable, with a deadline.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::errno::check_neg;
use crate::{Errno, Error, Result};

/// Sets whether reading blocks. The flag `O_NONBLOCK` is shared by all duplicates of the descriptor.
pub(crate) fn set_blocking(fd: &impl AsFd, blocking: bool) -> Result<(), Errno> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and the command has no argument.
    let flags = check_neg(|| unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    let flags = if blocking { flags & !libc::O_NONBLOCK } else { flags | libc::O_NONBLOCK };
    // SAFETY: the descriptor is open, and the argument is an integer.
    check_neg(|| unsafe { libc::fcntl(fd, libc::F_SETFL, flags) }).map(drop)
}

/// Waits until `take` returns something, for at most `timeout`; `None` when that has passed.
///
/// `take` must not block. `error` converts the errno of a failed `poll(2)`.
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
            // Another thread may have taken it first.
            if let Some(found) = take()? {
                return Ok(Some(found));
            }
            if ready & libc::POLLIN == 0 {
                // POLLHUP or POLLERR: the device is gone, or the descriptor is closed, so there will be nothing to
                // read.
                return Err(error(Errno(libc::EIO)));
            }
        }
        if left.is_zero() {
            return Ok(None);
        }
    }
}

/// Waits until a descriptor is readable or has failed, for at most `timeout`, or until a signal arrives: `poll(2)`.
///
/// Returns the events of each descriptor.
pub(crate) fn poll<const N: usize>(fds: [BorrowedFd<'_>; N], timeout: Duration) -> Result<[libc::c_short; N], Errno> {
    let mut polled = fds.map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    // Rounded up, so that the last fraction of a millisecond is not spent spinning.
    let millis = i32::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    // SAFETY: `polled` has `N` valid `pollfd` structures during the call.
    match check_neg(|| unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, millis) }) {
        Ok(_) => Ok(polled.map(|polled| polled.revents)),
        Err(Errno(libc::EINTR)) => Ok([0; N]),
        Err(errno) => Err(errno),
    }
}
