//! The ping-pong over the raw door: work is posted by address and key, and this sees to the memory.

use std::collections::HashMap;
use std::error::Error;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::time::{Duration, Instant};

use rdma_safe::{
    AddressHandle, Buffer, CompletionChannel, CompletionQueue, ConnectOptions, Grh, Inline, Payload, PostError,
    QueuePair, QueuePairAddress, QueuePairType, SendBatch, Sge, SharedReceiveQueue, UdTarget, WorkCompletion,
    WorkRequest,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Queue key of datagrams, of both ends, as in C.
pub(crate) const QKEY: u32 = 0x1111_1111;

/// Set in the identifiers of sends, which have the number of the queue pair above that of the buffer. Those of receives are
/// numbers of buffers.
const SEND: u64 = 1 << 63;
const QP_SHIFT: u32 = 32;
const BUFFER: u64 = (1 << QP_SHIFT) - 1;

const NO_SUCH_BUFFER: &str = "a completion names a buffer that there is not";
const NO_SUCH_QUEUE_PAIR: &str = "a completion names a queue pair that there is not";

/// Messages bounce between this end and its peer, one by each queue pair.
///
/// A queue pair sends when it has both received a message and seen the completion of its last send. What it sends is the
/// message that it received, from the same buffer.
pub(crate) struct Game {
    qps: ManuallyDrop<Vec<QueuePair>>,
    /// Where they take their receives, if not from the only one of them.
    srq: ManuallyDrop<Option<SharedReceiveQueue>>,
    held: ManuallyDrop<Held>,
    cq: CompletionQueue,
    channel: Option<CompletionChannel>,
    armed: bool,
    rules: Rules,
    /// Bytes before the message in each buffer.
    header: usize,
    inline: bool,
    /// What is lost is sent again.
    reliable: bool,
    /// Which queue pair has a number.
    numbers: HashMap<u32, usize>,
    /// What each queue pair is at.
    turns: Vec<Turn>,
    /// Buffers that are neither posted nor hold a message.
    spare: Vec<usize>,
    /// Receives that are posted.
    posted: u32,
    sent: u32,
    received: u32,
}

/// What work in flight names: it goes after the queues, or not at all.
struct Held {
    buffers: Vec<Buffer>,
    /// Where the datagrams of each queue pair go, and to which one there.
    targets: HashMap<usize, (AddressHandle, u32)>,
}

/// What a queue pair is at.
#[derive(Clone, Debug)]
struct Turn {
    /// The buffer of its message while it is here, or of its send.
    message: Option<usize>,
    /// What has to complete before it sends again.
    send_pending: bool,
    receive_pending: bool,
}

/// How to play.
pub(crate) struct Rules {
    pub(crate) size: usize,
    /// Messages each way, over all queue pairs.
    pub(crate) iters: u32,
    pub(crate) rx_depth: u32,
    pub(crate) timeout: Duration,
}

impl Game {
    /// Posts the receives: to `srq`, or without it to the only queue pair. There must be two buffers more than receives for each
    /// queue pair: one for its message, and one because a message can arrive before the completion of its last send. Each has room
    /// for a message and what comes before it.
    pub(crate) fn new(
        qps: Vec<QueuePair>,
        srq: Option<SharedReceiveQueue>,
        cq: CompletionQueue,
        channel: Option<CompletionChannel>,
        buffers: Vec<Buffer>,
        rules: Rules,
    ) -> Result<Self> {
        let header = qps.first().map_or(0, |qp| header(qp.qp_type()));
        if !buffers.iter().all(|buffer| buffer.capacity() >= header + rules.size) {
            return Err("a buffer is too short".into());
        }
        let mut game = Game {
            header,
            // As C does: inline where the device grants it unasked.
            inline: qps.iter().all(|qp| qp.capacity().max_inline_data as usize >= rules.size),
            reliable: qps.iter().all(|qp| qp.qp_type() == QueuePairType::RC),
            numbers: qps.iter().enumerate().map(|(index, qp)| (qp.number(), index)).collect(),
            turns: vec![Turn { message: None, send_pending: false, receive_pending: true }; qps.len()],
            spare: (0..buffers.len()).collect(),
            qps: ManuallyDrop::new(qps),
            srq: ManuallyDrop::new(srq),
            held: ManuallyDrop::new(Held { buffers, targets: HashMap::new() }),
            cq,
            channel,
            armed: false,
            rules,
            posted: 0,
            sent: 0,
            received: 0,
        };
        game.fill_receives()?;
        Ok(game)
    }

    /// Connects queue pair number `index` to the one at `remote`, or aims its datagrams there.
    pub(crate) fn connect(&mut self, index: usize, remote: &QueuePairAddress, how: &ConnectOptions) -> Result<()> {
        let qp = self.qps.get_mut(index).ok_or(NO_SUCH_QUEUE_PAIR)?;
        if qp.qp_type() != QueuePairType::UD {
            return Ok(qp.connect(remote, how)?);
        }
        let handle = qp.pd().address_handle(&qp.address_of(remote, how)?)?;
        // One that was there before may be named by work in flight.
        if self.held.targets.contains_key(&index) {
            return Err("a queue pair has one peer".into());
        }
        self.held.targets.insert(index, (handle, remote.qp_num));
        Ok(())
    }

    /// Plays to the end, and returns the time that it took. The client `begin`s, with the message of each queue pair.
    pub(crate) fn play(&mut self, begin: Option<impl Fn(&mut [u8])>) -> Result<Duration> {
        if let Some(fill) = begin {
            for index in 0..self.turns.len() {
                let slot = self.spare.pop().ok_or("no buffer for the message")?;
                let bytes = self.bytes();
                fill(self.held.buffers.get_mut(slot).and_then(|buffer| buffer.get_mut(bytes)).ok_or(NO_SUCH_BUFFER)?);
                self.turns[index].message = Some(slot);
                self.send(index)?;
            }
        }
        let start = Instant::now();
        while self.received < self.rules.iters || self.sent < self.rules.iters {
            self.step()?;
        }
        Ok(start.elapsed())
    }

    /// The message that arrived last at each queue pair, once the game is over.
    pub(crate) fn messages(&self) -> impl Iterator<Item = &[u8]> {
        let slots = self.turns.iter().filter_map(|turn| turn.message);
        slots.filter_map(|slot| self.held.buffers.get(slot)?.get(self.bytes()))
    }

    /// Where the message is in a buffer.
    fn bytes(&self) -> Range<usize> {
        self.header..self.header + self.rules.size
    }

    /// Waits for completions, and does what follows from them.
    fn step(&mut self) -> Result<()> {
        let start = Instant::now();
        loop {
            let mut seen = false;
            loop {
                let mut poll = self.cq.poll();
                let Some(completion) = poll.next()? else { break };
                let taken = Taken::of(&completion)?;
                drop(poll);
                self.take(taken)?;
                seen = true;
            }
            if seen {
                return Ok(());
            }
            let left = self.rules.timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(self.timed_out());
            }
            match &self.channel {
                // What completed before arming causes no event, so the queue is looked at once more.
                Some(_) if !self.armed => {
                    self.cq.arm(false)?;
                    self.armed = true;
                }
                Some(channel) => self.armed = channel.wait(left)?.is_none(),
                None => std::hint::spin_loop(),
            }
        }
    }

    fn take(&mut self, Taken { wr_id, byte_len, qp_num }: Taken) -> Result<()> {
        let slot = (wr_id & BUFFER) as usize;
        let index = if wr_id & SEND != 0 {
            let index = ((wr_id & !SEND) >> QP_SHIFT) as usize;
            let turn = self.turns.get_mut(index).ok_or(NO_SUCH_QUEUE_PAIR)?;
            turn.send_pending = false;
            // Unless an answer has taken its place.
            self.spare.extend(Some(slot).filter(|slot| turn.message != Some(*slot)));
            self.sent += 1;
            index
        } else {
            let (arrived, size) = ((byte_len as usize).saturating_sub(self.header), self.rules.size);
            if arrived != size {
                return Err(format!(
                    "a message of {arrived} bytes arrived instead of {size}: give both ends the same --size"
                )
                .into());
            }
            let index = *self.numbers.get(&qp_num).ok_or(NO_SUCH_QUEUE_PAIR)?;
            let turn = &mut self.turns[index];
            turn.receive_pending = false;
            let before = turn.message.replace(slot);
            // A buffer that is still being sent comes back with its completion.
            self.spare.extend(before.filter(|_| !turn.send_pending));
            self.received += 1;
            self.posted -= 1;
            if self.posted as usize <= self.turns.len() {
                self.fill_receives()?;
            }
            index
        };
        let turn = &self.turns[index];
        if self.sent < self.rules.iters && !turn.send_pending && !turn.receive_pending {
            self.send(index)?;
        }
        Ok(())
    }

    fn send(&mut self, index: usize) -> Result<()> {
        let bytes = self.bytes();
        let turn = self.turns.get_mut(index).ok_or(NO_SUCH_QUEUE_PAIR)?;
        let slot = turn.message.ok_or("no message to send")?;
        let Held { buffers, targets } = &*self.held;
        let buffer = buffers.get(slot).ok_or(NO_SUCH_BUFFER)?;
        let whole = buffer.sge();
        let sge = Sge { address: whole.address + bytes.start as u64, len: bytes.len() as u32, ..whole };
        let wr = WorkRequest::new(SEND | (index as u64) << QP_SHIFT | slot as u64).signaled();
        let target = targets.get(&index).map(|(handle, qp_num)| UdTarget::new(handle, *qp_num, QKEY));
        let mut batch = self.qps.get_mut(index).ok_or(NO_SUCH_QUEUE_PAIR)?.send_batch()?;
        if self.inline {
            let message = buffer.get(bytes).ok_or(NO_SUCH_BUFFER)?;
            // SAFETY: the bytes are copied in the call; see `add` for the handle.
            unsafe { add(&mut batch, wr, target, Inline(message)) }?;
        } else {
            // SAFETY: the buffer is not written, dropped or posted before its number comes back with the completion, except by
            // the drop of this, which keeps it unless the queues are gone; see `add` for the handle.
            unsafe { add(&mut batch, wr, target, sge) }?;
        }
        batch.post()?;
        turn.send_pending = true;
        turn.receive_pending = true;
        Ok(())
    }

    fn fill_receives(&mut self) -> Result<()> {
        let len = (self.header + self.rules.size) as u32;
        while self.posted < self.rules.rx_depth {
            let slot = self.spare.pop().ok_or("no buffer for a receive")?;
            let sge = Sge { len, ..self.held.buffers.get(slot).ok_or(NO_SUCH_BUFFER)?.sge() };
            // SAFETY: as in `send`; the buffer has that many bytes, which `new` has looked at.
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
    fn timed_out(&self) -> Box<dyn Error> {
        let Rules { iters, timeout, .. } = self.rules;
        let (seconds, sent, received) = (timeout.as_secs(), self.sent, self.received);
        let why = if self.reliable {
            "it may have stopped"
        } else {
            "it has stopped, or a message was lost, which is not sent again"
        };
        format!(
            "no message from the peer within {seconds} s ({sent} sends and {received} receives of {iters} are done): {why}; give \
             both ends the same --iters and --size"
        )
        .into()
    }
}

impl Drop for Game {
    fn drop(&mut self) {
        // SAFETY: both are taken here only, and not used after.
        let (qps, srq) = unsafe { (ManuallyDrop::take(&mut self.qps), ManuallyDrop::take(&mut self.srq)) };
        let left = qps.into_iter().filter_map(|qp| qp.destroy().err()).count();
        if left == 0 && srq.map_or(Ok(()), SharedReceiveQueue::destroy).is_ok() {
            // SAFETY: dropped here only. With the queues their work has ended. Otherwise the device may still use what it names.
            unsafe { ManuallyDrop::drop(&mut self.held) }
        }
    }
}

/// Bytes that a receive has before the message.
pub(crate) fn header(qp_type: QueuePairType) -> usize {
    if qp_type == QueuePairType::UD { Grh::LEN } else { 0 }
}

/// # Safety
/// That of [`SendBatch`], of which the handle of a target is kept: it is of the domain of the queue pair, and goes after it.
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

/// What is needed of a completion.
struct Taken {
    wr_id: u64,
    byte_len: u32,
    qp_num: u32,
}

impl Taken {
    fn of(completion: &WorkCompletion<'_>) -> Result<Self> {
        completion.ok()?;
        let (byte_len, qp_num) = (completion.byte_len().unwrap_or(0), completion.qp_num().unwrap_or(0));
        Ok(Taken { wr_id: completion.wr_id(), byte_len, qp_num })
    }
}
