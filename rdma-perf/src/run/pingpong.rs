//! The loops of latency tests.

use std::marker::PhantomData;
use std::sync::atomic::Ordering;

use anyhow::Result;
use rdma_safe::cq::Poller;
use rdma_safe::interface::{Classic, Known};
use rdma_safe::{WorkCompletion, WorkRequest};

use super::handle::{Receives, Sends};
use super::operation::{Message, Operation};
use super::pattern::Pattern;
use super::receiver::LaneReceives;
use super::stop::Stop;
use super::task::Task;
use super::wait::{Shared, Waiter};
use crate::clock::Clock;
use crate::endpoint::memory::LaneMemory;
use crate::interrupt::Interrupted;
use crate::plan::receives::RepostRules;
use crate::stats::Latencies;

/// Receives the times at which messages are posted.
pub(super) trait PostTimes {
    /// Whether the run has no supervising thread, as in perftest. Its number of messages is then fixed.
    const UNSUPERVISED: bool = false;

    fn record(&mut self, now: u64);
}

/// A histogram of the time between posts, divided by `divisor`.
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

impl PostTimes for Histogram {
    #[inline]
    fn record(&mut self, now: u64) {
        if let Some(last) = self.last.replace(now) {
            self.latencies.record((self.clock.nanos(now.saturating_sub(last)) / self.divisor) as u64);
        }
    }
}

/// Keeps all times in order, as perftest does.
pub(super) struct AllPostTimes<'m>(pub(super) std::slice::IterMut<'m, u64>);

impl PostTimes for AllPostTimes<'_> {
    const UNSUPERVISED: bool = true;

    #[inline]
    fn record(&mut self, now: u64) {
        if let Some(record) = self.0.next() {
            *record = now;
        }
    }
}

/// Ignores the times, during warm-up.
impl PostTimes for () {
    #[inline]
    fn record(&mut self, _now: u64) {}
}

/// When a run ends.
pub(super) struct RunLimits<'s> {
    shared: &'s Shared,
    clock: Clock,
    /// Messages of this size before this run.
    before: u64,
    /// Largest number of messages of this run.
    messages: u64,
    /// Latest end of this run, in ticks.
    end: u64,
}

impl<'s> RunLimits<'s> {
    /// Limits for `stop`, after `before` messages of this size.
    pub(super) fn new(stop: Stop, shared: &'s Shared, clock: Clock, before: u64) -> Self {
        let (messages, end) = match stop {
            Stop::Messages(messages) => (messages, u64::MAX),
            Stop::At(end) => (u64::MAX, end),
        };
        RunLimits { shared, clock, before, messages, end }
    }

    /// Whether to send message `index` of this run at the time `now`.
    #[inline]
    fn continues<M: PostTimes>(&self, index: u64, now: u64) -> Result<bool> {
        if M::UNSUPERVISED {
            return Ok(index < self.messages);
        }
        if self.shared.abort.load(Ordering::Relaxed) {
            return Err(Interrupted.into());
        }
        Ok(index < self.messages && now < self.end && !self.shared.stop.load(Ordering::Relaxed))
    }

    /// Counts a message for the progress bar.
    #[inline]
    fn count_message<M: PostTimes>(&self) {
        if !M::UNSUPERVISED {
            self.shared.progress.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// How messages of the peer are detected.
pub(super) trait Arrivals {
    /// Prepares message number `message`, counted from 0, before it is sent.
    fn mark(&mut self, memory: &LaneMemory, size: u64, message: u64);

    /// Waits for message number `message` of the peer. Returns `false` once `over` returns true.
    fn wait(&mut self, memory: &LaneMemory, size: u64, message: u64, over: impl Fn() -> bool) -> Result<bool>;
}

/// The peer sends no messages.
pub(super) struct NoArrivals;

impl Arrivals for NoArrivals {
    #[inline(always)]
    fn mark(&mut self, _memory: &LaneMemory, _size: u64, _message: u64) {}

    #[inline(always)]
    fn wait(&mut self, _memory: &LaneMemory, _size: u64, _message: u64, _over: impl Fn() -> bool) -> Result<bool> {
        Ok(true)
    }
}

/// Messages are detected by receive completions, polled by `C`.
pub(super) struct ReceiveArrivals<'a, C: Known, O> {
    pub(super) state: &'a mut LaneReceives,
    pub(super) rules: RepostRules,
    pub(super) receives: Receives<'a>,
    pub(super) poller: Poller<'a, C>,
    pub(super) waiter: Waiter<'a>,
    pub(super) pattern: Option<&'a Pattern>,
    pub(super) operation: PhantomData<O>,
}

impl<C: Known, O: Operation> Arrivals for ReceiveArrivals<'_, C, O> {
    #[inline(always)]
    fn mark(&mut self, _memory: &LaneMemory, _size: u64, _message: u64) {}

    #[inline(always)]
    fn wait(&mut self, _memory: &LaneMemory, size: u64, _message: u64, over: impl Fn() -> bool) -> Result<bool> {
        let ReceiveArrivals { state, rules, receives, poller, waiter, pattern, .. } = self;
        let look = |completion: &WorkCompletion<'_>| state.take::<O>(completion, receives, 0, rules, size, *pattern);
        wait_for_completion(poller, waiter, "message from the peer", over, look)
    }
}

/// Messages are detected by their last byte in memory.
pub(super) struct MemoryArrivals<'a> {
    pub(super) waiter: Waiter<'a>,
}

