//! One message in flight.

use std::sync::atomic::Ordering;

use anyhow::Result;
use rdma_safe::WorkRequest;

use super::Task;
use super::operation::{Message, Operation};
use super::pattern::Pattern;
use super::receiver::Receiver;
use super::sender::Stop;
use super::wait::{Interrupted, Shared, Waiter};
use crate::clock::Clock;
use crate::plan::Plan;
use crate::stats::Latencies;
use crate::worker::{Lane, Worker};

/// Takes the moments at which messages are posted.
pub(super) trait Moments {
    /// There is no other thread, as in perftest, that could want the run to end or look how far it is.
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

/// All of them, as perftest keeps them.
impl Moments for Vec<u64> {
    const ALONE: bool = true;

    #[inline]
    fn moment(&mut self, now: u64) {
        self.push(now);
    }
}

/// Notes nothing.
impl Moments for () {
    #[inline]
    fn moment(&mut self, _now: u64) {}
}

/// How many messages, or until when.
pub(super) struct Course<'s> {
    pub(super) stop: Stop,
    pub(super) shared: &'s Shared,
    pub(super) clock: Clock,
    /// Messages of this size before this run.
    pub(super) before: u64,
}

impl Course<'_> {
    /// Whether message `index` of this run is to be sent, at the time `now`.
    #[inline]
    fn goes_on<M: Moments>(&self, index: u64, now: u64) -> Result<bool> {
        if let (Stop::Messages(messages), true) = (self.stop, M::ALONE) {
            return Ok(index < messages);
        }
        if self.shared.abort.load(Ordering::Relaxed) {
            return Err(Interrupted.into());
        }
        Ok(match self.stop {
            Stop::Messages(messages) => index < messages,
            Stop::At(end) => now < end,
        } && !self.shared.stop.load(Ordering::Relaxed))
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
    fn mark(&mut self, lane: &Lane, size: u64, message: u64);

    /// Comes before the first look for a message; `false` when `over` says that there will be none.
    fn await_event(&mut self, _worker: &mut Worker, _over: impl Fn() -> bool) -> Result<bool> {
        Ok(true)
    }

    /// Whether the peer's message number `message` has arrived.
    fn look(&mut self, worker: &mut Worker, size: u64, message: u64) -> Result<bool>;

    /// Waits a little after a look that found nothing.
    fn idle(&mut self, worker: &mut Worker) -> Result<()>;

    /// A look found something.
    fn found(&mut self);
}

/// What is waited for.
const ARRIVAL: &str = "message of the peer";

/// By the completions of receives.
pub(super) struct Receives<'a> {
    pub(super) receiver: &'a mut Receiver,
    pub(super) waiter: Waiter<'a>,
    pub(super) pattern: Option<&'a Pattern>,
}

impl Arrivals for Receives<'_> {
    #[inline]
    fn mark(&mut self, _lane: &Lane, _size: u64, _message: u64) {}

    #[inline]
    fn await_event(&mut self, worker: &mut Worker, over: impl Fn() -> bool) -> Result<bool> {
        if self.waiter.is_as_perftest() { self.waiter.event(&mut worker.recv_cq, ARRIVAL, over) } else { Ok(true) }
    }

    #[inline]
    fn look(&mut self, worker: &mut Worker, size: u64, _message: u64) -> Result<bool> {
        Ok(self.receiver.reap(&mut worker.lanes, &mut worker.recv_cq, size, self.pattern)? > 0)
    }

    #[inline]
    fn idle(&mut self, worker: &mut Worker) -> Result<()> {
        self.waiter.nothing(&mut [&mut worker.recv_cq], ARRIVAL)
    }

    #[inline]
    fn found(&mut self) {
        self.waiter.found();
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
    fn mark(&mut self, lane: &Lane, size: u64, message: u64) {
        // SAFETY: within the source; the message before it has completed.
        unsafe { lane.memory.source.byte(size - 1).write_volatile(Self::last_byte(message)) }
    }

    #[inline]
    fn look(&mut self, worker: &mut Worker, size: u64, message: u64) -> Result<bool> {
        // SAFETY: within the target, which the peer's device writes whole bytes of.
        let byte = unsafe { worker.lanes[0].memory.target.byte(size - 1).read_volatile() };
        Ok(byte == Self::last_byte(message))
    }

    #[inline]
    fn idle(&mut self, _worker: &mut Worker) -> Result<()> {
        self.waiter.nothing(&mut [], "write of the peer")
    }

    #[inline]
    fn found(&mut self) {
        self.waiter.found();
    }
}

