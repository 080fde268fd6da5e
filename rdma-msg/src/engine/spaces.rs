//! Memory that a receiver offers for messages: *spaces*.
//!
//! For users, a space is an offer. In the other modules, an *offer* is memory that the peer is to read.
//!
//! A packet of [`Class::Space`] tells the peer of a space. The peer writes a message there, and then sends a frame with
//! [`Kind::Written`], which arrives after the bytes. The receiver ends the access of the peer before its program sees the message.
//!
//! Both ends number the spaces in the order of their packets. At most [`SPACES`] of a direction are open.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use rdma_async::{Failed, List, OwnedOperation, Threads};
use rdma_safe::{Buffer, ExposedRegion, Gather, RemoteMemory, SharedBuffer};

use super::Engine;
use crate::error::{Error, Violation};
use crate::wire::{self, Class, HEADER, Kind, MEMORY, WRITTEN};

/// The most spaces of an end that are open.
const SPACES: usize = 16;

/// Entries of the send queue for writes.
pub(crate) const WRITES: u32 = 4;

/// The most parts of memory that one write has.
pub(crate) const WRITE_PARTS: u32 = 4;

/// The most bytes of one write. Heartbeats and credit wait for [`WRITES`] of them at most.
const CHUNK: usize = 1 << 20;

/// The spaces of both ends.
#[derive(Default)]
pub(super) struct Spaces {
    /// Own spaces that the peer does not know yet, in order.
    due: VecDeque<ExposedRegion>,
    /// Own spaces that the peer knows, with their numbers, in order.
    own: VecDeque<(u32, ExposedRegion)>,
    /// Number of tasks that will offer a space.
    reserved: usize,
    /// The number of the next own space.
    next: u32,
    /// Free spaces of the peer, in order.
    free: VecDeque<Space>,
    /// Number of spaces of the peer that have no message yet.
    open: usize,
    /// The number of the next space of the peer.
    next_of_peer: u32,
    /// Writes in flight, in order.
    writes: VecDeque<OwnedOperation<Threads, List>>,
}

/// Memory that the peer has offered for a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    number: u32,
    memory: RemoteMemory,
}

/// A message that is written to memory of the peer.
pub(crate) struct Writing {
    pub(crate) space: Space,
    /// The parts that are not posted yet.
    parts: VecDeque<SharedBuffer>,
    /// The most parts that one write has.
    most_parts: usize,
    /// Length of the message in bytes.
    len: usize,
    /// Bytes that are posted.
    at: usize,
}

impl Writing {
    pub(crate) fn new(space: Space, parts: VecDeque<SharedBuffer>, most_parts: usize) -> Self {
        Writing { space, len: parts.iter().map(|part| part.len()).sum(), parts, most_parts, at: 0 }
    }

    /// The next bytes to write, and their place. `None` at the end of the message.
    fn next_chunk(&mut self) -> Option<(Gather, RemoteMemory)> {
        let (mut list, mut len) = (Gather::new(), 0);
        while list.len() < self.most_parts && len < CHUNK {
            let Some(part) = self.parts.pop_front() else { break };
            let room = CHUNK - len;
            let part = match (part.slice(..room.min(part.len())), part.slice(room.min(part.len())..)) {
                (Ok(head), Ok(rest)) if !rest.is_empty() => {
                    self.parts.push_front(rest);
                    head
                }
                _ => part,
            };
            len += part.len();
            list.push(part);
        }
        let address = self.space.memory.address.wrapping_add(self.at as u64);
        self.at += len;
        (len != 0).then_some((list, RemoteMemory { address, len: len as u64, ..self.space.memory }))
    }
}

impl Spaces {
    /// Whether there is a space that the peer does not know yet.
    pub(super) fn are_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Own spaces that the peer does not know.
    pub(super) fn take_due(&mut self) -> impl Iterator<Item = ExposedRegion> {
        self.due.drain(..)
    }

    /// Own spaces that the peer knows.
    pub(super) fn take_own(&mut self) -> impl Iterator<Item = ExposedRegion> {
        self.own.drain(..).map(|(_, region)| region)
    }

    /// Writes in flight. Their memory is freed when the device no longer uses it.
    pub(super) fn take_all_writes(&mut self) -> impl Iterator<Item = OwnedOperation<Threads, List>> {
        self.writes.drain(..)
    }

    /// The peer has offered memory.
    fn add(&mut self, memory: RemoteMemory) -> Result<(), Violation> {
        if self.open == SPACES {
            return Err(Violation::OffersBeyondLimit);
        }
        self.open += 1;
        self.free.push_back(Space { number: self.next_of_peer, memory });
        self.next_of_peer = self.next_of_peer.wrapping_add(1);
        Ok(())
    }

    /// Takes the oldest free space that has room for `len` bytes.
    fn claim(&mut self, len: usize) -> Option<Space> {
        let at = self.free.iter().position(|space| space.memory.len >= len as u64)?;
        self.free.remove(at)
    }
}

impl Engine {
    /// Whether the peer still needs memory. False after its last message.
    fn needs_space(&self) -> Result<bool, Error> {
        match self.check_open() {
            Err(_) if self.has_left_in_order() => Ok(false),
            open => open.map(|()| !self.incoming.has_end()),
        }
    }

    /// Reserves one of the spaces that may be open. `None` while all are in use; false after the last message of the peer.
    pub(crate) fn try_reserve_space(&mut self) -> Result<Option<bool>, Error> {
        if !self.needs_space()? {
            return Ok(Some(false));
        }
        let Spaces { own, due, reserved, .. } = &mut self.spaces;
        let is_free = own.len() + due.len() + *reserved < SPACES;
        *reserved += usize::from(is_free);
        Ok(is_free.then_some(true))
    }

