//! Event counters with a descriptor.

#![allow(unsafe_code)]

#[cfg_attr(miri, path = "signal/counter_of_miri.rs")]
mod counter;

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use counter::Counter;
pub(super) use counter::{read, read_now};

/// Counts pending events. Its descriptor is readable while there are any.
#[derive(Debug)]
pub(crate) struct Signal {
    counter: Counter,
    /// Events that are about to be counted.
    announced: AtomicU32,
}

impl Signal {
    pub(crate) fn new() -> io::Result<Signal> {
        Ok(Signal { counter: Counter::new()?, announced: AtomicU32::new(0) })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.counter.fd()
    }

    /// Counts one more event.
    pub(crate) fn raise(&self) {
        self.counter.add(1);
    }

    /// Announces an event that will be counted later.
    pub(super) fn announce(&self) {
        self.announced.fetch_add(1, Ordering::Relaxed);
    }

    /// Withdraws an announced event.
    pub(super) fn withdraw(&self) {
        self.announced.fetch_sub(1, Ordering::Release);
    }

    /// Counts announced events.
    pub(super) fn raise_announced(&self, events: u32) {
        self.counter.add(events);
        self.announced.fetch_sub(events, Ordering::Release);
    }

    /// Takes one event from the count, and returns whether there was any. Never waits.
    pub(crate) fn lower(&self) -> bool {
        if let Some(result) = read_now(self.fd()) {
            return result;
        }
        // Waiting is impossible here, because no other thread reads the count between the two calls: for a channel or a context the
        // device is locked, and only the server lowers its own signal. If `read_now` does not work, `channel::take` does not read
        // the count.
        matches!(is_readable(self.fd(), 0), Ok(true)) && read(self.fd()).is_ok()
    }

    /// Waits until all announced events are counted. The thread that counts them needs no lock for that.
    pub(super) fn wait_for_announced(&self) {
        while self.announced.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
    }
}

/// Waits for an event of a [`Signal`], without a deadline unless the descriptor is non-blocking.
///
/// Another thread may take the event before this thread has locked the device.
///
/// # Errors
/// `EAGAIN`, `EINTR`.
pub(crate) fn wait(fd: RawFd) -> io::Result<()> {
    let timeout = if is_nonblocking(fd)? { 0 } else { -1 };
    if is_readable(fd, timeout)? { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EAGAIN)) }
}

pub(super) fn is_nonblocking(fd: RawFd) -> io::Result<bool> {
    // SAFETY: the call takes no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 { Err(io::Error::last_os_error()) } else { Ok(flags & libc::O_NONBLOCK != 0) }
}

/// Whether a descriptor becomes readable within `timeout` milliseconds. -1 waits without a deadline.
pub(super) fn is_readable(fd: RawFd, timeout: libc::c_int) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer and the length describe one entry.
    match unsafe { libc::poll(&raw mut poll, 1, timeout) } {
        1 => Ok(true),
        0 => Ok(false),
        _ => Err(io::Error::last_os_error()),
    }
}
