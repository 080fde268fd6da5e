//! Latency tests: one message in flight.

use std::marker::PhantomData;

use anyhow::{Context, Result};
use rdma_safe::interface::Known;

use super::handle::{poller, split};
use super::lost::CountLosses;
use super::operation::Operation;
use super::pattern::Pattern;
use super::pingpong::{
    self, AllPostTimes, Histogram, MemoryArrivals, NoArrivals, ReceiveArrivals, Requester, RunLimits,
};
use super::receiver::Receiver;
use super::record::touched;
use super::runner::Runner;
use super::shared::SharedArrivals;
use super::stop::{Stop, stops};
use super::task::{Outcome, Task};
use super::wait::Waiter;
use crate::cpu::Usage;
use crate::endpoint::worker::Worker;
use crate::stats::Latencies;
use crate::stats::perftest::Timestamps;

pub(super) fn run<P: Known, C: Known, O: Operation>(
    runner: &mut Runner,
    operation: O,
    task: &Task<'_>,
) -> Result<Outcome> {
    let (plan, clock) = (task.plan, runner.clock);
    let divisor = if plan.is_two_sided() { 2.0 } else { 1.0 };
    let mut outcome = Outcome::new(runner.worker.lanes.len());
    let (warm_up, length) = stops(plan);
    if let Some(stop) = warm_up {
        outcome.warm_up = run_client::<P, C, O>(runner, operation, task, stop(clock), 0, &mut ())?;
    }
    let usage = (!plan.compat).then(Usage::now);
    let start = clock.now();
    let stop = length(clock);
    if let (true, Stop::Messages(messages)) = (plan.compat, stop) {
        let mut timestamps = touched(messages);
        settle();
        outcome.messages =
            run_client::<P, C, O>(runner, operation, task, stop, 0, &mut AllPostTimes(timestamps.iter_mut()))?;
        outcome.latencies = Latencies::of_timestamps(&timestamps, clock, divisor);
        outcome.timestamps = Some(Timestamps { posted: timestamps, completed: Vec::new() });
    } else {
        let mut histogram = Histogram::new(clock, divisor);
        outcome.messages = run_client::<P, C, O>(runner, operation, task, stop, outcome.warm_up, &mut histogram)?;
        pingpong::PostTimes::record(&mut histogram, clock.now());
        outcome.latencies = histogram.latencies;
    }
    outcome.window = (start, clock.now());
    outcome.usage = usage.map(|usage| (usage, Usage::now()));
    outcome.sent = vec![outcome.warm_up + outcome.messages];
    (task.sent)(&outcome.sent);
    outcome.validated = runner.validated();
    Ok(outcome)
}

/// Runs the end that sends first, after `before` messages of this size.
fn run_client<P: Known, C: Known, O: Operation>(
    runner: &mut Runner,
    operation: O,
    task: &Task<'_>,
    stop: Stop,
    before: u64,
    timestamps: &mut impl pingpong::PostTimes,
) -> Result<u64> {
    let limits = RunLimits::new(stop, task.shared, runner.clock, before);
    let pattern = task.pattern();
    let (plan, is_lossy) = (task.plan, !task.plan.transport.is_reliable());
    if task.plan.shared_receives {
        let (requester, arrivals) = shared_parts::<P, C, O>(runner, operation, task, pattern.as_ref())?;
        return if is_lossy {
            pingpong::ping(requester, CountLosses { plan, arrivals, sends_first: true }, &limits, timestamps)
        } else {
            pingpong::ping(requester, arrivals, &limits, timestamps)
        };
    }
    let (requester, arrivals, memory) = parts::<P, C, O>(runner, operation, task, pattern.as_ref())?;
    if plan.takes_receives() && is_lossy {
        pingpong::ping(requester, CountLosses { plan, arrivals, sends_first: true }, &limits, timestamps)
    } else if plan.takes_receives() {
        pingpong::ping(requester, arrivals, &limits, timestamps)
    } else if plan.is_two_sided() && is_lossy {
        pingpong::ping(requester, CountLosses { plan, arrivals: memory, sends_first: true }, &limits, timestamps)
    } else if plan.is_two_sided() {
        pingpong::ping(requester, memory, &limits, timestamps)
    } else {
        pingpong::ping(requester, NoArrivals, &limits, timestamps)
    }
}

