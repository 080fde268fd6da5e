//! Events, and the descriptors that become readable with them.

#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use rdma_sys::ibv_event_type;

use super::slab::Slab;

/// A descriptor that is readable while events wait: an eventfd that counts them.
#[derive(Debug)]
pub(crate) struct Signal {
    eventfd: OwnedFd,
    /// Events that the descriptor is about to count.
    late: AtomicU32,
}

impl Signal {
    pub(crate) fn new() -> io::Result<Signal> {
        // SAFETY: it takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was opened just now, and nobody else knows of it.
        Ok(Signal { eventfd: unsafe { OwnedFd::from_raw_fd(fd) }, late: AtomicU32::new(0) })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }

    /// Counts one more event.
    pub(crate) fn raise(&self) {
        self.raise_by(1);
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
        // This does not wait, because no other thread reads the count between the two calls. The device is locked for the
        // signal of a channel or a context, and only the server thread lowers its own signal. `take` reads no count on such a
        // kernel.
        matches!(is_readable(self.fd(), 0), Ok(true)) && read(self.fd()).is_ok()
    }

    /// Waits until the descriptor counts all events. The thread that is about to write to it needs no lock for that.
    fn settle(&self) {
        while self.late.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
    }
}

/// Signals to raise when this is dropped, each with its number of events.
///
/// A thread that an event wakes locks the device next, and may preempt the thread that woke it. So threads are woken after the
/// device is unlocked.
#[derive(Debug, Default)]
pub(super) struct Late {
    /// Needs no allocation. More than two channels at a time are rare.
    first: [Option<(Arc<Signal>, u32)>; 2],
    more: Vec<(Arc<Signal>, u32)>,
}

impl Late {
    #[inline]
    fn is_empty(&self) -> bool {
        self.first[0].is_none()
    }

    fn add(&mut self, signal: &Arc<Signal>) {
        signal.late.fetch_add(1, Ordering::Relaxed);
        let all = self.first.iter_mut().flatten().chain(&mut self.more);
        for (of, count) in all {
            if Arc::ptr_eq(of, signal) {
                *count += 1;
                return;
            }
        }
        let new = (Arc::clone(signal), 1);
        match self.first.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(new),
            None => self.more.push(new),
        }
    }

    fn raise(&mut self) {
        let first = self.first.iter_mut().filter_map(Option::take);
        for (signal, count) in first.chain(self.more.drain(..)) {
            signal.raise_by(count.into());
            signal.late.fetch_sub(count, Ordering::Release);
        }
    }
}

impl Drop for Late {
    #[inline]
    fn drop(&mut self) {
        if !self.is_empty() {
            self.raise();
        }
    }
}

