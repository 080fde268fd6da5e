//! Receiving: packets wait until a task takes their messages.
//!
//! A packet occupies its receive until its messages are dropped, and the parts of a long message until a task takes them. So a
//! program that does not receive holds back its peer, and the memory for it is bounded by the window, one message, and the next one
//! if it is being read ahead.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use rdma_async::Receiver;
use rdma_safe::RemoteMemory;

use super::Engine;
use crate::assembly::{Assembly, Meaning, aborted};
use crate::error::{Error, Violation};
use crate::message::{Arrival, CopyBudget, Message, Packet, Part};
use crate::parts::Parts;
use crate::shared::Shared;
use crate::wire::{self, Frame, HEADER, Hello, Kind};

/// The receiving half.
pub(super) struct Incoming {
    pub(super) receiver: Receiver,
    /// Whether the connection has nothing more.
    pub(super) is_deaf: bool,
    packets: VecDeque<Arrived>,
    /// Packets whose frames were all taken.
    spent: Vec<Arrived>,
    assembly: Assembly,
    /// Why the peer has aborted the connection, if it had no credit for data.
    aborted: Option<Error>,
    /// For messages of a program that keeps many.
    copies: CopyBudget,
    channel: Weak<Shared>,
}

/// A packet whose frames are being taken.
pub(super) struct Arrived {
    packet: Shareable,
    /// The next frame.
    at: usize,
}

/// A packet, behind an `Arc` if messages share it.
enum Shareable {
    Alone(Packet),
    Shared(Arc<Packet>),
}

/// What the next frames are.
#[derive(Debug)]
pub(super) enum Taken {
    /// Also the number of its bytes that were copied.
    Message(Message, usize),
    /// A message is to be read from the memory of the peer.
    Offer(Parts<RemoteMemory>),
    /// A message was written to memory that this end has offered: its number, and the length of the message.
    Written(u32, u64),
    /// The peer sends no more.
    End,
    /// Nothing has arrived.
    Nothing,
}

impl Arrived {
    /// The result of `f` for the first frame that was not taken for which it has one. Also passes the packet.
    fn find<R>(&self, f: impl Fn(Frame, &[u8]) -> Option<R>) -> Option<R> {
        let (bytes, mut at) = (self.packet.bytes(), self.at);
        while let Ok(Some(frame)) = wire::decode_frame(bytes, at) {
            if let Some(found) = f(frame, bytes) {
                return Some(found);
            }
            at = frame.end();
        }
        None
    }
}

impl Shareable {
    /// Whether no message is in it.
    fn is_unused(&self) -> bool {
        match self {
            Shareable::Alone(_) => true,
            Shareable::Shared(packet) => Arc::strong_count(packet) == 1,
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Shareable::Alone(packet) => packet.bytes(),
            Shareable::Shared(packet) => packet.bytes(),
        }
    }
}

impl Incoming {
    pub(super) fn new(receiver: Receiver, own: &Hello, copies: CopyBudget, channel: Weak<Shared>) -> Self {
        Incoming {
            receiver,
            is_deaf: false,
            packets: VecDeque::with_capacity(own.window as usize),
            spent: Vec::new(),
            assembly: Assembly::new(own.message),
            aborted: None,
            copies,
            channel,
        }
    }

    pub(super) fn push(&mut self, packet: rdma_async::Message) {
        let packet = Shareable::Alone(Packet::new(packet, &self.channel));
        self.packets.push_back(Arrived { packet, at: HEADER });
    }

    /// The peer has aborted the connection. Messages that arrived before come first.
    pub(super) fn abort(&mut self, reason: Error) {
        self.aborted = Some(reason);
    }

    /// Whether there is something for a reader.
    pub(super) fn has_more(&self) -> bool {
        !self.packets.is_empty() || self.assembly.has_ended() || self.aborted.is_some()
    }

    /// Whether the peer has sent its last message, also if no task has taken it yet.
    pub(super) fn has_end(&self) -> bool {
        let is_end = |frame: Frame, _: &[u8]| (frame.kind == Kind::End).then_some(());
        // No data follows it, so it is in the last packet.
        self.assembly.has_ended() || self.packets.back().and_then(|last| last.find(is_end)).is_some()
    }