/// Runs the end that answers.
pub(super) fn run_server<P: Known, C: Known, O: Operation>(
    runner: &mut Runner,
    operation: O,
    task: &Task<'_>,
) -> Result<Outcome> {
    let mut outcome = Outcome::new(runner.worker.lanes.len());
    let pattern = task.pattern();
    let (plan, is_lossy) = (task.plan, !task.plan.transport.is_reliable());
    if task.plan.shared_receives {
        let (requester, arrivals) = shared_parts::<P, C, O>(runner, operation, task, pattern.as_ref())?;
        outcome.messages = if is_lossy {
            pingpong::pong(requester, CountLosses { plan, arrivals, sends_first: false }, task)?
        } else {
            pingpong::pong(requester, arrivals, task)?
        };
    } else {
        let (requester, arrivals, memory) = parts::<P, C, O>(runner, operation, task, pattern.as_ref())?;
        outcome.messages = match (plan.takes_receives(), plan.is_two_sided(), is_lossy) {
            (true, _, false) => pingpong::pong(requester, arrivals, task)?,
            (true, _, true) => pingpong::pong(requester, CountLosses { plan, arrivals, sends_first: false }, task)?,
            (false, true, false) => pingpong::pong(requester, memory, task)?,
            (false, true, true) => {
                pingpong::pong(requester, CountLosses { plan, arrivals: memory, sends_first: false }, task)?
            }
            (false, false, _) => 0,
        };
    }
    outcome.sent = vec![outcome.messages];
    (task.sent)(&outcome.sent);
    outcome.validated = runner.validated();
    Ok(outcome)
}

/// Like [`parts`], for shared receives.
#[allow(clippy::type_complexity)]
fn shared_parts<'a, P: Known, C: Known, O: Operation>(
    runner: &'a mut Runner,
    operation: O,
    task: &'a Task<'_>,
    pattern: Option<&'a Pattern>,
) -> Result<(Requester<'a, P, C, O>, SharedArrivals<'a, C, O>)> {
    let (plan, size, clock) = (task.plan, task.size(), runner.clock);
    let Worker { lanes, send_cq, recv_cq, srq, .. } = &mut runner.worker;
    let waiter = |cq| Waiter::new(plan, cq, clock, task.shared);
    let (to_complete, to_arrive) = (waiter(send_cq)?, waiter(recv_cq)?);
    let queue = srq.as_mut().context("no shared receive queue")?;
    let (lane, state) = lanes.first_mut().zip(runner.shared.as_mut()).context("no queue pair")?;
    let requester = Requester { operation, sends: split(lane)?.0, poller: poller(send_cq)?, waiter: to_complete, size };
    let poller = poller(recv_cq)?;
    Ok((requester, SharedArrivals { state, queue, poller, waiter: to_arrive, pattern, operation: PhantomData }))
}

/// The parts of a latency test: what it sends with, and the two ways to detect messages of the peer.
#[allow(clippy::type_complexity)]
fn parts<'a, P: Known, C: Known, O: Operation>(
    runner: &'a mut Runner,
    operation: O,
    task: &'a Task<'_>,
    pattern: Option<&'a Pattern>,
) -> Result<(Requester<'a, P, C, O>, ReceiveArrivals<'a, C, O>, MemoryArrivals<'a>)> {
    let (plan, size, clock) = (task.plan, task.size(), runner.clock);
    let Worker { lanes, send_cq, recv_cq, .. } = &mut runner.worker;
    let waiter = |cq| Waiter::new(plan, cq, clock, task.shared);
    let (to_complete, to_arrive, to_see) = (waiter(send_cq)?, waiter(recv_cq)?, waiter(send_cq)?);
    let Receiver { lanes: states, rules, .. } = &mut runner.receiver;
    let (lane, state) = lanes.first_mut().zip(states.first_mut()).context("no queue pair")?;
    let (sends, receives) = split(lane)?;
    let requester = Requester { operation, sends, poller: poller(send_cq)?, waiter: to_complete, size };
    let (rules, poller) = (*rules, poller(recv_cq)?);
    let arrivals =
        ReceiveArrivals { state, rules, receives, poller, waiter: to_arrive, pattern, operation: PhantomData };
    Ok((requester, arrivals, MemoryArrivals { waiter: to_see }))
}

/// Lets deferred kernel work of the set-up finish at both ends. Such work runs at the next timer tick, and can delay a
/// message by five times its latency.
///
/// perftest sleeps here to measure the processor's clock rate, and then reads the file below. The work deferred by that
/// shows up in its `t_max`.
fn settle() {
    const MEASURING: std::time::Duration = std::time::Duration::from_millis(220);
    std::thread::sleep(MEASURING);
    // A missing file is no error: only the time matters.
    let _ = std::fs::read("/proc/cpuinfo");
}