impl MemoryArrivals<'_> {
    /// The last byte of message number `message`. It differs between successive messages.
    #[inline]
    fn last_byte(message: u64) -> u8 {
        (message + 1) as u8
    }
}

impl Arrivals for MemoryArrivals<'_> {
    #[inline]
    fn mark(&mut self, memory: &LaneMemory, size: u64, message: u64) {
        // SAFETY: within the source; the previous message has completed.
        unsafe { memory.source.byte(size - 1).write_volatile(Self::last_byte(message)) }
    }

    #[inline]
    fn wait(&mut self, memory: &LaneMemory, size: u64, message: u64, over: impl Fn() -> bool) -> Result<bool> {
        let byte = memory.target.byte(size - 1);
        // SAFETY: within the target; the peer's device writes whole bytes.
        while unsafe { byte.read_volatile() } != Self::last_byte(message) {
            if over() {
                return Ok(false);
            }
            self.waiter.wait::<Classic>(&mut [], "write from the peer")?;
        }
        self.waiter.reset();
        Ok(true)
    }
}

/// The sending side of an end, which posts by `P` and polls by `C`.
pub(super) struct Requester<'a, P: Known, C: Known, O> {
    pub(super) operation: O,
    pub(super) sends: Sends<'a, P>,
    pub(super) poller: Poller<'a, C>,
    pub(super) waiter: Waiter<'a>,
    pub(super) size: u64,
}

impl<P: Known, C: Known, O: Operation> Requester<'_, P, C, O> {
    /// Posts message number `message` and waits for its completion.
    #[inline(always)]
    fn send(&mut self, message: u64) -> Result<()> {
        let Sends { queue, memory } = &mut self.sends;
        let message = Message { memory, offset: 0, size: self.size, round: message };
        let wr = WorkRequest::new(0).signaled();
        // SAFETY: the memory belongs to the worker, is registered, and outlives the queue pair. It is accessed through
        // raw pointers only, and this process does not write to it before the message has completed. The peer's target
        // is plain bytes without references, so overwriting it is sound.
        queue.post(|batch| unsafe { self.operation.add(batch, wr, message) })?;
        let look = |completion: &WorkCompletion<'_>| Ok(completion.ok()?);
        wait_for_completion(&mut self.poller, &mut self.waiter, "completion of a message", || false, look)?;
        Ok(())
    }
}

/// Waits for one completion and passes it to `look`. Returns `false` once `over` returns true. `what` describes it in
/// errors.
#[inline(always)]
pub(super) fn wait_for_completion<C: Known>(
    poller: &mut Poller<'_, C>,
    waiter: &mut Waiter<'_>,
    what: &str,
    over: impl Fn() -> bool,
    mut look: impl FnMut(&WorkCompletion<'_>) -> Result<()>,
) -> Result<bool> {
    if !waiter.wait_for_event(poller, what, &over)? {
        return Ok(false);
    }
    loop {
        if let Some(looked) = poller.poll_one(|completion| look(&completion))? {
            waiter.reset();
            return looked.map(|()| true);
        }
        if over() {
            return Ok(false);
        }
        waiter.wait(&mut [poller], what)?;
    }
}

/// The end that sends first. It posts the next message when the previous one has completed and the peer's answer has
/// arrived. Returns the number of messages.
pub(super) fn ping<P: Known, C: Known, O: Operation, M: PostTimes>(
    mut requester: Requester<'_, P, C, O>,
    mut arrivals: impl Arrivals,
    limits: &RunLimits<'_>,
    times: &mut M,
) -> Result<u64> {
    let mut sent = 0;
    loop {
        let now = limits.clock.now();
        if !limits.continues::<M>(sent, now)? {
            return Ok(sent);
        }
        let message = limits.before + sent;
        arrivals.mark(requester.sends.memory, requester.size, message);
        times.record(now);
        requester.send(message)?;
        sent += 1;
        arrivals.wait(requester.sends.memory, requester.size, message, || false)?;
        limits.count_message::<M>();
    }
}

/// The end that answers. It sends one message for each that arrives, until all expected ones have. Returns the number
/// of messages.
pub(super) fn pong<P: Known, C: Known, O: Operation>(
    mut requester: Requester<'_, P, C, O>,
    mut arrivals: impl Arrivals,
    task: &Task<'_>,
) -> Result<u64> {
    let mut answered = 0;
    loop {
        let over = || answered >= task.expected.load(Ordering::Acquire);
        if !arrivals.wait(requester.sends.memory, requester.size, answered, over)? {
            return Ok(answered);
        }
        arrivals.mark(requester.sends.memory, requester.size, answered);
        requester.send(answered)?;
        answered += 1;
    }
}
