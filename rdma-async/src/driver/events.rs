//! Descriptors and deadlines that a driver waits for on behalf of tasks and connections.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use rdma_safe::cm::EventChannel;
use rdma_safe::{CompletionChannel, EndpointKey};

use super::poller::Poller;
use super::queue::Queue;
use crate::effects::Effects;
use crate::{Error, Result, Sharing, Threads};

/// The descriptors and deadlines of a driver.
pub(crate) struct Events<S: Sharing> {
    pub(crate) poller: Arc<Poller>,
    sources: S::Cell<Sources<S>>,
    timers: S::Cell<Timers>,
}

struct Sources<S: Sharing> {
    /// The generation of an entry is part of its token, so events of a removed source are recognized.
    entries: Vec<(u32, Option<Target<S>>)>,
    free: Vec<u32>,
    /// Nobody looks for events any more.
    is_stopped: bool,
}

/// The receiver of the events of a descriptor.
pub(crate) enum Target<S: Sharing> {
    /// The queue of the driver, which looks at it after every event.
    Queue,
    /// A task that waits until it is readable.
    Task { is_ready: bool, waker: Option<Waker> },
    /// A connection, to learn that the peer has ended it.
    Connection(S::Weak<Queue<S>>, EndpointKey),
}

#[derive(Default)]
struct Timers {
    next: u64,
    /// By time, and by number.
    by_time: BTreeMap<(Instant, u64), Waker>,
    /// The time that the descriptor of the timer was set to.
    set: Option<Instant>,
}

/// A descriptor that the driver watches.
pub(crate) struct Source<S: Sharing> {
    events: S::Rc<Events<S>>,
    index: u32,
    token: u64,
    watched: Watched,
}

/// The owner of the descriptor, which keeps it open.
enum Watched {
    Completions(CompletionChannel),
    Connection(EventChannel),
}

impl Watched {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Watched::Completions(channel) => channel.as_fd(),
            Watched::Connection(channel) => channel.as_fd(),
        }
    }
}

impl<S: Sharing> Events<S> {
    pub(crate) fn new() -> Result<Self> {
        let sources = Sources { entries: Vec::new(), free: Vec::new(), is_stopped: false };
        Ok(Events { poller: Arc::new(Poller::new()?), sources: S::cell(sources), timers: S::cell(Timers::default()) })
    }

    /// Whether the driver belongs to the parent of this process.
    #[inline(always)]
    pub(crate) fn is_inherited(&self) -> bool {
        self.poller.is_inherited()
    }

    /// Passes events to their receivers: the token of each names its descriptor. Adds the connections among them to `found`.
    #[inline]
    pub(crate) fn dispatch(
        &self,
        tokens: &[u64],
        effects: &mut Effects,
        found: &mut Vec<(S::Rc<Queue<S>>, EndpointKey)>,
    ) {
        S::with(&self.sources, |sources| {
            for token in tokens {
                let (index, generation) = (*token as u32, (*token >> 32) as u32);
                match sources.entries.get_mut(index as usize) {
                    Some((current, Some(target))) if *current == generation => match target {
                        Target::Queue => {}
                        Target::Task { is_ready, waker } => {
                            *is_ready = true;
                            waker.take().into_iter().for_each(|waker| effects.wake(waker));
                        }
                        Target::Connection(queue, key) => {
                            found.extend(S::upgrade::<Queue<S>>(queue).map(|queue| (queue, *key)));
                        }
                    },
                    _ => {}
                }
            }
        });
    }

    /// Wakes the tasks that wait for descriptors, since the driver has stopped.
    pub(crate) fn stop(&self, effects: &mut Effects) {
        S::with(&self.sources, |sources| {
            sources.is_stopped = true;
            for (_, target) in &mut sources.entries {
                if let Some(Target::Task { waker, .. }) = target {
                    waker.take().into_iter().for_each(|waker| effects.wake(waker));
                }
            }
        });
    }

    /// Wakes the tasks whose time has come.
    #[inline]
    pub(crate) fn expire(&self, effects: &mut Effects) {
        S::with(&self.timers, |timers| {
            // Most drivers have no timers, and need not read the clock.
            if timers.by_time.is_empty() {
                return;
            }
            let now = Instant::now();
            while let Some(first) = timers.by_time.first_entry() {
                if first.key().0 > now {
                    break;
                }
                effects.wake(first.remove());
            }
        });
    }

    /// Makes the descriptor readable at the first deadline, or at `other` if that is earlier.
    #[inline]
    pub(crate) fn set_timer(&self, other: Option<Instant>) -> Result<()> {
        // The timer is set inside of the cell, so that it agrees with `set` if several threads do this.
        S::with(&self.timers, |timers| {
            if timers.by_time.is_empty() && other.is_none() {
                return Ok(());
            }
            let first = timers.by_time.keys().next().map(|(time, _)| *time);
            let Some(first) = first.into_iter().chain(other).min() else { return Ok(()) };
            // An early expiry does no harm and is cheaper than to set the timer each time.
            if timers.set.is_some_and(|set| set <= first && set > Instant::now()) {
                return Ok(());
            }
            self.poller.set_timer(first)?;
            timers.set = Some(first);
            Ok(())
        })
    }
}

