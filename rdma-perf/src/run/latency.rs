//! One message in flight.

use std::marker::PhantomData;
use std::sync::atomic::Ordering;

use anyhow::Result;
use rdma_safe::{Classic, Known, Poller, WorkCompletion, WorkRequest};

use super::Task;
use super::handle::{Receives, Sends};
use super::operation::{Message, Operation};
use super::pattern::Pattern;
use super::receiver::{Inbox, Rules};
use super::sender::Stop;
use super::wait::{Interrupted, Shared, Waiter};
use crate::clock::Clock;
use crate::stats::Latencies;
use crate::worker::LaneMemory;

/// Takes the moments at which messages are posted.
pub(super) trait Moments {
    /// There is no other thread, as in perftest, that could want the run to end or look how far it is, and the number of
    /// messages is given.
    const ALONE: bool = false;

    fn moment(&mut self, now: u64);
}

/// A histogram of the times in between, of which a latency is one part in `divisor`.
pub(super) struct Histogram {
    pub(super) latencies: Latencies,
    clock: Clock,
    divisor: f64,
    last: Option<u64>,
}

impl Histogram {
    pub(super) fn new(clock: Clock, divisor: f64) -> Self {
        Histogram { latencies: Latencies::new(), clock, divisor, last: None }
    }
}

impl Moments for Histogram {
    #[inline]
    fn moment(&mut self, now: u64) {
        if let Some(last) = self.last.replace(now) {
            self.latencies.record((self.clock.nanos(now.saturating_sub(last)) / self.divisor) as u64);
        }
    }
}

/// All of them, as perftest keeps them, one after another.
pub(super) struct All<'m>(pub(super) std::slice::IterMut<'m, u64>);

impl Moments for All<'_> {
    const ALONE: bool = true;

    #[inline]
    fn moment(&mut self, now: u64) {
        if let Some(moment) = self.0.next() {
            *moment = now;
        }
    }
}

/// Notes nothing.
impl Moments for () {
    #[inline]
    fn moment(&mut self, _now: u64) {}
}

/// How many messages, or until when.
pub(super) struct Course<'s> {
    shared: &'s Shared,
    clock: Clock,
    /// Messages of this size before this run.
    before: u64,
    /// Messages of this run, at most.
    messages: u64,
    /// When the run ends at the latest, in ticks.
    end: u64,
}

impl<'s> Course<'s> {
    /// Until `stop`, after `before` messages of this size.
    pub(super) fn new(stop: Stop, shared: &'s Shared, clock: Clock, before: u64) -> Self {
        let (messages, end) = match stop {
            Stop::Messages(messages) => (messages, u64::MAX),
            Stop::At(end) => (u64::MAX, end),
        };
        Course { shared, clock, before, messages, end }
    }

    /// Whether message `index` of this run is to be sent, at the time `now`.
    #[inline]
    fn goes_on<M: Moments>(&self, index: u64, now: u64) -> Result<bool> {
        if M::ALONE {
            return Ok(index < self.messages);
        }
        if self.shared.abort.load(Ordering::Relaxed) {
            return Err(Interrupted.into());
        }
        Ok(index < self.messages && now < self.end && !self.shared.stop.load(Ordering::Relaxed))
    }

    /// One more message is done.
    #[inline]
    fn went<M: Moments>(&self) {
        if !M::ALONE {
            self.shared.progress.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// How the peer's messages are seen to arrive.
pub(super) trait Arrivals {
    /// What is to be done to message number `message`, counted from 0, before it is sent.
    fn mark(&mut self, memory: &LaneMemory, size: u64, message: u64);

    /// Waits for the peer's message number `message`; `false` when `over` says that there will be none.
    fn wait(&mut self, memory: &LaneMemory, size: u64, message: u64, over: impl Fn() -> bool) -> Result<bool>;
}

/// There are none: what is sent is not answered.
pub(super) struct NoArrivals;

impl Arrivals for NoArrivals {
    #[inline(always)]
    fn mark(&mut self, _memory: &LaneMemory, _size: u64, _message: u64) {}

    #[inline(always)]
    fn wait(&mut self, _memory: &LaneMemory, _size: u64, _message: u64, _over: impl Fn() -> bool) -> Result<bool> {
        Ok(true)
    }
}

/// By the completions of receives, which are polled by `C`.
pub(super) struct Receipts<'a, C: Known, O> {
    pub(super) inbox: &'a mut Inbox,
    pub(super) rules: Rules,
    pub(super) receives: Receives<'a>,
    pub(super) poller: Poller<'a, C>,
    pub(super) waiter: Waiter<'a>,
    pub(super) pattern: Option<&'a Pattern>,
    pub(super) operation: PhantomData<O>,
}

impl<C: Known, O: Operation> Arrivals for Receipts<'_, C, O> {
    #[inline(always)]
    fn mark(&mut self, _memory: &LaneMemory, _size: u64, _message: u64) {}

    #[inline(always)]
    fn wait(&mut self, _memory: &LaneMemory, size: u64, _message: u64, over: impl Fn() -> bool) -> Result<bool> {
        let Receipts { inbox, rules, receives, poller, waiter, pattern, .. } = self;
        let look = |completion: &WorkCompletion<'_>| inbox.take::<O>(completion, receives, 0, rules, size, *pattern);
        one(poller, waiter, "message of the peer", over, look)
    }
}

/// By the last byte of the message in memory.
pub(super) struct Memory<'a> {
    pub(super) waiter: Waiter<'a>,
}

