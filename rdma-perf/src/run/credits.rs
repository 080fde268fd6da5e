//! Bandwidth tests over transports that lose messages without a receive. The sender sends only as many as credits
//! allow.

use std::sync::atomic::Ordering;

use anyhow::{Result, bail};
use rdma_safe::cq::Poller;
use rdma_safe::interface::Known;
use rdma_safe::{QueuePair, Sge, WcOpcode, WorkRequest};

use super::handle::{Receives, Sends, poller, receives, split};
use super::lost::loss_error;
use super::operation::Operation;
use super::receiver::{MessageReceiver, PerLaneReceives};
use super::record::Recorder;
use super::runner::Runner;
use super::sender::{FlowControl, Sender};
use super::shared::SharedReceives;
use super::stop::Stop;
use super::task::Task;
use super::wait::Waiter;
use crate::clock::Clock;
use crate::endpoint::credits::{CreditConnection, CreditCounts, post_receive};
use crate::endpoint::worker::Worker;

impl FlowControl for Credits<'_, '_> {
    #[inline]
    fn room(&self, lane: usize, posted: u64) -> u64 {
        (self.counts.arrived[lane] + self.counts.window).saturating_sub(posted)
    }
}

/// The credit connection, without its completion queue.
struct Credits<'w, 'b> {
    qp: &'w mut QueuePair,
    counts: &'b mut CreditCounts,
}

impl Credits<'_, '_> {
    /// Takes the available completions and returns their number.
    fn poll<C: Known>(&mut self, poller: &mut Poller<'_, C>) -> Result<u32> {
        let mut taken = 0;
        while let Some(completion) = poller.poll_one(|completion| {
            completion.ok()?;
            anyhow::Ok((completion.opcode(), completion.imm()))
        })? {
            match completion? {
                (WcOpcode::RECV, Some(credit)) => {
                    self.counts.apply(credit)?;
                    post_receive(self.qp)?;
                }
                (WcOpcode::SEND, _) => self.counts.in_flight -= 1,
                other => bail!("unexpected completion on the connection for credits: {other:?}"),
            }
            taken += 1;
        }
        Ok(taken)
    }

    /// Sends the credits that are due, once the previous ones have completed.
    fn send_due(&mut self, receives: &impl MessageReceiver, idle: bool) -> Result<()> {
        if self.counts.in_flight > 0 {
            return Ok(());
        }
        for lane in 0..self.counts.announced.len() {
            let Some(credit) = self.counts.next_credit(lane, receives.received(lane), idle) else { continue };
            let nothing: &[Sge] = &[];
            let mut batch = self.qp.send_batch()?;
            // SAFETY: the message has no memory.
            unsafe { batch.send_imm(WorkRequest::new(0).signaled(), credit, nothing)? };
            batch.post()?;
            self.counts.in_flight += 1;
        }
        Ok(())
    }

    fn arrived(&self) -> u64 {
        self.counts.arrived.iter().sum()
    }
}

