//! Events, and the descriptors that become readable with them.

#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use rdma_sys::ibv_event_type;

use super::slab::Slab;

/// A descriptor that is readable while events wait: an eventfd that counts them.
///
/// Of events it counts what is in their queue whenever the device is not locked: whoever takes one takes both with the device
/// locked.
/// So nobody waits for a count that another one has taken, with the device locked for all who could raise it again.
#[derive(Debug)]
pub(crate) struct Signal(OwnedFd);

impl Signal {
    pub(crate) fn new() -> io::Result<Signal> {
        // SAFETY: it takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was opened just now, and nobody else knows of it.
        Ok(Signal(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// One more event.
    pub(crate) fn raise(&self) {
        let one = 1_u64;
        // SAFETY: eight bytes are read from where eight are. It fails only when 2⁶⁴ − 2 events wait.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }

    /// One event less, if there is any. Never waits, as nobody else takes one meanwhile: of a signal of events it is called with
    /// the device locked, and of the server's by the server.
    pub(crate) fn lower(&self) {
        if matches!(is_readable(self.fd(), 0), Ok(true)) {
            let mut count = 0_u64;
            // SAFETY: eight bytes go where eight are. Without any there is nothing to take.
            unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
        }
    }
}

/// Waits for an event of a [`Signal`], which somebody else may take before the device is locked. As long as it takes, unless the
/// descriptor was made non-blocking: the functions of libibverbs that do it have no deadline.
///
/// # Errors
/// `EAGAIN`, `EINTR`.
pub(crate) fn wait(fd: RawFd) -> io::Result<()> {
    // SAFETY: it takes no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    let timeout = if flags & libc::O_NONBLOCK != 0 { 0 } else { -1 };
    if is_readable(fd, timeout)? { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EAGAIN)) }
}

/// Whether it is, within so many milliseconds, or as long as it takes at -1.
fn is_readable(fd: RawFd, timeout: libc::c_int) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, and it is there.
    match unsafe { libc::poll(&raw mut poll, 1, timeout) } {
        1 => Ok(true),
        0 => Ok(false),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A completion channel.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) signal: Signal,
    /// Of the completion queues that have something to say.
    pub(crate) queue: VecDeque<u32>,
    pub(crate) users: u32,
}

/// A context: what was opened.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) signal: Signal,
    /// Each with the address in the program of its object. There are none of the port and the device, which do not change.
    pub(crate) queue: VecDeque<(ibv_event_type, usize)>,
}

/// What has happened and was not taken yet.
#[derive(Debug)]
pub(crate) struct Events {
    pub(crate) contexts: Slab<Context>,
    pub(crate) channels: Slab<Channel>,
    /// Asynchronous events that were taken and not acknowledged, by object.
    pub(crate) unacknowledged: HashMap<usize, u32>,
    /// Completion queues that have overrun, until their queue pairs are in the error state.
    overruns: Vec<u32>,
}

impl Events {
    pub(crate) fn new() -> Self {
        Events { contexts: Slab::new(1), channels: Slab::new(1), unacknowledged: HashMap::new(), overruns: Vec::new() }
    }

    pub(crate) fn raise(&mut self, context: u32, kind: ibv_event_type, object: usize) {
        if let Some(context) = self.contexts.get_mut(context) {
            context.queue.push_back((kind, object));
            context.signal.raise();
        }
    }

    /// Takes the earliest event of a context, and the object that it is about.
    pub(crate) fn take(&mut self, context: u32) -> Option<(ibv_event_type, usize)> {
        let context = self.contexts.get_mut(context)?;
        let taken = context.queue.pop_front()?;
        context.signal.lower();
        Some(taken)
    }

    /// Takes the completion queue that has had something to say for longest.
    pub(crate) fn take_notice(&mut self, channel: u32) -> Option<u32> {
        let channel = self.channels.get_mut(channel)?;
        let taken = channel.queue.pop_front()?;
        channel.signal.lower();
        Some(taken)
    }

    pub(crate) fn notify(&mut self, channel: u32, cq: u32) {
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.queue.push_back(cq);
            channel.signal.raise();
        }
    }

    /// A completion queue has overrun.
    pub(crate) fn overrun(&mut self, cq: u32) {
        if !self.overruns.contains(&cq) {
            self.overruns.push(cq);
        }
    }

    /// Takes a completion queue whose queue pairs have to fail.
    pub(crate) fn take_overrun(&mut self) -> Option<u32> {
        self.overruns.pop()
    }

    /// Takes back what was not taken of an object that goes.
    pub(crate) fn forget(&mut self, context: u32, object: usize) {
        if let Some(context) = self.contexts.get_mut(context) {
            let before = context.queue.len();
            context.queue.retain(|(_, of)| *of != object);
            (context.queue.len()..before).for_each(|_| context.signal.lower());
        }
    }
}
