//! Receives of queue pairs, and the messages that arrive in them.

use std::ops::ControlFlow;

use anyhow::{Result, anyhow, bail};
use rdma_safe::cq::Poller;
use rdma_safe::interface::Known;
use rdma_safe::{WcFlags, WcOpcode, WorkCompletion};

use super::handle::Receives;
use super::operation::{IMMEDIATE, Operation};
use super::pattern::Pattern;
use crate::plan::Plan;
use crate::plan::receives::RepostRules;

/// Most completions per poll.
pub(super) const REAP: u32 = 16;

/// Keeps receives posted on all lanes and takes arriving messages. It lives as long as the connection, because receives
/// left from one size serve the next.
pub(crate) struct Receiver {
    pub(super) lanes: Vec<LaneReceives>,
    pub(super) rules: RepostRules,
    /// Messages of the current size, taken by [`Receiver::reap`].
    pub(super) received: u64,
}

/// Counters of one lane's receives.
#[derive(Clone, Copy, Default)]
pub(super) struct LaneReceives {
    posted: u64,
    /// Messages since the connection began.
    received: u64,
    /// Messages before the current size.
    before: u64,
    /// Number of receives after which no more are posted, because no more messages will come.
    limit: u64,
    /// Messages of the current size whose bytes were compared.
    validated: u64,
}

/// Takes the messages of a worker, from receives of each queue pair or from shared ones.
pub(super) trait MessageReceiver {
    /// Takes arrived messages, like [`Receiver::reap`].
    fn reap<C: Known, O: Operation>(
        &mut self,
        poller: &mut Poller<'_, C>,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<u32>;

    /// Messages of the current size that lane `lane` has received.
    fn received(&self, lane: usize) -> u64;
}

/// Receives that belong to one lane each.
pub(super) struct PerLaneReceives<'r, 'w> {
    pub(super) receiver: &'r mut Receiver,
    pub(super) lanes: Vec<Receives<'w>>,
}

impl MessageReceiver for PerLaneReceives<'_, '_> {
    #[inline]
    fn reap<C: Known, O: Operation>(
        &mut self,
        poller: &mut Poller<'_, C>,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<u32> {
        self.receiver.reap::<C, O>(&mut self.lanes, poller, size, pattern)
    }

    #[inline]
    fn received(&self, lane: usize) -> u64 {
        let state = &self.receiver.lanes[lane];
        state.received - state.before
    }
}

impl Receiver {
    pub(crate) fn new(plan: &Plan) -> Self {
        Receiver { lanes: vec![LaneReceives::default(); plan.qps as usize], rules: RepostRules::of(plan), received: 0 }
    }

    /// Messages of the current size whose bytes were compared.
    pub(super) fn validated(&self) -> u64 {
        self.lanes.iter().map(|state| state.validated).sum()
    }

    /// Prepares for messages of the next size, and fills the receive queues. `messages` is the number per lane, if it is known.
    pub(crate) fn begin<'l>(&mut self, lanes: impl Iterator<Item = Receives<'l>>, messages: Option<u64>) -> Result<()> {
        self.received = 0;
        for (mut lane, (state, id)) in lanes.zip(self.lanes.iter_mut().zip(0..)) {
            (state.before, state.validated) = (state.received, 0);
            state.limit = messages.map_or(u64::MAX, |messages| state.received + messages);
            state.post(&mut lane, id, &self.rules)?;
        }
        Ok(())
    }

