//! Opcodes and extended transport headers.

use super::Ack;
use super::fields::Reader;
use super::header::Encoded;
use super::syndrome::Syndrome;
use super::{Malformed, Psn};

/// Transport service of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram, with the datagram header (DETH).
    Ud {
        /// Q_Key of the destination queue pair.
        qkey: u32,
        /// Source queue pair number, 24 bits.
        source_qp: u32,
    },
}

/// Operation of a packet, with its extended headers: table 38 of the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// First packet of a send.
    SendFirst,
    /// Middle packet of a send.
    SendMiddle,
    /// Last packet of a send.
    SendLast(Trailer),
    /// Only packet of a send.
    SendOnly(Trailer),
    /// First packet of an RDMA write.
    WriteFirst(RemoteRange),
    /// Middle packet of an RDMA write.
    WriteMiddle,
    /// Last packet of an RDMA write, with optional immediate data.
    WriteLast(Option<u32>),
    /// Only packet of an RDMA write, with optional immediate data.
    WriteOnly(RemoteRange, Option<u32>),
    /// RDMA read request.
    ReadRequest(RemoteRange),
    /// First packet of a read response.
    ReadFirst(Ack),
    /// Middle packet of a read response.
    ReadMiddle,
    /// Last packet of a read response.
    ReadLast(Ack),
    /// Only packet of a read response.
    ReadOnly(Ack),
    /// ACK or NAK.
    Acknowledge(Ack),
    /// Response to an atomic operation, with the previous value.
    AtomicAcknowledge(Ack, u64),
    /// Compare and swap: writes `swap` if the word equals `compare`.
    CompareSwap(Atomic),
    /// Fetch and add: adds `swap` to the word.
    FetchAdd(Atomic),
}

/// Extension of a message's last packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trailer {
    /// None.
    None,
    /// Immediate data in host byte order (ImmDt).
    Immediate(u32),
    /// Remote key for the receiver to invalidate (IETH).
    Invalidate(u32),
}

/// Memory of the responder: the RDMA extended transport header (RETH).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteRange {
    /// Virtual address.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
    /// Length in bytes.
    pub len: u32,
}

/// Word of the responder's memory with the operands: the atomic extended transport header (AtomicETH).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Atomic {
    /// Virtual address.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
    /// Value to write or to add.
    pub swap: u64,
    /// Value to compare with. Unused by fetch and add.
    pub compare: u64,
}

const RC: u8 = 0 << 5;
const UC: u8 = 1 << 5;
const UD: u8 = 3 << 5;

impl Transport {
    pub(super) fn bits(self) -> u8 {
        match self {
            Transport::Rc => RC,
            Transport::Uc => UC,
            Transport::Ud { .. } => UD,
        }
    }

    /// Whether the transport service of an opcode has connections.
    pub(super) fn is_connected(opcode: u8) -> bool {
        matches!(opcode & 0xe0, RC | UC)
    }

    pub(super) fn parse(opcode: u8, from: &mut Reader<'_>) -> Result<Transport, Malformed> {
        match opcode & 0xe0 {
            RC => Ok(Transport::Rc),
            UC => Ok(Transport::Uc),
            UD => {
                let qkey = from.u32().ok_or(Malformed::Short)?;
                let (_, source_qp) = from.byte_and_u24().ok_or(Malformed::Short)?;
                Ok(Transport::Ud { qkey, source_qp })
            }
            _ => Err(Malformed::Opcode(opcode)),
        }
    }

    pub(super) fn encode(self, to: &mut Encoded) {
        if let Transport::Ud { qkey, source_qp } = self {
            to.u32(qkey);
            to.u32(source_qp & 0xff_ffff);
        }
    }

    /// Whether the transport service has this operation.
    #[must_use]
    pub fn has(self, operation: &Operation) -> bool {
        self.has_bits(operation.bits())
    }

    /// Like [`Transport::has`], for the lower five bits of an opcode.
    fn has_bits(self, bits: u8) -> bool {
        match self {
            Transport::Rc => matches!(bits, 0..=20 | 22 | 23),
            // Sends and writes, but not send with invalidate.
            Transport::Uc => matches!(bits, 0..=11),
            // Sends of one packet, with or without immediate data.
            Transport::Ud { .. } => matches!(bits, 4 | 5),
        }
    }
}

impl Operation {
    /// Lower five bits of the opcode.
    pub(super) fn bits(&self) -> u8 {
        match self {
            Operation::SendFirst => 0,
            Operation::SendMiddle => 1,
            Operation::SendLast(Trailer::None) => 2,
            Operation::SendLast(Trailer::Immediate(_)) => 3,
            Operation::SendOnly(Trailer::None) => 4,
            Operation::SendOnly(Trailer::Immediate(_)) => 5,
            Operation::WriteFirst(_) => 6,
            Operation::WriteMiddle => 7,
            Operation::WriteLast(None) => 8,
            Operation::WriteLast(Some(_)) => 9,
            Operation::WriteOnly(_, None) => 10,
            Operation::WriteOnly(_, Some(_)) => 11,
            Operation::ReadRequest(_) => 12,
            Operation::ReadFirst(_) => 13,
            Operation::ReadMiddle => 14,
            Operation::ReadLast(_) => 15,
            Operation::ReadOnly(_) => 16,
            Operation::Acknowledge(_) => 17,
            Operation::AtomicAcknowledge(..) => 18,
            Operation::CompareSwap(_) => 19,
            Operation::FetchAdd(_) => 20,
            Operation::SendLast(Trailer::Invalidate(_)) => 22,
            Operation::SendOnly(Trailer::Invalidate(_)) => 23,
        }
    }

