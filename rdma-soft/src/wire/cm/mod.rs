//! Connection-management messages: InfiniBand Architecture Specification, volume 1, chapter 12.
//!
//! A message is a management datagram (MAD) of 256 bytes. It travels between queue pairs 1 as the payload of a UD packet. This
//! module encodes and decodes the messages and does not interpret them. [`IpHeader`] is the address header that rdma_cm puts at
//! the start of the private data of some messages.
//!
//! Field offsets and reason codes are those of Linux's include/rdma/ibta_vol1_c12.h and include/rdma/ib_cm.h. Encoding
//! truncates a value to the width of its field and writes zeros to reserved fields. Decoding ignores reserved fields.

mod connect;
mod disconnect;
mod ip;
mod path;
mod reject;
mod sidr;
mod time;

pub use connect::{Rep, Req, Rtu};
pub use disconnect::{Drep, Dreq};
pub use ip::{IpHeader, PS_TCP, PS_UDP, service_id, service_port};
pub use path::{Apr, Lap, Path};
pub use reject::{AdditionalInfo, Answered, Mra, Rej, RejectReason};
pub use sidr::{SidrRep, SidrReq, SidrStatus};
pub use time::timeout;

use super::fields::{Reader, Writer};

/// Length of a MAD in bytes.
pub const MAD_LEN: usize = 256;

/// Bytes of the common MAD header.
const HEADER_LEN: usize = 24;

const BASE_VERSION: u8 = 1;
/// Management class of connection management.
const CLASS: u8 = 7;
const CLASS_VERSION: u8 = 2;
/// Method `Send`, the only one of this class.
const SEND: u8 = 3;

const REQ: u16 = 0x10;
const MRA: u16 = 0x11;
const REJ: u16 = 0x12;
const REP: u16 = 0x13;
const RTU: u16 = 0x14;
const DREQ: u16 = 0x15;
const DREP: u16 = 0x16;
const SIDR_REQ: u16 = 0x17;
const SIDR_REP: u16 = 0x18;
const LAP: u16 = 0x19;
const APR: u16 = 0x1a;

/// Reads the id that the sender of a MAD has given its connection or lookup. A SIDR_REP has the id of the receiver there.
#[must_use]
pub const fn local_id(mad: &[u8; MAD_LEN]) -> u32 {
    const AT: usize = HEADER_LEN;
    u32::from_be_bytes([mad[AT], mad[AT + 1], mad[AT + 2], mad[AT + 3]])
}

/// A MAD of the communication-management class.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mad {
    /// Transaction id. A reply has the id of its request.
    pub transaction: u64,
    /// Message.
    pub message: Message,
}

/// A connection-management message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// Request for communication.
    Req(Req),
    /// Message receipt acknowledgement.
    Mra(Mra),
    /// Reject.
    Rej(Rej),
    /// Reply to a request for communication.
    Rep(Rep),
    /// Ready to use.
    Rtu(Rtu),
    /// Request for communication release.
    Dreq(Dreq),
    /// Reply to a request for communication release.
    Drep(Drep),
    /// Service id resolution request.
    SidrReq(SidrReq),
    /// Service id resolution response.
    SidrRep(SidrRep),
    /// Load alternate path.
    Lap(Lap),
    /// Alternate path response.
    Apr(Apr),
}

/// Why bytes are not a connection-management MAD.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MadError {
    /// The length is not [`MAD_LEN`].
    #[error("the MAD has {0} bytes instead of {MAD_LEN}")]
    Length(usize),
    /// The base version is not 1.
    #[error("unsupported MAD base version {0}")]
    BaseVersion(u8),
    /// The management class is not connection management.
    #[error("management class {0:#04x} is not connection management")]
    Class(u8),
    /// The class version is not 2.
    #[error("unsupported version {0} of the connection-management class")]
    ClassVersion(u8),
    /// The method is not `Send`.
    #[error("MAD method {0:#04x} is not Send")]
    Method(u8),
    /// The attribute is not a known message.
    #[error("unknown connection-management attribute {0:#06x}")]
    Attribute(u16),
}

impl Mad {
    /// Encodes the MAD.
    #[must_use]
    pub fn encode(&self) -> [u8; MAD_LEN] {
        let mut bytes = [0; MAD_LEN];
        let (header, data) = bytes.split_at_mut(HEADER_LEN);
        let mut to = Writer(header);
        to.put(&[BASE_VERSION, CLASS, CLASS_VERSION, SEND]);
        // Status and class-specific field.
        to.u32(0);
        to.u64(self.transaction);
        to.u16(self.message.attribute());
        to.u16(0);
        to.u32(self.message.ece_options());
        self.message.encode(&mut Writer(data));
        bytes
    }

