//! The measuring itself: what one thread does for one size.

mod alarm;
mod credits;
mod handle;
mod latency;
mod lost;
mod operation;
mod pattern;
mod receiver;
mod record;
mod sender;
mod shared;
mod wait;

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use rdma_safe::{Classic, Extended, Known};

pub(crate) use self::credits::{Book, credit_window};
use self::handle::{Receives, Sends, poller, receives, split};
use self::latency::{All, Course, Histogram, Line, Memory, NoArrivals, Receipts};
use self::lost::Counted;
use self::operation::Operation;
use self::pattern::Pattern;
use self::receiver::Receiver;
use self::record::{Compat, Native, Nothing, Recorder};
use self::sender::{Open, Sender, Stop};
use self::shared::{SharedInbox, SharedReceipts};
use self::wait::Waiter;
pub(crate) use self::wait::{Interrupted, Shared};
use crate::clock::Clock;
use crate::cpu::Usage;
use crate::plan::{Atomic, Length, Metric, Plan, Role, Verb, WarmUp};
use crate::stats::Latencies;
use crate::stats::perftest::{MAX_PEAK_ITERATIONS, Moments};
use crate::transport::Transport;
use crate::worker::Worker;

/// A worker that keeps what lasts from one size to the next.
pub(crate) struct Runner {
    pub(crate) worker: Worker,
    receiver: Receiver,
    /// Instead of it, where the queue pairs share their receives.
    shared: Option<SharedInbox>,
    role: Role,
    clock: Clock,
}

/// What a thread did for one size.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Messages that were measured.
    pub(crate) messages: u64,
    pub(crate) warm_up: u64,
    /// First post and last completion, in ticks.
    pub(crate) window: (u64, u64),
    /// Processor time of the process just before and after that.
    pub(crate) usage: Option<(Usage, Usage)>,
    pub(crate) latencies: Latencies,
    /// Messages a tick in the fastest stretch.
    pub(crate) peak: Option<f64>,
    /// For perftest's formulas.
    pub(crate) moments: Option<Moments>,
    /// Messages of each queue pair, with those of the warm-up.
    pub(crate) sent: Vec<u64>,
    /// Messages whose bytes were compared as they came in.
    pub(crate) validated: u64,
}

impl Outcome {
    fn new(lanes: usize) -> Self {
        Outcome {
            messages: 0,
            warm_up: 0,
            window: (0, 0),
            usage: None,
            latencies: Latencies::new(),
            peak: None,
            moments: None,
            sent: vec![0; lanes],
            validated: 0,
        }
    }
}

/// What a thread is told for one size.
pub(crate) struct Task<'t> {
    pub(crate) plan: &'t Plan,
    /// Which of the plan's sizes.
    pub(crate) index: usize,
    pub(crate) shared: &'t Shared,
    /// Messages that the peer sends to this worker, once that is known.
    pub(crate) expected: &'t AtomicU64,
    /// Called once, when everything this worker sends has completed, with the messages of each queue pair.
    pub(crate) sent: &'t dyn Fn(&[u64]),
}

impl Task<'_> {
    fn size(&self) -> u64 {
        self.plan.sizes[self.index]
    }

    fn pattern(&self) -> Option<Pattern> {
        self.plan.validate.then(|| Pattern::of(self.plan, self.index))
    }
}

impl Runner {
    pub(crate) fn new(worker: Worker, plan: &Plan, role: Role, clock: Clock) -> Self {
        let shared = worker.srq.is_some().then(|| SharedInbox::new(plan, &worker));
        Runner { worker, receiver: Receiver::new(plan), shared, role, clock }
    }

