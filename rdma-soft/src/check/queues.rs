//! Completion queues, signaled work and events.

use std::collections::BTreeMap;

use super::{Checker, Kind, Object, PATIENCE, Report, threads};
use crate::transport::Time;

/// Counts of work and of sleeping threads.
#[derive(Default)]
pub(super) struct Queues {
    /// Completions that work in flight will add, by completion queue.
    due: BTreeMap<u32, u32>,
    /// Unsignaled work requests since the last signaled one, by queue pair.
    unsignaled: BTreeMap<u32, u32>,
    /// Threads that sleep, by completion channel.
    sleepers: BTreeMap<u32, u32>,
    /// Completions that wait although no event will report them, by completion channel.
    stalls: BTreeMap<u32, Stall>,
}

/// Completions that nobody takes.
#[derive(Clone, Copy)]
struct Stall {
    cq: u32,
    /// Number of completions that were taken from the queue before.
    taken: u64,
    since: Time,
}

impl Queues {
    pub(super) fn send_posted(&mut self, qp: u32, cq: Option<u32>) {
        self.receive_posted(cq);
        let unsignaled = self.unsignaled.entry(qp).or_default();
        *unsignaled = if cq.is_some() { 0 } else { *unsignaled + 1 };
    }

    pub(super) fn receive_posted(&mut self, cq: Option<u32>) {
        if let Some(cq) = cq {
            *self.due.entry(cq).or_default() += 1;
        }
    }

    pub(super) fn unsignaled(&self, qp: u32) -> u32 {
        self.unsignaled.get(&qp).copied().unwrap_or(0)
    }

    pub(super) fn completed(&mut self, cq: Option<u32>) {
        if let Some(due) = cq.and_then(|cq| self.due.get_mut(&cq)) {
            *due = due.saturating_sub(1);
        }
    }

    pub(super) fn cleared(&mut self, qp: u32) {
        self.unsignaled.remove(&qp);
    }
}

impl Checker {
    /// Reports a completion queue that cannot hold the completions of all work in flight.
    pub(crate) fn check_room(&mut self, cq: u32, unpolled: usize, capacity: usize, qp: Option<u32>, wr_id: u64) {
        let due = self.queues.due.get(&cq).copied().unwrap_or(0) as usize;
        if due + unpolled <= capacity || !self.is_new(Kind::CqCanOverrun, cq.into()) {
            return;
        }
        let text = format!(
            "completion queue {cq} has {capacity} entries, but {unpolled} completions wait and {due} work requests in \
             flight add one each"
        );
        let report = Report { qp, wr_id: Some(wr_id), ..Report::new(Kind::CqCanOverrun, text) };
        self.report_once(Kind::CqCanOverrun, cq.into(), || report);
    }

    /// Notes that a completion queue is destroyed, whose number may be reused.
    pub(crate) fn cq_destroyed(&mut self, cq: u32) {
        self.queues.due.remove(&cq);
        self.destroyed(Object::CompletionQueue(cq));
        for kind in [Kind::CqCanOverrun, Kind::LostWakeup] {
            self.reported.remove(&(kind, cq.into()));
        }
    }

    /// Reports a completion that did not fit.
    pub(crate) fn cq_overrun(&mut self, cq: u32, capacity: usize, qp: u32, wr_id: u64) {
        let text = format!("completion queue {cq} with {capacity} entries was full when work completed");
        self.report(Report { qp: Some(qp), wr_id: Some(wr_id), ..Report::new(Kind::CqOverrun, text) });
    }

    /// Counts threads that sleep on a completion channel.
    pub(crate) fn sleeps(&mut self, channel: u32, begins: bool) {
        let sleepers = self.queues.sleepers.entry(channel).or_default();
        *sleepers = if begins { *sleepers + 1 } else { sleepers.saturating_sub(1) };
        if *sleepers == 0 {
            self.queues.sleepers.remove(&channel);
        }
    }

    /// Whether a thread sleeps on a completion channel.
    pub(crate) fn has_sleeper(&self, channel: u32) -> bool {
        self.queues.sleepers.get(&channel).is_some_and(|sleepers| *sleepers > 0)
    }

    /// Notes the completions of a channel that no event will report, as a queue, their number, and the number that was taken
    /// before. Reports them if nobody has taken any for a second, and all threads of the program sleep.
    pub(crate) fn watch_stall(&mut self, channel: u32, found: Option<(u32, usize, u64)>, now: Time) {
        let Some((cq, waiting, taken)) = found else {
            self.queues.stalls.remove(&channel);
            return;
        };
        let stall = self.queues.stalls.entry(channel).or_insert(Stall { cq, taken, since: now });
        if (stall.cq, stall.taken) != (cq, taken) {
            *stall = Stall { cq, taken, since: now };
        }
        if now >= stall.since + PATIENCE && self.is_new(Kind::LostWakeup, cq.into()) && threads::all_others_sleep() {
            self.lost_wakeup(
                cq,
                waiting,
                "all threads of the program sleep, nobody has taken a completion for a second",
            );
        }
    }

    /// Reports a thread that no event will wake.
    pub(crate) fn thread_sleeps(&mut self, cq: u32, waiting: usize) {
        self.lost_wakeup(cq, waiting, "a thread sleeps in ibv_get_cq_event");
    }

    fn lost_wakeup(&mut self, cq: u32, waiting: usize, who: &str) {
        let text = format!(
            "{who}, {waiting} completions wait in completion queue {cq}, and no queue of the \
             channel is armed: arm it, and poll once more before sleeping"
        );
        self.report_once(Kind::LostWakeup, cq.into(), || Report::new(Kind::LostWakeup, text));
    }

    /// Reports events that are not acknowledged, or were acknowledged twice.
    pub(crate) fn unacked(&mut self, text: String) {
        self.report(Report::new(Kind::UnackedEvents, text));
    }

    /// Reports a message that found no receive.
    pub(crate) fn receiver_not_ready(&mut self, qp: u32) {
        let text =
            "a message of the peer found no receive: post receives before the peer sends, and limit what it may send";
        let report = Report { qp: Some(qp), ..Report::new(Kind::ReceiverNotReady, text) };
        self.report_once(Kind::ReceiverNotReady, qp.into(), || report);
    }
}