    /// Whether a task has learned that the peer sends no more.
    pub(super) fn has_ended(&self) -> bool {
        self.assembly.has_ended()
    }

    /// The first packet if messages share it, the place of its next frame, and the maximum length of a whole message in bytes.
    /// `None` within a long message or after the end.
    pub(super) fn first_shared(&self) -> Option<(&Arc<Packet>, usize, usize)> {
        let Arrived { packet: Shareable::Shared(packet), at } = self.packets.front()? else { return None };
        Some((packet, *at, self.assembly.max_whole()?))
    }

    /// The frames before `at` of the first packet were taken.
    pub(super) fn skip_to(&mut self, at: usize) {
        if let Some(first) = self.packets.front_mut() {
            first.at = at;
        }
    }

    /// Discards everything. Returns the packets to drop.
    pub(super) fn clear(&mut self) -> impl Iterator<Item = Arrived> {
        self.is_deaf = true;
        self.assembly.clear();
        self.spent.drain(..).chain(self.packets.drain(..))
    }

    /// The reason why the peer has aborted the connection, if it has said so.
    pub(super) fn find_abort(&self) -> Option<Error> {
        let is_abort = |frame: Frame| frame.kind == Kind::Abort;
        let in_order = self.find(|frame, bytes| is_abort(frame).then(|| aborted(payload(bytes, frame)).ok())).flatten();
        in_order.or_else(|| self.aborted.clone())
    }

    /// The result of `f` for the first frame that was not taken for which it has one. Also passes the packet.
    fn find<R>(&self, f: impl Fn(Frame, &[u8]) -> Option<R>) -> Option<R> {
        self.packets.iter().find_map(|arrived| arrived.find(&f))
    }

    /// Frees the first packet if all its frames were taken.
    fn finish_packet(&mut self) {
        let is_spent = self.packets.front().is_some_and(|first| first.at >= first.packet.bytes().len());
        if is_spent {
            self.spent.extend(self.packets.pop_front());
        }
    }

    /// The next frame. `None` if there is none.
    fn next_frame(&mut self) -> Result<Option<Frame>, Violation> {
        while let Some(first) = self.packets.front_mut() {
            if let Some(frame) = wire::decode_frame(first.packet.bytes(), first.at)? {
                first.at = frame.end();
                return Ok(Some(frame));
            }
            self.spent.extend(self.packets.pop_front());
        }
        Ok(None)
    }

    /// Length in bytes of the next message, if it is to be read from the memory of the peer.
    pub(super) fn next_offer_len(&self) -> Option<u64> {
        let len = |frame: Frame, bytes: &[u8]| match frame.kind {
            Kind::Offer => wire::decode_offer(payload(bytes, frame), u64::MAX).ok().map(|parts| parts.bytes()),
            _ => None,
        };
        self.find(|frame, bytes| Some(len(frame, bytes))).flatten()
    }

    /// The message of a frame of the first packet, in place.
    fn in_place(&mut self, Frame { start, len, .. }: Frame) -> Option<Message> {
        let part = Part { start, len };
        let Arrived { packet, at } = self.packets.pop_front()?;
        if at >= packet.bytes().len() {
            return Some(match packet {
                Shareable::Alone(packet) => Message::only(packet, part),
                Shareable::Shared(packet) => Message::of(packet, part),
            });
        }
        let packet = match packet {
            Shareable::Alone(packet) => Arc::new(packet),
            Shareable::Shared(packet) => packet,
        };
        self.packets.push_front(Arrived { packet: Shareable::Shared(packet.clone()), at });
        Some(Message::of(packet, part))
    }

    /// The next message.
    pub(super) fn take(&mut self) -> Result<Taken, Error> {
        loop {
            let Some(frame) = self.next_frame()? else {
                if let Some(reason) = &self.aborted {
                    return Err(reason.clone());
                }
                return Ok(if self.assembly.has_ended() { Taken::End } else { Taken::Nothing });
            };
            let bytes = self.packets.front().map_or(&[][..], |first| payload(first.packet.bytes(), frame));
            match self.assembly.frame(frame.kind, bytes)? {
                Meaning::Nothing => {}
                Meaning::Message => {
                    if let Some(message) = self.in_place(frame) {
                        return Ok(Taken::Message(message, 0));
                    }
                }
                Meaning::Offer(parts) => {
                    self.finish_packet();
                    return Ok(Taken::Offer(parts));
                }
                Meaning::Written(number, len) => {
                    self.finish_packet();
                    return Ok(Taken::Written(number, len));
                }
                Meaning::Long(whole) => {
                    self.finish_packet();
                    let copied = whole.len();
                    return Ok(Taken::Message(Message::assembled(whole), copied));
                }
            }
        }
    }
}

