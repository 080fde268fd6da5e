//! Waiting for a descriptor with something to read, and a deadline.

use std::os::fd::{AsFd, AsRawFd};
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
        let mut polled = libc::pollfd { fd: fd.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // Rounded up, so that the last fraction of a millisecond is waited for and not spun through.
        let millis = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        // SAFETY: one valid `pollfd` for the duration of the call.
        let ready = unsafe { libc::poll(&mut polled, 1, millis) };
        if ready > 0 {
            // Another thread may be faster: then there is none.
            if let Some(found) = take()? {
                return Ok(Some(found));
            }
            if polled.revents & libc::POLLIN == 0 {
                // Nothing to read, now or ever: the device is gone, or the descriptor is.
                return Err(error(Errno(libc::EIO)));
            }
        } else if ready < 0 {
            match Errno::last() {
                Errno(libc::EINTR) => {}
                errno => return Err(error(errno)),
            }
        }
        if left.is_zero() {
            return Ok(None);
        }
    }
}
