//! Bandwidth tests: many messages in flight.

use std::sync::atomic::Ordering;

use anyhow::Result;
use rdma_safe::interface::Known;

use super::handle::{Receives, Sends, poller, receives, split};
use super::operation::Operation;
use super::receiver::MessageReceiver;
use super::record::{Compat, Native, NoRecorder, Recorder};
use super::runner::Runner;
use super::sender::{Sender, Unlimited};
use super::shared::SharedReceives;
use super::stop::{Stop, stops};
use super::task::{Outcome, Task};
use super::wait::Waiter;
use super::{credits, receiver, sender};
use crate::clock::Clock;
use crate::cpu::Usage;
use crate::endpoint::worker::Worker;
use crate::stats::Latencies;
use crate::stats::perftest::MAX_PEAK_ITERATIONS;

/// Runs this end of a bandwidth test, in one or both directions.
pub(super) fn run<P: Known, C: Known, O: Operation>(
    runner: &mut Runner,
    operation: O,
    task: &Task<'_>,
    sends: bool,
) -> Result<Outcome> {
    let (plan, clock) = (task.plan, runner.clock);
    let lanes = runner.worker.lanes.len();
    let mut sender = Sender::new(operation, plan, task.size(), lanes, clock, task.shared);
    let mut outcome = Outcome::new(runner.worker.lanes.len());
    if sends {
        let (warm_up, length) = stops(plan);
        if let Some(stop) = warm_up {
            send::<P, C, O>(runner, &mut sender, stop, task, &mut NoRecorder)?;
            outcome.warm_up = sender.sent();
        }
        let usage = (!plan.compat).then(Usage::now);
        outcome.window = if plan.compat {
            match plan.messages_of_lane() {
                Some(messages) if messages <= MAX_PEAK_ITERATIONS => {
                    let mut compat = Compat::new(clock, messages * lanes as u64, plan.post_list);
                    let window = send::<P, C, O>(runner, &mut sender, length, task, &mut compat)?;
                    outcome.latencies = compat.latencies();
                    outcome.timestamps = Some(compat.timestamps);
                    window
                }
                _ => send::<P, C, O>(runner, &mut sender, length, task, &mut NoRecorder)?,
            }
        } else {
            let mut native = Native::new(clock);
            let window = send::<P, C, O>(runner, &mut sender, length, task, &mut native)?;
            outcome.usage = usage.map(|usage| (usage, Usage::now()));
            outcome.latencies = std::mem::replace(&mut native.latencies, Latencies::new());
            outcome.peak = native.peak();
            window
        };
        outcome.messages = sender.sent();
    }
    outcome.sent = (0..lanes).map(|lane| sender.sent_of_lane(lane)).collect();
    (task.sent)(&outcome.sent);
    drain::<C, O>(runner, task)?;
    outcome.validated = runner.validated();
    Ok(outcome)
}

/// Sends one run, and takes messages that arrive meanwhile. Returns the times of the first post and of the last
/// completion.
fn send<P: Known, C: Known, O: Operation>(
    runner: &mut Runner,
    sender: &mut Sender<'_, O>,
    length: impl Fn(Clock) -> Stop,
    task: &Task<'_>,
    recorder: &mut impl Recorder,
) -> Result<(u64, u64)> {
    if task.plan.has_credits() {
        return credits::send::<P, C, O>(runner, sender, length, task, recorder);
    }
    let both = task.plan.bidirectional && task.plan.takes_receives();
    let pattern = task.pattern();
    let Worker { lanes, send_cq, recv_cq, .. } = &mut runner.worker;
    let mut waiter = Waiter::new(task.plan, send_cq, runner.clock, task.shared)?;
    let lanes = lanes.iter_mut().map(split::<P>).collect::<Result<Vec<_>>>()?;
    let (mut sends, mut receives): (Vec<Sends<'_, P>>, Vec<Receives<'_>>) = lanes.into_iter().unzip();
    let (mut completions, mut arrivals) = (poller::<C>(send_cq)?, poller::<C>(recv_cq)?);
    // A timed run starts now, after the set-up above.
    let (start, stop) = (runner.clock.now(), length(runner.clock));
    sender.begin(stop);
    let mut stopping = false;
    let mut found = 0;
    while !sender.is_done() {
        if !stopping && sender.should_stop(stop, recorder)? {
            sender.stop_posting();
            stopping = true;
        }
        sender.post(&mut sends, recorder, &Unlimited)?;
        // After a full batch there may be completions that cause no event.
        if found < sender::REAP && sender.is_waiting() {
            waiter.wait_for_event(&mut completions, "completion", || false)?;
        }
        found = sender.reap(&mut completions, recorder)?;
        if both {
            found += runner.receiver.reap::<C, O>(&mut receives, &mut arrivals, task.size(), pattern.as_ref())?;
        }
        if found > 0 {
            waiter.reset();
        } else if sender.is_waiting() {
            if both {
                waiter.wait(&mut [&mut completions, &mut arrivals], "completion")?;
            } else {
                waiter.wait(&mut [&mut completions], "completion")?;
            }
        }
    }
    Ok((start, runner.clock.now()))
}

/// Takes messages until as many have arrived as the peer has sent.
fn drain<C: Known, O: Operation>(runner: &mut Runner, task: &Task<'_>) -> Result<()> {
    if task.plan.has_credits() {
        return credits::drain::<C, O>(runner, task);
    }
    if task.plan.shared_receives {
        return drain_shared::<C, O>(runner, task);
    }
    if !(task.plan.takes_receives() && task.plan.is_sent_to(runner.role)) {
        return Ok(());
    }
    let Worker { lanes, recv_cq, .. } = &mut runner.worker;
    let pattern = task.pattern();
    let mut waiter = Waiter::new(task.plan, recv_cq, runner.clock, task.shared)?;
    let mut receives: Vec<Receives<'_>> = lanes.iter_mut().map(receives).collect();
    let mut arrivals = poller::<C>(recv_cq)?;
    let over = |received| received >= task.expected.load(Ordering::Acquire);
    let mut found = 0;
    while !over(runner.receiver.received) {
        if found < receiver::REAP {
            waiter.wait_for_event(&mut arrivals, "message from the peer", || over(runner.receiver.received))?;
        }
        found = runner.receiver.reap::<C, O>(&mut receives, &mut arrivals, task.size(), pattern.as_ref())?;
        if found > 0 {
            waiter.reset();
        } else {
            waiter.wait(&mut [&mut arrivals], "message from the peer")?;
        }
    }
    Ok(())
}

/// Like [`drain`], for shared receives.
fn drain_shared<C: Known, O: Operation>(runner: &mut Runner, task: &Task<'_>) -> Result<()> {
    let Worker { lanes, recv_cq, srq, .. } = &mut runner.worker;
    // An end that receives nothing has no shared receive queue.
    let (Some(queue), Some(state), Some(lane)) = (srq, &mut runner.shared, lanes.first()) else { return Ok(()) };
    let mut receives = SharedReceives { state, queue, memory: &lane.memory };
    let pattern = task.pattern();
    let mut waiter = Waiter::new(task.plan, recv_cq, runner.clock, task.shared)?;
    let mut arrivals = poller::<C>(recv_cq)?;
    let mut received = 0;
    while received < task.expected.load(Ordering::Acquire) {
        let taken = receives.reap::<C, O>(&mut arrivals, task.size(), pattern.as_ref())?;
        received += u64::from(taken);
        if taken > 0 {
            waiter.reset();
        } else {
            waiter.wait(&mut [&mut arrivals], "message from the peer")?;
        }
    }
    Ok(())
}
