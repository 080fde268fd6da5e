//! One end of the ping-pong, on an endpoint.

use std::error::Error;
use std::time::{Duration, Instant};

use common::Result;
use common::pingpong::{End, Fill, Setup};
use rdma_safe::{Buffer, Completion, ConnectOptions, Endpoint, Operation, QueuePairAddress, WcStatus, Work};

use crate::ticks::Ticks;

/// An end with one message in flight.
///
/// It sends when it has both received a message and completed its last send. It sends the message that it received, from the same
/// buffer.
pub(crate) struct EndpointEnd {
    endpoint: Endpoint,
    /// Buffers that are neither posted nor hold the message.
    free: Vec<Buffer>,
    /// The message, unless its buffer is posted.
    message: Option<Buffer>,
    size: usize,
    iters: u32,
    rx_depth: u32,
    /// Receives that are posted.
    posted: u32,
    is_inline: bool,
    events: bool,
    timeout: Duration,
    sent: u32,
    received: u32,
    send_pending: bool,
    receive_pending: bool,
    ticks: Option<Ticks>,
}

impl EndpointEnd {
    /// Posts the receives. `buffers` are two more than those.
    pub(crate) fn new(
        endpoint: Endpoint,
        buffers: Vec<Buffer>,
        setup: &Setup<'_>,
        ticks: Option<Ticks>,
    ) -> Result<Self> {
        let mut end = EndpointEnd {
            // Send inline if the device grants inline data without a request, as the C program does.
            is_inline: endpoint.queue_pair().capacity().max_inline_data as usize >= setup.size,
            endpoint,
            free: buffers,
            message: None,
            size: setup.size,
            iters: setup.iters,
            rx_depth: setup.rx_depth,
            posted: 0,
            events: setup.peer.events,
            timeout: setup.peer.timeout,
            sent: 0,
            received: 0,
            send_pending: false,
            receive_pending: true,
            ticks,
        };
        end.fill_receives()?;
        Ok(end)
    }

    /// Waits for a completion and handles it.
    #[inline]
    fn step(&mut self) -> Result<()> {
        /// Polls between two reads of the clock. On some machines a read is slow, because it needs a system call.
        const POLLS: u32 = 4096;

        if self.events {
            return match self.endpoint.wait(self.timeout) {
                Ok(mut completion) => self.handle(&mut completion),
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
                    Ok(Some(completion)) => return self.handle(completion),
                    Err(error) => return Err((*error).into()),
                }
            }
            if since.get_or_insert_with(Instant::now).elapsed() >= self.timeout {
                return Err(self.timed_out());
            }
        }
    }

    #[inline]
    fn handle(&mut self, completion: &mut Completion) -> Result<()> {
        if completion.status != WcStatus::SUCCESS {
            return Err(self.failure(completion));
        }
        match completion.operation {
            Operation::Send => {
                self.sent += 1;
                self.send_pending = false;
                if let Some(buffer) = completion.buffer.take() {
                    self.free.push(buffer);
                }
            }
            Operation::Receive => {
                if completion.byte_len as usize != self.size {
                    return Err(self.wrong_size(completion.byte_len));
                }
                if let (Some(ticks), Some(timestamp)) = (&mut self.ticks, completion.timestamp) {
                    ticks.add(timestamp);
                }
                // A message that was sent inline is still here.
                if let Some(sent) = std::mem::replace(&mut self.message, completion.buffer.take()) {
                    self.free.push(sent);
                }
                self.posted -= 1;
                if self.posted <= 1 {
                    self.fill_receives()?;
                }
                self.received += 1;
                self.receive_pending = false;
            }
            other => return Err(format!("a completion of {other:?}, although none was posted").into()),
        }
        if self.sent < self.iters && !self.send_pending && !self.receive_pending {
            self.send()?;
        }
        Ok(())
    }

    #[inline]
    fn send(&mut self) -> Result<()> {
        if self.is_inline {
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
            let buffer = self.free.pop().ok_or("no buffer for a receive")?;
            self.endpoint.receive(buffer)?;
            self.posted += 1;
        }
        Ok(())
    }

    #[cold]
    fn timed_out(&self) -> Box<dyn Error + Send + Sync> {
        let what = match (self.send_pending, self.received) {
            (true, _) => "no ACK of the last message",
            (false, 0) => "no first message from the peer",
            (false, _) => "no message from the peer",
        };
        let (seconds, progress) = (self.timeout.as_secs(), self.progress());
        format!(
            "{what} within {seconds} s ({progress}): the peer has stopped; see its output, and give both ends the same --iters and \
             --size"
        )
        .into()
    }

    #[cold]
    fn failure(&self, completion: &Completion) -> Box<dyn Error + Send + Sync> {
        let Completion { operation, status, vendor_error, .. } = *completion;
        let advice = match (status, operation) {
            // The status of a message that is too long for its receive depends on the device.
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
    fn wrong_size(&self, arrived: u32) -> Box<dyn Error + Send + Sync> {
        let size = self.size;
        format!("a message of {arrived} bytes arrived instead of {size}: give both ends the same --size").into()
    }

    fn progress(&self) -> String {
        let EndpointEnd { sent, received, iters, .. } = self;
        format!("{sent} sends and {received} receives of {iters} are done")
    }
}

impl End for EndpointEnd {
    fn addresses(&self) -> Vec<QueuePairAddress> {
        vec![self.endpoint.address()]
    }

    fn connect(&mut self, _index: usize, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        Ok(self.endpoint.connect_with(remote, options)?)
    }

    fn run(&mut self, fill: Option<Fill<'_>>) -> Result<Duration> {
        if let Some(fill) = fill {
            let mut message = self.free.pop().ok_or("no buffer for the message")?;
            message.set_len(self.size)?;
            fill(&mut message);
            self.message = Some(message);
            self.send()?;
        }
        let start = Instant::now();
        while self.received < self.iters || self.sent < self.iters {
            self.step()?;
        }
        Ok(start.elapsed())
    }

    fn messages(&self) -> Vec<&[u8]> {
        // A message that was sent came back with the completion of its send.
        self.message.as_deref().or(self.free.last().map(|buffer| &**buffer)).into_iter().collect()
    }

    fn statistics(&self) -> Option<String> {
        self.ticks.as_ref().filter(|ticks| !ticks.is_empty()).map(Ticks::to_string)
    }
}
