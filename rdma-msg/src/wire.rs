//! The bytes of packets, frames and handshakes. Numbers are big-endian.
//!
//! A packet is one message of the queue pair: a header, and frames one after another.
//!
//! | bytes | header of a packet |
//! |---|---|
//! | 0 | [`Class`] |
//! | 1 | 1 if the sender has no credit left for data |
//! | 2, 3 | receives for data packets at the sender |
//! | 4 to 7, 8 to 11 | [`Counts`]: data packets and control packets that the receiver may have sent |
//! | 12 to 15 | [`Counts`]: offers of the receiver that are done |
//!
//! A packet that waives credit has the number of data packets in the 4 bytes after the header. A packet that offers memory for a
//! message has its length, address and key in the 20 bytes after the header.
//!
//! | bytes | header of a frame |
//! |---|---|
//! | 0 to 3 | length of its payload in bytes |
//! | 4 | [`Kind`] |
//! | 5 to 7 | 0 |
//!
//! Payloads are padded to a multiple of [`ALIGN`] bytes. Bytes that must be 0 are ignored by the receiver.

use std::time::Duration;

use rdma_safe::RemoteMemory;

use crate::error::{Incompatible, Violation};
use crate::flow::Counts;
use crate::parts::Parts;

/// Length of the header of a packet.
pub(crate) const HEADER: usize = 16;
/// Length of the header of a frame.
pub(crate) const FRAME: usize = 8;
/// Alignment of frames.
pub(crate) const ALIGN: usize = 8;

/// Versions of the protocol that this crate knows: the lowest and the highest.
pub(crate) const VERSIONS: [u8; 2] = [1, 1];

/// What a packet consumes at the receiver.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Class {
    /// A receive of the window.
    Data,
    /// A receive for control packets. It has no frames.
    Control,
    /// A receive that the receiver has reserved for its offer. It has no frames.
    Answer,
    /// A receive of the window. It has no frames: its sender waives credit.
    Waiver,
    /// A receive for heartbeats. It has no frames. It asks whether the receiver's program runs, or answers that the sender's
    /// program does.
    Heartbeat,
    /// A receive for control packets. It has a frame with [`Kind::Abort`], and is the last packet: it is used when there is no
    /// credit for data.
    Abort,
    /// A receive of the window. It has no frames: its sender offers memory for a message.
    Space,
}

/// What a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A whole message.
    Whole,
    /// The length of a long message in 8 bytes. Its parts follow.
    Long,
    /// A part of a long message. The message is complete when its parts have its length.
    Part,
    /// A message that the receiver is to read: the length, the address and the key of each part of its memory.
    Offer,
    /// The long message is to be discarded: its sender has given it up.
    Cancelled,
    /// The sender sends no more.
    End,
    /// The sender has aborted the connection: a code and the reason.
    Abort,
    /// A message that was written to memory that the receiver has offered: the number of the offer, and the length.
    Written,
}

impl Kind {
    pub(crate) const ALL: [Kind; 8] =
        [Kind::Whole, Kind::Long, Kind::Part, Kind::Offer, Kind::Cancelled, Kind::End, Kind::Abort, Kind::Written];
}

/// A frame of a received packet. Its payload is at `start..start + len` of the packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Frame {
    /// The place of the next frame.
    pub(crate) fn end(self) -> usize {
        aligned(self.start + self.len)
    }
}

/// Encodes the header of a packet.
pub(crate) fn header(class: Class, counts: Counts) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[0] = class as u8;
    bytes[1] = counts.is_out_of_credit.into();
    // Windows have at most `MAX_WINDOW` receives.
    bytes[2..4].copy_from_slice(&(counts.window as u16).to_be_bytes());
    bytes[4..8].copy_from_slice(&counts.data.to_be_bytes());
    bytes[8..12].copy_from_slice(&counts.control.to_be_bytes());
    bytes[12..].copy_from_slice(&counts.answered.to_be_bytes());
    bytes
}