    /// Makes everything ready for messages of the peer.
    pub(crate) fn prepare(&mut self, plan: &Plan, index: usize) -> Result<()> {
        let size = plan.sizes[index];
        if plan.validate || plan.polls_memory() {
            let pattern = Pattern::of(plan, index);
            for (number, lane) in self.worker.lanes.iter().enumerate() {
                let (source, target) = (&lane.memory.source, &lane.memory.target);
                let (source, target) =
                    (plan.sends(self.role).then_some(source), plan.is_sent_to(self.role).then_some(target));
                let (filled, cleared) = if plan.verb == Verb::Read { (target, source) } else { (source, target) };
                if let Some(part) = cleared {
                    pattern::clear(part, size);
                }
                if let Some(part) = filled.filter(|_| plan.validate && plan.verb != Verb::Atomic) {
                    pattern.fill(part, number, size);
                }
            }
        }
        if let Some(credits) = &mut self.worker.credits {
            credits.book.begin();
        }
        if let (Some(queue), Some(shared)) = (&mut self.worker.srq, &mut self.shared) {
            let lane = self.worker.lanes.first().context("no queue pair")?;
            shared.begin(queue, &lane.memory)?;
        } else if plan.takes_receives() && plan.is_sent_to(self.role) {
            self.receiver.begin(self.worker.lanes.iter_mut().map(receives), plan.messages_of_lane())?;
        }
        if plan.compat && plan.events {
            // See `Waiter::event`.
            self.worker.send_cq.arm(false)?;
            self.worker.recv_cq.arm(false)?;
        }
        Ok(())
    }

    /// Compares what one size has left in memory, given the messages of each queue pair from here and from the peer; how
    /// many places or words there are to compare.
    pub(crate) fn check(&self, plan: &Plan, index: usize, ours: &[u64], theirs: &[u64]) -> Result<u64> {
        if !plan.validate {
            return Ok(0);
        }
        let pattern = Pattern::of(plan, index);
        let mut compared = 0;
        for (number, lane) in self.worker.lanes.iter().enumerate() {
            let sent = |counts: &[u64]| counts.get(number).copied().unwrap_or(0);
            // The last byte says which message it is.
            let size = plan.sizes[index] - u64::from(plan.polls_memory());
            compared += match plan.verb {
                Verb::Write | Verb::Atomic if !plan.is_sent_to(self.role) => 0,
                Verb::Read if !plan.sends(self.role) => 0,
                Verb::Send => 0,
                Verb::Write => pattern.check_all(&lane.memory.target, number, sent(theirs), size)?,
                Verb::Read => pattern.check_all(&lane.memory.source, number, sent(ours), size)?,
                Verb::Atomic => pattern.check_counts(&lane.memory.target, sent(theirs))?,
            };
        }
        Ok(compared)
    }

    /// Sends and receives what the plan says for one size.
    pub(crate) fn run(&mut self, task: &Task<'_>) -> Result<Outcome> {
        let plan = task.plan;
        let inline = task.size() <= plan.inline.into();
        let datagrams = plan.transport == Transport::Ud;
        match (plan.verb, plan.immediate, plan.atomic) {
            (Verb::Send, true, _) if datagrams => self.run_as(operation::SendImmTo, task),
            (Verb::Send, false, _) if datagrams && inline => self.run_as(operation::SendInlineTo, task),
            (Verb::Send, false, _) if datagrams => self.run_as(operation::SendTo, task),
            (Verb::Send, true, _) => self.run_as(operation::SendImm, task),
            (Verb::Send, false, _) if inline => self.run_as(operation::SendInline, task),
            (Verb::Send, false, _) => self.run_as(operation::Send, task),
            (Verb::Write, true, _) => self.run_as(operation::WriteImm, task),
            (Verb::Write, false, _) if inline => self.run_as(operation::WriteInline, task),
            (Verb::Write, false, _) => self.run_as(operation::Write, task),
            (Verb::Read, ..) => self.run_as(operation::Read, task),
            (Verb::Atomic, _, Atomic::FetchAdd) => self.run_as(operation::FetchAdd, task),
            (Verb::Atomic, _, Atomic::CompareSwap) => self.run_as(operation::CompareSwap, task),
        }
    }