/// Takes one from the count without waiting, and returns whether there was any.
///
/// Returns `None` before Linux 5.8, which cannot read a blocking eventfd in this way.
fn read_now(fd: RawFd) -> Option<bool> {
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
fn read(fd: RawFd) -> io::Result<()> {
    let mut count = 0_u64;
    // SAFETY: eight bytes go where eight are.
    let read = unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
    if read == 8 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// An event of a completion channel, before it is taken from the channel's queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pending {
    /// It was taken from the count of the descriptor.
    Taken,
    /// It is still counted, and another thread may be faster.
    Counted,
}

/// Waits for an event of a completion channel, without the device locked.
///
/// It waits without a deadline, as `ibv_get_cq_event(3)` does, unless the descriptor is non-blocking.
///
/// # Errors
/// `EAGAIN`, `EINTR`.
pub(crate) fn take(fd: RawFd) -> io::Result<Pending> {
    // Without `read_now`, `Signal::lower` would block if this thread took the count first.
    static CAN_TAKE: OnceLock<bool> = OnceLock::new();
    if *CAN_TAKE.get_or_init(|| Signal::new().is_ok_and(|signal| read_now(signal.fd()).is_some())) {
        read(fd).map(|()| Pending::Taken)
    } else {
        wait(fd).map(|()| Pending::Counted)
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
///
/// Its queue changes with the device locked. A thread first takes one from the count of the signal, by [`take`], and then takes
/// the event from the queue. So a program sees both agree: while the queue has an event that no thread is taking, the
/// descriptor is readable or about to be.
///
/// Destroying a completion queue works the other way round: it removes its events from the queue first. Other threads may
/// already have taken some of them from the count. The channel owes these: as many threads find no event. `counted + held =
/// queued + owed`.
#[derive(Debug)]
pub(crate) struct Channel {
    signal: Arc<Signal>,
    /// Completion queues with an event, once for each event.
    queue: VecDeque<u32>,
    /// Events that threads have taken from the count, and that are no longer in the queue.
    owed: usize,
    pub(crate) users: u32,
}

impl Channel {
    pub(crate) fn new(signal: Signal) -> Channel {
        Channel { signal: Arc::new(signal), queue: VecDeque::with_capacity(64), owed: 0, users: 0 }
    }

    /// Takes the oldest event and returns its completion queue.
    ///
    /// Returns `None` if that completion queue was destroyed, or if another thread was faster.
    fn take(&mut self, pending: Pending) -> Option<u32> {
        match pending {
            Pending::Taken if self.owed > 0 => {
                self.owed -= 1;
                None
            }
            Pending::Taken => self.queue.pop_front(),
            Pending::Counted => {
                self.signal.settle();
                if self.signal.lower() { self.queue.pop_front() } else { None }
            }
        }
    }

    /// Removes the events of a completion queue that is destroyed.
    pub(crate) fn forget(&mut self, cq: u32) {
        self.signal.settle();
        let before = self.queue.len();
        self.queue.retain(|of| *of != cq);
        for _ in self.queue.len()..before {
            if !self.signal.lower() {
                self.owed += 1;
            }
        }
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
    late: Late,
}

impl Events {
    pub(crate) fn new() -> Self {
        Events {
            contexts: Slab::new(1),
            channels: Slab::new(1),
            unacknowledged: HashMap::new(),
            overruns: Vec::new(),
            notices: 0,
            late: Late::default(),
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

    /// Takes an event of a completion channel, and returns its completion queue.
    pub(crate) fn take_notice(&mut self, channel: u32, pending: Pending) -> Option<u32> {
        self.channels.get_mut(channel)?.take(pending)
    }

    /// Completion events raised since the device was opened.
    pub(super) fn notices(&self) -> u64 {
        self.notices
    }

    /// Raises an event of a completion queue. Threads are woken for it after the device is unlocked.
    pub(crate) fn notify(&mut self, channel: u32, cq: u32) {
        self.notices += 1;
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.queue.push_back(cq);
            self.late.add(&channel.signal);
        }
    }

    /// Notes that a completion queue has overrun.
    pub(crate) fn overrun(&mut self, cq: u32) {
        if !self.overruns.contains(&cq) {
            self.overruns.push(cq);
        }
    }

    /// Forgets the overrun of a completion queue that is destroyed. Its number may be used again.
    pub(crate) fn forget_overrun(&mut self, cq: u32) {
        self.overruns.retain(|of| *of != cq);
    }

    /// Takes a completion queue whose queue pairs have to fail.
    pub(crate) fn take_overrun(&mut self) -> Option<u32> {
        self.overruns.pop()
    }

    /// Whether signals have to be raised after the device is unlocked.
    #[inline]
    pub(super) fn has_late(&self) -> bool {
        !self.late.is_empty()
    }

    /// Takes the signals to raise after the device is unlocked.
    pub(super) fn late(&mut self) -> Late {
        std::mem::take(&mut self.late)
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

    /// Events with a channel.
    fn events() -> (Events, u32, RawFd) {
        let mut events = Events::new();
        let signal = Signal::new().unwrap();
        let fd = signal.fd();
        let channel = events.channels.insert(Channel::new(signal));
        (events, channel, fd)
    }

    #[test]
    #[cfg_attr(miri, ignore = "it waits for descriptors")]
    fn a_thread_is_woken_by_an_event_when_the_device_is_unlocked() {
        let (mut events, channel, fd) = events();
        events.notify(channel, 7);
        assert!(!is_readable(fd, 0).unwrap());
        drop(events.late());
        assert!(is_readable(fd, 0).unwrap());
        let pending = take(fd).unwrap();
        assert_eq!(events.take_notice(channel, pending), Some(7));
        assert!(!is_readable(fd, 0).unwrap());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it waits for descriptors")]
    fn a_channel_is_readable_as_long_as_its_queue_has_events_also_when_a_completion_queue_goes() {
        let (mut events, channel, fd) = events();
        let notify = |events: &mut Events, cqs: &[u32]| {
            cqs.iter().for_each(|cq| events.notify(channel, *cq));
            drop(events.late());
        };
        notify(&mut events, &[1, 2, 1]);
        events.channels.get_mut(channel).unwrap().forget(1);
        let pending = take(fd).unwrap();
        assert_eq!(events.take_notice(channel, pending), Some(2));
        assert!(!is_readable(fd, 0).unwrap());
        // A thread has taken the event of a completion queue that is then destroyed.
        notify(&mut events, &[3]);
        let pending = take(fd).unwrap();
        events.channels.get_mut(channel).unwrap().forget(3);
        notify(&mut events, &[4]);
        assert_eq!(events.take_notice(channel, pending), None);
        assert!(is_readable(fd, 0).unwrap());
        let pending = take(fd).unwrap();
        assert_eq!(events.take_notice(channel, pending), Some(4));
        assert!(!is_readable(fd, 0).unwrap());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it waits for descriptors")]
    fn where_the_count_is_left_alone_an_event_is_taken_from_it_with_the_device_locked() {
        let (mut events, channel, fd) = events();
        events.notify(channel, 1);
        drop(events.late());
        assert_eq!(events.take_notice(channel, Pending::Counted), Some(1));
        assert_eq!(events.take_notice(channel, Pending::Counted), None);
        assert!(!is_readable(fd, 0).unwrap());
    }
}