/// Decodes the header of a packet.
pub(crate) fn decode_header(packet: &[u8]) -> Result<(Class, Counts), Violation> {
    let header: &[u8; HEADER] = packet.first_chunk().ok_or(Violation::Truncated)?;
    let class = match header[0] {
        0 => Class::Data,
        1 => Class::Control,
        2 => Class::Answer,
        3 => Class::Waiver,
        4 => Class::Heartbeat,
        5 => Class::Abort,
        6 => Class::Space,
        _ => return Err(Violation::UnknownKind),
    };
    let window = u16::from_be_bytes([header[2], header[3]]).into();
    let [data, control, answered] = [4, 8, 12].map(|at| number(&header[at..]));
    Ok((class, Counts { window, data, control, answered, is_out_of_credit: header[1] == 1 }))
}

/// Length of the payload of [`Class::Waiver`].
pub(crate) const WAIVER: usize = 4;

/// Decodes the number of data packets that a sender waives.
pub(crate) fn decode_waiver(packet: &[u8]) -> Result<u32, Violation> {
    let payload = packet.get(HEADER..).and_then(<[u8]>::first_chunk).ok_or(Violation::Truncated)?;
    Ok(u32::from_be_bytes(*payload))
}

/// Encodes the header of a frame with `len` bytes of payload.
pub(crate) fn frame(kind: Kind, len: u32) -> [u8; FRAME] {
    let mut bytes = [0; FRAME];
    bytes[..4].copy_from_slice(&len.to_be_bytes());
    bytes[4] = kind as u8;
    bytes
}

/// Length of a frame with `len` bytes of payload, without the padding after it.
pub(crate) const fn frame_len(len: usize) -> usize {
    FRAME + len
}

/// The next multiple of [`ALIGN`].
pub(crate) const fn aligned(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// Decodes the frame at `at`, which is a multiple of [`ALIGN`]. `None` at the end of the packet.
pub(crate) fn decode_frame(packet: &[u8], at: usize) -> Result<Option<Frame>, Violation> {
    let Some(rest) = packet.get(at..).filter(|rest| !rest.is_empty()) else { return Ok(None) };
    let header: &[u8; FRAME] = rest.first_chunk().ok_or(Violation::Truncated)?;
    let len = number(header) as usize;
    if len > rest.len() - FRAME {
        return Err(Violation::Truncated);
    }
    let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == header[4]).ok_or(Violation::UnknownKind)?;
    Ok(Some(Frame { kind, start: at + FRAME, len }))
}

