//! An end on queue pairs: it posts work by address and key.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::time::{Duration, Instant};

use rdma_safe::address::Grh;
use rdma_safe::post::Payload;
use rdma_safe::{
    Access, AddressHandle, Buffer, CompletionChannel, CompletionQueue, ConnectOptions, InitOptions, Inline, PostError,
    QueuePair, QueuePairAddress, QueuePairType, SendBatch, Sge, SharedReceiveQueue, UdTarget, WorkCompletion,
    WorkRequest,
};

use super::{End, Fill, Setup};
use crate::Result;

/// Queue key of datagrams at both ends, as in the C program.
const QKEY: u32 = 0x1111_1111;

/// Marks the `wr_id` of a send: this bit, the index of the queue pair, and the index of the buffer. The `wr_id` of a receive is the
/// index of the buffer alone.
const SEND: u64 = 1 << 63;
const QP_SHIFT: u32 = 32;
const BUFFER: u64 = (1 << QP_SHIFT) - 1;

const NO_SUCH_BUFFER: &str = "a completion names a buffer that does not exist";
const NO_SUCH_QUEUE_PAIR: &str = "a completion names a queue pair that does not exist";

/// Source of the receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Receives {
    /// The receive queue of the only queue pair.
    Own,
    /// One shared receive queue.
    Shared,
}

/// An end with one message in flight on each queue pair.
///
/// A queue pair sends when it has both received a message and completed its last send. It sends the message that it received, from
/// the same buffer.
pub struct RawEnd {
    qps: ManuallyDrop<Vec<QueuePair>>,
    srq: ManuallyDrop<Option<SharedReceiveQueue>>,
    memory: ManuallyDrop<Memory>,
    cq: CompletionQueue,
    channel: Option<CompletionChannel>,
    is_armed: bool,
    addresses: Vec<QueuePairAddress>,
    timeout: Duration,
    /// Length of a message in bytes.
    size: usize,
    /// Messages each way, over all queue pairs.
    iters: u32,
    /// Receives to keep posted.
    rx_depth: u32,
    /// Bytes before the message in each buffer.
    header: usize,
    is_inline: bool,
    is_reliable: bool,
    /// Index of the queue pair with each number.
    indices: HashMap<u32, usize>,
    states: Vec<State>,
    /// Buffers that are neither posted nor hold a message.
    free: Vec<usize>,
    /// Receives that are posted.
    posted: u32,
    sent: u32,
    received: u32,
}

/// Memory that work in flight uses. It is freed after the queues, or leaked.
struct Memory {
    buffers: Vec<Buffer>,
    /// For each queue pair, the address handle and the queue pair number of its peer. Empty except for datagrams.
    targets: HashMap<usize, (AddressHandle, u32)>,
}

/// State of one queue pair.
#[derive(Clone, Debug)]
struct State {
    /// The buffer with the message that it received or sends.
    message: Option<usize>,
    send_pending: bool,
    receive_pending: bool,
}

