//! The packet of which tasks take messages without the engine.

use std::mem;
use std::sync::Arc;

use super::Engine;
use crate::many::Run;
use crate::message::{Message, Packet, Part};
use crate::wire::{self, FRAME, Frame, Kind};

/// The most messages of a run. The driver may wait for the lock meanwhile.
const MOST: usize = 128;

/// The first packet that has arrived, while tasks take messages of it without the engine.
///
/// The engine itself takes the last of several messages in a row.
pub(crate) struct Unpacker {
    packet: Arc<Packet>,
    /// The next frame, a whole message.
    next: Frame,
    /// Longest message that is accepted, in bytes.
    max_message: usize,
    /// Messages that tasks have taken.
    taken: u64,
}

impl Unpacker {
    /// The next message. `None` if that needs the engine.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Message> {
        let after = whole(self.packet.bytes(), self.next.end(), self.max_message)?;
        let Frame { start, len, .. } = mem::replace(&mut self.next, after);
        self.taken += 1;
        Some(Message::of(self.packet.clone(), Part { start, len }))
    }

    /// The next messages, at most [`MOST`], up to the last one in a row. `None` if that needs the engine.
    pub(crate) fn take_run(&mut self) -> Option<Run> {
        let start = self.next.start - FRAME;
        let mut count = 0;
        while count < MOST {
            let Some(after) = whole(self.packet.bytes(), self.next.end(), self.max_message) else { break };
            self.next = after;
            count += 1;
        }
        self.taken += count as u64;
        let end = self.next.start - FRAME;
        (count != 0).then(|| Run { packet: self.packet.clone(), start, end, count })
    }
}

/// The frame at `at`, if it is a whole message that is not too long.
#[inline]
fn whole(packet: &[u8], at: usize, max_message: usize) -> Option<Frame> {
    let frame = wire::decode_frame(packet, at).ok()??;
    (frame.kind == Kind::Whole && frame.len <= max_message).then_some(frame)
}

impl Engine {
    /// Lends the first packet if one of its messages was taken, and two others follow.
    pub(crate) fn lend_packet(&self) -> Option<Unpacker> {
        let (packet, at, max_message) = self.incoming.first_shared()?;
        let next = whole(packet.bytes(), at, max_message)?;
        whole(packet.bytes(), next.end(), max_message)?;
        // A message that is being read comes first. If the program keeps many messages, the engine copies them.
        if self.reading.is_some() || !self.readers.is_empty() || self.keeps_many() {
            return None;
        }
        Some(Unpacker { packet: packet.clone(), next, max_message, taken: 0 })
    }

    /// Takes the packet back.
    pub(crate) fn return_packet(&mut self, unpacker: &Unpacker) {
        self.counts.statistics.messages_received += unpacker.taken;
        self.incoming.skip_to(unpacker.next.start - FRAME);
    }
}