impl Engine {
    /// The next message, after the one that is being read, and the number of its bytes that were copied. The outer `None` means
    /// that nothing has arrived, the inner one that the peer sends no more.
    fn take(&mut self) -> Result<Option<Option<(Arrival, usize)>>, Error> {
        if self.reading.is_none() {
            match self.incoming.take()? {
                Taken::Message(message, copied) => {
                    return Ok(Some(Some((self.spare_receive(message).into(), copied))));
                }
                Taken::Written(number, len) => {
                    let region = self.take_written(number, len)?;
                    return Ok(Some(Some((Arrival::Written(region, len as usize), 0))));
                }
                Taken::Offer(parts) => {
                    self.flow.offer_received()?;
                    self.begin_reading(parts)?;
                }
                Taken::End => return Ok(Some(None)),
                Taken::Nothing => return Ok(None),
            }
        }
        Ok(self.take_read().map(|(message, copied)| Some((message.into(), copied))))
    }

    /// Takes the next message, or learns that the peer sends no more. The outer `None` means that nothing has arrived.
    pub(crate) fn try_receive(&mut self) -> Result<Option<Option<Arrival>>, Error> {
        let taken = self.take();
        if matches!(taken, Ok(Some(Some(_)))) {
            // The message that was taken comes before the error.
            if let Err(error) = self.read_ahead() {
                self.end_receiving(error);
            }
        }
        self.freed.packets.append(&mut self.incoming.spent);
        if self.incoming.has_ended() {
            self.flow.peer_finished();
            // Tasks that wait to offer memory need not offer it.
            self.outgoing.has_progressed = true;
        }
        match taken {
            Ok(None) => self.ended_or(None),
            Ok(Some(None)) => Ok(Some(None)),
            Ok(Some(Some((arrival, copied)))) => {
                self.counts.statistics.messages_received += 1;
                self.counts.statistics.bytes_copied += copied as u64;
                Ok(Some(Some(arrival)))
            }
            Err(error) => {
                self.end_receiving(error.clone());
                Err(error)
            }
        }
    }

    /// Ends the channel and discards the packets that have arrived.
    fn end_receiving(&mut self, error: Error) {
        self.freed.packets.extend(self.incoming.clear());
        if self.ended.is_some() {
            // This error explains more than the end of the connection.
            self.ended = Some(error.clone());
        }
        self.end(error);
    }
}

impl Engine {
    /// Whether the program keeps messages of all packets, so that the peer cannot send.
    pub(super) fn is_starved(&self) -> bool {
        self.kept() >= self.flow.window()
    }

    /// Packets of which the program keeps messages.
    fn kept(&self) -> u32 {
        let spent = self.freed.packets.iter().filter(|arrived| arrived.packet.is_unused()).count();
        self.flow.unreturned().saturating_sub((self.incoming.packets.len() + spent) as u32)
    }

    /// Whether the program keeps so many messages that its peer could soon no longer send.
    pub(super) fn keeps_many(&self) -> bool {
        self.kept() > (self.flow.window() / 2).max(1)
    }

    /// Copies a message if the program keeps many.
    fn spare_receive(&mut self, message: Message) -> Message {
        if !message.is_in_packet() || !self.keeps_many() {
            return message;
        }
        let Some(copy) = self.incoming.copies.copy(&message) else { return message };
        self.counts.statistics.messages_copied += 1;
        self.counts.statistics.bytes_copied += copy.len() as u64;
        self.freed.messages.push(message);
        copy
    }
}

fn payload(packet: &[u8], frame: Frame) -> &[u8] {
    packet.get(frame.start..frame.start + frame.len).unwrap_or_default()
}