    fn run_as<O: Operation>(&mut self, operation: O, task: &Task<'_>) -> Result<Outcome> {
        // All queue pairs and both completion queues were asked for in the same way.
        let posts_extended = self.worker.lanes.first().is_some_and(|lane| lane.qp.is_extended());
        match (posts_extended, self.worker.send_cq.is_extended()) {
            (true, true) => self.run_by::<Extended, Extended, O>(operation, task),
            (true, false) => self.run_by::<Extended, Classic, O>(operation, task),
            (false, true) => self.run_by::<Classic, Extended, O>(operation, task),
            (false, false) => self.run_by::<Classic, Classic, O>(operation, task),
        }
    }

    /// Posts by `P` and polls by `C`.
    fn run_by<P: Known, C: Known, O: Operation>(&mut self, operation: O, task: &Task<'_>) -> Result<Outcome> {
        match (task.plan.metric, self.role) {
            (Metric::Bw, role) => self.bandwidth::<P, C, O>(operation, task, task.plan.sends(role)),
            (Metric::Lat, Role::Client) => self.latency::<P, C, O>(operation, task),
            (Metric::Lat, Role::Server) => self.answer::<P, C, O>(operation, task),
        }
    }

    /// Both directions of a bandwidth test, as far as this end takes part in them.
    fn bandwidth<P: Known, C: Known, O: Operation>(
        &mut self,
        operation: O,
        task: &Task<'_>,
        sends: bool,
    ) -> Result<Outcome> {
        let (plan, clock) = (task.plan, self.clock);
        let lanes = self.worker.lanes.len();
        let mut sender = Sender::new(operation, plan, task.size(), lanes, clock, task.shared);
        let mut outcome = Outcome::new(self.worker.lanes.len());
        if sends {
            let (warm_up, length) = stops(plan);
            if let Some(stop) = warm_up {
                self.send::<P, C, O>(&mut sender, stop, task, &mut Nothing)?;
                outcome.warm_up = sender.sent();
            }
            let usage = (!plan.compat).then(Usage::now);
            outcome.window = if plan.compat {
                match plan.messages_of_lane() {
                    Some(messages) if messages <= MAX_PEAK_ITERATIONS => {
                        let mut compat = Compat::new(clock, messages * lanes as u64, plan.post_list);
                        let window = self.send::<P, C, O>(&mut sender, length, task, &mut compat)?;
                        outcome.latencies = compat.latencies();
                        outcome.moments = Some(compat.moments);
                        window
                    }
                    _ => self.send::<P, C, O>(&mut sender, length, task, &mut Nothing)?,
                }
            } else {
                let mut native = Native::new(clock);
                let window = self.send::<P, C, O>(&mut sender, length, task, &mut native)?;
                outcome.usage = usage.map(|usage| (usage, Usage::now()));
                outcome.latencies = std::mem::replace(&mut native.latencies, Latencies::new());
                outcome.peak = native.peak();
                window
            };
            outcome.messages = sender.sent();
        }
        outcome.sent = (0..lanes).map(|lane| sender.sent_of_lane(lane)).collect();
        (task.sent)(&outcome.sent);
        self.drain::<C, O>(task)?;
        outcome.validated = self.validated();
        Ok(outcome)
    }