impl Memory<'_> {
    /// The last byte of message number `message`: never that of the one before it.
    #[inline]
    fn last_byte(message: u64) -> u8 {
        (message + 1) as u8
    }
}

impl Arrivals for Memory<'_> {
    #[inline]
    fn mark(&mut self, memory: &LaneMemory, size: u64, message: u64) {
        // SAFETY: within the source; the message before it has completed.
        unsafe { memory.source.byte(size - 1).write_volatile(Self::last_byte(message)) }
    }

    #[inline]
    fn wait(&mut self, memory: &LaneMemory, size: u64, message: u64, over: impl Fn() -> bool) -> Result<bool> {
        let byte = memory.target.byte(size - 1);
        // SAFETY: within the target, which the peer's device writes whole bytes of.
        while unsafe { byte.read_volatile() } != Self::last_byte(message) {
            if over() {
                return Ok(false);
            }
            self.waiter.nothing::<Classic>(&mut [], "write of the peer")?;
        }
        self.waiter.found();
        Ok(true)
    }
}

/// What an end posts to, by `P`, and waits for, by `C`.
pub(super) struct Line<'a, P: Known, C: Known, O> {
    pub(super) operation: O,
    pub(super) sends: Sends<'a, P>,
    pub(super) poller: Poller<'a, C>,
    pub(super) waiter: Waiter<'a>,
    pub(super) size: u64,
}

impl<P: Known, C: Known, O: Operation> Line<'_, P, C, O> {
    /// Posts message number `message` and waits for its completion.
    #[inline(always)]
    fn send(&mut self, message: u64) -> Result<()> {
        let Sends { queue, memory } = &mut self.sends;
        let message = Message { memory, offset: 0, size: self.size, round: message };
        let wr = WorkRequest::new(0).signaled();
        // SAFETY: the memory is the worker's, registered, and stays longer than the queue pair. It is reached by raw pointers
        // only, and not written by this process before the message has completed. What the peer's memory is overwritten with harms
        // nobody: a target is plain bytes, which nobody refers to.
        queue.post(|batch| unsafe { self.operation.add(batch, wr, message) })?;
        let look = |completion: &WorkCompletion<'_>| Ok(completion.ok()?);
        one(&mut self.poller, &mut self.waiter, "completion of a message", || false, look)?;
        Ok(())
    }
}

/// Waits for one completion, of `what`, and shows it to `look`; `false` when `over` says that there will be none.
#[inline(always)]
pub(super) fn one<C: Known>(
    poller: &mut Poller<'_, C>,
    waiter: &mut Waiter<'_>,
    what: &str,
    over: impl Fn() -> bool,
    mut look: impl FnMut(&WorkCompletion<'_>) -> Result<()>,
) -> Result<bool> {
    if !waiter.event(poller, what, &over)? {
        return Ok(false);
    }
    loop {
        if let Some(looked) = poller.take(|completion| look(&completion))? {
            waiter.found();
            return looked.map(|()| true);
        }
        if over() {
            return Ok(false);
        }
        waiter.nothing(&mut [poller], what)?;
    }
}

/// The end that begins: posts a message, and the next one when it has completed and the peer's has arrived, again and
/// again; how many.
pub(super) fn ping<P: Known, C: Known, O: Operation, M: Moments>(
    mut line: Line<'_, P, C, O>,
    mut arrivals: impl Arrivals,
    course: &Course<'_>,
    moments: &mut M,
) -> Result<u64> {
    let mut sent = 0;
    loop {
        let now = course.clock.now();
        if !course.goes_on::<M>(sent, now)? {
            return Ok(sent);
        }
        let message = course.before + sent;
        arrivals.mark(line.sends.memory, line.size, message);
        moments.moment(now);
        line.send(message)?;
        sent += 1;
        arrivals.wait(line.sends.memory, line.size, message, || false)?;
        course.went::<M>();
    }
}

/// The end that answers each message with one of its own, until there were as many as the task says; how many.
pub(super) fn pong<P: Known, C: Known, O: Operation>(
    mut line: Line<'_, P, C, O>,
    mut arrivals: impl Arrivals,
    task: &Task<'_>,
) -> Result<u64> {
    let mut answered = 0;
    loop {
        let over = || answered >= task.expected.load(Ordering::Acquire);
        if !arrivals.wait(line.sends.memory, line.size, answered, over)? {
            return Ok(answered);
        }
        arrivals.mark(line.sends.memory, line.size, answered);
        line.send(answered)?;
        answered += 1;
    }
}