/// Posts a message and waits for its completion, again and again; how many.
pub(super) fn requests<O: Operation, M: Moments>(
    operation: O,
    worker: &mut Worker,
    plan: &Plan,
    size: u64,
    course: &Course<'_>,
    moments: &mut M,
) -> Result<u64> {
    let mut waiter = Waiter::new(plan, &worker.send_cq, course.clock, course.shared)?;
    let mut sent = 0;
    loop {
        let now = course.clock.now();
        if !course.goes_on::<M>(sent, now)? {
            return Ok(sent);
        }
        moments.moment(now);
        post(operation, worker, size, course.before + sent)?;
        completion(worker, &mut waiter)?;
        sent += 1;
        course.went::<M>();
    }
}

/// The end that begins: posts a message, and the next one when the peer's has arrived, again and again; how many.
pub(super) fn ping<O: Operation, M: Moments>(
    operation: O,
    worker: &mut Worker,
    arrivals: &mut impl Arrivals,
    plan: &Plan,
    size: u64,
    course: &Course<'_>,
    moments: &mut M,
) -> Result<u64> {
    let mut waiter = Waiter::new(plan, &worker.send_cq, course.clock, course.shared)?;
    let mut sent = 0;
    loop {
        let now = course.clock.now();
        if !course.goes_on::<M>(sent, now)? {
            return Ok(sent);
        }
        let message = course.before + sent;
        arrivals.mark(&worker.lanes[0], size, message);
        moments.moment(now);
        post(operation, worker, size, message)?;
        completion(worker, &mut waiter)?;
        sent += 1;
        arrivals.await_event(worker, || false)?;
        while !arrivals.look(worker, size, message)? {
            arrivals.idle(worker)?;
        }
        arrivals.found();
        course.went::<M>();
    }
}

/// The end that answers each message with one of its own, until there were as many as the task says; how many.
pub(super) fn pong<O: Operation>(
    operation: O,
    worker: &mut Worker,
    arrivals: &mut impl Arrivals,
    clock: Clock,
    task: &Task<'_>,
) -> Result<u64> {
    let size = task.size();
    let mut waiter = Waiter::new(task.plan, &worker.send_cq, clock, task.shared)?;
    let mut answered = 0;
    let over = |answered| answered >= task.expected.load(Ordering::Acquire);
    loop {
        if !arrivals.await_event(worker, || over(answered))? {
            return Ok(answered);
        }
        while !arrivals.look(worker, size, answered)? {
            if over(answered) {
                return Ok(answered);
            }
            arrivals.idle(worker)?;
        }
        arrivals.found();
        arrivals.mark(&worker.lanes[0], size, answered);
        post(operation, worker, size, answered)?;
        completion(worker, &mut waiter)?;
        answered += 1;
    }
}

#[inline]
fn post<O: Operation>(operation: O, worker: &mut Worker, size: u64, message: u64) -> Result<()> {
    let Lane { qp, memory, .. } = &mut worker.lanes[0];
    let mut batch = qp.send_batch()?;
    let message = Message { memory, offset: 0, size, round: message };
    // SAFETY: the memory is the worker's, registered, and stays longer than the queue pair. It is reached by raw pointers
    // only, and not written by this process before the message has completed. What the peer's memory is overwritten with harms nobody: a
    // target is plain bytes, which nobody refers to.
    unsafe { operation.add(&mut batch, WorkRequest::new(0).signaled(), message)? }
    Ok(batch.post()?)
}

/// Waits for the completion of the message just posted.
#[inline]
fn completion(worker: &mut Worker, waiter: &mut Waiter<'_>) -> Result<()> {
    const WHAT: &str = "completion of a message";
    if waiter.is_as_perftest() {
        waiter.event(&mut worker.send_cq, WHAT, || false)?;
    }
    loop {
        if let Some(completion) = worker.send_cq.poll().next()? {
            completion.ok()?;
            waiter.found();
            return Ok(());
        }
        waiter.nothing(&mut [&mut worker.send_cq], WHAT)?;
    }
}
