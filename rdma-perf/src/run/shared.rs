//! Receives shared by the queue pairs of a worker.

use std::marker::PhantomData;
use std::ops::ControlFlow;

use anyhow::{Context as _, Result, bail};
use rdma_safe::cq::Poller;
use rdma_safe::interface::Known;
use rdma_safe::{SharedReceiveQueue, WorkCompletion};

use super::operation::Operation;
use super::pattern::Pattern;
use super::pingpong::Arrivals;
use super::receiver::{MessageReceiver, REAP, check_immediate, unexpected};
use super::wait::Waiter;
use crate::endpoint::memory::LaneMemory;
use crate::endpoint::worker::Worker;
use crate::plan::Plan;
use crate::plan::receives::RepostRules;

/// State of a worker's shared receives. Each has a slot in the first queue pair's memory. They complete in any order,
/// and the completion tells the queue pair.
pub(crate) struct SharedReceiveState {
    /// Slots without a posted receive.
    free: Vec<u64>,
    /// Receives per doorbell.
    batch: usize,
    /// Messages of the current size per queue pair.
    pub(super) received: Vec<u64>,
    /// Messages of the current size whose bytes were compared.
    pub(super) validated: u64,
    /// Queue pair numbers in ascending order, with the index of their lane.
    lanes: Vec<(u32, usize)>,
}

impl SharedReceiveState {
    pub(super) fn new(plan: &Plan, worker: &Worker) -> Self {
        let mut lanes: Vec<(u32, usize)> = worker.lanes.iter().map(|lane| lane.qp.number()).zip(0..).collect();
        lanes.sort_unstable();
        SharedReceiveState {
            free: (0..u64::from(plan.rx_depth)).rev().collect(),
            batch: RepostRules::of(plan).batch as usize,
            received: vec![0; lanes.len()],
            validated: 0,
            lanes,
        }
    }

    /// Starts a size, and posts all receives that are not posted.
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
            // SAFETY: the memory belongs to the worker, is registered with local write access, and outlives the queue.
            // It is accessed through raw pointers only.
            unsafe { batch.receive(slot, &[memory.receive_sge(slot)])? }
        }
        Ok(batch.post()?)
    }

    /// Takes a message, and reposts receives once a batch is free.
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
            bail!("a message arrived at unknown queue pair {number:#x}");
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

/// The shared receives of a worker, with their queue.
pub(super) struct SharedReceives<'a> {
    pub(super) state: &'a mut SharedReceiveState,
    pub(super) queue: &'a mut SharedReceiveQueue,
    pub(super) memory: &'a LaneMemory,
}

impl MessageReceiver for SharedReceives<'_> {
    fn reap<C: Known, O: Operation>(
        &mut self,
        poller: &mut Poller<'_, C>,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<u32> {
        let (mut taken, mut result) = (0, Ok(()));
        poller.poll_all(|completion| {
            result = self.state.take::<O>(&completion, self.queue, self.memory, size, pattern);
            taken += 1;
            if result.is_ok() && taken < REAP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        result.map(|()| taken)
    }

    fn received(&self, lane: usize) -> u64 {
        self.state.received[lane]
    }
}

/// Messages of a latency test that arrive in shared receives.
pub(super) struct SharedArrivals<'a, C: Known, O> {
    pub(super) state: &'a mut SharedReceiveState,
    pub(super) queue: &'a mut SharedReceiveQueue,
    pub(super) poller: Poller<'a, C>,
    pub(super) waiter: Waiter<'a>,
    pub(super) pattern: Option<&'a Pattern>,
    pub(super) operation: PhantomData<O>,
}

impl<C: Known, O: Operation> Arrivals for SharedArrivals<'_, C, O> {
    #[inline]
    fn mark(&mut self, _memory: &LaneMemory, _size: u64, _message: u64) {}

    #[inline]
    fn wait(&mut self, memory: &LaneMemory, size: u64, _message: u64, over: impl Fn() -> bool) -> Result<bool> {
        let SharedArrivals { state, queue, poller, waiter, pattern, .. } = self;
        let look = |completion: &WorkCompletion<'_>| state.take::<O>(completion, queue, memory, size, *pattern);
        super::pingpong::wait_for_completion(poller, waiter, "message from the peer", over, look)
    }
}
