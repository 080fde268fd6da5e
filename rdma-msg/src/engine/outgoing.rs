//! Sending: frames are copied into packets, and packets are sent when there is credit.
//!
//! A packet is sent at once while fewer than [`FEW`] are in flight. Otherwise, messages gather in the open packet until it is
//! full or an earlier packet is acknowledged. So single messages do not wait, and many small ones share packets. The rest of a long
//! message is also sent when a task begins to wait: for a message, which may be the answer, or for acknowledgements.

use std::collections::VecDeque;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use rdma_async::{OwnedOperation, SendOne, Threads};
use rdma_pool::Budget;
use rdma_safe::{Buffer, ReadableRegion};

use super::open::{Open, full_len, part_len};
use super::{Engine, Reserved};
use crate::error::Error;
use crate::flow::Counts;
use crate::parts::Parts;
use crate::payload::Payload;
use crate::wire::{self, Class, FRAME, HEADER, Hello, Kind, LONG, MEMORY, frame_len};

/// Packets in flight from which on messages gather in the open packet, unless it is [urgent](Outgoing::make_urgent).
const FEW: u32 = 2;

/// Buffers for control packets, answers and heartbeats.
pub(crate) const CONTROL_BUFFERS: usize = 3;

/// A part of a message is at least this long, in bytes. The last one may be shorter.
const MIN_PART: usize = 64;

/// The sending half.
pub(super) struct Outgoing {
    /// Length of the longest packet in bytes.
    packet: usize,
    /// Length at which a packet is full, unless it was [extended](Open::extend).
    full: usize,
    /// Longest message that the peer accepts, in bytes.
    pub(super) max_message: usize,
    pub(super) open: Option<Open>,
    /// Whether the packet before the open one was full.
    follows_full: bool,
    /// Whether the peer has sent data since this end last did, so that it probably waits for data. True at first.
    pub(super) is_answered: bool,
    /// Whether the open packet is to be sent with more packets in flight than usual.
    is_urgent: bool,
    /// Packets in flight from which on also an urgent packet waits.
    few_if_urgent: u32,
    /// Buffers that are not in use.
    spare: Vec<Buffer>,
    /// Buffers for control packets and answers that are not in flight.
    control: Vec<Buffer>,
    /// Buffers for data packets that exist.
    buffers: u32,
    /// Buffers for data packets that may exist.
    max_buffers: u32,
    /// Packets in the send queue, in order.
    pub(super) sending: VecDeque<Sent>,
    /// Whether the first one has the engine's waker. Otherwise nothing runs when it completes.
    pub(super) is_first_awaited: bool,
    /// Memory that the peer was offered and has not read.
    offers: VecDeque<Parts<ReadableRegion>>,
    /// Whether the parts so far are to be cancelled.
    cancel_due: bool,
    /// Whether this end is to say that it sends no more.
    finish_due: bool,
    has_finished: bool,
    /// Whether the packet that says so has nothing else.
    is_end_alone: bool,
    /// Whether messages were discarded by an abort.
    is_lossy: bool,
    /// Whether a packet was acknowledged since the last look.
    pub(super) has_progressed: bool,
}

/// A packet in the send queue.
pub(super) struct Sent {
    pub(super) operation: OwnedOperation<Threads, SendOne>,
    pub(super) class: Class,
    /// Messages that end in it.
    pub(super) messages: u32,
    /// Number of data packets up to this one.
    pub(super) number: u32,
    pub(super) is_acknowledged: bool,
}

/// How far a message was sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    /// Bytes that were copied into packets.
    pub(crate) offset: usize,
    /// Whether its length was sent, so that its parts have to follow.
    pub(crate) has_begun: bool,
}

impl Outgoing {
    pub(super) fn new([own, peer]: [&Hello; 2], sends: u32, reserved: Reserved) -> Self {
        let packet = own.packet.min(peer.packet) as usize;
        Outgoing {
            packet,
            full: full_len(packet),
            max_message: usize::try_from(peer.message).unwrap_or(usize::MAX),
            open: None,
            follows_full: false,
            is_answered: true,
            is_urgent: false,
            // A reader task may wait again and again. So half of the send queue stays free for full packets.
            few_if_urgent: FEW.max(sends / 2),
            spare: vec![reserved.packet],
            control: reserved.control.into(),
            offers: VecDeque::new(),
            buffers: 1,
            // One for each packet in flight, and the open one.
            max_buffers: sends + 1,
            sending: VecDeque::with_capacity(sends as usize + 1),
            is_first_awaited: false,
            cancel_due: false,
            finish_due: false,
            has_finished: false,
            is_end_alone: false,
            is_lossy: false,
            has_progressed: false,
        }
    }

