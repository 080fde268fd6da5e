//! Bandwidth of messages that are lost when they find no receive: none is sent before the peer has said that it has room.

use std::sync::atomic::Ordering;

use anyhow::{Result, bail};
use rdma_safe::{Known, Poller, QueuePair, Sge, WcOpcode, WorkRequest};

use super::handle::{Receives, Sends, poller, receives, split};
use super::lost::lost;
use super::operation::Operation;
use super::receiver::{Intake, OwnReceives, Rules};
use super::record::Recorder;
use super::sender::{Gate, Sender, Stop};
use super::shared::SharedReceives;
use super::wait::Waiter;
use super::{Runner, Task};
use crate::clock::Clock;
use crate::credit::{CreditLine, post_receive};
use crate::plan::Plan;
use crate::worker::Worker;

/// Messages of a queue pair that may be on their way: as many as receives are always posted, of those that it has or of its part of
/// those that it shares.
pub(crate) fn credit_window(plan: &Plan) -> u64 {
    let sharers = if plan.shared_receives { plan.qps.max(1) } else { 1 };
    Rules::of(plan).always_posted() / u64::from(sharers)
}

/// What both ends have told each other of the size that is running.
pub(crate) struct Book {
    window: u64,
    /// Messages of each queue pair that the peer has received.
    arrived: Vec<u64>,
    /// Messages of each queue pair from the peer that it was told of.
    told: Vec<u64>,
    /// Credits of ours on their way.
    in_flight: u64,
}

impl Book {
    pub(crate) fn new(lanes: usize, window: u64) -> Self {
        Book { window, arrived: vec![0; lanes], told: vec![0; lanes], in_flight: 0 }
    }

    /// A size begins. Of the one before nothing is on its way: its sender has waited for all credits.
    pub(super) fn begin(&mut self) {
        self.arrived.fill(0);
        self.told.fill(0);
    }

    /// What is to be said of `lane`, of which `received` messages have come: the immediate data of a credit.
    fn credit(&mut self, lane: usize, received: u64, idle: bool) -> Option<u32> {
        let more = received - self.told[lane];
        // Rarely, while messages come in: each credit takes its part of the link.
        if more == 0 || (!idle && more < self.window / 4) {
            return None;
        }
        self.told[lane] = received;
        // A window has 15 bits, and a worker's queue pairs have numbers of 14.
        Some((lane as u32) << 16 | more as u32)
    }

    /// Takes what the peer says.
    fn note(&mut self, credit: u32) -> Result<()> {
        match self.arrived.get_mut((credit >> 16) as usize) {
            Some(arrived) => *arrived += u64::from(credit & 0xffff),
            None => bail!("the peer tells of messages of a queue pair that is not there: {credit:#x}"),
        }
        Ok(())
    }
}

impl Gate for Credits<'_, '_> {
    #[inline]
    fn room(&self, lane: usize, posted: u64) -> u64 {
        (self.book.arrived[lane] + self.book.window).saturating_sub(posted)
    }
}

/// The credits of a worker, without their completions.
struct Credits<'w, 'b> {
    qp: &'w mut QueuePair,
    book: &'b mut Book,
}

impl Credits<'_, '_> {
    /// Takes the completions there are; how many.
    fn take<C: Known>(&mut self, poller: &mut Poller<'_, C>) -> Result<u32> {
        let mut taken = 0;
        while let Some(completion) = poller.take(|completion| {
            completion.ok()?;
            anyhow::Ok((completion.opcode(), completion.imm()))
        })? {
            match completion? {
                (WcOpcode::RECV, Some(credit)) => {
                    self.book.note(credit)?;
                    post_receive(self.qp)?;
                }
                (WcOpcode::SEND, _) => self.book.in_flight -= 1,
                other => bail!("the peer sends something that is no credit: {other:?}"),
            }
            taken += 1;
        }
        Ok(taken)
    }

    /// Tells the peer what has arrived since it was told, when it has taken what was said before.
    fn give(&mut self, intake: &impl Intake, idle: bool) -> Result<()> {
        if self.book.in_flight > 0 {
            return Ok(());
        }
        for lane in 0..self.book.told.len() {
            let Some(credit) = self.book.credit(lane, intake.received(lane), idle) else { continue };
            let nothing: &[Sge] = &[];
            let mut batch = self.qp.send_batch()?;
            // SAFETY: there is no memory in it.
            unsafe { batch.send_imm(WorkRequest::new(0).signaled(), credit, nothing)? };
            batch.post()?;
            self.book.in_flight += 1;
        }
        Ok(())
    }

    fn arrived(&self) -> u64 {
        self.book.arrived.iter().sum()
    }
}

