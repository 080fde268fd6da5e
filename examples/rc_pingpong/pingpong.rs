//! The ping-pong itself.

use std::error::Error;
use std::time::{Duration, Instant};

use rdma_safe::{Buffer, Completion, Endpoint, Operation, WcStatus, Work};

use crate::ticks::Ticks;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A message bounces between this end and its peer.
///
/// Each end sends when it has both received a message and seen the completion of its last send. What it sends is the
/// message that it received, in the same buffer.
pub(crate) struct PingPong {
    endpoint: Endpoint,
    /// Buffers that are neither posted nor hold the message.
    spare: Vec<Buffer>,
    /// The message while it is here.
    message: Option<Buffer>,
    size: usize,
    iters: u32,
    rx_depth: u32,
    /// Receives that are posted.
    posted: u32,
    inline: bool,
    events: bool,
    timeout: Duration,
    sent: u32,
    received: u32,
    /// What has to complete before the next message is sent.
    send_pending: bool,
    receive_pending: bool,
    ticks: Option<Ticks>,
}

/// How to play.
pub(crate) struct Rules {
    pub(crate) size: usize,
    pub(crate) iters: u32,
    pub(crate) rx_depth: u32,
    pub(crate) events: bool,
    pub(crate) timeout: Duration,
}

/// What came of it.
pub(crate) struct Outcome {
    pub(crate) elapsed: Duration,
    /// The buffer of the last message.
    pub(crate) message: Buffer,
    pub(crate) ticks: Option<Ticks>,
}

impl PingPong {
    /// Posts the receives. There must be two buffers more than receives: one for the message, and one because a message
    /// can arrive before the completion of the last send.
    pub(crate) fn new(endpoint: Endpoint, buffers: Vec<Buffer>, rules: &Rules, ticks: Option<Ticks>) -> Result<Self> {
        // As C does: inline where the device grants it unasked.
        let inline = endpoint.queue_pair().capacity().max_inline_data as usize >= rules.size;
        let mut pingpong = PingPong {
            endpoint,
            spare: buffers,
            message: None,
            size: rules.size,
            iters: rules.iters,
            rx_depth: rules.rx_depth,
            posted: 0,
            inline,
            events: rules.events,
            timeout: rules.timeout,
            sent: 0,
            received: 0,
            send_pending: false,
            receive_pending: true,
            ticks,
        };
        pingpong.fill_receives()?;
        Ok(pingpong)
    }