    pub(super) fn has_finished(&self) -> bool {
        self.has_finished
    }

    pub(super) fn has_offers(&self) -> bool {
        !self.offers.is_empty()
    }

    /// The memory of all offers that are not answered.
    pub(super) fn take_offers(&mut self) -> impl Iterator<Item = ReadableRegion> {
        self.offers.drain(..).flatten()
    }

    /// Whether something waits to be sent, or a control packet is in flight, whose buffer the next one needs.
    pub(super) fn has_due(&self) -> bool {
        let finishes = self.finish_due && !self.has_finished;
        self.has_frames() || self.cancel_due || finishes || self.control.len() < CONTROL_BUFFERS
    }

    /// Whether the open packet has frames.
    pub(super) fn has_frames(&self) -> bool {
        self.open.as_ref().is_some_and(Open::has_frames)
    }

    /// A task begins to wait. What it waits for may need the rest of a long message.
    pub(super) fn make_urgent(&mut self) {
        // Short messages gather all the same: the connection of an RPC library waits for the next message all the time.
        self.is_urgent = self.follows_full && self.has_frames();
    }

    /// The buffer of a packet that was sent.
    pub(super) fn take_back(&mut self, class: Class, buffer: Buffer) {
        match class {
            Class::Data | Class::Waiver | Class::Space => self.spare.push(buffer),
            Class::Control | Class::Answer | Class::Heartbeat | Class::Abort => self.control.push(buffer),
        }
    }

    /// A buffer for another packet. `None` if all are in use, or if there is no memory.
    pub(super) fn new_packet(&mut self, pool: &rdma_pool::Pool) -> Option<Buffer> {
        if let Some(buffer) = self.spare.pop() {
            return Some(buffer);
        }
        if self.buffers >= self.max_buffers {
            return None;
        }
        let buffer = pool.try_get(Budget::Sends, self.packet).ok()?;
        self.buffers += 1;
        Some(buffer)
    }

    /// Takes the buffer of a packet that is not in use.
    pub(super) fn take_unused(&mut self) -> Option<Buffer> {
        match self.has_frames() {
            true => self.spare.pop(),
            false => self.open.take().map(|open| open.buffer).or_else(|| self.spare.pop()),
        }
    }

    /// Whether it has buffers that an idle connection does not need, or packets whose completion nobody awaits.
    pub(super) fn may_have_surplus(&self) -> bool {
        self.spare.len() > usize::from(self.open.is_none()) || (!self.sending.is_empty() && !self.is_first_awaited)
    }

    /// Takes these buffers.
    pub(super) fn take_surplus(&mut self) -> impl Iterator<Item = Buffer> {
        let needed = usize::from(self.open.is_none()).min(self.spare.len());
        self.buffers -= (self.spare.len() - needed) as u32;
        self.spare.drain(needed..)
    }

    /// Adds a frame, whose payload `fill` writes. The open packet must have space for it.
    fn add(&mut self, kind: Kind, len: usize, fill: impl FnOnce(&mut [u8])) {
        if let Some(open) = &mut self.open {
            open.add(kind, len, fill);
        }
    }

    /// The open packet has the end of a long message.
    pub(super) fn end_message(&mut self) {
        if let Some(open) = &mut self.open {
            open.messages += 1;
        }
    }

    /// Space in the open packet in bytes. `None` if there is no buffer for a packet.
    fn space(&mut self, pool: &rdma_pool::Pool) -> Option<usize> {
        if self.open.is_none() {
            self.open = Some(Open::new(self.new_packet(pool)?, self.full)?);
        }
        self.open.as_ref().map(Open::space)
    }
}

impl Engine {
    /// Space in the open packet in bytes. `None` if there is no buffer for a packet.
    fn space(&mut self) -> Option<usize> {
        let space = self.outgoing.space(self.connection.pool());
        if space.is_some() {
            return space;
        }
        // Earlier packets may have completed.
        self.take_done();
        if self.ended.is_some() { None } else { self.outgoing.space(self.connection.pool()) }
    }

