//! Many messages in flight.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use anyhow::{Result, anyhow};
use rdma_safe::{Interface, Known, Poller, PostError, SendBatch, WorkCompletion, WorkRequest};

use super::handle::Sends;
use super::operation::{Message, Operation};
use super::record::Recorder;
use super::wait::{Interrupted, Shared};
use crate::clock::Clock;
use crate::plan::Plan;
use crate::worker::{LaneMemory, slots, stride};

/// Completions taken out at a time, as perftest does.
pub(super) const REAP: u32 = 16;

/// When to post no more.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stop {
    /// After this many messages of each queue pair.
    Messages(u64),
    /// At this time, in ticks, or soon after: the last message is a signaled one.
    At(u64),
}

/// How far the peer lets sends go.
pub(super) trait Gate {
    /// Messages that lane number `lane` may still send after `posted` of them.
    fn room(&self, lane: usize, posted: u64) -> u64;
}

/// As far as they can.
pub(super) struct Open;

impl Gate for Open {
    #[inline(always)]
    fn room(&self, _lane: usize, _posted: u64) -> u64 {
        u64::MAX
    }
}

/// Keeps the send queues of the lanes full.
pub(super) struct Sender<'s, O> {
    operation: O,
    shared: &'s Shared,
    clock: Clock,
    size: u64,
    depth: u64,
    list: u32,
    cq_mod: u32,
    flights: Vec<Flight>,
    pacer: Option<Pacer>,
    /// Of all lanes, in this run.
    posted: u64,
    completed: u64,
    /// Lanes that have more to post.
    posting: usize,
}

/// The messages of one lane.
struct Flight {
    /// Messages since the connection began to carry this size.
    posted: u64,
    completed: u64,
    /// Where the run ends.
    limit: u64,
    /// Messages until the next signaled one.
    until_signal: u32,
    /// The place of the next message.
    walk: Walk,
    /// Signaled messages in flight: when each was posted, and how many messages its completion tells of.
    signaled: Box<[(u64, u32)]>,
    /// The oldest of them, and the next one, both counted from the beginning.
    oldest: u64,
    next: u64,
}

/// Places of messages, one after another, round and round.
#[derive(Clone, Copy)]
struct Walk {
    offset: u64,
    round: u64,
    stride: u64,
    end: u64,
}

impl Walk {
    /// The message here.
    #[inline(always)]
    fn message(self, memory: &LaneMemory, size: u64) -> Message<'_> {
        Message { memory, offset: self.offset, size, round: self.round }
    }

    #[inline]
    fn step(&mut self) {
        self.offset += self.stride;
        if self.offset == self.end {
            self.offset = 0;
            self.round += 1;
        }
    }
}

/// Lets messages go no faster than they may.
struct Pacer {
    ticks_per_message: f64,
    next: f64,
}

impl<'s, O: Operation> Sender<'s, O> {
    /// For messages of `size` bytes over `lanes` queue pairs.
    pub(super) fn new(operation: O, plan: &Plan, size: u64, lanes: usize, clock: Clock, shared: &'s Shared) -> Self {
        let flight = || Flight {
            posted: 0,
            completed: 0,
            limit: 0,
            until_signal: plan.cq_mod,
            walk: Walk { offset: 0, round: 0, stride: stride(size), end: stride(size) * slots(size) },
            signaled: vec![(0, 0); plan.tx_depth.next_power_of_two() as usize].into_boxed_slice(),
            oldest: 0,
            next: 0,
        };
        let second = clock.ticks(std::time::Duration::from_secs(1)) as f64;
        let pacer = plan
            .rate
            .map(|rate| Pacer { ticks_per_message: second * f64::from(plan.threads) / rate.messages(size), next: 0.0 });
        Sender {
            operation,
            shared,
            clock,
            size,
            depth: plan.tx_depth.into(),
            list: plan.post_list,
            cq_mod: plan.cq_mod,
            flights: (0..lanes).map(|_| flight()).collect(),
            pacer,
            posted: 0,
            completed: 0,
            posting: 0,
        }
    }