    pub(super) fn parse(opcode: u8, of: Transport, from: &mut Reader<'_>) -> Result<Operation, Malformed> {
        let bits = opcode & 0x1f;
        if !of.has_bits(bits) {
            return Err(Malformed::Opcode(opcode));
        }
        Operation::fields(bits, from).ok_or(Malformed::Short)?
    }

    /// Reads the extended headers. `None` if the packet is too short.
    fn fields(bits: u8, from: &mut Reader<'_>) -> Option<Result<Operation, Malformed>> {
        Some(Ok(match bits {
            0 => Operation::SendFirst,
            1 => Operation::SendMiddle,
            2 => Operation::SendLast(Trailer::None),
            3 => Operation::SendLast(Trailer::Immediate(from.u32()?)),
            4 => Operation::SendOnly(Trailer::None),
            5 => Operation::SendOnly(Trailer::Immediate(from.u32()?)),
            6 => Operation::WriteFirst(RemoteRange::parse(from)?),
            7 => Operation::WriteMiddle,
            8 => Operation::WriteLast(None),
            9 => Operation::WriteLast(Some(from.u32()?)),
            10 => Operation::WriteOnly(RemoteRange::parse(from)?, None),
            11 => Operation::WriteOnly(RemoteRange::parse(from)?, Some(from.u32()?)),
            12 => Operation::ReadRequest(RemoteRange::parse(from)?),
            14 => Operation::ReadMiddle,
            13 | 15 | 16 | 17 | 18 => {
                let (syndrome, msn) = from.byte_and_u24()?;
                let Some(syndrome) = Syndrome::parse(syndrome) else {
                    return Some(Err(Malformed::Syndrome(syndrome)));
                };
                let ack = Ack { syndrome, msn: Psn::new(msn) };
                match bits {
                    13 => Operation::ReadFirst(ack),
                    15 => Operation::ReadLast(ack),
                    16 => Operation::ReadOnly(ack),
                    17 => Operation::Acknowledge(ack),
                    _ => Operation::AtomicAcknowledge(ack, from.u64()?),
                }
            }
            19 => Operation::CompareSwap(Atomic::parse(from)?),
            20 => Operation::FetchAdd(Atomic::parse(from)?),
            22 => Operation::SendLast(Trailer::Invalidate(from.u32()?)),
            _ => Operation::SendOnly(Trailer::Invalidate(from.u32()?)),
        }))
    }

    pub(super) fn encode(&self, to: &mut Encoded) {
        match *self {
            Operation::SendFirst
            | Operation::SendMiddle
            | Operation::WriteMiddle
            | Operation::ReadMiddle
            | Operation::WriteLast(None)
            | Operation::SendLast(Trailer::None)
            | Operation::SendOnly(Trailer::None) => {}
            Operation::SendLast(Trailer::Immediate(word) | Trailer::Invalidate(word))
            | Operation::SendOnly(Trailer::Immediate(word) | Trailer::Invalidate(word))
            | Operation::WriteLast(Some(word)) => to.u32(word),
            Operation::WriteFirst(range) | Operation::WriteOnly(range, None) | Operation::ReadRequest(range) => {
                range.encode(to);
            }
            Operation::WriteOnly(range, Some(imm)) => {
                range.encode(to);
                to.u32(imm);
            }
            Operation::ReadFirst(ack)
            | Operation::ReadLast(ack)
            | Operation::ReadOnly(ack)
            | Operation::Acknowledge(ack) => ack.encode(to),
            Operation::AtomicAcknowledge(ack, old) => {
                ack.encode(to);
                to.u64(old);
            }
            Operation::CompareSwap(atomic) | Operation::FetchAdd(atomic) => {
                to.u64(atomic.address);
                to.u32(atomic.rkey);
                to.u64(atomic.swap);
                to.u64(atomic.compare);
            }
        }
    }

    /// Whether the packet is in the middle of a message. It then has no extended headers.
    #[must_use]
    pub fn is_middle(&self) -> bool {
        matches!(self, Operation::SendMiddle | Operation::WriteMiddle | Operation::ReadMiddle)
    }

    /// Whether the packet is a response, which the requester of a connection handles.
    #[must_use]
    pub fn is_answer(&self) -> bool {
        matches!(
            self,
            Operation::ReadFirst(_)
                | Operation::ReadMiddle
                | Operation::ReadLast(_)
                | Operation::ReadOnly(_)
                | Operation::Acknowledge(_)
                | Operation::AtomicAcknowledge(..)
        )
    }

    /// Whether a payload may follow the headers.
    #[must_use]
    pub fn carries_payload(&self) -> bool {
        !matches!(
            self,
            Operation::ReadRequest(_)
                | Operation::Acknowledge(_)
                | Operation::AtomicAcknowledge(..)
                | Operation::CompareSwap(_)
                | Operation::FetchAdd(_)
        )
    }
}

impl RemoteRange {
    fn parse(from: &mut Reader<'_>) -> Option<RemoteRange> {
        Some(RemoteRange { address: from.u64()?, rkey: from.u32()?, len: from.u32()? })
    }

    fn encode(self, to: &mut Encoded) {
        to.u64(self.address);
        to.u32(self.rkey);
        to.u32(self.len);
    }
}

impl Atomic {
    fn parse(from: &mut Reader<'_>) -> Option<Atomic> {
        Some(Atomic { address: from.u64()?, rkey: from.u32()?, swap: from.u64()?, compare: from.u64()? })
    }
}

impl Ack {
    fn encode(self, to: &mut Encoded) {
        to.u32(u32::from(self.syndrome.encode()) << 24 | self.msn.get());
    }
}
