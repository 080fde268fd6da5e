//! Reading messages from the memory of the peer.
//!
//! The receiver decides when: it reads one message at a time, when a task asks for it and there is memory. A message of up to
//! [`IN_PLACE`] bytes is read into one buffer, which becomes the message. A longer one is read in chunks, and copied.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use rdma_async::{Connection, OwnedOperation, ReadOne, Threads};
use rdma_pool::Budget;
use rdma_safe::{Buffer, RemoteMemory};

use super::Engine;
use crate::error::Violation;
use crate::long::Long;
use crate::message::Message;

/// Entries of the send queue for reads.
pub(crate) const READS: u32 = 1;

/// Length of the longest message that is read into one buffer.
const IN_PLACE: u64 = 4 << 20;

/// Length of a read of a longer message.
const CHUNK: u64 = 1 << 20;

/// Length of a read if the pool has no memory for a longer one.
const SHORTEST: usize = 4096;

/// A message that is being read.
pub(super) struct Reading {
    memory: RemoteMemory,
    /// Bytes that were read before.
    at: u64,
    /// Whether the whole message is read into one buffer.
    is_in_place: bool,
    /// The bytes of a message that is read in chunks.
    whole: Long,
    step: Step,
}

type Memory = Pin<Box<dyn Future<Output = rdma_pool::Result<Buffer>> + Send>>;

enum Step {
    /// Waits for memory of the pool.
    Memory(Memory),
    Read(OwnedOperation<Threads, ReadOne>),
    Done(Message),
}

impl Reading {
    pub(super) fn is_done(&self) -> bool {
        matches!(self.step, Step::Done(_))
    }

    /// Reads the next part into `buffer`.
    fn start(&mut self, connection: &Connection, mut buffer: Buffer) {
        let len = (self.memory.len - self.at).min(buffer.capacity() as u64);
        // It does not exceed the capacity.
        let _ = buffer.set_len(len as usize);
        let memory = RemoteMemory { address: self.memory.address.wrapping_add(self.at), len, ..self.memory };
        self.step = Step::Read(connection.read_owned(buffer, memory));
    }

    /// A part was read into `buffer`. Returns the buffer if it is no longer used.
    fn finish(&mut self, connection: &Connection, buffer: Buffer) -> Option<Buffer> {
        if self.is_in_place {
            self.step = Step::Done(Message::read(buffer));
            return None;
        }
        self.whole.extend_from_slice(&buffer);
        self.at += buffer.len() as u64;
        if self.at < self.memory.len {
            self.start(connection, buffer);
            return None;
        }
        self.step = Step::Done(Message::assembled(std::mem::take(&mut self.whole)));
        Some(buffer)
    }
}

impl Engine {
    /// Starts to read a message.
    pub(super) fn begin_reading(&mut self, memory: RemoteMemory) -> Result<(), Violation> {
        let pool = self.connection.pool().clone();
        let is_short = memory.len <= IN_PLACE;
        let mut len = if is_short { memory.len } else { CHUNK } as usize;
        let wait: Memory = loop {
            match pool.try_get(Budget::Bulk, len) {
                Ok(buffer) => break Box::pin(std::future::ready(Ok(buffer))),
                // Reads in shorter chunks. Memory for the shortest is set apart, so messages that wait to be read do not keep it.
                Err(_) if len > SHORTEST => len = (len / 2).max(SHORTEST),
                Err(_) => break Box::pin(async move { pool.get_async(Budget::Bulk, len).await }),
            }
        };
        let is_in_place = is_short && len as u64 == memory.len;
        let whole = if is_in_place { Some(Long::default()) } else { Long::with_capacity(memory.len as usize) };
        let has_memory = whole.is_some();
        let reading =
            Reading { memory, at: 0, is_in_place, whole: whole.unwrap_or_default(), step: Step::Memory(wait) };
        if !has_memory {
            self.freed.readings.push(reading);
            return Err(Violation::TooLong);
        }
        self.reading = Some(reading);
        self.advance_reading();
        Ok(())
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
                        self.freed.buffers.extend(reading.finish(connection, buffer));
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
