//! Messages that come in.

use anyhow::{Result, anyhow, bail};
use rdma_safe::{CompletionQueue, WcFlags, WcOpcode};

use super::operation::IMMEDIATE;
use super::pattern::Pattern;
use crate::plan::{Plan, Verb};
use crate::worker::{Lane, RECEIVE_BATCH};

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
    /// Of the size that is running.
    of_size: u64,
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
            immediate: plan.immediate,
            received: 0,
            validated: 0,
        }
    }

    /// Begins a size of which each lane gets `messages`, or nobody knows how many, and fills the receive queues.
    pub(crate) fn begin(&mut self, lanes: &mut [Lane], messages: Option<u64>) -> Result<()> {
        (self.received, self.validated) = (0, 0);
        for (index, lane) in lanes.iter_mut().enumerate() {
            let inbox = &mut self.lanes[index];
            inbox.of_size = 0;
            inbox.limit = messages.map_or(u64::MAX, |messages| inbox.received + messages);
            inbox.post(lane, index, self.depth, self.batch)?;
        }
        Ok(())
    }

    /// Takes what has arrived, and posts receives again; how many messages there were. Each has to have `size` bytes, and
    /// those of `pattern` if that is given.
    #[inline]
    pub(crate) fn reap(
        &mut self,
        lanes: &mut [Lane],
        cq: &mut CompletionQueue,
        size: u64,
        pattern: Option<&Pattern>,
    ) -> Result<u32> {
        let mut poll = cq.poll();
        let mut taken = 0;
        while taken < REAP {
            let Some(completion) = poll.next()? else { break };
            completion.ok()?;
            let id = completion.wr_id() as usize;
            let (Some(inbox), Some(lane)) = (self.lanes.get_mut(id), lanes.get_mut(id)) else {
                return Err(unknown(completion.wr_id()));
            };
            if inbox.received == inbox.posted {
                return Err(unknown(completion.wr_id()));
            }
            let is_write = completion.opcode() == WcOpcode::RECV_RDMA_WITH_IMM;
            let len = completion.byte_len();
            if is_write == self.is_send || (self.is_send && len.is_some_and(|len| u64::from(len) != size)) {
                return Err(unexpected(len, size));
            }
            if self.immediate {
                let imm = completion.flags().contains(WcFlags::WITH_IMM).then(|| completion.imm()).flatten();
                if imm != Some(IMMEDIATE) {
                    bail!("a message came with the immediate data {imm:x?} instead of {IMMEDIATE:#x}");
                }
            }
            if let Some(pattern) = pattern.filter(|_| self.is_send) {
                let offset = lane.memory.receive_offset(inbox.received);
                pattern.check(&lane.memory.target, offset, id, inbox.of_size, size)?;
                self.validated += 1;
            }
            inbox.received += 1;
            inbox.of_size += 1;
            self.received += 1;
            taken += 1;
            if inbox.posted + self.batch <= inbox.received + self.depth {
                inbox.post(lane, id, self.depth, self.batch)?;
            }
        }
        Ok(taken)
    }
}

impl Inbox {
    /// Posts receives until the queue is full, or there are enough for all messages to come.
    #[inline]
    fn post(&mut self, lane: &mut Lane, index: usize, depth: u64, batch: u64) -> Result<()> {
        let end = (self.received + depth).min(self.limit);
        while self.posted < end {
            let count = (end - self.posted).min(batch);
            if count == 1 {
                let sge = lane.memory.receive_sge(self.posted);
                // SAFETY: the memory is the worker's, registered with local write access, and stays longer than the queue
                // pair. It is reached by raw pointers only.
                unsafe { lane.qp.receive(index as u64, sge)? }
            } else {
                let mut batch = lane.qp.recv_batch()?;
                for number in self.posted..self.posted + count {
                    // SAFETY: as above.
                    unsafe { batch.receive(index as u64, &[lane.memory.receive_sge(number)])? }
                }
                batch.post()?;
            }
            self.posted += count;
        }
        Ok(())
    }
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