    /// One run of a sender, with the messages that come in meanwhile; from the first post to the last completion.
    fn send<P: Known, C: Known, O: Operation>(
        &mut self,
        sender: &mut Sender<'_, O>,
        length: impl Fn(Clock) -> Stop,
        task: &Task<'_>,
        recorder: &mut impl Recorder,
    ) -> Result<(u64, u64)> {
        if task.plan.has_credits() {
            return self.send_by_credits::<P, C, O>(sender, length, task, recorder);
        }
        let both = task.plan.bidirectional && task.plan.takes_receives();
        let pattern = task.pattern();
        let Worker { lanes, send_cq, recv_cq, .. } = &mut self.worker;
        let mut waiter = Waiter::new(task.plan, send_cq, self.clock, task.shared)?;
        let lanes = lanes.iter_mut().map(split::<P>).collect::<Result<Vec<_>>>()?;
        let (mut sends, mut receives): (Vec<Sends<'_, P>>, Vec<Receives<'_>>) = lanes.into_iter().unzip();
        let (mut completions, mut arrivals) = (poller::<C>(send_cq)?, poller::<C>(recv_cq)?);
        // A time begins here, and not with what has come before.
        let (start, stop) = (self.clock.now(), length(self.clock));
        sender.begin(stop);
        let mut winding_up = false;
        let mut found = 0;
        while !sender.is_done() {
            if !winding_up && sender.is_time(stop, recorder)? {
                sender.wind_up();
                winding_up = true;
            }
            sender.post(&mut sends, recorder, &Open)?;
            // What more there was causes no event.
            if found < sender::REAP && sender.is_waiting() {
                waiter.event(&mut completions, "completion", || false)?;
            }
            found = sender.reap(&mut completions, recorder)?;
            if both {
                found += self.receiver.reap::<C, O>(&mut receives, &mut arrivals, task.size(), pattern.as_ref())?;
            }
            if found > 0 {
                waiter.found();
            } else if sender.is_waiting() {
                if both {
                    waiter.nothing(&mut [&mut completions, &mut arrivals], "completion")?;
                } else {
                    waiter.nothing(&mut [&mut completions], "completion")?;
                }
            }
        }
        Ok((start, self.clock.now()))
    }

    /// Takes what the peer still sends, until there was as much as it says.
    fn drain<C: Known, O: Operation>(&mut self, task: &Task<'_>) -> Result<()> {
        if task.plan.has_credits() {
            return self.drain_with_credits::<C, O>(task);
        }
        if task.plan.shared_receives {
            return self.drain_shared::<C, O>(task);
        }
        if !(task.plan.takes_receives() && task.plan.is_sent_to(self.role)) {
            return Ok(());
        }
        let Worker { lanes, recv_cq, .. } = &mut self.worker;
        let pattern = task.pattern();
        let mut waiter = Waiter::new(task.plan, recv_cq, self.clock, task.shared)?;
        let mut receives: Vec<Receives<'_>> = lanes.iter_mut().map(receives).collect();
        let mut arrivals = poller::<C>(recv_cq)?;
        let over = |received| received >= task.expected.load(Ordering::Acquire);
        let mut found = 0;
        while !over(self.receiver.received) {
            if found < receiver::REAP {
                waiter.event(&mut arrivals, "message of the peer", || over(self.receiver.received))?;
            }
            found = self.receiver.reap::<C, O>(&mut receives, &mut arrivals, task.size(), pattern.as_ref())?;
            if found > 0 {
                waiter.found();
            } else {
                waiter.nothing(&mut [&mut arrivals], "message of the peer")?;
            }
        }
        Ok(())
    }

    fn latency<P: Known, C: Known, O: Operation>(&mut self, operation: O, task: &Task<'_>) -> Result<Outcome> {
        let (plan, clock) = (task.plan, self.clock);
        let divisor = if plan.is_two_sided() { 2.0 } else { 1.0 };
        let mut outcome = Outcome::new(self.worker.lanes.len());
        let (warm_up, length) = stops(plan);
        if let Some(stop) = warm_up {
            outcome.warm_up = self.course::<P, C, O>(operation, task, stop(clock), 0, &mut ())?;
        }
        let usage = (!plan.compat).then(Usage::now);
        let start = clock.now();
        let stop = length(clock);
        if let (true, Stop::Messages(messages)) = (plan.compat, stop) {
            let mut moments = touched(messages);
            settle();
            outcome.messages = self.course::<P, C, O>(operation, task, stop, 0, &mut All(moments.iter_mut()))?;
            outcome.latencies = Latencies::of_moments(&moments, clock, divisor);
            outcome.moments = Some(Moments { posted: moments, completed: Vec::new() });
        } else {
            let mut histogram = Histogram::new(clock, divisor);
            outcome.messages = self.course::<P, C, O>(operation, task, stop, outcome.warm_up, &mut histogram)?;
            latency::Moments::moment(&mut histogram, clock.now());
            outcome.latencies = histogram.latencies;
        }
        outcome.window = (start, clock.now());
        outcome.usage = usage.map(|usage| (usage, Usage::now()));
        outcome.sent = vec![outcome.warm_up + outcome.messages];
        (task.sent)(&outcome.sent);
        outcome.validated = self.validated();
        Ok(outcome)
    }

