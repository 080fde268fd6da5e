//! A connection for messages and chunks of a file.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use common::Result;
use rdma_safe::cm::{Cause, Connection};
use rdma_safe::{Access, Buffer, Endpoint, EndpointBuilder, Operation, ProtectionDomain, RemoteMemory, WcStatus, Work};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::message::{MESSAGE, SLOTS};

/// Longest wait for the peer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Messages that can be in flight at a time, besides those that answer a chunk.
const MESSAGES: u32 = 4;

/// Sets the depths and the access of an endpoint.
pub(crate) fn endpoint(builder: EndpointBuilder<'_>) -> EndpointBuilder<'_> {
    let depth = SLOTS + 2 * MESSAGES;
    builder.send_depth(2 * depth).recv_depth(depth).events(true).peer_access(Access::REMOTE_WRITE)
}

/// Posts a receive for each message and chunk that can be in flight. Call it before the peer can send.
pub(crate) fn post_receives(endpoint: &mut Endpoint) -> Result<()> {
    for inbox in buffers(endpoint.pd(), SLOTS + MESSAGES)? {
        endpoint.receive(inbox)?;
    }
    Ok(())
}

/// Buffers for messages, in one registration.
fn buffers(pd: &ProtectionDomain, count: u32) -> Result<Vec<Buffer>> {
    Ok(pd.allocate(count as usize * MESSAGE)?.into_chunks(MESSAGE)?)
}

/// A message or completion.
pub(crate) enum Arrival {
    /// A message of the peer.
    Message(Vec<u8>),
    /// The peer has written `len` bytes to a slot.
    Chunk { slot: u32, len: u32 },
    /// A chunk was written to the peer, and its buffer is free.
    Written(Buffer),
}

/// A connection for messages and chunks of a file.
pub(crate) struct Link {
    connection: Connection,
    outboxes: Vec<Buffer>,
    /// Arrivals during the wait for an outbox.
    arrived: VecDeque<Arrival>,
}

impl Link {
    /// Wraps a connection that was made with [`endpoint`] and [`post_receives`].
    pub(crate) fn new(connection: Connection) -> Result<Self> {
        let outboxes = buffers(connection.pd(), SLOTS + MESSAGES)?;
        Ok(Link { connection, outboxes, arrived: VecDeque::new() })
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut outbox = loop {
            match self.outboxes.pop() {
                Some(outbox) => break outbox,
                // Limits the memory for a peer that sends but does not receive.
                None if self.arrived.len() > (SLOTS + MESSAGES) as usize => {
                    return Err("the peer sends too many messages without receiving".into());
                }
                None => {
                    let arrived = self.pump()?;
                    self.arrived.extend(arrived);
                }
            }
        };
        outbox.fill_from(&serde_json::to_vec(message)?)?;
        self.connection.send(outbox)?;
        Ok(())
    }

    /// Writes a chunk to the peer's memory, with its slot as immediate data.
    pub(crate) fn write(&mut self, chunk: Buffer, target: RemoteMemory, slot: u32) -> Result<()> {
        self.connection.post(Work::write(chunk, target).imm(slot))?;
        Ok(())
    }

    /// Waits for the next message or completion.
    pub(crate) fn next(&mut self) -> Result<Arrival> {
        loop {
            if let Some(arrived) = self.arrived.pop_front() {
                return Ok(arrived);
            }
            let arrived = self.pump()?;
            self.arrived.extend(arrived);
        }
    }

    /// Waits for the next message. Anything else is an error.
    pub(crate) fn message<M: DeserializeOwned>(&mut self) -> Result<M> {
        match self.next()? {
            Arrival::Message(message) => parse(&message),
            Arrival::Chunk { .. } | Arrival::Written(_) => Err("a chunk of the file arrived out of turn".into()),
        }
    }

    /// Waits for one completion. `None` for the send of a message.
    fn pump(&mut self) -> Result<Option<Arrival>> {
        let done = self.connection.wait(TIMEOUT).map_err(|error| match error.connect_cause() {
            Some(Cause::Disconnected) => CLOSED.into(),
            _ => crate::Failure::from(error),
        })?;
        if done.status == WcStatus::WR_FLUSH_ERR {
            return Err(CLOSED.into());
        }
        let done = done.ok().map_err(|failed| self.connection.explain(&failed).to_string())?;
        let (operation, imm, len) = (done.operation, done.imm(), done.byte_len);
        let buffer = done.buffer.ok_or("the completion returned no buffer")?;
        Ok(match operation {
            Operation::Receive => {
                let message = buffer.to_vec();
                self.connection.receive(buffer)?;
                Some(Arrival::Message(message))
            }
            Operation::ReceiveWrite => {
                self.connection.receive(buffer)?;
                Some(Arrival::Chunk { slot: imm.ok_or("a chunk without its slot")?, len })
            }
            Operation::Write => Some(Arrival::Written(buffer)),
            _ => {
                self.outboxes.push(buffer);
                None
            }
        })
    }

    /// Closes the connection.
    pub(crate) fn close(self) -> Result<()> {
        self.connection.disconnect()?;
        Ok(())
    }

    /// Waits for the peer to close the connection, as it does after the last message.
    ///
    /// Gives up when the peer has sent more than could be in flight.
    pub(crate) fn await_close(mut self) {
        let start = Instant::now();
        let mut in_flight = 0..2 * (SLOTS + MESSAGES);
        while in_flight.next().is_some() && start.elapsed() < TIMEOUT && self.pump().is_ok() {}
    }
}

const CLOSED: &str = "the peer has closed the connection";

/// Decodes a message.
pub(crate) fn parse<M: DeserializeOwned>(bytes: &[u8]) -> Result<M> {
    serde_json::from_slice(bytes).map_err(|error| format!("a message is not one of this program: {error}").into())
}
