//! Packets and their headers.

use std::fmt;
use std::ops::{Deref, DerefMut};

use super::fields::Reader;
use super::icrc::ICRC;
use super::{Data, Operation, Psn, Transport};

/// The headers of a packet: base and extended transport headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Transport service, with the datagram header (DETH) of UD.
    pub transport: Transport,
    /// Operation, with its extended headers.
    pub operation: Operation,
    /// Partition key.
    pub pkey: u16,
    /// Destination queue pair number, 24 bits.
    pub dest_qp: u32,
    /// Packet sequence number.
    pub psn: Psn,
    /// Solicited event bit.
    pub solicited: bool,
    /// AckReq bit: requests an ACK.
    pub ack_request: bool,
    /// MigReq bit: the path has migrated. Always set without automatic path migration.
    pub migrated: bool,
    /// FECN and BECN bits: congestion on the path of this packet, and on the reverse path.
    pub congestion: (bool, bool),
}

/// A parsed packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// Headers.
    pub header: Header,
    /// Payload without padding.
    pub payload: Data<'a>,
}

/// Why a packet is malformed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// The packet ends before its headers do.
    #[error("the packet is shorter than its headers")]
    Short,
    /// The length is not a multiple of 4 bytes.
    #[error("the packet length is not a multiple of 4 bytes")]
    Unaligned,
    /// The transport header version is not 0.
    #[error("unsupported transport header version {0}")]
    Version(u8),
    /// The opcode is unknown, or the transport service does not have it.
    #[error("unknown opcode {0:#04x}")]
    Opcode(u8),
    /// The AETH syndrome is unknown.
    #[error("unknown AETH syndrome {0:#04x}")]
    Syndrome(u8),
    /// The padding is longer than the payload, or the operation has no payload.
    #[error("the packet has more padding than payload, or payload that its opcode does not allow")]
    Padding,
}

/// Bytes of the base transport header (BTH).
const BTH_LEN: usize = 12;

/// Upper bound for the headers of a packet: a datagram header (DETH) and an AtomicETH.
const MAX_HEADER: usize = BTH_LEN + 8 + 28;

impl<'a> Packet<'a> {
    /// Parses a packet that starts at the base transport header and ends with the invariant CRC.
    ///
    /// The CRC is not checked. [`IcrcSeed::matches`](super::IcrcSeed::matches) checks it.
    ///
    /// # Errors
    /// [`Malformed`] if the packet is damaged or does not follow the specification.
    pub fn parse(datagram: impl Into<Data<'a>>) -> Result<Self, Malformed> {
        let datagram = datagram.into();
        let (content, _) =
            datagram.len().checked_sub(ICRC).and_then(|len| datagram.split_at(len)).ok_or(Malformed::Short)?;
        if datagram.len() % 4 != 0 {
            return Err(Malformed::Unaligned);
        }
        // The peer cannot change the copy while it is parsed.
        let mut copy = [0; MAX_HEADER];
        let (start, _) = content.split_at(content.len().min(MAX_HEADER)).ok_or(Malformed::Short)?;
        let headers = &mut copy[..start.len()];
        start.copy_to(headers);
        let mut from = Reader(headers);
        let (opcode, flags, pkey) = base(&mut from).ok_or(Malformed::Short)?;
        let (ecn, dest_qp) = from.byte_and_u24().ok_or(Malformed::Short)?;
        let (request, psn) = from.byte_and_u24().ok_or(Malformed::Short)?;
        if flags & 0xf != 0 {
            return Err(Malformed::Version(flags & 0xf));
        }
        let transport = Transport::parse(opcode, &mut from)?;
        let operation = Operation::parse(opcode, transport, &mut from)?;
        let padding = usize::from(flags >> 4 & 3);
        let Reader(rest) = from;
        let (_, padded) = content.split_at(start.len() - rest.len()).ok_or(Malformed::Short)?;
        let payload = padded.len().checked_sub(padding).and_then(|len| padded.split_at(len));
        let (payload, _) = payload.ok_or(Malformed::Padding)?;
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
        Ok(Packet { header, payload })
    }
}

fn base(from: &mut Reader<'_>) -> Option<(u8, u8, u16)> {
    Some((from.u8()?, from.u8()?, from.u16()?))
}

/// The destination queue pair of a packet that starts with these headers. `None` if its transport has no connections.
#[must_use]
pub fn connected_qp(headers: &[u8]) -> Option<u32> {
    let [opcode, _, _, _, _, qp @ .., _, _, _, _] = headers.first_chunk::<BTH_LEN>()?;
    let [high, middle, low] = *qp;
    Transport::is_connected(*opcode).then(|| u32::from_be_bytes([0, high, middle, low]))
}

/// Recognises the packets that continue a run by comparing headers.
#[derive(Clone, Copy, Debug)]
pub struct Following {
    header: Header,
    encoded: Encoded,
    payload_len: usize,
}

impl Following {
    /// The packets after `packet`. `None` if it is not in the middle of a message.
    #[must_use]
    pub fn after(packet: &Packet<'_>) -> Option<Following> {
        let (header, payload_len) = (packet.header, packet.payload.len());
        header.operation.is_middle().then(|| Following { header, encoded: header.encode(payload_len), payload_len })
    }

    /// Returns `datagram` as a packet if it is the next one. Call it until the first `None`.
    ///
    /// The CRC is not checked.
    pub fn next<'a>(&mut self, datagram: Data<'a>) -> Option<Packet<'a>> {
        self.header.psn = self.header.psn.add(1);
        increment_psn(&mut self.encoded);
        let (headers, rest) = datagram.split_at(BTH_LEN)?;
        let (payload, end) = rest.split_at(self.payload_len)?;
        let is_next = headers.to_array::<BTH_LEN>().is_some_and(|headers| headers == self.encoded[..]);
        (is_next && end.len() == Header::padding(self.payload_len) + ICRC)
            .then_some(Packet { header: self.header, payload })
    }
}

/// Increments the PSN of a packet that starts with these headers. Does nothing if they are shorter than a base transport header.
pub fn increment_psn(headers: &mut [u8]) {
    if let Some([.., high, middle, low]) = headers.first_chunk_mut::<BTH_LEN>() {
        let psn = Psn::new(u32::from_be_bytes([0, *high, *middle, *low])).add(1);
        [_, *high, *middle, *low] = psn.get().to_be_bytes();
    }
}

impl Header {
    /// Encodes the headers before a payload of that many bytes.
    ///
    /// Zeros up to a multiple of 4 bytes and the invariant CRC follow the payload.
    #[must_use]
    pub fn encode(&self, payload: usize) -> Encoded {
        let mut to = Encoded { bytes: [0; MAX_HEADER], len: 0 };
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

    /// Whether the packet belongs to the partition of `pkey`. The membership bit of the keys is ignored.
    #[must_use]
    pub fn is_of_partition(&self, pkey: u16) -> bool {
        (self.pkey ^ pkey) & 0x7fff == 0
    }

    /// Number of padding bytes after a payload of that many bytes.
    #[must_use]
    pub const fn padding(payload: usize) -> usize {
        payload.wrapping_neg() % 4
    }
}

/// Encoded headers of a packet.
#[derive(Clone, Copy)]
pub struct Encoded {
    bytes: [u8; MAX_HEADER],
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

impl DerefMut for Encoded {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl fmt::Debug for Encoded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Encoded").field(&&**self).finish()
    }
}
