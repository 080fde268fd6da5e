//! The ping-pong of rdma-safe.

use std::time::Duration;

use rdma_safe::{Buffer, Completion, Endpoint, EndpointKey, EndpointSet};

use crate::{End, Result, SIZE, open, timed};

/// Longest wait for a message.
const LIMIT: Duration = Duration::from_secs(60);

/// An endpoint of rdma-safe: an `Endpoint`, or a member of a set.
trait Ends {
    fn send(&mut self, buffer: Buffer) -> Result<()>;
    fn receive(&mut self, buffer: Buffer) -> Result<()>;
    fn wait(&mut self) -> Result<Completion>;
}

impl Ends for Endpoint {
    fn send(&mut self, buffer: Buffer) -> Result<()> {
        Endpoint::send(self, buffer)?;
        Ok(())
    }

    fn receive(&mut self, buffer: Buffer) -> Result<()> {
        Endpoint::receive(self, buffer)?;
        Ok(())
    }

    fn wait(&mut self) -> Result<Completion> {
        Ok(Endpoint::wait(self, LIMIT)?)
    }
}

impl Ends for (EndpointSet, EndpointKey) {
    fn send(&mut self, buffer: Buffer) -> Result<()> {
        self.0.endpoint(self.1).ok_or("no endpoint")?.send(buffer)?;
        Ok(())
    }

    fn receive(&mut self, buffer: Buffer) -> Result<()> {
        self.0.endpoint(self.1).ok_or("no endpoint")?.receive(buffer)?;
        Ok(())
    }

    fn wait(&mut self) -> Result<Completion> {
        Ok(self.0.wait(LIMIT)?.1)
    }
}

/// Waits for the completion of a send, or for a message.
struct Waiter<E> {
    endpoint: E,
    sent: Option<Buffer>,
    received: Option<Buffer>,
}

impl<E: Ends> Waiter<E> {
    fn wait(&mut self) -> Result<()> {
        let done = self.endpoint.wait()?.ok()?;
        let place = if done.id.is_receive() { &mut self.received } else { &mut self.sent };
        *place = done.buffer;
        Ok(())
    }

    fn send(&mut self, buffer: Buffer) -> Result<Buffer> {
        self.endpoint.send(buffer)?;
        loop {
            if let Some(buffer) = self.sent.take() {
                return Ok(buffer);
            }
            self.wait()?;
        }
    }

    /// Takes a message, and posts its buffer again.
    fn receive(&mut self) -> Result<()> {
        loop {
            if let Some(buffer) = self.received.take() {
                self.endpoint.receive(buffer)?;
                return Ok(());
            }
            self.wait()?;
        }
    }
}

/// An `Endpoint`, which does not share its completion queue.
pub(crate) fn endpoint(end: &End<'_>) -> Result<Duration> {
    let pd = open()?;
    let mut endpoint = Endpoint::builder(&pd).events(true).send_depth(64).recv_depth(64).build()?;
    let peer = end.exchange(endpoint.address())?;
    for _ in 0..64 {
        endpoint.receive(pd.allocate(SIZE)?)?;
    }
    endpoint.connect(&peer)?;
    run(end, endpoint, pd.allocate(SIZE)?)
}

/// An endpoint in a set, as in rdma-async.
pub(crate) fn set(end: &End<'_>) -> Result<Duration> {
    let pd = open()?;
    let mut set = EndpointSet::builder(pd.context(), 128).events(true).build()?;
    let key = Endpoint::builder(&pd).send_depth(64).recv_depth(64).build_in(&mut set)?;
    let mut endpoint = set.endpoint(key).ok_or("no endpoint")?;
    let peer = end.exchange(endpoint.address())?;
    for _ in 0..64 {
        endpoint.receive(pd.allocate(SIZE)?)?;
    }
    endpoint.connect(&peer)?;
    run(end, (set, key), pd.allocate(SIZE)?)
}

fn run(end: &End<'_>, endpoint: impl Ends, buffer: Buffer) -> Result<Duration> {
    let mut waiter = Waiter { endpoint, sent: None, received: None };
    let mut buffer = Some(buffer);
    timed(end, |messages| {
        for _ in 0..messages {
            if !end.is_client {
                waiter.receive()?;
            }
            let sent = buffer.take().ok_or("the buffer is lost")?;
            buffer = Some(waiter.send(sent)?);
            if end.is_client {
                waiter.receive()?;
            }
        }
        Ok(())
    })
}
