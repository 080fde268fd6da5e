//! Whole packets.

use std::fmt;
use std::ops::Deref;

use super::fields::Reader;
use super::icrc::ICRC;
use super::{Operation, Psn, Transport};

/// All that comes before the payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The service that it belongs to.
    pub transport: Transport,
    /// What it does.
    pub operation: Operation,
    /// The partition.
    pub pkey: u16,
    /// The number of the queue pair that it is for, 24 bits.
    pub dest_qp: u32,
    /// Its number.
    pub psn: Psn,
    /// Whether to wake who waits for solicited events.
    pub solicited: bool,
    /// Whether an acknowledgement is asked for.
    pub ack_request: bool,
    /// Whether the sender's path has migrated; set in all packets where paths do not migrate.
    pub migrated: bool,
    /// Whether it met congestion on its way, and what it answers did: explicit congestion notification.
    pub congestion: (bool, bool),
}

/// A packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// All that comes before the payload.
    pub header: Header,
    /// Without its padding.
    pub payload: &'a [u8],
}

/// Why bytes are no packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// They end too early.
    #[error("the packet ends before its headers do")]
    Short,
    /// They are not in words of four, as padding makes them.
    #[error("the packet is not a whole number of 32-bit words long")]
    Unaligned,
    /// The headers are of another version than 0.
    #[error("transport version {0}, not 0")]
    Version(u8),
    /// Unknown, or none of the service.
    #[error("opcode {0:#04x}, which is of no packet that is known")]
    Opcode(u8),
    /// Unknown.
    #[error("acknowledge syndrome {0:#04x}, which has no meaning")]
    Syndrome(u8),
    /// More than there is.
    #[error("more padding than payload, or some where no payload goes")]
    Padding,
}

/// Bytes of the base transport header.
const BASE: usize = 12;

/// More than any packet has before its payload: a datagram's header and an atomic operation's.
const LONGEST: usize = BASE + 8 + 28;

impl<'a> Packet<'a> {
    /// A packet that came, without its UDP header and with its invariant CRC, which is not looked at: [`Icrc`](super::Icrc).
    ///
    /// # Errors
    /// [`Malformed`]: whoever has sent it does not follow the specification, or it came damaged.
    pub fn parse(datagram: &'a [u8]) -> Result<Self, Malformed> {
        let (content, _) = datagram.split_last_chunk::<ICRC>().ok_or(Malformed::Short)?;
        if datagram.len() % 4 != 0 {
            return Err(Malformed::Unaligned);
        }
        let mut from = Reader(content);
        let (opcode, flags, pkey) = base(&mut from).ok_or(Malformed::Short)?;
        let (ecn, dest_qp) = from.byte_and_u24().ok_or(Malformed::Short)?;
        let (request, psn) = from.byte_and_u24().ok_or(Malformed::Short)?;
        if flags & 0xf != 0 {
            return Err(Malformed::Version(flags & 0xf));
        }
        let transport = Transport::parse(opcode, &mut from)?;
        let operation = Operation::parse(opcode, transport, &mut from)?;
        let padding = usize::from(flags >> 4 & 3);
        let Reader(padded) = from;
        let len = padded.len().checked_sub(padding).ok_or(Malformed::Padding)?;
        if !operation.carries_payload() && !padded.is_empty() {
            return Err(Malformed::Padding);
        }
        let header = Header {
            transport,
            operation,
            pkey,
            dest_qp,
            psn: Psn::new(psn),
            solicited: flags & 0x80 != 0,
            ack_request: request & 0x80 != 0,
            migrated: flags & 0x40 != 0,
            congestion: (ecn & 0x80 != 0, ecn & 0x40 != 0),
        };
        Ok(Packet { header, payload: &padded[..len] })
    }
}

fn base(from: &mut Reader<'_>) -> Option<(u8, u8, u16)> {
    Some((from.u8()?, from.u8()?, from.u16()?))
}

impl Header {
    /// The bytes before a payload of that length. After the payload come zeros up to a multiple of four, and the invariant CRC.
    #[must_use]
    pub fn encode(&self, payload: usize) -> Encoded {
        let mut to = Encoded { bytes: [0; LONGEST], len: 0 };
        let padding = Header::padding(payload) as u32;
        let flag = |set: bool, bit: u32| u32::from(set) << bit;
        let opcode = u32::from(self.transport.bits() | self.operation.bits());
        to.u32(
            opcode << 24 | flag(self.solicited, 23) | flag(self.migrated, 22) | padding << 20 | u32::from(self.pkey),
        );
        let (forward, backward) = self.congestion;
        to.u32(flag(forward, 31) | flag(backward, 30) | self.dest_qp & 0xff_ffff);
        to.u32(flag(self.ack_request, 31) | self.psn.get());
        self.transport.encode(&mut to);
        self.operation.encode(&mut to);
        to
    }

    /// Whether it is of the partition of that key. The highest bit of a key says how a port belongs to the partition, not to which.
    #[must_use]
    pub fn is_of_partition(&self, pkey: u16) -> bool {
        (self.pkey ^ pkey) & 0x7fff == 0
    }

    /// How many zeros follow a payload of that length.
    #[must_use]
    pub const fn padding(payload: usize) -> usize {
        payload.wrapping_neg() % 4
    }
}

/// The bytes of a header.
#[derive(Clone, Copy)]
pub struct Encoded {
    bytes: [u8; LONGEST],
    len: usize,
}

impl Encoded {
    fn put(&mut self, field: &[u8]) {
        self.bytes[self.len..][..field.len()].copy_from_slice(field);
        self.len += field.len();
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.put(&value.to_be_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.put(&value.to_be_bytes());
    }
}

impl Deref for Encoded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl fmt::Debug for Encoded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Encoded").field(&&**self).finish()
    }
}
