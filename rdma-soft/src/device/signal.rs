//! Descriptors that count events.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// A descriptor that is readable while events wait: an eventfd that counts them.
#[derive(Debug)]
pub(crate) struct Signal {
    eventfd: OwnedFd,
    /// Events that the descriptor is about to count.
    announced: AtomicU32,
}

impl Signal {
    pub(crate) fn new() -> io::Result<Signal> {
        // SAFETY: it takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was opened just now, and nobody else knows of it.
        Ok(Signal { eventfd: unsafe { OwnedFd::from_raw_fd(fd) }, announced: AtomicU32::new(0) })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }

    /// Counts one more event.
    pub(crate) fn raise(&self) {
        self.raise_by(1);
    }

    /// Says that an event is about to be counted.
    pub(super) fn announce(&self) {
        self.announced.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes back what [`announce`](Signal::announce) said.
    pub(super) fn withdraw(&self) {
        self.announced.fetch_sub(1, Ordering::Release);
    }

    /// Counts events that were announced.
    pub(super) fn raise_announced(&self, events: u32) {
        self.raise_by(events.into());
        self.announced.fetch_sub(events, Ordering::Release);
    }

    fn raise_by(&self, events: u64) {
        // SAFETY: eight bytes are read from where eight are. It fails only when 2⁶⁴ − 2 events wait.
        unsafe { libc::write(self.fd(), (&raw const events).cast(), 8) };
    }

    /// Takes one event from the count, and returns whether there was any. Never waits.
    pub(crate) fn lower(&self) -> bool {
        if let Some(result) = read_now(self.fd()) {
            return result;
        }
        // This does not wait, because no other thread reads the count between the two calls. For a channel or a context the
        // device is locked. The server's own signal is lowered by the server alone. On such a kernel `channel::take` reads no
        // count.
        matches!(is_readable(self.fd(), 0), Ok(true)) && read(self.fd()).is_ok()
    }

    /// Waits until the descriptor counts all events. The thread that is about to write to it needs no lock for that.
    pub(super) fn settle(&self) {
        while self.announced.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
    }
}

/// Takes one from the count without waiting, and returns whether there was any.
///
/// Returns `None` before Linux 5.8, which cannot read a blocking eventfd in this way.
pub(super) fn read_now(fd: RawFd) -> Option<bool> {
    let mut count = 0_u64;
    let part = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
    let here: libc::c_long = -1;
    // SAFETY: the kernel writes at most eight bytes, to eight. The offset -1 means the current file position: `preadv2(2)`.
    let read = unsafe { libc::syscall(libc::SYS_preadv2, fd, &raw const part, 1, here, here, libc::RWF_NOWAIT) };
    match read {
        8 => Some(true),
        _ if io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock => Some(false),
        _ => None,
    }
}

/// Takes one from the count. Waits for it unless the descriptor is non-blocking.
pub(super) fn read(fd: RawFd) -> io::Result<()> {
    let mut count = 0_u64;
    // SAFETY: eight bytes go where eight are.
    let read = unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
    if read == 8 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Waits for an event of a [`Signal`], which somebody else may take before the device is locked. As long as it takes, unless the
/// descriptor was made non-blocking: the functions of libibverbs that do it have no deadline.
///
/// # Errors
/// `EAGAIN`, `EINTR`.
pub(crate) fn wait(fd: RawFd) -> io::Result<()> {
    let timeout = if is_nonblocking(fd)? { 0 } else { -1 };
    if is_readable(fd, timeout)? { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EAGAIN)) }
}

pub(super) fn is_nonblocking(fd: RawFd) -> io::Result<bool> {
    // SAFETY: it takes no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 { Err(io::Error::last_os_error()) } else { Ok(flags & libc::O_NONBLOCK != 0) }
}

/// Whether it is, within so many milliseconds, or as long as it takes at -1.
pub(super) fn is_readable(fd: RawFd, timeout: libc::c_int) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, and it is there.
    match unsafe { libc::poll(&raw mut poll, 1, timeout) } {
        1 => Ok(true),
        0 => Ok(false),
        _ => Err(io::Error::last_os_error()),
    }
}