    /// Decodes a MAD.
    ///
    /// # Errors
    /// [`MadError`] if the bytes are not a MAD of this class, or if the message is unknown.
    pub fn decode(bytes: &[u8]) -> Result<Mad, MadError> {
        let short = MadError::Length(bytes.len());
        if bytes.len() != MAD_LEN {
            return Err(short);
        }
        let mut from = Reader(bytes);
        let [base, class, version, method] = from.take().ok_or(short)?;
        if base != BASE_VERSION {
            return Err(MadError::BaseVersion(base));
        }
        if class != CLASS {
            return Err(MadError::Class(class));
        }
        if version != CLASS_VERSION {
            return Err(MadError::ClassVersion(version));
        }
        if method != SEND {
            return Err(MadError::Method(method));
        }
        let (transaction, attribute, modifier) = identity(&mut from).ok_or(short)?;
        let message = Message::decode(attribute, modifier, &mut from).ok_or(short)??;
        Ok(Mad { transaction, message })
    }
}

/// Reads the rest of the MAD header: transaction id, attribute id and attribute modifier.
fn identity(from: &mut Reader<'_>) -> Option<(u64, u16, u32)> {
    let (_status, _class_specific) = (from.u16()?, from.u16()?);
    let (transaction, attribute) = (from.u64()?, from.u16()?);
    let (_reserved, modifier) = (from.u16()?, from.u32()?);
    Some((transaction, attribute, modifier))
}

impl Message {
    /// Attribute id of the message.
    fn attribute(&self) -> u16 {
        match self {
            Message::Req(_) => REQ,
            Message::Mra(_) => MRA,
            Message::Rej(_) => REJ,
            Message::Rep(_) => REP,
            Message::Rtu(_) => RTU,
            Message::Dreq(_) => DREQ,
            Message::Drep(_) => DREP,
            Message::SidrReq(_) => SIDR_REQ,
            Message::SidrRep(_) => SIDR_REP,
            Message::Lap(_) => LAP,
            Message::Apr(_) => APR,
        }
    }

    /// ECE options of the message: its attribute modifier. Messages without ECE have none.
    fn ece_options(&self) -> u32 {
        match self {
            Message::Req(req) => req.ece_options,
            Message::Rep(rep) => rep.ece_options,
            Message::SidrRep(rep) => rep.ece_options,
            _ => 0,
        }
    }

    fn encode(&self, to: &mut Writer<'_>) {
        match self {
            Message::Req(req) => req.encode(to),
            Message::Mra(mra) => mra.encode(to),
            Message::Rej(rej) => rej.encode(to),
            Message::Rep(rep) => rep.encode(to),
            Message::Rtu(rtu) => rtu.encode(to),
            Message::Dreq(dreq) => dreq.encode(to),
            Message::Drep(drep) => drep.encode(to),
            Message::SidrReq(req) => req.encode(to),
            Message::SidrRep(rep) => rep.encode(to),
            Message::Lap(lap) => lap.encode(to),
            Message::Apr(apr) => apr.encode(to),
        }
    }

    /// Reads the message of an attribute. `None` if the data is too short.
    fn decode(attribute: u16, modifier: u32, from: &mut Reader<'_>) -> Option<Result<Message, MadError>> {
        Some(Ok(match attribute {
            REQ => Message::Req(Req::decode(modifier, from)?),
            MRA => Message::Mra(Mra::decode(from)?),
            REJ => Message::Rej(Rej::decode(from)?),
            REP => Message::Rep(Rep::decode(modifier, from)?),
            RTU => Message::Rtu(Rtu::decode(from)?),
            DREQ => Message::Dreq(Dreq::decode(from)?),
            DREP => Message::Drep(Drep::decode(from)?),
            SIDR_REQ => Message::SidrReq(SidrReq::decode(from)?),
            SIDR_REP => Message::SidrRep(SidrRep::decode(modifier, from)?),
            LAP => Message::Lap(Lap::decode(from)?),
            APR => Message::Apr(Apr::decode(from)?),
            _ => return Some(Err(MadError::Attribute(attribute))),
        }))
    }
}
