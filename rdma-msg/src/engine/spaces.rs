//! Memory that a receiver offers for messages: *spaces*.
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
use rdma_safe::{ExposedRegion, Gather, RemoteMemory};

use super::Engine;
use crate::error::{Error, Violation};
use crate::wire::{self, Class, HEADER, Kind, PART, WRITTEN};

/// The most spaces of an end that are open.
const SPACES: usize = 16;

/// Entries of the send queue for writes of messages.
pub(crate) const WRITES: u32 = 4;

/// The most parts of memory of a message that is written.
pub(crate) const WRITE_PARTS: u32 = 4;

/// The spaces of both ends.
#[derive(Default)]
pub(super) struct Spaces {
    /// Those that the peer was told of, in order, with their numbers.
    own: VecDeque<(u32, ExposedRegion)>,
    /// Number of tasks that are going to offer one.
    reserved: usize,
    /// The number of the next one.
    next: u32,
    /// Those of the peer that are free, in order.
    free: VecDeque<Space>,
    /// Number of those of the peer to which no message was written.
    open: usize,
    /// The number of the next one of the peer.
    next_of_peer: u32,
    /// Messages that are being written, in order.
    writes: VecDeque<OwnedOperation<Threads, List>>,
}

/// Memory that the peer has offered for a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    number: u32,
    memory: RemoteMemory,
}

impl Spaces {
    /// Messages that are being written. Their memory is freed when the device no longer uses it.
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

    /// The peer has written a message of `len` bytes.
    fn take(&mut self, number: u32, len: u64) -> Result<ExposedRegion, Violation> {
        let at = self.own.iter().position(|(of, _)| *of == number).ok_or(Violation::NotOffered)?;
        let (_, region) = self.own.remove(at).ok_or(Violation::NotOffered)?;
        if len > region.len() as u64 { Err(Violation::TooLong) } else { Ok(region) }
    }
}

impl Engine {
    /// Reserves one of the spaces that may be open. `None` if none is left.
    pub(crate) fn try_reserve_space(&mut self) -> Result<Option<()>, Error> {
        self.check_open()?;
        let is_free = self.spaces.own.len() + self.spaces.reserved < SPACES;
        self.spaces.reserved += usize::from(is_free);
        Ok(is_free.then_some(()))
    }

    /// A task no longer needs its reservation.
    pub(crate) fn release_space(&mut self) {
        self.spaces.reserved -= 1;
        self.outgoing.has_progressed = true;
    }

    /// Tells the peer of memory. `None` if there is no room for the packet.
    ///
    /// The caller must be the first in line, and have a reservation.
    pub(crate) fn try_offer_space(&mut self, region: &mut Option<ExposedRegion>) -> Result<Option<()>, Error> {
        self.check_open()?;
        let Some(memory) = region.as_ref().map(ExposedRegion::remote) else { return Err(Error::Closed) };
        let Some((mut buffer, counts)) = self.start_packet() else { return Ok(None) };
        buffer[HEADER..HEADER + PART].copy_from_slice(&wire::memory(memory));
        let Spaces { own, next, .. } = &mut self.spaces;
        own.extend(region.take().map(|region| (*next, region)));
        *next = next.wrapping_add(1);
        self.counts.statistics.offers_sent += 1;
        self.post(buffer, HEADER + PART, Class::Space, counts, 0);
        Ok(Some(()))
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

    /// Nothing was written to this memory.
    pub(crate) fn return_space(&mut self, space: Space) {
        self.spaces.free.push_front(space);
    }

    /// Writes a message to memory of the peer. `None` if there is no room; otherwise, the space and the list are taken.
    ///
    /// The caller must be the first in line.
    pub(crate) fn try_write_message(
        &mut self,
        space: &mut Option<Space>,
        list: &mut Option<Gather>,
    ) -> Result<Option<()>, Error> {
        self.check_open()?;
        let (len, max) = (list.as_ref().map_or(0, Gather::byte_len), self.outgoing.max_message());
        if len > max {
            return Err(Error::TooLong { len, max });
        }
        let Some(Space { number, memory }) = *space else { return Err(Error::Closed) };
        self.take_writes();
        if self.spaces.writes.len() >= WRITES as usize || !self.place_cancellation() {
            return Ok(None);
        }
        let written = wire::written(number, len as u64);
        if !self.place(Kind::Written, WRITTEN, |target| target.copy_from_slice(&written)) {
            return Ok(None);
        }
        self.outgoing.end_message();
        *space = None;
        self.spaces.open -= 1;
        // It is posted at once, since the queue has entries for all writes. The packet of the frame is posted later.
        let list = list.take().unwrap_or_default();
        let remote = RemoteMemory { len: len as u64, ..memory };
        let mut write = self.connection.write_list_owned(list, remote);
        match Pin::new(&mut write).poll(&mut Context::from_waker(&self.completions)) {
            Poll::Pending => self.spaces.writes.push_back(write),
            Poll::Ready(result) => self.finish_write(result),
        }
        self.counts.statistics.messages_sent += 1;
        self.counts.statistics.messages_written += 1;
        Ok(Some(()))
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

    /// The message that the peer has written.
    pub(super) fn take_written(&mut self, number: u32, len: u64) -> Result<ExposedRegion, Violation> {
        // Another task may offer memory now.
        self.outgoing.has_progressed = true;
        self.spaces.take(number, len)
    }
}