    pub(crate) fn endpoint(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// Plays to the end. The client `begin`s, with its message.
    pub(crate) fn play(mut self, begin: Option<impl FnOnce(&mut [u8])>) -> Result<Outcome> {
        if let Some(fill) = begin {
            let mut message = self.spare.pop().ok_or("no buffer for the message")?;
            message.set_len(self.size)?;
            fill(&mut message);
            self.message = Some(message);
            self.send()?;
        }
        let start = Instant::now();
        while self.received < self.iters || self.sent < self.iters {
            self.step()?;
        }
        let elapsed = start.elapsed();
        // The last one to be sent came back with its completion.
        let message = self.message.or_else(|| self.spare.pop()).ok_or("no buffer holds the message")?;
        Ok(Outcome { elapsed, message, ticks: self.ticks })
    }

    /// Waits for a completion, and does what follows from it.
    #[inline]
    fn step(&mut self) -> Result<()> {
        /// Between two looks at the clock, which are dear where it is not read in user space.
        const POLLS: u32 = 4096;

        if self.events {
            return match self.endpoint.wait(self.timeout) {
                Ok(mut completion) => self.take(&mut completion),
                Err(rdma_safe::Error::Timeout { .. }) => Err(self.timed_out()),
                Err(error) => Err(error.into()),
            };
        }
        let mut since = None;
        loop {
            for _ in 0..POLLS {
                // Not `?`, which would copy the completion.
                match &mut self.endpoint.poll() {
                    Ok(None) => {}
                    Ok(Some(completion)) => return self.take(completion),
                    Err(error) => return Err((*error).into()),
                }
            }
            if since.get_or_insert_with(Instant::now).elapsed() >= self.timeout {
                return Err(self.timed_out());
            }
        }
    }

    #[inline]
    fn take(&mut self, completion: &mut Completion) -> Result<()> {
        if completion.status != WcStatus::SUCCESS {
            return Err(self.failure(completion));
        }
        match completion.operation {
            Operation::Send => {
                self.sent += 1;
                self.send_pending = false;
                if let Some(buffer) = completion.buffer.take() {
                    self.spare.push(buffer);
                }
            }
            Operation::Receive => {
                if completion.byte_len as usize != self.size {
                    return Err(self.wrong_size(completion.byte_len));
                }
                if let (Some(ticks), Some(timestamp)) = (&mut self.ticks, completion.timestamp) {
                    ticks.add(timestamp);
                }
                // What was sent inline has left its buffer here.
                if let Some(sent) = std::mem::replace(&mut self.message, completion.buffer.take()) {
                    self.spare.push(sent);
                }
                self.posted -= 1;
                if self.posted <= 1 {
                    self.fill_receives()?;
                }
                self.received += 1;
                self.receive_pending = false;
            }
            other => return Err(format!("a completion of {other:?}, which was not posted").into()),
        }
        if self.sent < self.iters && !self.send_pending && !self.receive_pending {
            self.send()?;
        }
        Ok(())
    }

    #[inline]
    fn send(&mut self) -> Result<()> {
        if self.inline {
            let message = self.message.as_ref().ok_or("no message to send")?;
            self.endpoint.post(Work::send_inline(message))?;
        } else {
            let message = self.message.take().ok_or("no message to send")?;
            self.endpoint.post(Work::send(message))?;
        }
        self.send_pending = true;
        self.receive_pending = true;
        Ok(())
    }

    fn fill_receives(&mut self) -> Result<()> {
        while self.posted < self.rx_depth {
            let buffer = self.spare.pop().ok_or("no buffer for a receive")?;
            self.endpoint.receive(buffer)?;
            self.posted += 1;
        }
        Ok(())
    }

    #[cold]
    fn timed_out(&self) -> Box<dyn Error> {
        let what = match (self.send_pending, self.received) {
            (true, _) => "no acknowledgement of the last message",
            (false, 0) => "no first message from the peer",
            (false, _) => "no message from the peer",
        };
        let (seconds, progress) = (self.timeout.as_secs(), self.progress());
        format!(
            "{what} within {seconds} s ({progress}): the peer has stopped or is gone; see what it says, and give both \
             ends the same --iters and --size"
        )
        .into()
    }

    #[cold]
    fn failure(&self, completion: &Completion) -> Box<dyn Error> {
        let Completion { operation, status, vendor_error, .. } = *completion;
        let advice = match (status, operation) {
            // What becomes of a message that is too long for its receive differs from device to device.
            (WcStatus::LOC_LEN_ERR | WcStatus::LOC_QP_OP_ERR, Operation::Receive)
            | (WcStatus::REM_INV_REQ_ERR | WcStatus::REM_OP_ERR, Operation::Send) => "; give both ends the same --size",
            (WcStatus::RETRY_EXC_ERR, _) => "; give both ends the same --mtu",
            _ => "",
        };
        let what = if operation == Operation::Send { "a send" } else { "a receive" };
        let (reason, progress) = (status.explain(), self.progress());
        format!("{what} failed ({progress}): {status} (vendor error {vendor_error:#x}): {reason}{advice}").into()
    }

    #[cold]
    fn wrong_size(&self, arrived: u32) -> Box<dyn Error> {
        let size = self.size;
        format!("a message of {arrived} bytes arrived instead of {size}: give both ends the same --size").into()
    }

    fn progress(&self) -> String {
        let PingPong { sent, received, iters, .. } = self;
        format!("{sent} sends and {received} receives of {iters} are done")
    }
}