    /// Sends a message, or as much of it as there is room for. `None` until the message is complete.
    ///
    /// The caller must be the first in line.
    pub(crate) fn try_send(&mut self, payload: &Payload<'_>, progress: &mut Progress) -> Result<Option<()>, Error> {
        let (len, capacity) = (payload.len(), self.outgoing.full - HEADER);
        self.check_message(len)?;
        if !self.place_cancellation() {
            return Ok(None);
        }
        let is_long = frame_len(len) > capacity && (progress.has_begun || !self.extend_open(len));
        loop {
            let Some(space) = self.space() else { return Ok(None) };
            let needed = match (is_long, progress.has_begun) {
                (false, _) => frame_len(len),
                (true, false) => frame_len(LONG),
                (true, true) => FRAME + (len - progress.offset).min(MIN_PART),
            };
            if needed > space {
                if !self.send_open() {
                    return Ok(None);
                }
                continue;
            }
            if !is_long {
                self.outgoing.add(Kind::Whole, len, |target| payload.copy(0, target));
                self.counts.statistics.bytes_copied += len as u64;
                self.counts.statistics.messages_sent += 1;
                return Ok(Some(()));
            }
            if !progress.has_begun {
                let total = (len as u64).to_be_bytes();
                self.outgoing.add(Kind::Long, LONG, |target| target.copy_from_slice(&total));
                progress.has_begun = true;
                continue;
            }
            let part = self.part_len(len - progress.offset, space);
            self.outgoing.add(Kind::Part, part, |target| payload.copy(progress.offset, target));
            self.counts.statistics.bytes_copied += part as u64;
            progress.offset += part;
            if progress.offset == len {
                self.outgoing.end_message();
                self.counts.statistics.messages_sent += 1;
                return Ok(Some(()));
            }
            let is_divided = part < space - FRAME;
            if is_divided && !self.send_open() {
                return Ok(None);
            }
        }
    }

    /// Length of the next part, if `left` bytes are still to be sent and the open packet has `space`: [`part_len`].
    ///
    /// If a packet is on its way, the peer has enough to do. Without credit, nothing would be sent sooner.
    fn part_len(&self, left: usize, space: usize) -> usize {
        let may_divide = self.flow.data_in_flight() == 0 && self.flow.room() != 0;
        part_len(left, self.outgoing.full - space, self.outgoing.full, may_divide)
    }

    /// Extends the open packet for a message of `len` bytes that the peer probably waits for, if the packet can be sent at once.
    /// Returns whether the message fits.
    fn extend_open(&mut self, len: usize) -> bool {
        if self.space().is_none() {
            return false;
        }
        let in_flight = self.flow.data_in_flight();
        let is_awaited = in_flight == 0 || (self.outgoing.is_answered && in_flight < FEW);
        let Outgoing { open, packet, .. } = &mut self.outgoing;
        is_awaited && self.flow.room() != 0 && open.as_mut().is_some_and(|open| open.extend(len, *packet))
    }

    /// Offers the memory of a message for the peer to read. `None` if there is no room.
    ///
    /// The caller must be the first in line.
    pub(crate) fn try_offer(&mut self, memory: &mut Option<Parts<ReadableRegion>>) -> Result<Option<()>, Error> {
        let Some(parts) = memory else { return Err(Error::Closed) };
        self.check_message(parts.iter().map(|region| region.len()).sum())?;
        if !self.place_cancellation() || !self.flow.can_offer() {
            return Ok(None);
        }
        let fill = |target: &mut [u8]| {
            let each = target.chunks_exact_mut(MEMORY).zip(parts.iter());
            each.for_each(|(target, region)| target.copy_from_slice(&wire::memory(region.remote())));
        };
        if !self.place(Kind::Offer, parts.len() * MEMORY, fill) {
            return Ok(None);
        }
        self.flow.offer();
        self.outgoing.offers.extend(memory.take());
        self.counts.statistics.messages_sent += 1;
        self.counts.offers_made += 1;
        Ok(Some(()))
    }

    /// Whether these many offers are answered.
    fn try_answered(&self, offers: u64) -> Result<Option<()>, Error> {
        if self.counts.offers_answered >= offers {
            return Ok(Some(()));
        }
        self.ended_or(None)
    }

    /// Frees the memory of offers that the peer has answered.
    pub(super) fn take_answers(&mut self) {
        while self.outgoing.offers.len() > self.flow.offers_open() as usize {
            self.freed.regions.extend(self.outgoing.offers.pop_front().into_iter().flatten());
            self.counts.offers_answered += 1;
            self.counts.statistics.messages_acknowledged += 1;
            self.outgoing.has_progressed = true;
        }
    }