    /// One run of the end that begins, after `before` messages of this size.
    fn course<P: Known, C: Known, O: Operation>(
        &mut self,
        operation: O,
        task: &Task<'_>,
        stop: Stop,
        before: u64,
        moments: &mut impl latency::Moments,
    ) -> Result<u64> {
        let course = Course::new(stop, task.shared, self.clock, before);
        let pattern = task.pattern();
        let (plan, counts) = (task.plan, !task.plan.transport.is_reliable());
        if task.plan.shared_receives {
            let (line, receipts) = self.shared_line::<P, C, O>(operation, task, pattern.as_ref())?;
            return if counts {
                latency::ping(line, Counted { plan, arrivals: receipts, begins: true }, &course, moments)
            } else {
                latency::ping(line, receipts, &course, moments)
            };
        }
        let (line, receipts, memory) = self.line::<P, C, O>(operation, task, pattern.as_ref())?;
        if plan.takes_receives() && counts {
            latency::ping(line, Counted { plan, arrivals: receipts, begins: true }, &course, moments)
        } else if plan.takes_receives() {
            latency::ping(line, receipts, &course, moments)
        } else if plan.is_two_sided() && counts {
            latency::ping(line, Counted { plan, arrivals: memory, begins: true }, &course, moments)
        } else if plan.is_two_sided() {
            latency::ping(line, memory, &course, moments)
        } else {
            latency::ping(line, NoArrivals, &course, moments)
        }
    }

    /// The other end of a latency test.
    fn answer<P: Known, C: Known, O: Operation>(&mut self, operation: O, task: &Task<'_>) -> Result<Outcome> {
        let mut outcome = Outcome::new(self.worker.lanes.len());
        let pattern = task.pattern();
        let (plan, counts) = (task.plan, !task.plan.transport.is_reliable());
        if task.plan.shared_receives {
            let (line, receipts) = self.shared_line::<P, C, O>(operation, task, pattern.as_ref())?;
            outcome.messages = if counts {
                latency::pong(line, Counted { plan, arrivals: receipts, begins: false }, task)?
            } else {
                latency::pong(line, receipts, task)?
            };
        } else {
            let (line, receipts, memory) = self.line::<P, C, O>(operation, task, pattern.as_ref())?;
            outcome.messages = match (plan.takes_receives(), plan.is_two_sided(), counts) {
                (true, _, false) => latency::pong(line, receipts, task)?,
                (true, _, true) => latency::pong(line, Counted { plan, arrivals: receipts, begins: false }, task)?,
                (false, true, false) => latency::pong(line, memory, task)?,
                (false, true, true) => latency::pong(line, Counted { plan, arrivals: memory, begins: false }, task)?,
                (false, false, _) => 0,
            };
        }
        outcome.sent = vec![outcome.messages];
        (task.sent)(&outcome.sent);
        outcome.validated = self.validated();
        Ok(outcome)
    }

    /// Messages of the size that is running whose bytes were compared as they came.
    fn validated(&self) -> u64 {
        self.shared.as_ref().map_or_else(|| self.receiver.validated(), |shared| shared.validated)
    }