/// Like `bandwidth::send`, until credits report that all messages have arrived.
pub(super) fn send<P: Known, C: Known, O: Operation>(
    runner: &mut Runner,
    sender: &mut Sender<'_, O>,
    length: impl Fn(Clock) -> Stop,
    task: &Task<'_>,
    recorder: &mut impl Recorder,
) -> Result<(u64, u64)> {
    let both = task.plan.bidirectional;
    let pattern = task.pattern();
    let Worker { lanes, send_cq, recv_cq, credits, .. } = &mut runner.worker;
    let CreditConnection { qp, cq, counts, .. } = credit_connection(credits)?;
    let mut waiter = Waiter::new(task.plan, send_cq, runner.clock, task.shared)?;
    let lanes = lanes.iter_mut().map(split::<P>).collect::<Result<Vec<_>>>()?;
    let (mut sends, lanes): (Vec<Sends<'_, P>>, Vec<Receives<'_>>) = lanes.into_iter().unzip();
    let mut receives = PerLaneReceives { receiver: &mut runner.receiver, lanes };
    let (mut completions, mut arrivals) = (poller::<C>(send_cq)?, poller::<C>(recv_cq)?);
    let (mut credits, mut reports) = (Credits { qp, counts }, poller::<C>(cq)?);
    let (start, stop) = (runner.clock.now(), length(runner.clock));
    sender.begin(stop);
    let mut stopping = false;
    while !(sender.is_done() && credits.arrived() == sender.total()) {
        if !stopping && sender.should_stop(stop, recorder)? {
            sender.stop_posting();
            stopping = true;
        }
        sender.post(&mut sends, recorder, &credits)?;
        let mut found = sender.reap(&mut completions, recorder)? + credits.poll(&mut reports)?;
        if both {
            let taken = receives.reap::<C, O>(&mut arrivals, task.size(), pattern.as_ref())?;
            credits.send_due(&receives, taken == 0)?;
            found += taken;
        }
        if found > 0 {
            waiter.reset();
        } else if sender.is_waiting() || credits.arrived() < sender.total() {
            let mut pollers = [&mut completions, &mut reports, &mut arrivals];
            let used = if both { 3 } else { 2 };
            waiter
                .wait(&mut pollers[..used], "credit from the peer")
                .map_err(|error| loss_error(error, task.plan, sender.total(), credits.arrived()))?;
        }
    }
    Ok((start, runner.clock.now()))
}

/// Like `bandwidth::drain`, and sends credits.
pub(super) fn drain<C: Known, O: Operation>(runner: &mut Runner, task: &Task<'_>) -> Result<()> {
    if !task.plan.is_sent_to(runner.role) {
        return Ok(());
    }
    let Worker { lanes, recv_cq, srq, credits, .. } = &mut runner.worker;
    let CreditConnection { qp, cq, counts, .. } = credit_connection(credits)?;
    let waiter = Waiter::new(task.plan, recv_cq, runner.clock, task.shared)?;
    let (arrivals, reports) = (poller::<C>(recv_cq)?, poller::<C>(cq)?);
    let receiver = CreditReceiver { credits: Credits { qp, counts }, arrivals, reports, waiter };
    let before = runner.receiver.received;
    match (srq, &mut runner.shared, lanes.as_mut_slice()) {
        (Some(queue), Some(state), [lane, ..]) => {
            receiver.drain::<O>(SharedReceives { state, queue, memory: &lane.memory }, task, 0)
        }
        (_, _, lanes) => {
            let lanes = lanes.iter_mut().map(receives).collect();
            receiver.drain::<O>(PerLaneReceives { receiver: &mut runner.receiver, lanes }, task, before)
        }
    }
}

/// The receiving end of a test with credits.
struct CreditReceiver<'w, C: Known> {
    credits: Credits<'w, 'w>,
    arrivals: Poller<'w, C>,
    reports: Poller<'w, C>,
    waiter: Waiter<'w>,
}

impl<C: Known> CreditReceiver<'_, C> {
    /// Takes messages until as many have arrived as the peer has sent, beginning with `received` of them.
    fn drain<O: Operation>(
        mut self,
        mut receives: impl MessageReceiver,
        task: &Task<'_>,
        mut received: u64,
    ) -> Result<()> {
        let CreditReceiver { credits, arrivals, reports, waiter } = &mut self;
        let pattern = task.pattern();
        let expected = || task.expected.load(Ordering::Acquire);
        while received < expected() {
            let taken = receives.reap::<C, O>(arrivals, task.size(), pattern.as_ref())?;
            received += u64::from(taken);
            let found = taken + credits.poll(reports)?;
            credits.send_due(&receives, taken == 0)?;
            if found > 0 {
                waiter.reset();
            } else {
                waiter
                    .wait(&mut [arrivals, reports], "message from the peer")
                    .map_err(|error| loss_error(error, task.plan, expected(), received))?;
            }
        }
        Ok(())
    }
}

fn credit_connection(credits: &mut Option<CreditConnection>) -> Result<&mut CreditConnection> {
    anyhow::Context::context(credits.as_mut(), "no connection for credits; this is a bug in rdma-perf")
}
