//! The packet that is being filled.

use rdma_safe::Buffer;

use super::Engine;
use crate::payload::Payload;
use crate::wire::{self, FRAME, HEADER, Kind, aligned, frame_len};

/// The packet that is being filled.
pub(super) struct Open {
    pub(super) buffer: Buffer,
    pub(super) used: usize,
    /// Messages that end in it.
    pub(super) messages: u32,
}

/// The largest payload of a packet on the network.
const MTU: usize = 4096;

/// Longest packet that soft0 sends over UDP by one message to the kernel, in 15 segments.
const UDP_MESSAGE: usize = 15 * MTU;

/// Length of a full packet: `packet`, or the last multiple of [`UDP_MESSAGE`] up to it.
pub(super) fn full_len(packet: usize) -> usize {
    if packet < UDP_MESSAGE { packet } else { packet - packet % UDP_MESSAGE }
}

/// Length of the next part, if `left` bytes are still to be sent. The open packet has `len` bytes, of which `used` are used. It has
/// space for at least one byte after the header of a frame.
///
/// Packets are full, unless two are needed and they may be divided: then each has about half of the bytes. So the peer begins
/// sooner, and works on the first one while this end copies the second.
pub(super) fn part_len(left: usize, used: usize, len: usize, may_divide: bool) -> usize {
    let start = used + FRAME;
    let most = len - start;
    if !may_divide || left <= most || left > most + len - HEADER - FRAME {
        return left.min(most);
    }
    ((start + left / 2).next_multiple_of(MTU) - start).min(most)
}

impl Open {
    /// A packet of `len` bytes without frames. `None` if the buffer is shorter.
    pub(super) fn new(mut buffer: Buffer, len: usize) -> Option<Self> {
        buffer.set_len(len).ok()?;
        Some(Open { buffer, used: HEADER, messages: 0 })
    }

    /// Extends a packet without frames to `most` bytes. Returns whether a message of `len` bytes then fits.
    pub(super) fn extend(&mut self, len: usize, most: usize) -> bool {
        !self.has_frames() && HEADER + frame_len(len) <= most && self.buffer.set_len(most).is_ok()
    }

    pub(super) fn has_frames(&self) -> bool {
        self.used > HEADER
    }

    /// Free space in bytes.
    pub(super) fn space(&self) -> usize {
        self.buffer.len().saturating_sub(self.used)
    }

    /// Adds a frame, whose payload `fill` writes. There must be space for it.
    pub(super) fn add(&mut self, kind: Kind, len: usize, fill: impl FnOnce(&mut [u8])) {
        self.messages += u32::from(kind == Kind::Whole);
        let start = self.used + FRAME;
        self.buffer[self.used..start].copy_from_slice(&wire::frame(kind, len as u32));
        fill(&mut self.buffer[start..start + len]);
        self.used = aligned(start + len);
        // The memory of the pool may have bytes of others.
        let padding = start + len..self.used.min(self.buffer.len());
        self.buffer[padding].fill(0);
    }
}

/// The open packet while tasks add messages to it without the engine.
pub(crate) struct Packer {
    open: Open,
    /// Longest message that the peer accepts, in bytes.
    max_message: usize,
    /// Messages that tasks have added, and their bytes.
    messages: u64,
    bytes: u64,
}

impl Packer {
    /// Adds a message. `None` if that needs the engine.
    #[inline]
    pub(crate) fn add(&mut self, message: &Payload<'_>) -> Option<()> {
        let len = message.len();
        if len > self.max_message || frame_len(len) > self.open.space() {
            return None;
        }
        self.open.add(Kind::Whole, len, |target| message.copy(0, target));
        self.messages += 1;
        self.bytes += len as u64;
        Some(())
    }

    /// Adds messages up to the first one that needs the engine. Returns how many.
    pub(crate) fn add_all(&mut self, messages: &[&[u8]]) -> usize {
        messages.iter().take_while(|message| self.add(&Payload::from(**message)).is_some()).count()
    }
}

impl Engine {
    /// Lends the open packet if it has frames, and no sender waits.
    pub(crate) fn lend_open(&mut self) -> Option<Packer> {
        // While a cancellation is due, the packet has no space, or it would have been added.
        let may_add = self.outgoing.has_frames() && self.senders.is_empty() && self.check_open().is_ok();
        let open = if may_add { self.outgoing.open.take()? } else { return None };
        Some(Packer { open, max_message: self.outgoing.max_message, messages: 0, bytes: 0 })
    }

    /// Takes the open packet back.
    pub(crate) fn return_open(&mut self, Packer { open, messages, bytes, .. }: Packer) {
        self.counts.statistics.messages_sent += messages;
        self.counts.statistics.bytes_copied += bytes;
        self.outgoing.open = Some(open);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_packet_has_a_multiple_of_60_kib_if_it_may_be_so_long() {
        for (packet, full) in
            [(512, 512), (61_439, 61_439), (61_440, 61_440), (122_879, 61_440), (1 << 20, 17 * 61_440)]
        {
            assert_eq!(full_len(packet), full, "{packet}");
        }
    }

    #[test]
    fn what_needs_two_packets_is_divided_evenly() {
        const LEN: usize = 15 * MTU;
        let full = LEN - HEADER - FRAME;
        let part = |left, may_divide| part_len(left, HEADER, LEN, may_divide);
        for may_divide in [false, true] {
            assert_eq!([1, full].map(|left| part(left, may_divide)), [1, full]);
            // Three packets are full: the peer begins with the first one soon enough.
            assert_eq!(part(2 * full + 1, may_divide), full);
        }
        // The first packet ends with one of the network.
        let first = |mtus| mtus * MTU - HEADER - FRAME;
        assert_eq!([full + 1, 16 * MTU, 2 * full].map(|left| part(left, true)), [first(8), first(9), full]);
        assert_eq!([full + 1, 2 * full].map(|left| part(left, false)), [full; 2]);
        // There are other frames in front, or the packet is short.
        assert_eq!(part_len(LEN, 5 * MTU, LEN, true), 8 * MTU - FRAME);
        assert_eq!(part_len(600, HEADER, 512, true), 512 - HEADER - FRAME);
    }
}
