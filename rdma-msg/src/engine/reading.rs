//! Reading messages from the memory of the peer.
//!
//! The receiver decides when: it reads one message at a time, when a task asks for it and there is memory. When a task takes a
//! message, it also starts to read the next one, of up to [`READ_AHEAD`] bytes. A message of up to [`IN_PLACE`] bytes is read into
//! one buffer, which becomes the message. A longer one is read in chunks, and copied.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::{mem, vec};

use rdma_async::{Connection, OwnedOperation, ReadOne, Threads};
use rdma_pool::Budget;
use rdma_safe::{Buffer, RemoteMemory};

use super::Engine;
use super::incoming::Taken;
use crate::error::{Error, Violation};
use crate::long::Long;
use crate::message::Message;
use crate::parts::Parts;

/// Entries of the send queue for reads.
pub(crate) const READS: u32 = 1;

/// Length of the longest message that is read into one buffer.
const IN_PLACE: u64 = 4 << 20;

/// Length of the longest message that is read before a task asks for it.
const READ_AHEAD: u64 = 1 << 20;

/// Length of a read of a longer message.
const CHUNK: u64 = 1 << 20;

/// Length of a read if the pool has no memory for a longer one.
const SHORTEST: usize = 4096;

/// A message that is being read.
pub(super) struct Reading {
    /// The rest of the current part.
    part: RemoteMemory,
    /// The parts after it.
    later: vec::IntoIter<RemoteMemory>,
    target: Target,
    step: Step,
}

/// Where the bytes go.
enum Target {
    /// One buffer for the message of `len` bytes, in three pieces: `read`, the one that is being read, and `rest`.
    InPlace { len: usize, read: Option<Buffer>, rest: Option<Buffer> },
    /// The bytes of a message that is read in chunks.
    Copy(Long),
}

type Memory = Pin<Box<dyn Future<Output = rdma_pool::Result<Buffer>> + Send>>;

enum Step {
    /// Waits for memory of the pool.
    Memory(Memory),
    Read(OwnedOperation<Threads, ReadOne>),
    Done(Message),
}

impl Reading {
    fn new(parts: Parts<RemoteMemory>, target: Target, memory: Memory) -> Self {
        Reading { part: parts.first, later: parts.rest.into_iter(), target, step: Step::Memory(memory) }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.step, Step::Done(_))
    }

    /// Reads the next bytes into `buffer`.
    fn start(&mut self, connection: &Connection, mut buffer: Buffer) {
        let len = self.part.len.min(buffer.capacity() as u64);
        if let Target::InPlace { rest, .. } = &mut self.target {
            if self.later.len() != 0 {
                // The buffer has room for the other parts, too.
                if let Ok(head) = buffer.split_to(len as usize) {
                    *rest = Some(mem::replace(&mut buffer, head));
                }
            }
        }
        // It does not exceed the capacity.
        let _ = buffer.set_len(len as usize);
        self.step = Step::Read(connection.read_owned(buffer, RemoteMemory { len, ..self.part }));
    }

    /// Bytes were read into `buffer`. Returns the buffer if it is no longer used.
    fn finish(&mut self, connection: &Connection, buffer: Buffer) -> rdma_safe::Result<Option<Buffer>> {
        let read = buffer.len() as u64;
        self.part.address = self.part.address.wrapping_add(read);
        self.part.len = self.part.len.saturating_sub(read);
        if self.part.len == 0 {
            self.part = self.later.next().unwrap_or(self.part);
        }
        let is_last = self.part.len == 0;
        let unused = match &mut self.target {
            Target::Copy(whole) => {
                whole.extend_from_slice(&buffer);
                if is_last {
                    self.step = Step::Done(Message::assembled(mem::take(whole)));
                }
                Some(buffer)
            }
            Target::InPlace { len, read, rest } => {
                let mut whole = match read.take() {
                    Some(before) => before.join(buffer)?,
                    None => buffer,
                };
                if is_last {
                    whole.set_len(*len)?;
                    self.step = Step::Done(Message::read(whole));
                } else {
                    *read = Some(whole);
                }
                rest.take()
            }
        };
        if is_last {
            return Ok(unused);
        }
        if let Some(buffer) = unused {
            self.start(connection, buffer);
        }
        Ok(None)
    }
}

