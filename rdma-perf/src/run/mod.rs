//! The measured loops: what one thread does for one size.

mod alarm;
mod bandwidth;
mod credits;
mod handle;
mod latency;
mod lost;
mod operation;
mod pattern;
mod pingpong;
mod receiver;
mod record;
mod runner;
mod sender;
mod shared;
mod stop;
mod task;
mod wait;

use anyhow::{Context, Result};
use rdma_safe::interface::{Classic, Extended, Known};

use self::handle::receives;
use self::operation::Operation;
use self::pattern::Pattern;
pub(crate) use self::runner::Runner;
pub(crate) use self::task::{Outcome, Task};
pub(crate) use self::wait::Shared;
use crate::plan::{Atomic, Metric, Plan, Role, Verb};
use crate::transport::Transport;

impl Runner {
    /// Prepares memory and receives for messages of the peer.
    pub(crate) fn prepare(&mut self, plan: &Plan, index: usize) -> Result<()> {
        let size = plan.sizes[index];
        if plan.validate || plan.polls_memory() {
            let pattern = Pattern::of(plan, index);
            for (number, lane) in self.worker.lanes.iter().enumerate() {
                let (source, target) = (&lane.memory.source, &lane.memory.target);
                let (source, target) =
                    (plan.sends(self.role).then_some(source), plan.is_sent_to(self.role).then_some(target));
                let (filled, cleared) = if plan.verb == Verb::Read { (target, source) } else { (source, target) };
                if let Some(buffer) = cleared {
                    pattern::clear(buffer, size);
                }
                if let Some(buffer) = filled.filter(|_| plan.validate && plan.verb != Verb::Atomic) {
                    pattern.fill(buffer, number, size);
                }
            }
        }
        if let Some(credits) = &mut self.worker.credits {
            credits.counts.reset();
        }
        if let (Some(queue), Some(shared)) = (&mut self.worker.srq, &mut self.shared) {
            let lane = self.worker.lanes.first().context("no queue pair")?;
            shared.begin(queue, &lane.memory)?;
        } else if plan.takes_receives() && plan.is_sent_to(self.role) {
            self.receiver.begin(self.worker.lanes.iter_mut().map(receives), plan.messages_of_lane())?;
        }
        if plan.compat && plan.events {
            // See `Waiter::wait_for_event`.
            self.worker.send_cq.arm(false)?;
            self.worker.recv_cq.arm(false)?;
        }
        Ok(())
    }

    /// Compares the memory after one size, given the messages per queue pair that this end and the peer have sent.
    /// Returns the number of slots or words compared.
    pub(crate) fn check(&self, plan: &Plan, index: usize, ours: &[u64], theirs: &[u64]) -> Result<u64> {
        if !plan.validate {
            return Ok(0);
        }
        let pattern = Pattern::of(plan, index);
        let mut compared = 0;
        for (number, lane) in self.worker.lanes.iter().enumerate() {
            let sent = |counts: &[u64]| counts.get(number).copied().unwrap_or(0);
            // The last byte of a polled message is its sequence number.
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

    /// Runs one size of the plan.
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
        // All queue pairs have the same interface, and so have both completion queues.
        let posts_extended = self.worker.lanes.first().is_some_and(|lane| lane.qp.is_extended());
        match (posts_extended, self.worker.send_cq.is_extended()) {
            (true, true) => self.run_by::<Extended, Extended, O>(operation, task),
            (true, false) => self.run_by::<Extended, Classic, O>(operation, task),
            (false, true) => self.run_by::<Classic, Extended, O>(operation, task),
            (false, false) => self.run_by::<Classic, Classic, O>(operation, task),
        }
    }

    /// Runs with posting interface `P` and polling interface `C`.
    fn run_by<P: Known, C: Known, O: Operation>(&mut self, operation: O, task: &Task<'_>) -> Result<Outcome> {
        match (task.plan.metric, self.role) {
            (Metric::Bw, role) => bandwidth::run::<P, C, O>(self, operation, task, task.plan.sends(role)),
            (Metric::Lat, Role::Client) => latency::run::<P, C, O>(self, operation, task),
            (Metric::Lat, Role::Server) => latency::run_server::<P, C, O>(self, operation, task),
        }
    }
}
