//! Messages that come in.

use std::ops::ControlFlow;

use anyhow::{Result, anyhow, bail};
use rdma_safe::{Poller, WcFlags, WcOpcode, WorkCompletion};

use super::handle::{By, Receives};
use super::operation::IMMEDIATE;
use super::pattern::Pattern;
use crate::plan::{Plan, Verb};
use crate::worker::RECEIVE_BATCH;

/// Completions taken out at a time.
pub(super) const REAP: u32 = 16;

/// Keeps receives posted on the lanes, and takes what arrives. It lives as long as the connection: receives that one size
/// leaves over serve the next.
pub(crate) struct Receiver {
    lanes: Vec<Inbox>,
    depth: u64,
    /// Receives posted with one doorbell.
    batch: u64,
    is_send: bool,
    /// What completes when a message has arrived.
    opcode: WcOpcode,
    immediate: bool,
    /// Messages of the size that is running.
    pub(crate) received: u64,
    /// Messages whose bytes were compared.
    pub(crate) validated: u64,
}

#[derive(Clone, Copy, Default)]
struct Inbox {
    posted: u64,
    /// Since the connection began.
    received: u64,
    /// The same before the size that is running.
    before: u64,
    /// Receives that need not be posted any more, since no messages come for them.
    limit: u64,
}

impl Receiver {
    pub(crate) fn new(plan: &Plan) -> Self {
        let depth = u64::from(plan.rx_depth);
        Receiver {
            lanes: vec![Inbox::default(); plan.qps as usize],
            depth,
            // perftest posts each by itself.
            batch: if plan.compat { 1 } else { (depth / 2).clamp(1, RECEIVE_BATCH.into()) },
            is_send: plan.verb == Verb::Send,
            opcode: if plan.verb == Verb::Send { WcOpcode::RECV } else { WcOpcode::RECV_RDMA_WITH_IMM },
            immediate: plan.immediate,
            received: 0,
            validated: 0,
        }
    }

    /// Begins a size of which each lane gets `messages`, or nobody knows how many, and fills the receive queues.
    pub(crate) fn begin<'l>(&mut self, lanes: impl Iterator<Item = Receives<'l>>, messages: Option<u64>) -> Result<()> {
        (self.received, self.validated) = (0, 0);
        for (index, (mut lane, inbox)) in lanes.zip(&mut self.lanes).enumerate() {
            inbox.before = inbox.received;
            inbox.limit = messages.map_or(u64::MAX, |messages| inbox.received + messages);
            inbox.post(&mut lane, index, self.depth, self.batch)?;
        }
        Ok(())
    }

    /// Takes what has arrived, and posts receives again; how many messages there were. Each has to have `size` bytes, and
    /// those of `pattern` if that is given.
    #[inline]
    pub(super) fn reap<C: By>(
        &mut self,
        lanes: &mut [Receives<'_>],
        poller: &mut Poller<'_, C>,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<u32> {
        let (mut taken, mut result) = (0, Ok(()));
        poller.drain(|completion| {
            result = self.take(&completion, lanes, size, pattern);
            taken += 1;
            if result.is_ok() && taken < REAP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        result.map(|()| taken)
    }

    /// Takes one message, as [`Receiver::reap`] does.
    #[inline(always)]
    pub(super) fn take(
        &mut self,
        completion: &WorkCompletion<'_>,
        lanes: &mut [Receives<'_>],
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<()> {
        completion.ok()?;
        let id = completion.wr_id() as usize;
        let (Some(inbox), Some(lane)) = (self.lanes.get_mut(id), lanes.get_mut(id)) else {
            return Err(unknown(completion.wr_id()));
        };
        if inbox.received == inbox.posted {
            return Err(unknown(completion.wr_id()));
        }
        // Of a write it is what the memory was written with, not of the receive.
        let len = completion.byte_len().filter(|_| self.is_send).map_or(size, u64::from);
        if completion.opcode() != self.opcode || len != size {
            return Err(unexpected(completion.byte_len(), size));
        }
        if self.immediate {
            check_immediate(completion)?;
        }
        if let Some(pattern) = pattern {
            // What writes leave is compared when all of them are done.
            if self.is_send {
                let (memory, message) = (lane.memory, inbox.received - inbox.before);
                pattern.check(&memory.target, memory.receive_offset(inbox.received), id, message, size)?;
                self.validated += 1;
            }
        }
        inbox.received += 1;
        self.received += 1;
        if self.batch == 1 {
            if inbox.posted < inbox.limit { inbox.post_one(lane, id) } else { Ok(()) }
        } else if inbox.posted + self.batch <= inbox.received + self.depth {
            inbox.post(lane, id, self.depth, self.batch)
        } else {
            Ok(())
        }
    }
}

impl Inbox {
    /// Posts receives until the queue is full, or there are enough for all messages to come.
    fn post(&mut self, lane: &mut Receives<'_>, index: usize, depth: u64, batch: u64) -> Result<()> {
        let end = (self.received + depth).min(self.limit);
        while self.posted < end {
            let count = (end - self.posted).min(batch);
            if count == 1 {
                self.post_one(lane, index)?;
                continue;
            }
            let mut batch = lane.queue.batch()?;
            for number in self.posted..self.posted + count {
                // SAFETY: as in `post_one`.
                unsafe { batch.receive(index as u64, &[lane.memory.receive_sge(number)])? }
            }
            batch.post()?;
            self.posted += count;
        }
        Ok(())
    }

    #[inline(always)]
    fn post_one(&mut self, lane: &mut Receives<'_>, index: usize) -> Result<()> {
        let sge = lane.memory.receive_sge(self.posted);
        // SAFETY: the memory is the worker's, registered with local write access, and stays longer than the queue pair. It is
        // reached by raw pointers only.
        unsafe { lane.queue.receive(index as u64, sge)? }
        self.posted += 1;
        Ok(())
    }
}

fn check_immediate(completion: &WorkCompletion<'_>) -> Result<()> {
    let imm = completion.flags().contains(WcFlags::WITH_IMM).then(|| completion.imm()).flatten();
    if imm != Some(IMMEDIATE) {
        bail!("a message came with the immediate data {imm:x?} instead of {IMMEDIATE:#x}");
    }
    Ok(())
}

#[cold]
fn unknown(id: u64) -> anyhow::Error {
    anyhow!("a completion of receive {id}, which is not posted")
}

#[cold]
fn unexpected(len: Option<u32>, size: u64) -> anyhow::Error {
    anyhow!(
        "a message of {len:?} bytes arrived instead of one of {size}; is another program connected to this queue pair?"
    )
}
