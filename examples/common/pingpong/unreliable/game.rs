//! The ping-pong over the raw door: work is posted by address and key, and this sees to the memory.

use std::error::Error;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::time::{Duration, Instant};

use rdma_safe::{
    AddressHandle, Buffer, CompletionChannel, CompletionQueue, Grh, Inline, Payload, PostError, QueuePair,
    QueuePairType, SendBatch, Sge, UdTarget, WorkCompletion, WorkRequest,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Set in the identifiers of sends; the rest, and those of receives, are numbers of buffers.
const SEND: u64 = 1 << 63;

const NO_SUCH_BUFFER: &str = "a completion names a buffer that there is not";

/// A message bounces between this end and its peer.
///
/// Each end sends when it has both received a message and seen the completion of its last send. What it sends is the
/// message that it received, from the same buffer.
pub(crate) struct Game {
    qp: ManuallyDrop<QueuePair>,
    held: ManuallyDrop<Held>,
    cq: CompletionQueue,
    channel: Option<CompletionChannel>,
    armed: bool,
    rules: Rules,
    /// Bytes before the message in each buffer.
    header: usize,
    inline: bool,
    /// Buffers that are neither posted nor hold the message.
    spare: Vec<usize>,
    /// The buffer of the message while it is here, or of its send.
    message: Option<usize>,
    /// Receives that are posted.
    posted: u32,
    sent: u32,
    received: u32,
    /// What has to complete before the next message is sent.
    send_pending: bool,
    receive_pending: bool,
}

/// What work in flight names: it goes after the queue pair, or not at all.
struct Held {
    buffers: Vec<Buffer>,
    /// Where datagrams go.
    target: Option<(AddressHandle, u32, u32)>,
}

/// How to play.
pub(crate) struct Rules {
    pub(crate) size: usize,
    pub(crate) iters: u32,
    pub(crate) rx_depth: u32,
    pub(crate) timeout: Duration,
}

impl Game {
    /// Posts the receives. There must be two buffers more than receives: one for the message, and one because a message can
    /// arrive before the completion of the last send. Each has room for a message and what comes before it.
    pub(crate) fn new(
        qp: QueuePair,
        cq: CompletionQueue,
        channel: Option<CompletionChannel>,
        buffers: Vec<Buffer>,
        rules: Rules,
    ) -> Result<Self> {
        // As C does: inline where the device grants it unasked.
        let inline = qp.capacity().max_inline_data as usize >= rules.size;
        let header = header(qp.qp_type());
        if !buffers.iter().all(|buffer| buffer.capacity() >= header + rules.size) {
            return Err("a buffer is too short".into());
        }
        let mut game = Game {
            qp: ManuallyDrop::new(qp),
            spare: (0..buffers.len()).collect(),
            held: ManuallyDrop::new(Held { buffers, target: None }),
            cq,
            channel,
            armed: false,
            rules,
            header,
            inline,
            message: None,
            posted: 0,
            sent: 0,
            received: 0,
            send_pending: false,
            receive_pending: true,
        };
        game.fill_receives()?;
        Ok(game)
    }

    pub(crate) fn queue_pair(&mut self) -> &mut QueuePair {
        &mut self.qp
    }

    /// Datagrams go to `qp_num` behind `handle`.
    pub(crate) fn aim(&mut self, handle: AddressHandle, qp_num: u32, qkey: u32) {
        self.held.target = Some((handle, qp_num, qkey));
    }

    /// Plays to the end, and returns the time that it took. The client `begin`s, with its message.
    pub(crate) fn play(&mut self, begin: Option<impl FnOnce(&mut [u8])>) -> Result<Duration> {
        if let Some(fill) = begin {
            let slot = self.spare.pop().ok_or("no buffer for the message")?;
            let message = self.bytes();
            fill(self.held.buffers.get_mut(slot).and_then(|buffer| buffer.get_mut(message)).ok_or(NO_SUCH_BUFFER)?);
            self.message = Some(slot);
            self.send()?;
        }
        let start = Instant::now();
        while self.received < self.rules.iters || self.sent < self.rules.iters {
            self.step()?;
        }
        Ok(start.elapsed())
    }

    /// The message that arrived last, once the game is over.
    pub(crate) fn message(&self) -> Option<&[u8]> {
        let slot = self.message.filter(|_| !self.send_pending)?;
        self.held.buffers.get(slot)?.get(self.bytes())
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

    fn take(&mut self, Taken { wr_id, byte_len }: Taken) -> Result<()> {
        if wr_id & SEND != 0 {
            self.sent += 1;
            self.send_pending = false;
            let slot = (wr_id & !SEND) as usize;
            // Unless an answer has taken its place.
            if self.message != Some(slot) {
                self.spare.push(slot);
            }
        } else {
            let (arrived, size) = ((byte_len as usize).saturating_sub(self.header), self.rules.size);
            if arrived != size {
                return Err(format!(
                    "a message of {arrived} bytes arrived instead of {size}: give both ends the same --size"
                )
                .into());
            }
            let before = self.message.replace(wr_id as usize);
            // A buffer that is still being sent comes back with its completion.
            self.spare.extend(before.filter(|_| !self.send_pending));
            self.posted -= 1;
            if self.posted <= 1 {
                self.fill_receives()?;
            }
            self.received += 1;
            self.receive_pending = false;
        }
        if self.sent < self.rules.iters && !self.send_pending && !self.receive_pending {
            self.send()?;
        }
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        let slot = self.message.ok_or("no message to send")?;
        let bytes = self.bytes();
        let Held { buffers, target } = &*self.held;
        let buffer = buffers.get(slot).ok_or(NO_SUCH_BUFFER)?;
        let whole = buffer.sge();
        let sge = Sge { address: whole.address + bytes.start as u64, len: bytes.len() as u32, ..whole };
        let wr = WorkRequest::new(SEND | slot as u64).signaled();
        let target = target.as_ref().map(|(handle, qp_num, qkey)| UdTarget::new(handle, *qp_num, *qkey));
        let mut batch = self.qp.send_batch()?;
        if self.inline {
            let message = buffer.get(bytes).ok_or(NO_SUCH_BUFFER)?;
            // SAFETY: the bytes are copied in the call; see `add` for the handle.
            unsafe { add(&mut batch, wr, target, Inline(message)) }?;
        } else {
            // SAFETY: the buffer is not touched, dropped or posted before its number comes back with the completion, except by
            // the drop of this, which keeps it unless the queue pair is gone.
            unsafe { add(&mut batch, wr, target, sge) }?;
        }
        batch.post()?;
        self.send_pending = true;
        self.receive_pending = true;
        Ok(())
    }

    fn fill_receives(&mut self) -> Result<()> {
        let len = (self.header + self.rules.size) as u32;
        while self.posted < self.rules.rx_depth {
            let slot = self.spare.pop().ok_or("no buffer for a receive")?;
            let sge = Sge { len, ..self.held.buffers.get(slot).ok_or(NO_SUCH_BUFFER)?.sge() };
            // SAFETY: as in `send`; and the buffer has that many bytes, which `new` has looked at.
            unsafe { self.qp.receive(slot as u64, sge) }?;
            self.posted += 1;
        }
        Ok(())
    }

    #[cold]
    fn timed_out(&self) -> Box<dyn Error> {
        let Rules { iters, timeout, .. } = self.rules;
        let (seconds, sent, received) = (timeout.as_secs(), self.sent, self.received);
        format!(
            "no message from the peer within {seconds} s ({sent} sends and {received} receives of {iters} are done): it has \
             stopped, or a message was lost, which is not sent again; give both ends the same --iters and --size"
        )
        .into()
    }
}

impl Drop for Game {
    fn drop(&mut self) {
        // SAFETY: taken here only, and not used after.
        let qp = unsafe { ManuallyDrop::take(&mut self.qp) };
        if qp.destroy().is_ok() {
            // SAFETY: dropped here only. With the queue pair its work has ended. Otherwise the device may still use it.
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
}

impl Taken {
    fn of(completion: &WorkCompletion<'_>) -> Result<Self> {
        completion.ok()?;
        Ok(Taken { wr_id: completion.wr_id(), byte_len: completion.byte_len().unwrap_or(0) })
    }
}
