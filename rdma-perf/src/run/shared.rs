//! Receives that the queue pairs of a worker share.

use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use anyhow::{Context as _, Result, bail};
use rdma_safe::{Known, Poller, SharedReceiveQueue, WorkCompletion};

use super::handle::poller;
use super::latency::Arrivals;
use super::operation::Operation;
use super::pattern::Pattern;
use super::receiver::{Intake, REAP, Rules, check_immediate, unexpected};
use super::wait::Waiter;
use super::{Runner, Task};
use crate::plan::Plan;
use crate::worker::{LaneMemory, Worker};

/// The shared receives of a worker, each with a slot of the first queue pair's memory. Who takes one is known when it
/// completes, and they complete in any order.
pub(crate) struct SharedInbox {
    /// Slots whose receives are not posted.
    free: Vec<u64>,
    /// Receives posted with one doorbell.
    batch: usize,
    /// Messages of the size that is running, of each queue pair.
    pub(super) received: Vec<u64>,
    /// Those whose bytes were compared.
    pub(super) validated: u64,
    /// Numbers of the queue pairs in ascending order, and which they are.
    lanes: Vec<(u32, usize)>,
}

impl SharedInbox {
    pub(super) fn new(plan: &Plan, worker: &Worker) -> Self {
        let mut lanes: Vec<(u32, usize)> = worker.lanes.iter().map(|lane| lane.qp.number()).zip(0..).collect();
        lanes.sort_unstable();
        SharedInbox {
            free: (0..u64::from(plan.rx_depth)).rev().collect(),
            batch: Rules::of(plan).batch() as usize,
            received: vec![0; lanes.len()],
            validated: 0,
            lanes,
        }
    }

    /// Begins a size: every receive is posted that is not.
    pub(super) fn begin(&mut self, queue: &mut SharedReceiveQueue, memory: &LaneMemory) -> Result<()> {
        self.received.fill(0);
        self.validated = 0;
        while !self.free.is_empty() {
            self.post(queue, memory)?;
        }
        Ok(())
    }

    fn post(&mut self, queue: &mut SharedReceiveQueue, memory: &LaneMemory) -> Result<()> {
        let mut batch = queue.recv_batch();
        for slot in self.free.drain(self.free.len().saturating_sub(self.batch)..) {
            // SAFETY: the memory is the worker's, registered with local write access, and stays longer than the queue. It is
            // reached by raw pointers only.
            unsafe { batch.receive(slot, &[memory.receive_sge(slot)])? }
        }
        Ok(batch.post()?)
    }

    /// Takes a message, and posts receives again when there are enough for a doorbell.
    fn take<O: Operation>(
        &mut self,
        completion: &WorkCompletion<'_>,
        queue: &mut SharedReceiveQueue,
        memory: &LaneMemory,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<()> {
        completion.ok()?;
        let number = completion.qp_num().context("a completion without the number of its queue pair")?;
        let Ok(index) = self.lanes.binary_search_by_key(&number, |(number, _)| *number) else {
            bail!("a message came to queue pair {number:#x}, which is not there");
        };
        let lane = self.lanes[index].1;
        let expected = O::HEADER + size;
        let len = completion.byte_len().map_or(expected, u64::from);
        if completion.opcode() != O::RECEIVED_AS || len != expected {
            return Err(unexpected(completion.byte_len(), expected));
        }
        if O::HAS_IMMEDIATE {
            check_immediate(completion)?;
        }
        let slot = completion.wr_id();
        if let Some(pattern) = pattern {
            let offset = memory.receive_offset(slot) + O::HEADER;
            pattern.check(&memory.target, offset, lane, self.received[lane], size)?;
            self.validated += 1;
        }
        self.received[lane] += 1;
        self.free.push(slot);
        if self.free.len() >= self.batch { self.post(queue, memory) } else { Ok(()) }
    }
}

/// The shared receives of a worker, and where they are posted to.
pub(super) struct SharedReceives<'a> {
    pub(super) inbox: &'a mut SharedInbox,
    pub(super) queue: &'a mut SharedReceiveQueue,
    pub(super) memory: &'a LaneMemory,
}

impl Intake for SharedReceives<'_> {
    fn reap<C: Known, O: Operation>(
        &mut self,
        poller: &mut Poller<'_, C>,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<u32> {
        let (mut taken, mut result) = (0, Ok(()));
        poller.drain(|completion| {
            result = self.inbox.take::<O>(&completion, self.queue, self.memory, size, pattern);
            taken += 1;
            if result.is_ok() && taken < REAP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        result.map(|()| taken)
    }

    fn received(&self, lane: usize) -> u64 {
        self.inbox.received[lane]
    }
}

/// A latency test's messages, which take shared receives.
pub(super) struct SharedReceipts<'a, C: Known, O> {
    pub(super) inbox: &'a mut SharedInbox,
    pub(super) queue: &'a mut SharedReceiveQueue,
    pub(super) poller: Poller<'a, C>,
    pub(super) waiter: Waiter<'a>,
    pub(super) pattern: Option<&'a Pattern>,
    pub(super) operation: PhantomData<O>,
}

impl<C: Known, O: Operation> Arrivals for SharedReceipts<'_, C, O> {
    #[inline]
    fn mark(&mut self, _memory: &LaneMemory, _size: u64, _message: u64) {}

    #[inline]
    fn wait(&mut self, memory: &LaneMemory, size: u64, _message: u64, over: impl Fn() -> bool) -> Result<bool> {
        let SharedReceipts { inbox, queue, poller, waiter, pattern, .. } = self;
        let look = |completion: &WorkCompletion<'_>| inbox.take::<O>(completion, queue, memory, size, *pattern);
        super::latency::one(poller, waiter, "message of the peer", over, look)
    }
}

impl Runner {
    /// As [`Runner::drain`], of shared receives.
    pub(super) fn drain_shared<C: Known, O: Operation>(&mut self, task: &Task<'_>) -> Result<()> {
        let Worker { lanes, recv_cq, srq, .. } = &mut self.worker;
        // An end that nobody sends to has none.
        let (Some(queue), Some(inbox), Some(lane)) = (srq, &mut self.shared, lanes.first()) else { return Ok(()) };
        let mut receives = SharedReceives { inbox, queue, memory: &lane.memory };
        let pattern = task.pattern();
        let mut waiter = Waiter::new(task.plan, recv_cq, self.clock, task.shared)?;
        let mut arrivals = poller::<C>(recv_cq)?;
        let mut received = 0;
        while received < task.expected.load(Ordering::Acquire) {
            let taken = receives.reap::<C, O>(&mut arrivals, task.size(), pattern.as_ref())?;
            received += u64::from(taken);
            if taken > 0 {
                waiter.found();
            } else {
                waiter.nothing(&mut [&mut arrivals], "message of the peer")?;
            }
        }
        Ok(())
    }
}