    /// As [`Runner::line`], where receives are shared.
    #[allow(clippy::type_complexity)]
    fn shared_line<'a, P: Known, C: Known, O: Operation>(
        &'a mut self,
        operation: O,
        task: &'a Task<'_>,
        pattern: Option<&'a Pattern>,
    ) -> Result<(Line<'a, P, C, O>, SharedReceipts<'a, C, O>)> {
        let (plan, size, clock) = (task.plan, task.size(), self.clock);
        let Worker { lanes, send_cq, recv_cq, srq, .. } = &mut self.worker;
        let waiter = |cq| Waiter::new(plan, cq, clock, task.shared);
        let (to_complete, to_arrive) = (waiter(send_cq)?, waiter(recv_cq)?);
        let queue = srq.as_mut().context("no shared receive queue")?;
        let (lane, inbox) = lanes.first_mut().zip(self.shared.as_mut()).context("no queue pair")?;
        let line = Line { operation, sends: split(lane)?.0, poller: poller(send_cq)?, waiter: to_complete, size };
        let poller = poller(recv_cq)?;
        Ok((line, SharedReceipts { inbox, queue, poller, waiter: to_arrive, pattern, operation: PhantomData }))
    }

    /// What a latency test posts to, and the two ways to see what the peer sends.
    #[allow(clippy::type_complexity)]
    fn line<'a, P: Known, C: Known, O: Operation>(
        &'a mut self,
        operation: O,
        task: &'a Task<'_>,
        pattern: Option<&'a Pattern>,
    ) -> Result<(Line<'a, P, C, O>, Receipts<'a, C, O>, Memory<'a>)> {
        let (plan, size, clock) = (task.plan, task.size(), self.clock);
        let Worker { lanes, send_cq, recv_cq, .. } = &mut self.worker;
        let waiter = |cq| Waiter::new(plan, cq, clock, task.shared);
        let (to_complete, to_arrive, to_see) = (waiter(send_cq)?, waiter(recv_cq)?, waiter(send_cq)?);
        let Receiver { lanes: inboxes, rules, .. } = &mut self.receiver;
        let (lane, inbox) = lanes.first_mut().zip(inboxes.first_mut()).context("no queue pair")?;
        let (sends, receives) = split(lane)?;
        let line = Line { operation, sends, poller: poller(send_cq)?, waiter: to_complete, size };
        let (rules, poller) = (*rules, poller(recv_cq)?);
        let receipts = Receipts { inbox, rules, receives, poller, waiter: to_arrive, pattern, operation: PhantomData };
        Ok((line, receipts, Memory { waiter: to_see }))
    }
}

/// Lets what the set-up has left to be done, in the kernel of either end, be done, since work that was put off until the next
/// tick of a timer can hold a message up by as much as five take.
///
/// As perftest does, if for another reason: it measures the processor's clock here, and then reads of it. What that leaves to be
/// done comes at the first ticks and is its `t_max`.
fn settle() {
    const MEASURING: std::time::Duration = std::time::Duration::from_millis(220);
    std::thread::sleep(MEASURING);
    // Where there is no such file nothing is to be done.
    let _ = std::fs::read("/proc/cpuinfo");
}

/// Memory for so many moments that no page fault holds a message up.
fn touched(count: u64) -> Vec<u64> {
    // Not zeroes, which come without pages.
    vec![1; count as usize]
}

/// Until when to warm up, if at all, and until when to measure; times are from the moment that they are called at.
fn stops(plan: &Plan) -> (Option<impl Fn(Clock) -> Stop>, impl Fn(Clock) -> Stop) {
    let at = |clock: Clock, time| Stop::At(clock.now() + clock.ticks(time));
    let (warm_up, length) = (plan.warm_up, plan.length);
    let has_warm_up = !matches!(warm_up, WarmUp::Iterations(0) | WarmUp::Time(std::time::Duration::ZERO));
    let warm_up = has_warm_up.then_some(move |clock| match warm_up {
        WarmUp::Iterations(messages) => Stop::Messages(messages),
        WarmUp::Time(time) => at(clock, time),
    });
    let length = move |clock| match length {
        Length::Iterations(messages) => Stop::Messages(messages),
        Length::Time(time) => at(clock, time),
    };
    (warm_up, length)
}