impl Runner {
    /// As [`Runner::send`], until the peer has said that all messages have arrived.
    pub(super) fn send_by_credits<P: Known, C: Known, O: Operation>(
        &mut self,
        sender: &mut Sender<'_, O>,
        length: impl Fn(Clock) -> Stop,
        task: &Task<'_>,
        recorder: &mut impl Recorder,
    ) -> Result<(u64, u64)> {
        let both = task.plan.bidirectional;
        let pattern = task.pattern();
        let Worker { lanes, send_cq, recv_cq, credits, .. } = &mut self.worker;
        let CreditLine { qp, cq, book, .. } = line(credits)?;
        let mut waiter = Waiter::new(task.plan, send_cq, self.clock, task.shared)?;
        let lanes = lanes.iter_mut().map(split::<P>).collect::<Result<Vec<_>>>()?;
        let (mut sends, lanes): (Vec<Sends<'_, P>>, Vec<Receives<'_>>) = lanes.into_iter().unzip();
        let mut receives = OwnReceives { receiver: &mut self.receiver, lanes };
        let (mut completions, mut arrivals) = (poller::<C>(send_cq)?, poller::<C>(recv_cq)?);
        let (mut credits, mut told) = (Credits { qp, book }, poller::<C>(cq)?);
        let (start, stop) = (self.clock.now(), length(self.clock));
        sender.begin(stop);
        let mut winding_up = false;
        while !(sender.is_done() && credits.arrived() == sender.total()) {
            if !winding_up && sender.is_time(stop, recorder)? {
                sender.wind_up();
                winding_up = true;
            }
            sender.post(&mut sends, recorder, &credits)?;
            let mut found = sender.reap(&mut completions, recorder)? + credits.take(&mut told)?;
            if both {
                let came = receives.reap::<C, O>(&mut arrivals, task.size(), pattern.as_ref())?;
                credits.give(&receives, came == 0)?;
                found += came;
            }
            if found > 0 {
                waiter.found();
            } else if sender.is_waiting() || credits.arrived() < sender.total() {
                let mut pollers = [&mut completions, &mut told, &mut arrivals];
                let used = if both { 3 } else { 2 };
                waiter
                    .nothing(&mut pollers[..used], "word of the peer that messages have arrived")
                    .map_err(|error| lost(error, task.plan, sender.total(), credits.arrived()))?;
            }
        }
        Ok((start, self.clock.now()))
    }

    /// As [`Runner::drain`], telling the peer what has arrived.
    pub(super) fn drain_with_credits<C: Known, O: Operation>(&mut self, task: &Task<'_>) -> Result<()> {
        if !task.plan.is_sent_to(self.role) {
            return Ok(());
        }
        let Worker { lanes, recv_cq, srq, credits, .. } = &mut self.worker;
        let CreditLine { qp, cq, book, .. } = line(credits)?;
        let waiter = Waiter::new(task.plan, recv_cq, self.clock, task.shared)?;
        let (arrivals, told) = (poller::<C>(recv_cq)?, poller::<C>(cq)?);
        let listener = Listener { credits: Credits { qp, book }, arrivals, told, waiter };
        let before = self.receiver.received;
        match (srq, &mut self.shared, lanes.as_mut_slice()) {
            (Some(queue), Some(inbox), [lane, ..]) => {
                listener.drain::<O>(SharedReceives { inbox, queue, memory: &lane.memory }, task, 0)
            }
            (_, _, lanes) => {
                let lanes = lanes.iter_mut().map(receives).collect();
                listener.drain::<O>(OwnReceives { receiver: &mut self.receiver, lanes }, task, before)
            }
        }
    }
}

/// The end that receives, and says so.
struct Listener<'w, C: Known> {
    credits: Credits<'w, 'w>,
    arrivals: Poller<'w, C>,
    told: Poller<'w, C>,
    waiter: Waiter<'w>,
}

impl<C: Known> Listener<'_, C> {
    /// Takes what comes after the first `received` messages of the size that is running, until there was as much as the peer says.
    fn drain<O: Operation>(mut self, mut intake: impl Intake, task: &Task<'_>, mut received: u64) -> Result<()> {
        let Listener { credits, arrivals, told, waiter } = &mut self;
        let pattern = task.pattern();
        let expected = || task.expected.load(Ordering::Acquire);
        while received < expected() {
            let came = intake.reap::<C, O>(arrivals, task.size(), pattern.as_ref())?;
            received += u64::from(came);
            let found = came + credits.take(told)?;
            credits.give(&intake, came == 0)?;
            if found > 0 {
                waiter.found();
            } else {
                waiter
                    .nothing(&mut [arrivals, told], "message of the peer")
                    .map_err(|error| lost(error, task.plan, expected(), received))?;
            }
        }
        Ok(())
    }
}

fn line(credits: &mut Option<CreditLine>) -> Result<&mut CreditLine> {
    anyhow::Context::context(credits.as_mut(), "no connection for credits; this is a fault of rdma-perf")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credits_add_up_at_the_other_end() {
        let (mut receiver, mut sender) = (Book::new(3, 100), Book::new(3, 100));
        assert_eq!(receiver.credit(2, 24, false), None);
        for (lane, received, idle) in [(2, 25, false), (2, 26, true), (0, 100, false), (2, 126, false)] {
            let credit = receiver.credit(lane, received, idle).unwrap();
            sender.note(credit).unwrap();
            assert_eq!(sender.arrived[lane], received);
        }
        assert_eq!(receiver.credit(2, 126, true), None);
        assert_eq!(sender.arrived, [100, 0, 126]);
        assert!(sender.note(3 << 16 | 1).is_err());
    }

    #[test]
    fn a_window_is_what_is_always_posted() {
        let window = |arguments: &str| credit_window(&crate::report::sample::plan(arguments));
        // Receives are posted again in batches of half of the queue, at most 32.
        assert_eq!(window("send bw h"), 512 - 31);
        assert_eq!(window("send bw h -r 2"), 2);
        assert_eq!(window("send bw h -r 16"), 9);
        assert_eq!((window("send bw h -q 8 -r 16"), window("send bw h -q 8 -r 16 --use-srq")), (9, 1));
        assert_eq!(window("send bw h -q 8 -T 2 -r 16 --use-srq"), 2);
    }
}