    /// Takes arrived messages, reposts receives, and returns the number of messages. Each must have `size` bytes, and
    /// match `pattern` if there is one.
    #[inline]
    pub(super) fn reap<C: Known, O: Operation>(
        &mut self,
        lanes: &mut [Receives<'_>],
        poller: &mut Poller<'_, C>,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<u32> {
        let (mut taken, mut result) = (0, Ok(()));
        poller.poll_all(|completion| {
            let id = completion.wr_id();
            result = match (self.lanes.get_mut(id as usize), lanes.get_mut(id as usize)) {
                (Some(state), Some(lane)) => state.take::<O>(&completion, lane, id, &self.rules, size, pattern),
                _ => Err(unknown(&completion)),
            };
            taken += 1;
            if result.is_ok() && taken < REAP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        self.received += u64::from(taken);
        result.map(|()| taken)
    }
}

impl LaneReceives {
    /// Takes one message of lane `id`, like [`Receiver::reap`].
    #[inline(always)]
    pub(super) fn take<O: Operation>(
        &mut self,
        completion: &WorkCompletion<'_>,
        lane: &mut Receives<'_>,
        id: u64,
        rules: &RepostRules,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<()> {
        completion.ok()?;
        if completion.wr_id() != id || self.received == self.posted {
            return Err(unknown(completion));
        }
        // The length of a write with immediate data is not checked here: it is the write's, and the receive buffer is
        // unused.
        let is_send = O::RECEIVED_AS == WcOpcode::RECV;
        let expected = O::HEADER + size;
        let len = completion.byte_len().filter(|_| is_send).map_or(expected, u64::from);
        if completion.opcode() != O::RECEIVED_AS || len != expected {
            return Err(unexpected(completion.byte_len(), expected));
        }
        if O::HAS_IMMEDIATE {
            check_immediate(completion)?;
        }
        if let Some(pattern) = pattern {
            // The target of writes is compared after the run.
            if is_send {
                let (memory, message) = (lane.memory, self.received - self.before);
                let offset = memory.receive_offset(self.received) + O::HEADER;
                pattern.check(&memory.target, offset, id as usize, message, size)?;
                self.validated += 1;
            }
        }
        self.received += 1;
        if rules.batch == 1 {
            if self.posted < self.limit { self.post_one(lane, id) } else { Ok(()) }
        } else if self.posted + rules.batch <= self.received + rules.depth {
            self.post(lane, id, rules)
        } else {
            Ok(())
        }
    }

    /// Posts receives until the queue is full, or there is one for each remaining message.
    fn post(&mut self, lane: &mut Receives<'_>, id: u64, rules: &RepostRules) -> Result<()> {
        let end = (self.received + rules.depth).min(self.limit);
        while self.posted < end {
            let count = (end - self.posted).min(rules.batch);
            if count == 1 {
                self.post_one(lane, id)?;
                continue;
            }
            let mut batch = lane.queue.batch()?;
            for number in self.posted..self.posted + count {
                // SAFETY: as in `post_one`.
                unsafe { batch.receive(id, &[lane.memory.receive_sge(number)])? }
            }
            batch.post()?;
            self.posted += count;
        }
        Ok(())
    }

    #[inline(always)]
    fn post_one(&mut self, lane: &mut Receives<'_>, id: u64) -> Result<()> {
        let sge = lane.memory.receive_sge(self.posted);
        // SAFETY: the memory belongs to the worker, is registered with local write access, and outlives the queue pair.
        // It is accessed through raw pointers only.
        unsafe { lane.queue.receive(id, sge)? }
        self.posted += 1;
        Ok(())
    }
}

pub(super) fn check_immediate(completion: &WorkCompletion<'_>) -> Result<()> {
    let imm = completion.flags().contains(WcFlags::WITH_IMM).then(|| completion.imm()).flatten();
    if imm != Some(IMMEDIATE) {
        bail!("a message arrived with the immediate data {imm:x?} instead of {IMMEDIATE:#x}");
    }
    Ok(())
}

#[cold]
fn unknown(completion: &WorkCompletion<'_>) -> anyhow::Error {
    match completion.ok() {
        Ok(()) => anyhow!("a completion of receive {}, which is not posted", completion.wr_id()),
        Err(error) => error.into(),
    }
}

#[cold]
pub(super) fn unexpected(len: Option<u32>, size: u64) -> anyhow::Error {
    anyhow!(
        "a message of {len:?} bytes arrived instead of one of {size}; is another program connected to this queue pair?"
    )
}