impl Engine {
    /// Starts to read a message from these parts of the peer's memory.
    pub(super) fn begin_reading(&mut self, parts: Parts<RemoteMemory>) -> Result<(), Error> {
        let pool = self.connection.pool().clone();
        let whole = parts.bytes();
        if whole <= IN_PLACE {
            if let Ok(buffer) = pool.try_get(Budget::Bulk, whole as usize) {
                self.read_in_place(parts, buffer);
                return Ok(());
            }
        }
        let Some(bytes) = Long::with_capacity(whole as usize) else {
            return Err(Error::OutOfMemory { len: whole as usize });
        };
        let mut len = whole.min(CHUNK) as usize;
        let memory: Memory = loop {
            match pool.try_get(Budget::Bulk, len) {
                Ok(buffer) => break Box::pin(std::future::ready(Ok(buffer))),
                // Reads in shorter chunks. Memory for the shortest is set apart, so messages that wait to be read do not keep it.
                Err(_) if len > SHORTEST => len = (len / 2).max(SHORTEST),
                Err(_) => break Box::pin(async move { pool.get_async(Budget::Bulk, len).await }),
            }
        };
        self.reading = Some(Reading::new(parts, Target::Copy(bytes), memory));
        self.advance_reading();
        Ok(())
    }

    /// Starts to read the next message, if it has at most [`READ_AHEAD`] bytes and the pool has much memory left.
    ///
    /// A program may not receive it for a long time, so all messages that are read ahead use at most half of the memory.
    pub(super) fn read_ahead(&mut self) -> Result<(), Error> {
        if self.reading.is_some() || self.ended.is_some() {
            return Ok(());
        }
        let Some(len) = self.incoming.next_offer_len().filter(|len| *len <= READ_AHEAD) else { return Ok(()) };
        let pool = self.connection.pool();
        let common = pool.statistics().common();
        if common.used + len as usize > common.limit / 2 {
            return Ok(());
        }
        // Not `Bulk`, of which memory is set apart for messages that tasks wait for.
        let Ok(buffer) = pool.try_get(Budget::Receives, len as usize) else { return Ok(()) };
        match self.take_offer() {
            Ok(parts) => self.read_in_place(parts, buffer),
            Err(error) => {
                // Dropping it can wake tasks.
                self.freed.buffers.push(buffer);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes the next message, which is to be read from the memory of the peer.
    fn take_offer(&mut self) -> Result<Parts<RemoteMemory>, Error> {
        let Taken::Offer(parts) = self.incoming.take()? else { return Err(Violation::UnknownKind.into()) };
        self.flow.offer_received()?;
        Ok(parts)
    }

    /// Starts to read a message into one buffer.
    fn read_in_place(&mut self, parts: Parts<RemoteMemory>, buffer: Buffer) {
        let target = Target::InPlace { len: parts.bytes() as usize, read: None, rest: None };
        self.reading = Some(Reading::new(parts, target, Box::pin(std::future::ready(Ok(buffer)))));
        self.advance_reading();
    }

    /// The message that was read, and the number of its bytes that were copied.
    pub(super) fn take_read(&mut self) -> Option<(Message, usize)> {
        let Step::Done(message) = self.reading.take_if(|reading| reading.is_done())?.step else { return None };
        let copied = if message.is_in_place() { 0 } else { message.len() };
        Some((message, copied))
    }

    pub(super) fn advance_reading(&mut self) {
        let error = loop {
            let Engine { reading: Some(reading), connection, completions, .. } = self else { return };
            let context = &mut Context::from_waker(completions);
            match &mut reading.step {
                Step::Memory(memory) => match memory.as_mut().poll(context) {
                    Poll::Pending => return,
                    Poll::Ready(Ok(buffer)) => reading.start(connection, buffer),
                    Poll::Ready(Err(error)) => break error.into(),
                },
                Step::Read(read) => match Pin::new(read).poll(context) {
                    Poll::Pending => return,
                    Poll::Ready(Ok(buffer)) => {
                        match reading.finish(connection, buffer) {
                            Ok(unused) => self.freed.buffers.extend(unused),
                            Err(error) => break error.into(),
                        }
                        if reading.is_done() {
                            return self.flow.offer_done();
                        }
                    }
                    Poll::Ready(Err(failed)) => {
                        self.freed.buffers.extend(failed.buffer);
                        break failed.error;
                    }
                },
                Step::Done(_) => return,
            }
        };
        // A message is lost, so later ones must not be delivered.
        self.freed.readings.extend(self.reading.take());
        self.fail(error);
        self.freed.packets.extend(self.incoming.clear());
    }
}
