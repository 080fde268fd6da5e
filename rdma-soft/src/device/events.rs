//! Events, and the descriptors that become readable with them.

#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use rdma_sys::ibv_event_type;

use super::slab::Slab;

/// A descriptor that is readable while events wait: an eventfd that counts them.
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

    /// Takes one event from the count, and returns whether there was any. Never waits.
    pub(crate) fn lower(&self) -> bool {
        if let Some(result) = read_now(self.fd()) {
            return result;
        }
        // Here nobody else takes one between the calls: of a signal of events both are made with the device locked, and of the server's
        // signal by the server. `take` leaves the count alone on such a kernel.
        matches!(is_readable(self.fd(), 0), Ok(true)) && read(self.fd()).is_ok()
    }
}

/// Takes one from the count without waiting: whether there was any. `None`: Linux before 5.8 cannot do that to an eventfd that blocks.
fn read_now(fd: RawFd) -> Option<bool> {
    let mut count = 0_u64;
    let part = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
    let here: libc::c_long = -1;
    // SAFETY: eight bytes go where eight are. An offset of -1 stands for that of the descriptor: `preadv2(2)`.
    let read = unsafe { libc::syscall(libc::SYS_preadv2, fd, &raw const part, 1, here, here, libc::RWF_NOWAIT) };
    match read {
        8 => Some(true),
        _ if io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock => Some(false),
        _ => None,
    }
}

/// Takes one from the count. Waits for it unless the descriptor is non-blocking.
fn read(fd: RawFd) -> io::Result<()> {
    let mut count = 0_u64;
    // SAFETY: eight bytes go where eight are.
    let read = unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
    if read == 8 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes an event of a [`Signal`] from the count, without the device locked: for [`Channel::take`]. As [`wait`] otherwise; `false` where
/// it has only waited.
///
/// # Errors
/// `EAGAIN`, `EINTR`.
pub(crate) fn take(fd: RawFd) -> io::Result<bool> {
    // `Signal::lower` must not wait for a count that is taken here.
    static TAKES: OnceLock<bool> = OnceLock::new();
    if *TAKES.get_or_init(|| Signal::new().is_ok_and(|signal| read_now(signal.fd()).is_some())) {
        return read(fd).map(|()| true);
    }
    wait(fd).map(|()| false)
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
///
/// Its queue changes with the device locked, and its signal counts what is in the queue. A thread that waits [takes](take) an event from the
/// count first, without the device locked, and then one from the queue. Threads that find an event in the queue, or take back those of a
/// completion queue, take as many from the count, and never wait for that with the device locked: what such a thread holds already is owed.
/// So `count + held by threads = queue + owed`, and nobody can hold one while the queue is empty and nothing is owed.
#[derive(Debug)]
pub(crate) struct Channel {
    signal: Signal,
    /// Of the completion queues that have something to say.
    queue: VecDeque<u32>,
    /// Events that threads hold which are not in the queue any more.
    owed: usize,
    pub(crate) users: u32,
}

impl Channel {
    pub(crate) fn new(signal: Signal) -> Channel {
        Channel { signal, queue: VecDeque::with_capacity(64), owed: 0, users: 0 }
    }

    fn raise(&mut self, cq: u32) {
        self.queue.push_back(cq);
        self.signal.raise();
    }

    fn lower(&mut self) {
        if !self.signal.lower() {
            self.owed += 1;
        }
    }

    /// Takes the completion queue that has had something to say for longest, by a thread that may hold an event of the count.
    fn take(&mut self, is_held: bool) -> Option<u32> {
        let is_held = match (is_held, self.owed.checked_sub(1)) {
            (true, Some(left)) => {
                self.owed = left;
                false
            }
            _ => is_held,
        };
        let taken = self.queue.pop_front()?;
        if !is_held {
            self.lower();
        }
        Some(taken)
    }

    /// Takes back what a completion queue has said.
    pub(crate) fn forget(&mut self, cq: u32) {
        let before = self.queue.len();
        self.queue.retain(|of| *of != cq);
        (self.queue.len()..before).for_each(|_| self.lower());
    }
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
    notices: u64,
}

impl Events {
    pub(crate) fn new() -> Self {
        Events {
            contexts: Slab::new(1),
            channels: Slab::new(1),
            unacknowledged: HashMap::new(),
            overruns: Vec::new(),
            notices: 0,
        }
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

    /// As [`Channel::take`], of that channel.
    pub(crate) fn take_notice(&mut self, channel: u32, is_held: bool) -> Option<u32> {
        self.channels.get_mut(channel)?.take(is_held)
    }

    /// Events of completion queues that were ever raised.
    pub(super) fn notices(&self) -> u64 {
        self.notices
    }

    pub(crate) fn notify(&mut self, channel: u32, cq: u32) {
        self.notices += 1;
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.raise(cq);
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
            (context.queue.len()..before).for_each(|_| _ = context.signal.lower());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The signal's count.
    fn count(channel: &Channel) -> usize {
        let count = std::iter::repeat_with(|| channel.signal.lower()).take_while(|had| *had).count();
        (0..count).for_each(|_| channel.signal.raise());
        count
    }

    #[test]
    #[cfg_attr(miri, ignore = "it waits for descriptors")]
    fn a_channel_is_readable_as_long_as_its_queue_has_events_whoever_holds_one() {
        let mut channel = Channel::new(Signal::new().unwrap());
        let fd = channel.signal.fd();
        let is_held = |channel: &Channel| count(channel) > 0 && take(fd).unwrap();
        channel.raise(1);
        channel.raise(2);
        // One thread waits, and another is faster.
        let held = is_held(&channel);
        assert_eq!((channel.take(false), channel.take(false)), (Some(1), Some(2)));
        assert_eq!(count(&channel), 0);
        // There is a new event before the first goes on.
        channel.raise(3);
        assert_eq!(channel.take(held), Some(3));
        assert_eq!(count(&channel), 0);
        // It holds the event of a queue that goes.
        channel.raise(4);
        let held = is_held(&channel);
        channel.forget(4);
        assert_eq!((channel.take(held), count(&channel)), (None, 0));
        channel.raise(5);
        let held = is_held(&channel);
        channel.raise(6);
        assert_eq!((channel.take(held), count(&channel)), (Some(5), 1));
        assert_eq!((channel.take(false), count(&channel)), (Some(6), 0));
        assert_eq!(channel.take(false), None);
    }
}
