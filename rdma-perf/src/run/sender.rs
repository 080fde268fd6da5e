//! The sending side of bandwidth tests.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use anyhow::{Result, anyhow};
use rdma_safe::cq::Poller;
use rdma_safe::interface::{Interface, Known};
use rdma_safe::{PostError, SendBatch, WorkCompletion, WorkRequest};

use super::handle::Sends;
use super::operation::{Message, Operation};
use super::record::Recorder;
use super::stop::Stop;
use super::wait::Shared;
use crate::clock::Clock;
use crate::endpoint::memory::LaneMemory;
use crate::interrupt::Interrupted;
use crate::plan::Plan;
use crate::plan::layout::{slots, stride};

/// Most completions per poll, the same as perftest's.
pub(super) const REAP: u32 = 16;

/// Flow control by the peer.
pub(super) trait FlowControl {
    /// Messages that lane `lane` may send beyond the `posted` ones.
    fn room(&self, lane: usize, posted: u64) -> u64;
}

/// No flow control.
pub(super) struct Unlimited;

impl FlowControl for Unlimited {
    #[inline(always)]
    fn room(&self, _lane: usize, _posted: u64) -> u64 {
        u64::MAX
    }
}

/// Keeps the send queues of all lanes full.
pub(super) struct Sender<'s, O> {
    operation: O,
    shared: &'s Shared,
    clock: Clock,
    size: u64,
    depth: u64,
    list: u32,
    cq_mod: u32,
    states: Vec<SendState>,
    pacer: Option<Pacer>,
    /// Messages of all lanes in this run.
    posted: u64,
    completed: u64,
    /// Number of lanes with messages left to post.
    posting: usize,
}

/// Send state of one lane.
struct SendState {
    /// Messages of the current size, warm-up included.
    posted: u64,
    completed: u64,
    /// Value of `posted` at which the run ends.
    limit: u64,
    /// Messages up to and including the next signaled one.
    until_signal: u32,
    /// Slot of the next message.
    cursor: SlotCursor,
    /// Signaled messages in flight, as a ring: the post time of each, and the number of messages its completion covers.
    signaled: Box<[(u64, u32)]>,
    /// Sequence numbers of the oldest signaled message and of the next one.
    oldest: u64,
    next: u64,
}

/// Cycles through the slots of a lane's memory.
#[derive(Clone, Copy)]
struct SlotCursor {
    offset: u64,
    round: u64,
    stride: u64,
    end: u64,
}

impl SlotCursor {
    /// The message in this slot.
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

/// Limits the send rate.
struct Pacer {
    ticks_per_message: f64,
    next: f64,
}

impl<'s, O: Operation> Sender<'s, O> {
    /// A sender of messages of `size` bytes over `lanes` queue pairs.
    pub(super) fn new(operation: O, plan: &Plan, size: u64, lanes: usize, clock: Clock, shared: &'s Shared) -> Self {
        let state = || SendState {
            posted: 0,
            completed: 0,
            limit: 0,
            until_signal: plan.cq_mod,
            cursor: SlotCursor { offset: 0, round: 0, stride: stride(size), end: stride(size) * slots(size) },
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
            states: (0..lanes).map(|_| state()).collect(),
            pacer,
            posted: 0,
            completed: 0,
            posting: 0,
        }
    }

    /// Starts a run.
    pub(super) fn begin(&mut self, stop: Stop) {
        (self.posted, self.completed) = (0, 0);
        for state in &mut self.states {
            state.limit = match stop {
                Stop::Messages(messages) => state.posted + messages,
                Stop::At(_) => u64::MAX,
            };
        }
        self.count_posting();
        if let Some(pacer) = &mut self.pacer {
            pacer.next = self.clock.now() as f64;
        }
    }

    /// Stops posting. Each lane still posts up to its next signaled message, so that all completions can be awaited.
    pub(super) fn stop_posting(&mut self) {
        for state in &mut self.states {
            let rest = if state.until_signal == self.cq_mod { 0 } else { u64::from(state.until_signal) };
            state.limit = state.limit.min(state.posted + rest);
        }
        self.count_posting();
    }

    fn count_posting(&mut self) {
        self.posting = self.states.iter().filter(|state| state.posted < state.limit).count();
    }

    /// Whether all messages of the run were posted and have completed.
    #[inline]
    pub(super) fn is_done(&self) -> bool {
        self.completed == self.posted && self.posting == 0
    }

    /// Whether a completion is due. With `--rate`, unsignaled messages may wait long for the next signaled one.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.completed < self.posted
            && (self.pacer.is_none() || self.states.iter().any(|state| state.oldest < state.next))
    }

    /// Messages of this run so far.
    pub(super) fn sent(&self) -> u64 {
        self.posted
    }

    /// Messages of a lane in all runs of this size.
    pub(super) fn sent_of_lane(&self, lane: usize) -> u64 {
        self.states[lane].posted
    }

    /// Messages of all lanes in all runs of this size.
    pub(super) fn total(&self) -> u64 {
        self.states.iter().map(|state| state.posted).sum()
    }

