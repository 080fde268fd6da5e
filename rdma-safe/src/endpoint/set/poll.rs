//! Polling a set of endpoints.

use std::time::{Duration, Instant};

use super::builder::SET_FIELDS;
use super::sink::{CompletionSink, Each};
use super::{EndpointKey, EndpointSet};
use crate::cq::OpenPoll;
use crate::endpoint::Armed;
use crate::endpoint::completion::Completion;
use crate::endpoint::datagram::DatagramSender;
use crate::endpoint::keepalive::Check;
use crate::endpoint::poll::CurrentCompletion;
use crate::endpoint::poll_each::Taken;
use crate::endpoint::wait::{self, Waitable};
use crate::{CompletionQueue, Error, PollError, Result, WorkCompletion};

/// Most peers that are checked in one poll.
const CHECKS: u32 = 32;

impl EndpointSet {
    /// Takes one piece of completed work of any endpoint, if there is any. Never waits.
    ///
    /// # Errors
    /// [`PollError::NotInFlight`] when the provider names work that is not in flight. Its endpoint then takes no more
    /// work, and the others are unaffected. [`PollError::Provider`] when the provider failed. The set is then unusable,
    /// and [`EndpointSet::remove`] returns the buffers.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<(EndpointKey, Completion)>, PollError> {
        self.settle_provisional();
        self.end_forgotten_batch();
        if self.schedule.count() {
            return self.poll_and_check_peers();
        }
        if self.records_all || !self.members.is_idle() {
            return self.poll_slowly();
        }
        if self.cq.is_extended() {
            // SAFETY: the queue is extended. It is polled only here, in `poll_into`, `poll_queue` and `transfer_and_poll`, and each
            // of these polls is ended. Only queue pairs of this set complete to it, and none of them is modified or destroyed here.
            let Some(open) = (unsafe { self.cq.start_poll() })? else { return Ok(None) };
            return match self.members.take_fast(SetCompletion(open)) {
                Ok(taken) => Ok(Some(taken)),
                Err(current) => self.poll_recording(current.0),
            };
        }
        // SAFETY: the queue is a classic one.
        let Some(row) = (unsafe { self.cq.next_row() })? else { return Ok(None) };
        match self.members.take_fast(row) {
            Ok(taken) => Ok(Some(taken)),
            Err(row) => {
                self.members.record(row)?;
                self.poll_slowly()
            }
        }
    }

    /// Takes completed work, at most `max` pieces, and passes each to `f`. Never waits. Returns their number.
    ///
    /// For one piece it costs as much as [`EndpointSet::poll`], and less for each further one: the provider is asked once for
    /// all. The provider may hold a lock while `f` runs, so `f` should only store what it is given.
    ///
    /// # Errors
    /// Like [`EndpointSet::poll`]. The pieces before the error have been passed to `f`.
    #[inline(always)]
    pub fn poll_each(&mut self, max: usize, mut f: impl FnMut(EndpointKey, Completion)) -> Result<usize, PollError> {
        self.poll_each_from(max, |key, completion, _| f(key, completion))
    }

    /// Like [`EndpointSet::poll_each`], with the sender of each received datagram.
    ///
    /// # Errors
    /// Like [`EndpointSet::poll_each`].
    #[inline(always)]
    pub fn poll_each_from(
        &mut self,
        max: usize,
        f: impl FnMut(EndpointKey, Completion, Option<DatagramSender>),
    ) -> Result<usize, PollError> {
        self.poll_into(max, Each(f))
    }

    /// Takes completed work, at most `max` pieces, and passes each to the sink. Never waits. Returns their number.
    ///
    /// This is the cheapest way to take work. Most of it arrives as [`Succeeded`](crate::endpoint::Succeeded), which is
    /// smaller than a [`Completion`].
    ///
    /// ```no_run
    /// use rdma_safe::endpoint::{CompletionSink, DatagramSender, Succeeded};
    /// use rdma_safe::{Buffer, Completion, EndpointKey, EndpointSet};
    ///
    /// #[derive(Default)]
    /// struct Inbox {
    ///     requests: Vec<(EndpointKey, Buffer)>,
    ///     others: Vec<(EndpointKey, Completion)>,
    /// }
    ///
    /// impl CompletionSink for Inbox {
    ///     fn received(&mut self, key: EndpointKey, work: Succeeded) {
    ///         self.requests.push((key, work.buffer));
    ///     }
    ///
    ///     fn completed(&mut self, key: EndpointKey, completion: Completion, _: Option<DatagramSender>) {
    ///         self.others.push((key, completion));
    ///     }
    /// }
    ///
    /// # fn example(clients: &mut EndpointSet) -> Result<(), rdma_safe::PollError> {
    /// let mut inbox = Inbox::default();
    /// let taken = clients.poll_into(32, &mut inbox)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Like [`EndpointSet::poll`]. Work that was taken before the error has been passed to the sink.
    #[inline(always)]
    pub fn poll_into(&mut self, max: usize, mut sink: impl CompletionSink) -> Result<usize, PollError> {
        self.settle_provisional();
        self.end_forgotten_batch();
        let checks = self.schedule.count();
        if checks || !self.takes_several || !self.members.is_idle() || max == 0 {
            // Moved, so that the other branch can keep its fields in registers.
            let mut sink = sink;
            return self.poll_slowly_into(checks, max, &mut sink);
        }
        // SAFETY: as in `poll`. What the sink may do is in the documentation of `cq::owned`.
        let Some(started) = (unsafe { self.cq.start_poll() })? else { return Ok(0) };
        let mut open = SetCompletion(started);
        let mut taken = 0;
        loop {
            if !self.members.take_plain(&open.completion(), &mut sink) {
                // Moved, as above.
                let mut sink = sink;
                return self.poll_rest_into(open.0, taken, max, &mut sink);
            }
            taken += 1;
            if taken == max {
                return Ok(taken);
            }
            match open.0.next() {
                Ok(true) => {}
                Ok(false) => return Ok(taken),
                Err(error) => return fail(open.0, error),
            }
        }
    }

    // The sink of these functions is not a type parameter, so that the compiler inlines its functions above.

    #[cold]
    #[inline(never)]
    fn poll_slowly_into(
        &mut self,
        checks: bool,
        max: usize,
        sink: &mut dyn CompletionSink,
    ) -> Result<usize, PollError> {
        if checks && max != 0 {
            self.read_clock()?;
        }
        self.poll_singly_into(0, max, sink)
    }

    /// The rest of [`EndpointSet::poll_into`] after it has found a completion that the fast path does not handle: one that returns
    /// several sends, or one that has to be recorded.
    #[cold]
    #[inline(never)]
    fn poll_rest_into(
        &mut self,
        open: OpenPoll,
        mut taken: usize,
        max: usize,
        mut sink: &mut dyn CompletionSink,
    ) -> Result<usize, PollError> {
        let mut open = SetCompletion(open);
        loop {
            match self.members.take_run(&open.completion(), max, &mut taken, sink) {
                Taken::All => {}
                Taken::Part => {
                    drop(open);
                    return self.poll_singly_into(taken, max, sink);
                }
                Taken::None if self.members.take_plain(&open.completion(), &mut sink) => taken += 1,
                Taken::None => {
                    self.record(open.0)?;
                    return self.poll_singly_into(taken, max, sink);
                }
            }
            if taken == max {
                return Ok(taken);
            }
            match open.0.next() {
                Ok(true) => {}
                Ok(false) => return Ok(taken),
                Err(error) => return fail(open.0, error),
            }
        }
    }

    fn poll_singly_into(
        &mut self,
        mut taken: usize,
        max: usize,
        sink: &mut dyn CompletionSink,
    ) -> Result<usize, PollError> {
        while taken < max {
            let Some((key, completion)) = self.poll()? else { break };
            let sender = self.members.sender(key, &completion);
            sink.completed(key, completion, sender);
            taken += 1;
        }
        Ok(taken)
    }

    #[cold]
    #[inline(never)]
    fn read_clock(&mut self) -> Result<(), PollError> {
        let now = Instant::now();
        self.schedule.read(now);
        self.check_due(now)
    }

    /// Reads the clock, and checks some of the peers whose time it is.
    #[cold]
    #[inline(never)]
    fn poll_and_check_peers(&mut self) -> Result<Option<(EndpointKey, Completion)>, PollError> {
        self.read_clock()?;
        self.poll_slowly()
    }

    /// Checks peers whose time it is, at most [`CHECKS`].
    fn check_due(&mut self, now: Instant) -> Result<(), PollError> {
        let mut drained = false;
        for _ in 0..CHECKS {
            let Some(due) = self.schedule.take(now) else { return Ok(()) };
            let Some(check) = self.members.check_peer(due.key) else {
                self.schedule.forgotten();
                continue;
            };
            self.schedule.repeat(due, now);
            if check == Check::Lost {
                // The queue is never empty while other peers are busy. A completion of this one may be in it.
                if !std::mem::replace(&mut drained, true) {
                    self.drain()?;
                }
                self.members.lose_peer(due.key);
            }
        }
        self.schedule.hurry();
        Ok(())
    }

    /// Time by which to call [`poll`](Self::poll) and [`arm`](Self::arm) again, even if there is no event.
    ///
    /// For programs that sleep until [`channel`](Self::channel) is readable. [`wait`](Self::wait) does this itself. `None`
    /// if no endpoint has a [keepalive](crate::EndpointBuilder::keepalive). It changes with each call of `arm`.
    #[must_use]
    pub fn keepalive_due(&self) -> Option<Instant> {
        self.schedule.next()
    }

    #[cold]
    #[inline(never)]
    fn poll_recording(&mut self, open: OpenPoll) -> Result<Option<(EndpointKey, Completion)>, PollError> {
        self.record(open)?;
        self.poll_slowly()
    }

    /// Records the completion at the position of the poll, and ends the poll.
    pub(super) fn record(&mut self, open: OpenPoll) -> Result<(), PollError> {
        // SAFETY: these are the fields of the queue.
        self.members.record(unsafe { open.completion(self.fields) })
    }

    #[cold]
    #[inline(never)]
    fn poll_slowly(&mut self) -> Result<Option<(EndpointKey, Completion)>, PollError> {
        if self.members.takes_turns() {
            // The order of turns depends on all completions in the queue. The queue holds no more than its capacity,
            // and no receive is posted in the meantime.
            for _ in 0..=self.cq.capacity() {
                if !self.poll_queue()? {
                    break;
                }
            }
        }
        loop {
            if let Some(taken) = self.members.pop() {
                return Ok(Some(taken));
            }
            if !self.poll_queue()? {
                return Ok(None);
            }
        }
    }

    /// Takes one completion out of the queue, if there is any, and records it at its endpoint.
    #[inline(never)]
    pub(super) fn poll_queue(&mut self) -> Result<bool, PollError> {
        if self.cq.is_extended() {
            // SAFETY: as in `poll`. Recording a completion changes no queue pair; `fail_over_share` does, after the poll has
            // ended. It moves buffers and drops none, and if it ran code of the user, that could reach neither the queue nor the
            // queue pairs: this borrows the set.
            let Some(open) = (unsafe { self.cq.start_poll() })? else { return Ok(false) };
            // SAFETY: these are the fields of the queue.
            self.members.record(unsafe { open.completion(self.fields) })?;
        } else {
            // SAFETY: the queue is a classic one.
            let Some(found) = (unsafe { self.cq.next_row() })? else { return Ok(false) };
            self.members.record(found)?;
        }
        self.members.fail_over_share();
        Ok(true)
    }

    /// Waits until a piece of work of any endpoint has completed, for `timeout` at most.
    ///
    /// Spins, or sleeps until there is an event if the set was built with
    /// [`EndpointSetBuilder::events`](crate::endpoint::EndpointSetBuilder::events).
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Poll`]; [`Error::Channel`].
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<(EndpointKey, Completion)> {
        match self.poll() {
            Ok(Some(taken)) => Ok(taken),
            Ok(None) => wait::wait(self, timeout),
            Err(error) => Err(error.into()),
        }
    }

    /// Requests an event for the next completion of any endpoint, unless completions are available already.
    ///
    /// First takes all pending events from the channel, so no other code has to read them. [`Armed`] says whether to
    /// wait for the channel or to poll again. One thread can thus wait for the set and for other descriptors, such as
    /// new clients:
    ///
    /// ```no_run
    /// # use rdma_safe::{EndpointKey, EndpointSet};
    /// # use rdma_safe::endpoint::Armed;
    /// # fn serve(_: EndpointKey, _: rdma_safe::Completion) {}
    /// # fn readable(_: std::os::fd::BorrowedFd<'_>, _: &std::net::TcpListener) {}
    /// # fn example(clients: &mut EndpointSet, listener: std::net::TcpListener) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::os::fd::AsFd;
    ///
    /// listener.set_nonblocking(true)?;
    /// loop {
    ///     while let Some((key, done)) = clients.poll()? {
    ///         serve(key, done);
    ///     }
    ///     while let Ok((stream, _)) = listener.accept() {
    ///         // … build an endpoint in the set, and exchange addresses over the stream
    /// #       drop(stream);
    ///     }
    ///     match clients.arm()? {
    ///         Armed::Poll => continue,
    ///         // Sleep until one of them is readable: poll(2), epoll(7), the reactor of a runtime.
    ///         Armed::Wait => readable(clients.channel().unwrap().as_fd(), &listener),
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoChannel`] without
    /// [`EndpointSetBuilder::events`](crate::endpoint::EndpointSetBuilder::events);
    /// [`Error::Verb`]; [`Error::Poll`].
    pub fn arm(&mut self) -> Result<Armed> {
        self.take_events()?;
        self.settle_provisional();
        self.end_forgotten_batch();
        if self.schedule.next().is_some() {
            // A service that sleeps on its channel polls seldom, so the clock is read each time. Probes are posted before
            // arming, so their completions raise events.
            self.check_due(Instant::now())?;
        }
        self.cq.arm(false)?;
        self.events = self.events.map(|events| events.saturating_add(1));
        // Completions from before arming raise no event. Those of removed endpoints may be among them, and are not
        // handed out.
        while self.members.is_idle() && self.poll_queue()? {}
        Ok(Armed::with(!self.members.is_idle()))
    }

    /// Takes the events from the channel.
    ///
    /// A queue raises at most one event each time it is armed, so a read that would find none is left out. If the queue raises one
    /// between a read that finds none and the next arming, it may raise another one. That one stays in the channel until the next
    /// call.
    fn take_events(&mut self) -> Result<()> {
        let Some(channel) = self.cq.channel() else { return Ok(()) };
        while self.events != Some(0) {
            match channel.take_event()? {
                Some(id) if id == self.cq.id() => self.events = self.events.map(|events| events - 1),
                // The program has created another queue with this channel.
                Some(_) => self.events = None,
                None => {
                    self.events = self.events.map(|_| 0);
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Ends a poll with an error. Out of line, so that the fast path does not check its result again.
#[cold]
#[inline(never)]
fn fail(open: OpenPoll, error: PollError) -> Result<usize, PollError> {
    drop(open);
    Err(error)
}

impl Waitable for EndpointSet {
    type Done = (EndpointKey, Completion);

    fn poll_once(&mut self) -> Result<Option<Self::Done>, PollError> {
        self.poll()
    }

    fn queue(&mut self) -> &mut CompletionQueue {
        // The caller arms the queue and reads the channel itself.
        self.events = None;
        &mut self.cq
    }

    fn check_peers(&mut self, now: Instant) -> Option<Instant> {
        // After an error, the next poll meets it as well.
        let is_idle = self.check_due(now).is_ok() && self.members.is_idle();
        if is_idle { self.schedule.next() } else { Some(now) }
    }

    fn ended(&self) -> Option<Error> {
        None
    }
}

/// The current completion of the set's extended queue.
struct SetCompletion(OpenPoll);

impl CurrentCompletion for SetCompletion {
    #[inline(always)]
    fn completion(&self) -> WorkCompletion<'_> {
        // SAFETY: the queue of a set has these fields.
        unsafe { self.0.completion(SET_FIELDS) }
    }
}
