//! Completion channels.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};

use super::epoll::Epoll;
use super::signal::{Signal, is_nonblocking, is_readable, read, read_now};

/// An event of a completion channel that is still in the channel's queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pending {
    /// It was taken from the count of the signal, or before it was counted.
    Taken,
    /// It is still in the count, so another thread may take it first.
    Counted,
}

/// The descriptors of a completion channel, for threads that wait without the device locked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChannelFds {
    /// Descriptor that the program waits for: [`Channel::epoll`].
    pub(crate) epoll: RawFd,
    pub(super) signal: RawFd,
}

impl ChannelFds {
    pub(crate) fn is_nonblocking(self) -> io::Result<bool> {
        is_nonblocking(self.epoll)
    }
}

/// Takes an event from the count of a completion channel's signal. Never waits.
pub(super) fn take_now(fd: RawFd) -> Option<Pending> {
    match read_now(fd) {
        Some(is_taken) => is_taken.then_some(Pending::Taken),
        None => matches!(is_readable(fd, 0), Ok(true)).then_some(Pending::Counted),
    }
}

/// Takes an event from the count of a completion channel's signal. Waits for it without the device locked and without a deadline.
///
/// # Errors
/// `EINTR`.
pub(super) fn take(fd: RawFd) -> io::Result<Pending> {
    // If `read_now` does not work, threads must not take events from the count here: `Signal::lower` could then block.
    static CAN_TAKE: OnceLock<bool> = OnceLock::new();
    if *CAN_TAKE.get_or_init(|| Signal::new().is_ok_and(|signal| read_now(signal.fd()).is_some())) {
        read(fd).map(|()| Pending::Taken)
    } else {
        is_readable(fd, -1).map(|_| Pending::Counted)
    }
}

/// A completion channel.
///
/// The queue changes with the device locked. A thread first takes an event from the count of the signal, by [`take`], and then from
/// the queue. So both agree for the program: while the queue has an event that is not held and that no thread is taking, the
/// descriptor is readable or is about to be.
///
/// Destroying a completion queue removes its events from the queue first. Other threads may already have taken some of them from
/// the count. `owed` is the number of these threads that will find no event: `counted + taken + held = queued + owed`, where
/// `taken` events were taken from the count but not yet from the queue.
#[derive(Debug)]
pub(crate) struct Channel {
    /// Descriptor that the program waits for. Contains `signal` and, while the channel is [direct](super::direct), the sockets.
    pub(super) epoll: Arc<Epoll>,
    pub(super) signal: Arc<Signal>,
    /// Completion queues, once for each of their events.
    pub(super) queue: VecDeque<u32>,
    /// Events that threads have taken from the count and that are no longer in the queue.
    owed: usize,
    /// Events that are held: [`Events::hold`](super::events::Events::hold). They are in the queue, and neither in the count nor
    /// taken.
    pub(super) held: u32,
    /// Whether `ibv_get_cq_event` has failed with `EAGAIN`. A program that calls it again expects that.
    pub(super) was_empty: bool,
    pub(crate) users: u32,
}

impl Channel {
    pub(crate) fn new() -> io::Result<Channel> {
        let (epoll, signal) = (Arc::new(Epoll::new()?), Arc::new(Signal::new()?));
        epoll.add(signal.fd(), 0)?;
        Ok(Channel { epoll, signal, queue: VecDeque::with_capacity(64), owed: 0, held: 0, was_empty: false, users: 0 })
    }

    pub(crate) fn fds(&self) -> ChannelFds {
        ChannelFds { epoll: self.epoll.fd(), signal: self.signal.fd() }
    }

    /// Takes the oldest event and returns its completion queue.
    ///
    /// Returns `None` if that completion queue was destroyed, or if another thread was faster.
    pub(super) fn take(&mut self, pending: Pending) -> Option<u32> {
        match pending {
            Pending::Taken if self.owed > 0 => {
                self.owed -= 1;
                None
            }
            Pending::Taken => self.queue.pop_front(),
            Pending::Counted => {
                self.signal.wait_for_announced();
                if self.signal.lower() { self.queue.pop_front() } else { None }
            }
        }
    }

    /// Removes the events of a completion queue that is destroyed.
    pub(crate) fn remove_cq(&mut self, cq: u32) {
        self.signal.wait_for_announced();
        let before = self.queue.len();
        self.queue.retain(|of| *of != cq);
        for _ in self.queue.len()..before {
            if self.held > 0 {
                self.held -= 1;
            } else if !self.signal.lower() {
                self.owed += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::events::Events;

    /// Creates events with one channel.
    fn events() -> (Events, u32, ChannelFds) {
        let mut events = Events::new();
        let channel = Channel::new().unwrap();
        let fds = channel.fds();
        let channel = events.channels.insert(channel);
        (events, channel, fds)
    }

    #[test]
    #[cfg_attr(miri, ignore = "it waits for descriptors")]
    fn a_thread_is_woken_by_an_event_when_the_device_is_unlocked() {
        let (mut events, channel, fds) = events();
        events.notify(channel, 7);
        assert!(!is_readable(fds.epoll, 0).unwrap());
        drop(events.take_wakeups());
        assert!(is_readable(fds.epoll, 0).unwrap());
        let pending = take(fds.signal).unwrap();
        assert_eq!(events.take_completion_event(channel, pending), Some(7));
        assert!(!is_readable(fds.epoll, 0).unwrap());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it waits for descriptors")]
    fn a_channel_stays_readable_while_it_has_events_even_if_a_completion_queue_is_destroyed() {
        let (mut events, channel, fds) = events();
        let notify = |events: &mut Events, cqs: &[u32]| {
            cqs.iter().for_each(|cq| events.notify(channel, *cq));
            drop(events.take_wakeups());
        };
        notify(&mut events, &[1, 2, 1]);
        events.channels.get_mut(channel).unwrap().remove_cq(1);
        let pending = take(fds.signal).unwrap();
        assert_eq!(events.take_completion_event(channel, pending), Some(2));
        assert!(!is_readable(fds.epoll, 0).unwrap());
        // A thread has taken the event of a completion queue that is then destroyed.
        notify(&mut events, &[3]);
        let pending = take(fds.signal).unwrap();
        events.channels.get_mut(channel).unwrap().remove_cq(3);
        notify(&mut events, &[4]);
        assert_eq!(events.take_completion_event(channel, pending), None);
        assert!(is_readable(fds.epoll, 0).unwrap());
        let pending = take(fds.signal).unwrap();
        assert_eq!(events.take_completion_event(channel, pending), Some(4));
        assert!(!is_readable(fds.epoll, 0).unwrap());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it waits for descriptors")]
    fn on_older_kernels_an_event_is_taken_from_the_count_with_the_device_locked() {
        let (mut events, channel, fds) = events();
        events.notify(channel, 1);
        drop(events.take_wakeups());
        assert_eq!(events.take_completion_event(channel, Pending::Counted), Some(1));
        assert_eq!(events.take_completion_event(channel, Pending::Counted), None);
        assert!(!is_readable(fds.epoll, 0).unwrap());
    }
}