    /// Copies bytes of a stream into packets while there is room. Returns their number; `None` without room.
    ///
    /// The caller must be the first in line.
    #[cfg_attr(not(any(feature = "futures", feature = "tokio")), allow(dead_code, reason = "see `Stream`"))]
    pub(crate) fn try_write(&mut self, payload: &Payload<'_>) -> Result<Option<usize>, Error> {
        self.check_open()?;
        let mut written = 0;
        while written < payload.len() {
            let Some(space) = self.space() else { break };
            if space <= FRAME {
                if !self.send_open() {
                    break;
                }
                continue;
            }
            let left = payload.len() - written;
            let is_extended = FRAME + left > space && self.extend_open(left);
            let len = if is_extended { left } else { self.part_len(left, space) };
            self.outgoing.add(Kind::Whole, len, |target| payload.copy(written, target));
            written += len;
            self.counts.statistics.messages_sent += 1;
            let is_divided = written < payload.len() && len < space - FRAME;
            if is_divided && !self.send_open() {
                break;
            }
        }
        self.counts.statistics.bytes_copied += written as u64;
        Ok((written != 0).then_some(written))
    }

    /// Says that this end sends no more. `None` until that was added to a packet.
    pub(crate) fn try_finish(&mut self) -> Result<Option<()>, Error> {
        if self.outgoing.has_finished {
            return Ok(Some(()));
        }
        if self.has_left_in_order() && self.has_all_acknowledged() {
            // The peer has left in order, and misses nothing.
            self.outgoing.has_finished = true;
            return Ok(Some(()));
        }
        self.check_open()?;
        if self.spaces.are_due() || !self.place_cancellation() || !self.place(Kind::End, 0, |_| {}) {
            return Ok(None);
        }
        self.outgoing.has_finished = true;
        self.outgoing.is_end_alone = self.outgoing.open.as_ref().is_some_and(|open| open.used == HEADER + FRAME);
        Ok(Some(()))
    }

    /// Says that this end sends no more, once there is room for that.
    pub(crate) fn finish_later(&mut self) {
        self.outgoing.finish_due = true;
    }

    /// Number of packets of all classes that were posted.
    pub(crate) fn posted(&self) -> u64 {
        self.counts.posted
    }

    /// Whether these many packets have completed, or the channel has ended.
    pub(crate) fn try_drain(&self, posted: u64) -> Result<Option<()>, Error> {
        Ok((self.counts.completed >= posted || self.ended.is_some()).then_some(()))
    }

    /// Numbers of packets and of offers that have to be acknowledged for everything that was sent so far.
    pub(crate) fn added(&self) -> [u64; 2] {
        [self.counts.statistics.packets_sent + u64::from(self.outgoing.has_frames()), self.counts.offers_made]
    }

    /// Whether the peer has ended the connection after it had sent everything.
    pub(super) fn has_left_in_order(&self) -> bool {
        matches!(self.ended, Some(Error::Disconnected)) && self.incoming.has_end()
    }

    /// Whether these many packets and offers are acknowledged.
    pub(crate) fn try_flush(&self, [packets, offers]: [u64; 2]) -> Result<Option<()>, Error> {
        let missing = packets.saturating_sub(self.counts.packets_acknowledged);
        let is_last = packets == self.added()[0];
        match &self.ended {
            None if missing != 0 => Ok(None),
            // A peer that has left in order does not miss the packet that only says that this end has finished.
            Some(_) if missing == 1 && is_last && self.outgoing.is_end_alone && self.has_left_in_order() => {
                self.try_answered(offers)
            }
            Some(ended) if missing != 0 || self.outgoing.is_lossy => Err(ended.clone()),
            _ => self.try_answered(offers),
        }
    }

    /// Ends the connection with a code and a reason. Unsent messages are discarded.
    pub(crate) fn abort(&mut self, code: u32, reason: &str) {
        self.take_completions();
        if self.ended.is_some() {
            return;
        }
        if let Some(open) = self.outgoing.open.take() {
            self.outgoing.is_lossy = open.has_frames();
            self.outgoing.spare.push(open.buffer);
        }
        let payload = wire::abort(code, reason);
        let is_placed = self.place(Kind::Abort, payload.len(), |target| target.copy_from_slice(&payload));
        if !(is_placed && self.send_open()) {
            self.abort_without_credit(&payload);
        }
        self.end(Error::Closed);
    }

    /// Sends an abort as a control packet, without credit or room for data. If no memory is free, the peer does not learn the
    /// reason.
    fn abort_without_credit(&mut self, payload: &[u8]) {
        let len = HEADER + frame_len(payload.len());
        let Ok(mut buffer) = self.connection.pool().try_get(Budget::Control, len) else { return };
        let Some(counts) = self.flow.abort() else { return self.freed.buffers.push(buffer) };
        buffer[HEADER..HEADER + FRAME].copy_from_slice(&wire::frame(Kind::Abort, payload.len() as u32));
        buffer[HEADER + FRAME..len].copy_from_slice(payload);
        self.post(buffer, len, Class::Abort, counts, 0);
    }

