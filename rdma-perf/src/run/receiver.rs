//! Messages that come in.

use std::ops::ControlFlow;

use anyhow::{Result, anyhow, bail};
use rdma_safe::{Known, Poller, WcFlags, WcOpcode, WorkCompletion};

use super::handle::Receives;
use super::operation::{IMMEDIATE, Operation};
use super::pattern::Pattern;
use crate::plan::Plan;
use crate::worker::RECEIVE_BATCH;

/// Completions taken out at a time.
pub(super) const REAP: u32 = 16;

/// Keeps receives posted on the lanes, and takes what arrives. It lives as long as the connection: receives that one size
/// leaves over serve the next.
pub(crate) struct Receiver {
    pub(super) lanes: Vec<Inbox>,
    pub(super) rules: Rules,
    /// Messages of the size that is running, taken by [`Receiver::reap`].
    pub(super) received: u64,
}

/// How receives are posted: the same for all lanes.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    depth: u64,
    /// Receives posted with one doorbell.
    batch: u64,
}

/// The receives of a lane.
#[derive(Clone, Copy, Default)]
pub(super) struct Inbox {
    posted: u64,
    /// Since the connection began.
    received: u64,
    /// The same before the size that is running.
    before: u64,
    /// Receives that need not be posted any more, since no messages come for them.
    limit: u64,
    /// Messages of the size that is running whose bytes were compared.
    validated: u64,
}

impl Rules {
    pub(super) fn of(plan: &Plan) -> Self {
        let depth = u64::from(plan.rx_depth);
        // perftest posts each by itself.
        let batch = if plan.compat { 1 } else { (depth / 2).clamp(1, RECEIVE_BATCH.into()) };
        Rules { depth, batch }
    }

    pub(super) fn batch(self) -> u64 {
        self.batch
    }

    /// Receives of a queue that are posted at any time, if as many messages are to come.
    pub(super) fn always_posted(self) -> u64 {
        self.depth - self.batch + 1
    }
}

/// What takes the messages of a worker, whether each queue pair has receives of its own or they share them.
pub(super) trait Intake {
    /// Takes what has arrived, as [`Receiver::reap`] does.
    fn reap<C: Known, O: Operation>(
        &mut self,
        poller: &mut Poller<'_, C>,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<u32>;

    /// Messages of the size that is running that lane number `lane` has got.
    fn received(&self, lane: usize) -> u64;
}

/// Receives of which each lane has its own.
pub(super) struct OwnReceives<'r, 'w> {
    pub(super) receiver: &'r mut Receiver,
    pub(super) lanes: Vec<Receives<'w>>,
}

impl Intake for OwnReceives<'_, '_> {
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
        let inbox = &self.receiver.lanes[lane];
        inbox.received - inbox.before
    }
}

impl Receiver {
    pub(crate) fn new(plan: &Plan) -> Self {
        Receiver { lanes: vec![Inbox::default(); plan.qps as usize], rules: Rules::of(plan), received: 0 }
    }

    /// Messages of the size that is running whose bytes were compared.
    pub(super) fn validated(&self) -> u64 {
        self.lanes.iter().map(|inbox| inbox.validated).sum()
    }

    /// Begins a size of which each lane gets `messages`, or nobody knows how many, and fills the receive queues.
    pub(crate) fn begin<'l>(&mut self, lanes: impl Iterator<Item = Receives<'l>>, messages: Option<u64>) -> Result<()> {
        self.received = 0;
        for (mut lane, (inbox, id)) in lanes.zip(self.lanes.iter_mut().zip(0..)) {
            (inbox.before, inbox.validated) = (inbox.received, 0);
            inbox.limit = messages.map_or(u64::MAX, |messages| inbox.received + messages);
            inbox.post(&mut lane, id, &self.rules)?;
        }
        Ok(())
    }

    /// Takes what has arrived, and posts receives again; how many messages there were. Each has to have `size` bytes, and
    /// those of `pattern` if that is given.
    #[inline]
    pub(super) fn reap<C: Known, O: Operation>(
        &mut self,
        lanes: &mut [Receives<'_>],
        poller: &mut Poller<'_, C>,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<u32> {
        let (mut taken, mut result) = (0, Ok(()));
        poller.drain(|completion| {
            let id = completion.wr_id();
            result = match (self.lanes.get_mut(id as usize), lanes.get_mut(id as usize)) {
                (Some(inbox), Some(lane)) => inbox.take::<O>(&completion, lane, id, &self.rules, size, pattern),
                _ => Err(unknown(&completion)),
            };
            taken += 1;
            if result.is_ok() && taken < REAP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        self.received += u64::from(taken);
        result.map(|()| taken)
    }
}

impl Inbox {
    /// Takes a message of lane `id`, as [`Receiver::reap`] does.
    #[inline(always)]
    pub(super) fn take<O: Operation>(
        &mut self,
        completion: &WorkCompletion<'_>,
        lane: &mut Receives<'_>,
        id: u64,
        rules: &Rules,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<()> {
        completion.ok()?;
        if completion.wr_id() != id || self.received == self.posted {
            return Err(unknown(completion));
        }
        // Of a write it is what the memory was written with, not of the receive.
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
            // What writes leave is compared when all of them are done.
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

    /// Posts receives until the queue is full, or there are enough for all messages to come.
    fn post(&mut self, lane: &mut Receives<'_>, id: u64, rules: &Rules) -> Result<()> {
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
        // SAFETY: the memory is the worker's, registered with local write access, and stays longer than the queue pair. It is
        // reached by raw pointers only.
        unsafe { lane.queue.receive(id, sge)? }
        self.posted += 1;
        Ok(())
    }
}

pub(super) fn check_immediate(completion: &WorkCompletion<'_>) -> Result<()> {
    let imm = completion.flags().contains(WcFlags::WITH_IMM).then(|| completion.imm()).flatten();
    if imm != Some(IMMEDIATE) {
        bail!("a message came with the immediate data {imm:x?} instead of {IMMEDIATE:#x}");
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