    /// Posts as many messages as the send queues and `flow` allow.
    #[inline(always)]
    pub(super) fn post<P: Known, R: Recorder>(
        &mut self,
        lanes: &mut [Sends<'_, P>],
        recorder: &mut R,
        flow: &impl FlowControl,
    ) -> Result<()> {
        if self.posting == 0 {
            return Ok(());
        }
        for (lane, (state, id)) in lanes.iter_mut().zip(self.states.iter_mut().zip(0_u64..)) {
            loop {
                let left = state.limit - state.posted;
                let room = (state.completed + self.depth - state.posted).min(flow.room(id as usize, state.posted));
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
                // A delayed message delays all later ones. Latency is therefore counted from the scheduled time, to
                // avoid coordinated omission.
                let has_signaled = u64::from(state.until_signal) <= count || count == left;
                let stamp = recorder.posting(self.posted, has_signaled);
                let stamp = due.unwrap_or(stamp);
                let list = List { id, stamp, cq_mod: self.cq_mod, count, last: count == left };
                let (operation, memory, size) = (self.operation, lane.memory, self.size);
                if count == 1 {
                    // A separate path for single messages, which compiles to fewer instructions.
                    let signaled = state.until_signal == 1 || list.last;
                    let wr = state.advance(&list, 1, signaled);
                    let message = state.cursor.message(memory, size);
                    // SAFETY: the memory belongs to the worker, is registered, and outlives the queue pair. It is
                    // accessed through raw pointers only, and this process does not write to it while messages are in
                    // flight. The peer's target is plain bytes without references, so overwriting it is sound.
                    lane.queue.post(|batch| unsafe { operation.add(batch, wr, message) })?;
                    state.cursor.step();
                } else {
                    // SAFETY: as above.
                    lane.queue.post(|batch| unsafe { state.fill(batch, &list, operation, memory, size) })?;
                }
                state.posted += count;
                self.posted += count;
                self.posting -= usize::from(count == left);
            }
        }
        Ok(())
    }

    /// Takes completions and returns their number.
    #[inline(always)]
    pub(super) fn reap<C: Known, R: Recorder>(&mut self, poller: &mut Poller<'_, C>, recorder: &mut R) -> Result<u32> {
        let (mut taken, mut result) = (0, Ok(()));
        recorder.begin_poll();
        poller.poll_all(|completion| {
            result = self.take(&completion, recorder);
            taken += 1;
            if result.is_ok() && taken < REAP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        if !R::UNSUPERVISED && taken > 0 {
            self.shared.progress.fetch_add(u64::from(taken * self.cq_mod), Ordering::Relaxed);
        }
        result.map(|()| taken)
    }

    #[inline(always)]
    fn take(&mut self, completion: &WorkCompletion<'_>, recorder: &mut impl Recorder) -> Result<()> {
        completion.ok()?;
        let id = completion.wr_id();
        let Some(state) = self.states.get_mut(id as usize).filter(|state| state.oldest < state.next) else {
            return Err(unknown(id));
        };
        let mask = state.signaled.len() as u64 - 1;
        let (stamp, messages) = state.signaled[(state.oldest & mask) as usize];
        state.oldest += 1;
        state.completed += u64::from(messages);
        self.completed += u64::from(messages);
        recorder.completed(stamp, self.completed);
        Ok(())
    }

    /// Whether the run must stop posting now.
    #[inline]
    pub(super) fn should_stop<R: Recorder>(&self, stop: Stop, _recorder: &R) -> Result<bool> {
        if let (Stop::Messages(_), true) = (stop, R::UNSUPERVISED) {
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

/// Messages posted with one doorbell.
struct List {
    id: u64,
    /// Post time.
    stamp: u64,
    cq_mod: u32,
    count: u64,
    /// Whether these are the last messages of the run.
    last: bool,
}

impl SendState {
    /// Accounts for the next `count` messages, whose last one may be signaled. Returns its work request.
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
    /// The contract of [`Operation::add`], for all slots of messages of `size` bytes.
    #[inline]
    unsafe fn fill<I: Interface>(
        &mut self,
        batch: &mut SendBatch<'_, I>,
        list: &List,
        operation: impl Operation,
        memory: &LaneMemory,
        size: u64,
    ) -> Result<(), PostError> {
        let mut cursor = self.cursor;
        let mut left = list.count;
        while left > 0 {
            // Up to the next signaled message, so that the inner loop does not check each one.
            let interval = left.min(self.until_signal.into());
            let signaled = interval == u64::from(self.until_signal) || (list.last && interval == left);
            for _ in 0..interval - u64::from(signaled) {
                // SAFETY: the caller upholds the contract.
                unsafe { operation.add(batch, WorkRequest::new(list.id), cursor.message(memory, size))? }
                cursor.step();
            }
            let wr = self.advance(list, interval as u32, signaled);
            if signaled {
                // SAFETY: the caller upholds the contract.
                unsafe { operation.add(batch, wr, cursor.message(memory, size))? }
                cursor.step();
            }
            left -= interval;
        }
        self.cursor = cursor;
        Ok(())
    }
}

#[cold]
fn unknown(id: u64) -> anyhow::Error {
    anyhow!("a completion of work {id}, which is not in flight")
}