impl<S: Sharing> Source<S> {
    /// Watches the channel of a completion queue.
    pub(crate) fn completions(events: &S::Rc<Events<S>>, channel: &CompletionChannel) -> Result<Self> {
        Source::new(events, Watched::Completions(channel.clone()), Target::Queue)
    }

    /// Watches the channel of a handshake or a listener, for a task.
    pub(crate) fn channel(events: &S::Rc<Events<S>>, channel: &EventChannel) -> Result<Self> {
        Source::new(events, Watched::Connection(channel.clone()), Target::Task { is_ready: false, waker: None })
    }

    fn new(events: &S::Rc<Events<S>>, watched: Watched, target: Target<S>) -> Result<Self> {
        let (index, generation) = S::with(&events.sources, |sources| match sources.free.pop() {
            Some(index) => {
                let entry = &mut sources.entries[index as usize];
                entry.1 = Some(target);
                (index, entry.0)
            }
            None => {
                sources.entries.push((0, Some(target)));
                ((sources.entries.len() - 1) as u32, 0)
            }
        });
        let token = u64::from(index) | u64::from(generation) << 32;
        let source = Source { events: events.clone(), index, token, watched };
        events.poller.add(source.watched.fd(), token)?;
        Ok(source)
    }

    /// From now on, a runtime watches the descriptor. The driver only looks for errors, which tokio does not report to a reader.
    #[cfg(feature = "tokio")]
    pub(super) fn report_errors(&self) {
        self.events.poller.report_errors(self.watched.fd(), self.token);
    }

    /// Reports once more if the descriptor is readable.
    pub(crate) fn report_again(&self) {
        self.events.poller.report_again(self.watched.fd(), self.token);
    }

    /// From now on, reports to a connection instead of a task.
    pub(crate) fn set_connection(&self, queue: &S::Rc<Queue<S>>, key: EndpointKey) {
        let target = Target::Connection(S::downgrade(queue), key);
        drop(S::with(&self.events.sources, |sources| sources.entries[self.index as usize].1.replace(target)));
    }

    /// Whether the descriptor has become readable since this was last ready. Wakes the task of the last call when it does.
    ///
    /// # Errors
    /// [`Error::DriverStopped`].
    pub(crate) fn poll_ready(&self, context: &mut Context<'_>) -> Poll<Result<()>> {
        let waker = context.waker().clone();
        let (polled, unused) =
            S::with(&self.events.sources, |sources| match &mut sources.entries[self.index as usize].1 {
                Some(Target::Task { is_ready: is_ready @ true, .. }) => {
                    *is_ready = false;
                    (Poll::Ready(Ok(())), Some(waker))
                }
                _ if sources.is_stopped => (Poll::Ready(Err(Error::DriverStopped)), Some(waker)),
                Some(Target::Task { waker: last, .. }) => (Poll::Pending, last.replace(waker)),
                _ => (Poll::Pending, Some(waker)),
            });
        drop(unused);
        polled
    }
}

impl<S: Sharing> Drop for Source<S> {
    fn drop(&mut self) {
        if self.events.is_inherited() {
            return;
        }
        self.events.poller.remove(self.watched.fd());
        drop(S::with(&self.events.sources, |sources| {
            let entry = &mut sources.entries[self.index as usize];
            entry.0 = entry.0.wrapping_add(1);
            sources.free.push(self.index);
            entry.1.take()
        }));
    }
}

/// A deadline of a task, kept by the driver. Made by [`Connection::deadline`](crate::Connection::deadline).
pub struct Deadline<S: Sharing = Threads> {
    events: S::Rc<Events<S>>,
    key: Option<(Instant, u64)>,
}

impl<S: Sharing> Deadline<S> {
    pub(crate) fn new(events: &S::Rc<Events<S>>) -> Self {
        Deadline { events: events.clone(), key: None }
    }

    /// Ready from `time` on. Wakes the task then, unless it is polled with another time before.
    pub fn poll(&mut self, time: Instant, context: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= time {
            return Poll::Ready(());
        }
        let waker = context.waker().clone();
        let (before, is_first) = S::with(&self.events.timers, |timers| {
            let before = self.key.take().and_then(|key| timers.by_time.remove(&key));
            let key = (time, timers.next);
            timers.next += 1;
            timers.by_time.insert(key, waker);
            self.key = Some(key);
            (before, timers.by_time.keys().next() == Some(&key))
        });
        drop(before);
        if is_first {
            // The driver may be asleep. If this fails, it waits for the deadline that is set, or for the next event.
            let _ = self.events.set_timer(None);
        }
        Poll::Pending
    }
}

impl<S: Sharing> Drop for Deadline<S> {
    fn drop(&mut self) {
        let Some(key) = self.key.take().filter(|_| !self.events.is_inherited()) else { return };
        drop(S::with(&self.events.timers, |timers| timers.by_time.remove(&key)));
    }
}

impl<S: Sharing> fmt::Debug for Deadline<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deadline").field("time", &self.key.map(|(time, _)| time)).finish_non_exhaustive()
    }
}

impl<S: Sharing> fmt::Debug for Source<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("index", &self.index).finish_non_exhaustive()
    }
}