    /// A task gives up a message of which parts were sent.
    pub(crate) fn cancel(&mut self) {
        self.outgoing.cancel_due = true;
    }

    /// Whether a message of this length can be sent.
    pub(super) fn check_message(&self, len: usize) -> Result<(), Error> {
        self.check_open()?;
        let max = self.outgoing.max_message;
        if len > max { Err(Error::TooLong { len, max }) } else { Ok(()) }
    }

    pub(super) fn check_open(&self) -> Result<(), Error> {
        match &self.ended {
            Some(ended) => Err(ended.clone()),
            None if self.outgoing.has_finished => Err(Error::Closed),
            None => Ok(()),
        }
    }

    /// Adds a frame to the open packet or to a new one. False if there is no room.
    pub(super) fn place(&mut self, kind: Kind, len: usize, fill: impl FnOnce(&mut [u8])) -> bool {
        loop {
            match self.space() {
                Some(space) if frame_len(len) <= space => break,
                Some(_) if self.send_open() => {}
                _ => return false,
            }
        }
        self.outgoing.add(kind, len, fill);
        true
    }

    /// Adds a cancellation if one is due. False if there is no room for it.
    pub(super) fn place_cancellation(&mut self) -> bool {
        if self.outgoing.cancel_due && self.place(Kind::Cancelled, 0, |_| {}) {
            self.outgoing.cancel_due = false;
            self.has_new_room = true;
        }
        !self.outgoing.cancel_due
    }

    /// Sends the open packet if it is time, and an update if one is due.
    pub(super) fn send_due(&mut self) {
        self.send_spaces();
        if self.outgoing.finish_due {
            let _ = self.try_finish();
        } else {
            self.place_cancellation();
        }
        let few = if self.outgoing.is_urgent { self.outgoing.few_if_urgent } else { FEW };
        if self.flow.data_in_flight() < few {
            self.send_open();
        }
        if let Some(counts) = self.flow.answer() {
            self.post_control(Class::Answer, counts);
        }
        if let Some(counts) = self.due_heartbeat() {
            self.post_control(Class::Heartbeat, counts);
        }
        if let Some(counts) = self.flow.update() {
            self.counts.statistics.updates_sent += 1;
            self.post_control(Class::Control, counts);
        }
    }

    /// Sends a packet without frames. There is a buffer for each class, of which one packet is in flight.
    fn post_control(&mut self, class: Class, counts: Counts) {
        if let Some(buffer) = self.outgoing.control.pop() {
            self.post(buffer, HEADER, class, counts, 0);
        }
    }

    /// Sends the open packet if it has frames and there is credit.
    pub(super) fn send_open(&mut self) -> bool {
        if !self.outgoing.has_frames() {
            return false;
        }
        let Some(counts) = self.credit() else { return false };
        let Some(open) = mem::take(&mut self.outgoing.open) else { return false };
        (self.outgoing.follows_full, self.outgoing.is_urgent) = (open.space() <= FRAME, false);
        let Open { buffer, used, messages } = open;
        self.counts.statistics.packets_sent += 1;
        self.has_new_room = true;
        self.post(buffer, used.min(self.outgoing.packet), Class::Data, counts, messages);
        self.ended.is_none()
    }

    /// Uses credit for a packet of the window. `None` without credit or room.
    pub(super) fn credit(&mut self) -> Option<Counts> {
        if self.flow.room() == 0 {
            // Earlier packets may have completed.
            self.take_done();
            if self.ended.is_some() {
                return None;
            }
        }
        self.flow.send()
    }

    pub(super) fn post(&mut self, mut buffer: Buffer, len: usize, class: Class, counts: Counts, messages: u32) {
        self.counts.posted += 1;
        self.outgoing.is_answered &= class != Class::Data;
        buffer[..HEADER].copy_from_slice(&wire::header(class, counts));
        // A packet is never longer than its buffer.
        let _ = buffer.set_len(len);
        let mut operation = self.connection.send_owned(buffer);
        match Pin::new(&mut operation).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => {
                let number = self.flow.sent();
                self.outgoing.is_first_awaited &= !self.outgoing.sending.is_empty();
                self.outgoing.sending.push_back(Sent { operation, class, messages, number, is_acknowledged: false });
            }
            Poll::Ready(Ok(buffer)) => {
                self.counts.completed += 1;
                self.flow.completed(class);
                self.outgoing.take_back(class, buffer);
            }
            Poll::Ready(Err(failed)) => {
                self.counts.completed += 1;
                self.flow.completed(class);
                self.freed.buffers.extend(failed.buffer);
                // Earlier packets may have completed.
                self.take_completions();
                self.fail(failed.error);
            }
        }
    }
}