impl RawEnd {
    /// Creates `count` queue pairs with their queues and buffers, and posts the receives.
    pub fn build(
        setup: &Setup<'_>,
        qp_type: QueuePairType,
        count: usize,
        receives: Receives,
        access: Access,
    ) -> Result<Self> {
        let Setup { pd, peer, size, rx_depth, .. } = *setup;
        let context = pd.context();
        let header = header(qp_type);
        // Two buffers more than receives for each queue pair: one for its message, and one because a message can arrive before the
        // last send completes.
        let (region, stride) = setup.allocate(rx_depth as usize + 2 * count, header, access)?;
        let buffers = region.into_chunks(stride)?;

        let advise =
            |error| format!("{error}; the device needs room for --rx-depth receives and a send of each queue pair");
        let channel = if peer.events { Some(context.create_channel()?) } else { None };
        // The classic interface, like the C programs.
        let mut cq = context.completion_queue(rx_depth.saturating_add(count as u32)).classic(true);
        if let Some(channel) = &channel {
            cq = cq.channel(channel);
        }
        let cq = cq.build().map_err(advise)?;
        let srq = match receives {
            Receives::Shared => Some(pd.shared_receive_queue(rx_depth).build().map_err(advise)?),
            Receives::Own => None,
        };
        let mut init = InitOptions::default().port(peer.ib_port);
        if let Some(index) = peer.gid_idx {
            init = init.gid_index(index);
        }
        let (mut qps, mut addresses) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let builder = pd.queue_pair(&cq, &cq).qp_type(qp_type).send_depth(1).max_batch(1).classic(true);
            let builder = match &srq {
                Some(srq) => builder.shared_receive_queue(srq),
                None => builder.recv_depth(rx_depth),
            };
            let mut qp = builder.build().map_err(advise)?;
            addresses.push(match qp_type {
                QueuePairType::UD => qp.init_datagrams(QKEY, &init)?,
                _ => qp.init(&init)?,
            });
            qps.push(qp);
        }
        let mut end = RawEnd {
            // Send inline if the device grants inline data without a request, as the C programs do.
            is_inline: qps.iter().all(|qp| qp.capacity().max_inline_data as usize >= size),
            is_reliable: qp_type == QueuePairType::RC,
            indices: qps.iter().enumerate().map(|(index, qp)| (qp.number(), index)).collect(),
            states: vec![State { message: None, send_pending: false, receive_pending: true }; count],
            free: (0..buffers.len()).collect(),
            qps: ManuallyDrop::new(qps),
            srq: ManuallyDrop::new(srq),
            memory: ManuallyDrop::new(Memory { buffers, targets: HashMap::new() }),
            cq,
            channel,
            is_armed: false,
            addresses,
            timeout: peer.timeout,
            size,
            iters: setup.iters,
            rx_depth,
            header,
            posted: 0,
            sent: 0,
            received: 0,
        };
        end.fill_receives()?;
        Ok(end)
    }

    /// Range of the message in a buffer.
    fn bytes(&self) -> Range<usize> {
        self.header..self.header + self.size
    }

    /// Waits for completions and handles them.
    fn step(&mut self) -> Result<()> {
        let start = Instant::now();
        loop {
            let mut is_idle = true;
            loop {
                let mut poll = self.cq.poll();
                let Some(completion) = poll.next()? else { break };
                let done = Done::new(&completion)?;
                drop(poll);
                self.handle(done)?;
                is_idle = false;
            }
            if !is_idle {
                return Ok(());
            }
            let left = self.timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(self.timed_out());
            }
            match &self.channel {
                // Work that completed before arming causes no event: poll once more.
                Some(_) if !self.is_armed => {
                    self.cq.arm(false)?;
                    self.is_armed = true;
                }
                Some(channel) => self.is_armed = channel.wait(left)?.is_none(),
                None => std::hint::spin_loop(),
            }
        }
    }

    fn handle(&mut self, Done { wr_id, byte_len, qp_num }: Done) -> Result<()> {
        let slot = (wr_id & BUFFER) as usize;
        let index = if wr_id & SEND != 0 {
            let index = ((wr_id & !SEND) >> QP_SHIFT) as usize;
            let state = self.states.get_mut(index).ok_or(NO_SUCH_QUEUE_PAIR)?;
            state.send_pending = false;
            // The answer may already have replaced the message.
            self.free.extend(Some(slot).filter(|slot| state.message != Some(*slot)));
            self.sent += 1;
            index
        } else {
            let (arrived, size) = ((byte_len as usize).saturating_sub(self.header), self.size);
            if arrived != size {
                return Err(format!(
                    "a message of {arrived} bytes arrived instead of {size}: give both ends the same --size"
                )
                .into());
            }
            let index = *self.indices.get(&qp_num).ok_or(NO_SUCH_QUEUE_PAIR)?;
            let state = &mut self.states[index];
            state.receive_pending = false;
            let previous = state.message.replace(slot);
            // A buffer that is still being sent is freed when its send completes.
            self.free.extend(previous.filter(|_| !state.send_pending));
            self.received += 1;
            self.posted -= 1;
            if self.posted as usize <= self.states.len() {
                self.fill_receives()?;
            }
            index
        };
        let state = &self.states[index];
        if self.sent < self.iters && !state.send_pending && !state.receive_pending {
            self.send(index)?;
        }
        Ok(())
    }

    fn send(&mut self, index: usize) -> Result<()> {
        let bytes = self.bytes();
        let state = self.states.get_mut(index).ok_or(NO_SUCH_QUEUE_PAIR)?;
        let slot = state.message.ok_or("no message to send")?;
        let Memory { buffers, targets } = &*self.memory;
        let buffer = buffers.get(slot).ok_or(NO_SUCH_BUFFER)?;
        let whole = buffer.sge();
        let sge = Sge { address: whole.address + bytes.start as u64, len: bytes.len() as u32, ..whole };
        let wr = WorkRequest::new(SEND | (index as u64) << QP_SHIFT | slot as u64).signaled();
        let target = targets.get(&index).map(|(handle, qp_num)| UdTarget::new(handle, *qp_num, QKEY));
        let mut batch = self.qps.get_mut(index).ok_or(NO_SUCH_QUEUE_PAIR)?.send_batch()?;
        if self.is_inline {
            let message = buffer.get(bytes).ok_or(NO_SUCH_BUFFER)?;
            // SAFETY: the bytes are copied during the call. `add` argues for the handle.
            unsafe { add(&mut batch, wr, target, Inline(message)) }?;
        } else {
            // SAFETY: until the completion returns the index of the buffer, the buffer is not written or posted. It is dropped only
            // by `drop` of `self`, after the queues. `add` argues for the handle.
            unsafe { add(&mut batch, wr, target, sge) }?;
        }
        batch.post()?;
        state.send_pending = true;
        state.receive_pending = true;
        Ok(())
    }

    fn fill_receives(&mut self) -> Result<()> {
        let len = (self.header + self.size) as u32;
        while self.posted < self.rx_depth {
            let slot = self.free.pop().ok_or("no buffer for a receive")?;
            let sge = Sge { len, ..self.memory.buffers.get(slot).ok_or(NO_SUCH_BUFFER)?.sge() };
            // SAFETY: as in `send`. `build` allocates that many bytes for each buffer.
            unsafe {
                match &mut *self.srq {
                    Some(srq) => srq.receive(slot as u64, sge)?,
                    None => self.qps.first_mut().ok_or(NO_SUCH_QUEUE_PAIR)?.receive(slot as u64, sge)?,
                }
            }
            self.posted += 1;
        }
        Ok(())
    }

    #[cold]
    fn timed_out(&self) -> Box<dyn Error + Send + Sync> {
        let (seconds, sent, received, iters) = (self.timeout.as_secs(), self.sent, self.received, self.iters);
        let why = if self.is_reliable {
            "it may have stopped"
        } else {
            "it has stopped, or a message was lost, which is not retransmitted"
        };
        format!(
            "no message from the peer within {seconds} s ({sent} sends and {received} receives of {iters} are done): {why}; give \
             both ends the same --iters and --size"
        )
        .into()
    }
}