/// The first eight bytes as a number. Callers have at least eight.
fn long_number(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// The first four bytes as a number. Callers have at least four.
fn number(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

/// Length of the payload of [`Kind::Long`].
pub(crate) const LONG: usize = 8;

/// Decodes the payload of [`Kind::Long`].
pub(crate) fn decode_long(payload: &[u8]) -> Result<u64, Violation> {
    match payload.try_into() {
        Ok(bytes) => Ok(u64::from_be_bytes(bytes)),
        Err(_) => Err(Violation::Truncated),
    }
}

/// Length of encoded memory: of a part in the payload of [`Kind::Offer`], or after the header of a packet of [`Class::Space`].
pub(crate) const MEMORY: usize = 20;

/// The most parts of memory that an offer has.
pub(crate) const MAX_OFFER_PARTS: usize = 16;

// Every packet has room for them.
const _: () = assert!(HEADER + FRAME + MAX_OFFER_PARTS * MEMORY <= MIN_PACKET as usize);

/// Encodes memory.
pub(crate) fn memory(memory: RemoteMemory) -> [u8; MEMORY] {
    let mut bytes = [0; MEMORY];
    bytes[..8].copy_from_slice(&memory.len.to_be_bytes());
    bytes[8..16].copy_from_slice(&memory.address.to_be_bytes());
    bytes[16..].copy_from_slice(&memory.rkey.to_be_bytes());
    bytes
}

/// The memory in the first [`MEMORY`] bytes. Callers have as many.
fn decode_memory(bytes: &[u8]) -> RemoteMemory {
    RemoteMemory { len: long_number(bytes), address: long_number(&bytes[8..]), rkey: number(&bytes[16..]) }
}

/// Decodes the payload of [`Kind::Offer`]. All parts together have at most `most` bytes.
pub(crate) fn decode_offer(payload: &[u8], most: u64) -> Result<Parts<RemoteMemory>, Violation> {
    if payload.len() % MEMORY != 0 || payload.len() > MAX_OFFER_PARTS * MEMORY {
        return Err(Violation::Truncated);
    }
    let parts = Parts::new(payload.chunks_exact(MEMORY).map(decode_memory)).ok_or(Violation::Truncated)?;
    let mut left = most;
    for part in parts.iter() {
        left = left.checked_sub(part.len).filter(|_| part.len != 0).ok_or(Violation::TooLong)?;
    }
    Ok(parts)
}

/// Decodes the memory in a packet of [`Class::Space`].
pub(crate) fn decode_space(packet: &[u8]) -> Result<RemoteMemory, Violation> {
    let payload = packet.get(HEADER..HEADER + MEMORY).ok_or(Violation::Truncated)?;
    Ok(decode_memory(payload))
}

/// Length of the payload of [`Kind::Written`].
pub(crate) const WRITTEN: usize = 12;

/// The payload of [`Kind::Written`].
pub(crate) fn written(number: u32, len: u64) -> [u8; WRITTEN] {
    let mut bytes = [0; WRITTEN];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes[4..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// Decodes the payload of [`Kind::Written`].
pub(crate) fn decode_written(payload: &[u8]) -> Result<(u32, u64), Violation> {
    let bytes: &[u8; WRITTEN] = payload.try_into().map_err(|_| Violation::Truncated)?;
    Ok((number(bytes), long_number(&bytes[4..])))
}

/// The payload of [`Kind::Abort`].
pub(crate) fn abort(code: u32, reason: &str) -> Vec<u8> {
    let mut end = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    [&code.to_be_bytes(), &reason.as_bytes()[..end]].concat()
}

/// Decodes the reason in a packet of [`Class::Abort`].
pub(crate) fn decode_abort_packet(packet: &[u8]) -> Result<(u32, String), Violation> {
    let Frame { kind, start, len } = decode_frame(packet, HEADER)?.ok_or(Violation::Truncated)?;
    if kind != Kind::Abort {
        return Err(Violation::UnknownKind);
    }
    decode_abort(&packet[start..start + len])
}

/// The most bytes of a reason that are sent.
pub(crate) const MAX_REASON: usize = 200;

/// Decodes the payload of [`Kind::Abort`].
pub(crate) fn decode_abort(payload: &[u8]) -> Result<(u32, String), Violation> {
    let (code, reason) = payload.split_at_checked(4).ok_or(Violation::Truncated)?;
    let reason = &reason[..reason.len().min(MAX_REASON)];
    Ok((number(code), String::from_utf8_lossy(reason).into_owned()))
}

/// The handshake message, in the private data of the connection.
///
/// | bytes | |
/// |---|---|
/// | 0 to 3 | `RMSG` |
/// | 4, 5 | lowest and highest version |
/// | 6 | 0 for messages, 1 for a stream |
/// | 7 | 0 |
/// | 8 to 11 | receives for data packets |
/// | 12 to 15 | longest packet that it can receive, in bytes |
/// | 16 to 23 | longest message that it accepts, in bytes |
/// | 24 to 27 | most receives for data packets that it may have |
/// | 28 to 31 | time in ms within which it wants to hear from the peer; 0 for any time |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    pub(crate) versions: [u8; 2],
    pub(crate) purpose: Purpose,
    pub(crate) window: u32,
    pub(crate) packet: u32,
    pub(crate) message: u64,
    /// Equals `window` if that never changes.
    pub(crate) max_window: u32,
    /// The time within which it wants to hear from the program of the peer.
    pub(crate) keepalive: Option<Duration>,
}

/// What a connection is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    Messages,
    Stream,
}

const MAGIC: [u8; 4] = *b"RMSG";

/// Packets are at least this long, so that every control frame fits.
pub(crate) const MIN_PACKET: u32 = 512;
/// Packets are at most this long.
pub(crate) const MAX_PACKET: u32 = 1 << 20;
/// Most receives for data packets.
pub(crate) const MAX_WINDOW: u32 = 1 << 14;

impl Hello {
    pub(crate) fn encode(&self) -> [u8; 32] {
        let keepalive = self.keepalive.map_or(0, |time| u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1));
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.versions);
        bytes[6] = self.purpose as u8;
        bytes[8..12].copy_from_slice(&self.window.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.packet.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.message.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.max_window.to_be_bytes());
        bytes[28..].copy_from_slice(&keepalive.to_be_bytes());
        bytes
    }

    /// Decodes the private data of a peer, and checks that this end can talk to it.
    pub(crate) fn decode(&self, private_data: &[u8]) -> Result<Self, crate::Error> {
        let bytes: &[u8; 32] = private_data.first_chunk().ok_or(Incompatible::OtherProtocol)?;
        if bytes[..4] != MAGIC {
            return Err(Incompatible::OtherProtocol.into());
        }
        let versions = [bytes[4], bytes[5]];
        let (own, peer) = (self.versions, versions);
        if versions[0] > versions[1] || versions[0] > own[1] || versions[1] < own[0] {
            return Err(Incompatible::Version { own, peer }.into());
        }
        let purpose = match bytes[6] {
            0 => Purpose::Messages,
            1 => Purpose::Stream,
            _ => return Err(Violation::Handshake.into()),
        };
        if purpose != self.purpose {
            return Err(Incompatible::Purpose.into());
        }
        let (window, packet) = (number(&bytes[8..]), number(&bytes[12..]));
        let message = long_number(&bytes[16..]);
        let max_window = number(&bytes[24..]);
        let are_possible = (1..=max_window).contains(&window)
            && max_window <= MAX_WINDOW
            && (MIN_PACKET..=MAX_PACKET).contains(&packet);
        if !are_possible {
            return Err(Violation::Handshake.into());
        }
        let keepalive = Some(number(&bytes[28..])).filter(|time| *time != 0);
        let keepalive = keepalive.map(|time| Duration::from_millis(time.into()));
        Ok(Hello { versions, purpose, window, packet, message, max_window, keepalive })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Hello = Hello {
        versions: VERSIONS,
        purpose: Purpose::Messages,
        window: 4,
        packet: 8192,
        message: 1 << 30,
        max_window: 4,
        keepalive: Some(Duration::from_millis(700)),
    };

    #[test]
    fn packets_are_decoded_as_they_were_encoded() {
        let counts =
            Counts { window: 0x0506, data: 0x0102_0304, control: u32::MAX, answered: 7, is_out_of_credit: true };
        let mut packet = header(Class::Data, counts).to_vec();
        packet.extend(frame(Kind::Part, 3));
        packet.extend(*b"abc\0\0\0\0\0");
        packet.extend(frame(Kind::Whole, 0));
        assert_eq!(decode_header(&packet), Ok((Class::Data, counts)));
        let first = Frame { kind: Kind::Part, start: 24, len: 3 };
        assert_eq!(decode_frame(&packet, HEADER), Ok(Some(first)));
        assert_eq!(&packet[first.start..first.start + first.len], b"abc");
        let second = Frame { kind: Kind::Whole, start: 40, len: 0 };
        assert_eq!(decode_frame(&packet, first.end()), Ok(Some(second)));
        assert_eq!(decode_frame(&packet, 40), Ok(None));
        // The last payload need not be padded.
        packet.truncate(27);
        assert_eq!(decode_frame(&packet, HEADER), Ok(Some(first)));
        assert_eq!(decode_frame(&packet, 32), Ok(None));
    }

    #[test]
    fn packets_that_are_cut_or_unknown_are_refused() {
        let packet =
            header(Class::Control, Counts { window: 1, data: 1, control: 2, answered: 0, is_out_of_credit: false });
        assert_eq!(decode_header(&packet[..HEADER - 1]), Err(Violation::Truncated));
        assert_eq!(decode_header(&[7; HEADER]), Err(Violation::UnknownKind));
        assert_eq!(decode_waiver(&[0; HEADER + WAIVER - 1]), Err(Violation::Truncated));
        assert_eq!(decode_waiver(&[[0; HEADER].as_slice(), &[0, 0, 1, 2]].concat()), Ok(0x102));
        let mut packet = frame(Kind::Whole, 1).to_vec();
        assert_eq!(decode_frame(&packet, 0), Err(Violation::Truncated));
        assert_eq!(decode_frame(&packet[..7], 0), Err(Violation::Truncated));
        packet[..4].copy_from_slice(&u32::MAX.to_be_bytes());
        packet.push(0);
        assert_eq!(decode_frame(&packet, 0), Err(Violation::Truncated));
        packet[..5].copy_from_slice(&[0, 0, 0, 1, 8]);
        assert_eq!(decode_frame(&packet, 0), Err(Violation::UnknownKind));
        let memory = RemoteMemory { address: 1 << 40, len: 7 << 33, rkey: 0x0102_0304 };
        let parts = [memory, RemoteMemory { len: 5, ..memory }];
        let encoded = parts.map(super::memory).concat();
        let most = memory.len + 5;
        assert_eq!(decode_offer(&encoded, most).ok(), Parts::new(parts));
        assert_eq!(decode_offer(&encoded, most - 1), Err(Violation::TooLong));
        assert_eq!(decode_offer(&[0; MEMORY], most), Err(Violation::TooLong));
        for len in [0, MEMORY - 1, MEMORY + 1, (MAX_OFFER_PARTS + 1) * MEMORY] {
            assert_eq!(decode_offer(&vec![1; len], u64::MAX), Err(Violation::Truncated));
        }
        assert_eq!(decode_abort(&[0; 3]), Err(Violation::Truncated));
        assert_eq!(decode_abort(&abort(7, "gone")), Ok((7, "gone".into())));
        assert_eq!(abort(1, &"ä".repeat(200)).len(), 4 + MAX_REASON);
        assert_eq!(abort(1, &format!("a{}", "ä".repeat(200))).len(), 4 + MAX_REASON - 1, "no half of a letter");
    }

    #[test]
    fn an_old_end_understands_a_new_one_and_a_new_end_an_old_one() {
        let hello = |versions| Hello { versions, ..OWN };
        let own = hello([1, 1]);
        let mut sent = own.encode().to_vec();
        sent.resize(56, 0);
        assert_eq!(own.decode(&sent).unwrap(), own);
        assert!(own.decode(&sent[..31]).is_err());
        for keepalive in [None, Some(Duration::from_secs(1 << 22))] {
            let peer = Hello { keepalive, ..own };
            assert_eq!(own.decode(&peer.encode()).unwrap(), peer);
        }
        let elastic = Hello { window: 1, max_window: 7, ..own };
        assert_eq!(own.decode(&elastic.encode()).unwrap(), elastic);
        let newer = hello([1, 7]);
        assert_eq!(own.decode(&newer.encode()).unwrap(), newer);
        assert_eq!(newer.decode(&own.encode()).unwrap(), own);
        let much_newer = hello([2, 7]);
        for (this, peer) in [(own, much_newer), (much_newer, own)] {
            let error = this.decode(&peer.encode()).unwrap_err();
            let expected = Incompatible::Version { own: this.versions, peer: peer.versions };
            assert!(matches!(error, crate::Error::Incompatible(found) if found == expected), "{error}");
        }
    }

    #[test]
    fn an_end_of_another_protocol_or_purpose_is_refused() {
        let own = OWN;
        let refused = |bytes: &[u8]| own.decode(bytes).unwrap_err().to_string();
        assert!(refused(&[]).contains("does not use rdma-msg"));
        assert!(refused(&[0; 56]).contains("does not use rdma-msg"));
        assert!(refused(&Hello { purpose: Purpose::Stream, ..own }.encode()).contains("a stream of bytes"));
        for wrong in [
            Hello { window: 0, ..own },
            Hello { window: MAX_WINDOW + 1, ..own },
            Hello { max_window: MAX_WINDOW + 1, ..own },
            Hello { max_window: 3, ..own },
            Hello { packet: MIN_PACKET - 1, ..own },
            Hello { packet: MAX_PACKET + 1, ..own },
        ] {
            assert!(refused(&wrong.encode()).contains("impossible values"), "{wrong:?}");
        }
    }
}
