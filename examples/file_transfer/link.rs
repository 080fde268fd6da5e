//! A connection over which messages and pieces of a file go.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rdma_safe::cm::{Cause, Connection};
use rdma_safe::{Access, Buffer, Endpoint, EndpointBuilder, Operation, ProtectionDomain, RemoteMemory, WcStatus, Work};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Result;
use crate::message::{MESSAGE, PLACES};

/// How long a peer may have nothing to say.
const PATIENCE: Duration = Duration::from_secs(30);

/// Messages that can be on their way at a time, beside those that answer a piece.
const MESSAGES: u32 = 4;

/// An end of a connection as this program needs it, in which the receives are that the peer's first messages need.
pub(crate) fn endpoint(builder: EndpointBuilder<'_>) -> EndpointBuilder<'_> {
    let depth = PLACES + 2 * MESSAGES;
    builder.send_depth(2 * depth).recv_depth(depth).events(true).peer_access(Access::REMOTE_WRITE)
}

/// Posts a receive for each message and piece that can be on its way.
pub(crate) fn post_receives(endpoint: &mut Endpoint) -> Result<()> {
    for inbox in messages(endpoint.pd(), PLACES + MESSAGES)? {
        endpoint.receive(inbox)?;
    }
    Ok(())
}

/// Room for messages, of one registration.
fn messages(pd: &ProtectionDomain, count: u32) -> Result<Vec<Buffer>> {
    Ok(pd.allocate(count as usize * MESSAGE)?.into_chunks(MESSAGE)?)
}

/// What comes from a link.
pub(crate) enum Arrival {
    /// A message of the peer.
    Message(Vec<u8>),
    /// The peer has written so many bytes to that place.
    Piece { place: u32, len: u32 },
    /// A piece is with the peer, and its buffer is free.
    Written(Buffer),
}

/// A connection over which messages and pieces of a file go.
pub(crate) struct Link {
    connection: Connection,
    outboxes: Vec<Buffer>,
    /// Came while an outbox was waited for.
    arrived: VecDeque<Arrival>,
}

impl Link {
    /// Of a connection with [`endpoint`] and [`post_receives`].
    pub(crate) fn new(connection: Connection) -> Result<Self> {
        let outboxes = messages(connection.pd(), PLACES + MESSAGES)?;
        Ok(Link { connection, outboxes, arrived: VecDeque::new() })
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut outbox = loop {
            match self.outboxes.pop() {
                Some(outbox) => break outbox,
                // Who takes nothing and sends on would fill the memory.
                None if self.arrived.len() > (PLACES + MESSAGES) as usize => {
                    return Err("the peer sends more than it may before it takes what was sent to it".into());
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

    /// Writes a piece to the peer's memory and says which place it is in.
    pub(crate) fn write(&mut self, piece: Buffer, target: RemoteMemory, place: u32) -> Result<()> {
        self.connection.post(Work::write(piece, target).imm(place))?;
        Ok(())
    }

    /// What comes next.
    pub(crate) fn next(&mut self) -> Result<Arrival> {
        loop {
            if let Some(arrived) = self.arrived.pop_front() {
                return Ok(arrived);
            }
            let arrived = self.pump()?;
            self.arrived.extend(arrived);
        }
    }

    /// The next message, where nothing else can come.
    pub(crate) fn message<M: DeserializeOwned>(&mut self) -> Result<M> {
        match self.next()? {
            Arrival::Message(message) => parse(&message),
            Arrival::Piece { .. } | Arrival::Written(_) => Err("a piece of the file came out of turn".into()),
        }
    }

    /// One completion, and what it says if it says anything.
    fn pump(&mut self) -> Result<Option<Arrival>> {
        let done = self.connection.wait(PATIENCE).map_err(|error| match error.connect_cause() {
            Some(Cause::Disconnected) => ENDED.into(),
            _ => crate::Failure::from(error),
        })?;
        if done.status == WcStatus::WR_FLUSH_ERR {
            return Err(ENDED.into());
        }
        let done = done.ok().map_err(|failed| self.connection.explain(&failed).to_string())?;
        let (operation, imm, len) = (done.operation, done.imm(), done.byte_len);
        let buffer = done.buffer.ok_or("a completion without its buffer")?;
        Ok(match operation {
            Operation::Receive => {
                let message = buffer.to_vec();
                self.connection.receive(buffer)?;
                Some(Arrival::Message(message))
            }
            Operation::ReceiveWrite => {
                self.connection.receive(buffer)?;
                Some(Arrival::Piece { place: imm.ok_or("a piece without its place")?, len })
            }
            Operation::Write => Some(Arrival::Written(buffer)),
            _ => {
                self.outboxes.push(buffer);
                None
            }
        })
    }

    /// Ends the connection, when all is said.
    pub(crate) fn hang_up(self) -> Result<()> {
        self.connection.disconnect()?;
        Ok(())
    }

    /// Waits for the peer to end the connection, which it does when it has got the last message. For one that sends on instead of
    /// what was on its way, no longer.
    pub(crate) fn await_hang_up(mut self) {
        let start = Instant::now();
        let mut under_way = 0..2 * (PLACES + MESSAGES);
        while under_way.next().is_some() && start.elapsed() < PATIENCE && self.pump().is_ok() {}
    }
}

const ENDED: &str = "the peer has ended the connection";

/// The message in these bytes.
pub(crate) fn parse<M: DeserializeOwned>(bytes: &[u8]) -> Result<M> {
    serde_json::from_slice(bytes).map_err(|error| format!("a message that is none of this program: {error}").into())
}