impl End for RawEnd {
    fn addresses(&self) -> Vec<QueuePairAddress> {
        self.addresses.clone()
    }

    fn connect(&mut self, index: usize, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        let qp = self.qps.get_mut(index).ok_or(NO_SUCH_QUEUE_PAIR)?;
        if qp.qp_type() != QueuePairType::UD {
            return Ok(qp.connect(remote, options)?);
        }
        let handle = qp.pd().address_handle(&qp.address_of(remote, options)?)?;
        // Work in flight may use an earlier handle.
        if self.memory.targets.contains_key(&index) {
            return Err("a queue pair has one peer".into());
        }
        self.memory.targets.insert(index, (handle, remote.qp_num));
        Ok(())
    }

    fn run(&mut self, fill: Option<Fill<'_>>) -> Result<Duration> {
        if let Some(fill) = fill {
            for index in 0..self.states.len() {
                let slot = self.free.pop().ok_or("no buffer for the message")?;
                let bytes = self.bytes();
                fill(self.memory.buffers.get_mut(slot).and_then(|buffer| buffer.get_mut(bytes)).ok_or(NO_SUCH_BUFFER)?);
                self.states[index].message = Some(slot);
                self.send(index)?;
            }
        }
        let start = Instant::now();
        while self.received < self.iters || self.sent < self.iters {
            self.step()?;
        }
        Ok(start.elapsed())
    }

    fn messages(&self) -> Vec<&[u8]> {
        let slots = self.states.iter().filter_map(|state| state.message);
        slots.filter_map(|slot| self.memory.buffers.get(slot)?.get(self.bytes())).collect()
    }
}

impl fmt::Debug for RawEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RawEnd { sent, received, .. } = self;
        f.debug_struct("RawEnd").field("sent", sent).field("received", received).finish_non_exhaustive()
    }
}

impl Drop for RawEnd {
    fn drop(&mut self) {
        // SAFETY: both are taken only here, and not used afterwards.
        let (qps, srq) = unsafe { (ManuallyDrop::take(&mut self.qps), ManuallyDrop::take(&mut self.srq)) };
        let failures = qps.into_iter().filter_map(|qp| qp.destroy().err()).count();
        if failures == 0 && srq.map_or(Ok(()), SharedReceiveQueue::destroy).is_ok() {
            // SAFETY: dropped only here. All queues are destroyed with their work, so the device no longer uses the memory.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

/// Bytes that the device writes before the message of a receive.
fn header(qp_type: QueuePairType) -> usize {
    if qp_type == QueuePairType::UD { Grh::LEN } else { 0 }
}

/// Adds a send to the batch.
///
/// # Safety
/// The contract of [`SendBatch`] for the payload. For the target it holds: the address handle belongs to the domain of the queue
/// pair, and [`RawEnd`] drops it after the queue pair.
unsafe fn add(
    batch: &mut SendBatch<'_>,
    wr: WorkRequest,
    target: Option<UdTarget<'_>>,
    payload: impl Payload,
) -> std::result::Result<(), PostError> {
    // SAFETY: the caller's contract.
    unsafe {
        match target {
            Some(target) => batch.send_to(wr, target, payload),
            None => batch.send(wr, payload),
        }
    }
}

/// The fields of a completion that are used.
struct Done {
    wr_id: u64,
    byte_len: u32,
    qp_num: u32,
}

impl Done {
    fn new(completion: &WorkCompletion<'_>) -> Result<Self> {
        completion.ok()?;
        let (byte_len, qp_num) = (completion.byte_len().unwrap_or(0), completion.qp_num().unwrap_or(0));
        Ok(Done { wr_id: completion.wr_id(), byte_len, qp_num })
    }
}