    /// Uses a reservation to offer memory. Without memory, another task may use it. Returns whether the peer needs it.
    pub(crate) fn offer_space(&mut self, region: Option<ExposedRegion>) -> Result<bool, Error> {
        self.spaces.reserved -= 1;
        self.outgoing.has_progressed = true;
        let needs = self.needs_space();
        match (region, &needs) {
            (Some(region), Ok(true)) => self.spaces.due.push_back(region),
            (unused, _) => self.freed.spaces.extend(unused),
        }
        needs
    }

    /// Tells the peer of memory, as far as there is credit.
    pub(super) fn send_spaces(&mut self) {
        const LEN: usize = HEADER + MEMORY;
        while let Some(memory) = self.spaces.due.front().map(ExposedRegion::remote) {
            let Some(mut buffer) = self.unused_packet() else { return };
            let counts = if buffer.set_len(LEN).is_ok() { self.credit() } else { None };
            let Some(counts) = counts else { return self.outgoing.take_back(Class::Space, buffer) };
            buffer[HEADER..].copy_from_slice(&wire::memory(memory));
            let Spaces { due, own, next, .. } = &mut self.spaces;
            own.extend(due.pop_front().map(|region| (*next, region)));
            *next = next.wrapping_add(1);
            self.counts.statistics.offers_sent += 1;
            self.has_new_room = true;
            self.post(buffer, LEN, Class::Space, counts, 0);
        }
    }

    /// A buffer for a packet that may come before the open one.
    fn unused_packet(&mut self) -> Option<Buffer> {
        let unused = self.outgoing.take_unused();
        unused.or_else(|| self.outgoing.new_packet(self.connection.pool()))
    }

    /// The peer has offered memory.
    pub(super) fn space_received(&mut self, memory: RemoteMemory) -> Result<(), Violation> {
        self.counts.statistics.offers_received += 1;
        self.spaces.add(memory)
    }

    /// Memory of the peer for a message of `len` bytes. The caller writes the message, or returns the space.
    pub(crate) fn claim_space(&mut self, len: usize) -> Option<Space> {
        self.spaces.claim(len)
    }

    /// No message was announced in this memory.
    pub(crate) fn return_space(&mut self, space: Space) {
        let free = &mut self.spaces.free;
        let is_older = |other: &Space| (other.number.wrapping_sub(space.number) as i32) < 0;
        free.insert(free.partition_point(is_older), space);
    }

    /// Writes a message to memory of the peer, or as much of it as there is room for. `None` until the message is announced.
    ///
    /// The caller must be the first in line.
    pub(crate) fn try_write_message(&mut self, writing: &mut Option<Writing>) -> Result<Option<()>, Error> {
        let Some(message) = writing else { return Err(Error::Closed) };
        self.check_message(message.len)?;
        loop {
            self.take_writes();
            if self.spaces.writes.len() >= WRITES as usize {
                return self.ended_or(None);
            }
            let Some((list, remote)) = message.next_chunk() else { break };
            self.post_write(list, remote);
        }
        // The packet of this frame is posted after the writes, so it arrives after the bytes.
        let written = wire::written(message.space.number, message.len as u64);
        let fill = |target: &mut [u8]| target.copy_from_slice(&written);
        self.ended_or(())?;
        if !self.place_cancellation() || !self.place(Kind::Written, WRITTEN, fill) {
            return self.ended_or(None);
        }
        self.outgoing.end_message();
        *writing = None;
        self.spaces.open -= 1;
        self.counts.statistics.messages_sent += 1;
        self.counts.statistics.messages_written += 1;
        self.ended_or(Some(()))
    }

    /// The send queue has entries for all writes, so this one does not wait.
    fn post_write(&mut self, list: Gather, remote: RemoteMemory) {
        let mut write = self.connection.write_list_owned(list, remote);
        match Pin::new(&mut write).poll(&mut Context::from_waker(&self.completions)) {
            Poll::Pending => self.spaces.writes.push_back(write),
            Poll::Ready(result) => self.finish_write(result),
        }
    }

    /// Takes the completions of writes, which come in order.
    pub(super) fn take_writes(&mut self) {
        while let Some(first) = self.spaces.writes.front_mut() {
            let Poll::Ready(result) = Pin::new(first).poll(&mut Context::from_waker(&self.completions)) else { return };
            self.spaces.writes.pop_front();
            self.finish_write(result);
        }
    }

    fn finish_write(&mut self, result: Result<Gather, Failed>) {
        match result {
            Ok(list) => {
                self.has_new_room = true;
                self.freed.lists.push(list);
            }
            Err(failed) => {
                self.freed.lists.extend(failed.list);
                self.fail(failed.error);
            }
        }
    }

    /// The memory to which the peer has written a message of `len` bytes.
    pub(super) fn take_written(&mut self, number: u32, len: u64) -> Result<ExposedRegion, Violation> {
        // Another task may offer memory now.
        self.outgoing.has_progressed = true;
        let own = &mut self.spaces.own;
        let at = own.iter().position(|(of, _)| *of == number);
        let (_, region) = at.and_then(|at| own.remove(at)).ok_or(Violation::NotOffered)?;
        if len > region.len() as u64 {
            self.freed.spaces.push(region);
            return Err(Violation::TooLong);
        }
        Ok(region)
    }

    /// The message in memory of this end is lost, so no later one is received.
    pub(crate) fn lose_written(&mut self, error: Error) {
        self.end(error);
        self.freed.readings.extend(self.reading.take());
        self.freed.packets.extend(self.incoming.clear());
    }
}