    /// Begins a run.
    pub(super) fn begin(&mut self, stop: Stop) {
        (self.posted, self.completed) = (0, 0);
        for flight in &mut self.flights {
            flight.limit = match stop {
                Stop::Messages(messages) => flight.posted + messages,
                Stop::At(_) => u64::MAX,
            };
        }
        self.count_posting();
        if let Some(pacer) = &mut self.pacer {
            pacer.next = self.clock.now() as f64;
        }
    }

    /// Ends a run when its messages under way have completed, the last one of each lane being a signaled one.
    pub(super) fn wind_up(&mut self) {
        for flight in &mut self.flights {
            let rest = if flight.until_signal == self.cq_mod { 0 } else { u64::from(flight.until_signal) };
            flight.limit = flight.limit.min(flight.posted + rest);
        }
        self.count_posting();
    }

    fn count_posting(&mut self) {
        self.posting = self.flights.iter().filter(|flight| flight.posted < flight.limit).count();
    }

    /// Whether all messages of the run were posted and have completed.
    #[inline]
    pub(super) fn is_done(&self) -> bool {
        self.completed == self.posted && self.posting == 0
    }

    /// Whether there is a completion to wait for. At a given rate it can take any time until the next signaled message is
    /// posted.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.completed < self.posted
            && (self.pacer.is_none() || self.flights.iter().any(|flight| flight.oldest < flight.next))
    }

    /// Messages in the run so far.
    pub(super) fn sent(&self) -> u64 {
        self.posted
    }

    /// Messages of each lane since the beginning.
    pub(super) fn sent_of_lane(&self, lane: usize) -> u64 {
        self.flights[lane].posted
    }

    /// Messages of all lanes since the beginning.
    pub(super) fn total(&self) -> u64 {
        self.flights.iter().map(|flight| flight.posted).sum()
    }

    /// Posts what there is room for, here and behind `gate`.
    #[inline(always)]
    pub(super) fn post<P: Known, R: Recorder>(
        &mut self,
        lanes: &mut [Sends<'_, P>],
        recorder: &mut R,
        gate: &impl Gate,
    ) -> Result<()> {
        if self.posting == 0 {
            return Ok(());
        }
        for (lane, (flight, id)) in lanes.iter_mut().zip(self.flights.iter_mut().zip(0_u64..)) {
            loop {
                let left = flight.limit - flight.posted;
                let room = (flight.completed + self.depth - flight.posted).min(gate.room(id as usize, flight.posted));
                let count = u64::from(self.list).min(left);
                if count == 0 || count > room {
                    break;
                }
                let mut due = None;
                if let Some(pacer) = &mut self.pacer {
                    if (self.clock.now() as f64) < pacer.next {
                        return Ok(());
                    }
                    due = Some(pacer.next as u64);
                    pacer.next += pacer.ticks_per_message * count as f64;
                }
                // What holds up one message holds up those after it: their latency is counted from when the rate would have had
                // them posted (coordinated omission).
                let has_signaled = u64::from(flight.until_signal) <= count || count == left;
                let stamp = recorder.posting(self.posted, has_signaled);
                let stamp = due.unwrap_or(stamp);
                let list = List { id, stamp, cq_mod: self.cq_mod, count, last: count == left };
                let (operation, memory, size) = (self.operation, lane.memory, self.size);
                if count == 1 {
                    // By itself, so that the compiler has little to keep in mind.
                    let signaled = flight.until_signal == 1 || list.last;
                    let wr = flight.advance(&list, 1, signaled);
                    let message = flight.walk.message(memory, size);
                    // SAFETY: the memory is the worker's, registered, and stays longer than the queue pair. It is reached by raw
                    // pointers only, and not written by this process while messages are in flight. What the peer's memory is
                    // overwritten with harms nobody: a target is plain bytes, which nobody refers to.
                    lane.queue.post(|batch| unsafe { operation.add(batch, wr, message) })?;
                    flight.walk.step();
                } else {
                    // SAFETY: as above.
                    lane.queue.post(|batch| unsafe { flight.fill(batch, &list, operation, memory, size) })?;
                }
                flight.posted += count;
                self.posted += count;
                self.posting -= usize::from(count == left);
            }
        }
        Ok(())
    }

    /// Takes completions; how many there were.
    #[inline(always)]
    pub(super) fn reap<C: Known, R: Recorder>(&mut self, poller: &mut Poller<'_, C>, recorder: &mut R) -> Result<u32> {
        let (mut taken, mut result) = (0, Ok(()));
        recorder.look();
        poller.drain(|completion| {
            result = self.take(&completion, recorder);
            taken += 1;
            if result.is_ok() && taken < REAP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        if !R::ALONE && taken > 0 {
            self.shared.progress.fetch_add(u64::from(taken * self.cq_mod), Ordering::Relaxed);
        }
        result.map(|()| taken)
    }

    #[inline(always)]
    fn take(&mut self, completion: &WorkCompletion<'_>, recorder: &mut impl Recorder) -> Result<()> {
        completion.ok()?;
        let id = completion.wr_id();
        let Some(flight) = self.flights.get_mut(id as usize).filter(|flight| flight.oldest < flight.next) else {
            return Err(unknown(id));
        };
        let mask = flight.signaled.len() as u64 - 1;
        let (stamp, messages) = flight.signaled[(flight.oldest & mask) as usize];
        flight.oldest += 1;
        flight.completed += u64::from(messages);
        self.completed += u64::from(messages);
        recorder.completed(stamp, self.completed);
        Ok(())
    }

    /// Whether the run has to be wound up now.
    #[inline]
    pub(super) fn is_time<R: Recorder>(&self, stop: Stop, _recorder: &R) -> Result<bool> {
        if let (Stop::Messages(_), true) = (stop, R::ALONE) {
            return Ok(false);
        }
        if self.shared.abort.load(Ordering::Relaxed) {
            return Err(Interrupted.into());
        }
        Ok(match stop {
            Stop::Messages(_) => false,
            Stop::At(end) => self.clock.now() >= end,
        } || self.shared.stop.load(Ordering::Relaxed))
    }
}

/// What is posted with one doorbell.
struct List {
    id: u64,
    /// When it is posted.
    stamp: u64,
    cq_mod: u32,
    count: u64,
    /// There is nothing to post after it.
    last: bool,
}

impl Flight {
    /// Counts the next `count` messages, of which the last one is signaled, or none; the work request of the last one.
    #[inline(always)]
    fn advance(&mut self, list: &List, count: u32, signaled: bool) -> WorkRequest {
        self.until_signal -= count;
        let wr = WorkRequest::new(list.id);
        if !signaled {
            return wr;
        }
        let mask = self.signaled.len() as u64 - 1;
        self.signaled[(self.next & mask) as usize] = (list.stamp, list.cq_mod - self.until_signal);
        self.next += 1;
        self.until_signal = list.cq_mod;
        wr.signaled()
    }

    /// Adds the messages of `list`.
    ///
    /// # Safety
    /// That of [`Operation::add`], for all places that messages of `size` bytes take turns in.
    #[inline]
    unsafe fn fill<I: Interface>(
        &mut self,
        batch: &mut SendBatch<'_, I>,
        list: &List,
        operation: impl Operation,
        memory: &LaneMemory,
        size: u64,
    ) -> Result<(), PostError> {
        let mut walk = self.walk;
        let mut left = list.count;
        while left > 0 {
            // Until the next signaled one, so that not each message has to be asked whether it is.
            let stretch = left.min(self.until_signal.into());
            let signaled = stretch == u64::from(self.until_signal) || (list.last && stretch == left);
            for _ in 0..stretch - u64::from(signaled) {
                // SAFETY: the caller's contract.
                unsafe { operation.add(batch, WorkRequest::new(list.id), walk.message(memory, size))? }
                walk.step();
            }
            let wr = self.advance(list, stretch as u32, signaled);
            if signaled {
                // SAFETY: the caller's contract.
                unsafe { operation.add(batch, wr, walk.message(memory, size))? }
                walk.step();
            }
            left -= stretch;
        }
        self.walk = walk;
        Ok(())
    }
}

#[cold]
fn unknown(id: u64) -> anyhow::Error {
    anyhow!("a completion of work {id}, which is not in flight")
}
