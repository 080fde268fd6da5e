//! Messages that delay or refuse an answer: MRA and REJ.

use std::fmt;

use crate::wire::fields::{Reader, Writer};

/// Message receipt acknowledgement (MRA): table 107 of the specification.
///
/// The sender needs more time to answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mra {
    /// Communication id of the sender.
    pub local_id: u32,
    /// Communication id of the receiver.
    pub remote_id: u32,
    /// Message that was received.
    pub answers: Answered,
    /// Time that the sender needs, 5 bits. [`timeout`](super::timeout) converts it.
    pub timeout: u8,
    /// Private data.
    pub private_data: [u8; Mra::PRIVATE_DATA],
}

/// Reject (REJ): table 108 of the specification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rej {
    /// Communication id of the sender. 0 if it has none.
    pub local_id: u32,
    /// Communication id of the receiver. 0 if the sender does not know it.
    pub remote_id: u32,
    /// Message that is rejected.
    pub answers: Answered,
    /// Reason.
    pub reason: RejectReason,
    /// Additional reject information. Its length has 7 bits.
    pub info: AdditionalInfo,
    /// Private data.
    pub private_data: [u8; Rej::PRIVATE_DATA],
}

/// Kind of the message that an MRA or REJ answers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Answered {
    /// A REQ.
    Req,
    /// A REP.
    Rep,
    /// A LAP in an MRA, no message in a REJ. The reserved value 3 is decoded as this one.
    Other,
}

/// Additional information of a REJ, SIDR_REP or APR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdditionalInfo {
    /// Length in bytes. A peer may send one that is greater than 72.
    pub len: u8,
    /// Information, followed by zeros.
    pub bytes: [u8; 72],
}

/// Reason of a REJ: `enum ib_cm_rej_reason` of Linux.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RejectReason(pub u16);

macro_rules! reasons {
    ($($name:ident = $code:literal, $text:literal;)+) => {
        impl RejectReason {
            $(
                #[doc = concat!("Reason ", $code, ": ", $text, ".")]
                pub const $name: RejectReason = RejectReason($code);
            )+
        }

        impl fmt::Display for RejectReason {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 {
                    $($code => f.write_str($text),)+
                    code => write!(f, "unknown reject reason {code}"),
                }
            }
        }
    };
}

reasons! {
    NO_QP = 1, "no queue pair is available";
    NO_EEC = 2, "no end-to-end context is available";
    NO_RESOURCES = 3, "no resources are available";
    TIMEOUT = 4, "the sender gave up after a timeout";
    UNSUPPORTED = 5, "the request is not supported";
    INVALID_COMM_ID = 6, "the communication id is invalid";
    INVALID_COMM_INSTANCE = 7, "the communication instance is invalid";
    INVALID_SERVICE_ID = 8, "nothing listens on the service id";
    INVALID_TRANSPORT_TYPE = 9, "the transport service type is invalid";
    STALE_CONN = 10, "the connection is stale";
    RDC_NOT_EXIST = 11, "the reliable datagram channel does not exist";
    INVALID_GID = 12, "the GID of the primary path is invalid";
    INVALID_LID = 13, "the LID of the primary path is invalid";
    INVALID_SL = 14, "the service level of the primary path is invalid";
    INVALID_TRAFFIC_CLASS = 15, "the traffic class of the primary path is invalid";
    INVALID_HOP_LIMIT = 16, "the hop limit of the primary path is invalid";
    INVALID_PACKET_RATE = 17, "the packet rate of the primary path is invalid";
    INVALID_ALT_GID = 18, "the GID of the alternate path is invalid";
    INVALID_ALT_LID = 19, "the LID of the alternate path is invalid";
    INVALID_ALT_SL = 20, "the service level of the alternate path is invalid";
    INVALID_ALT_TRAFFIC_CLASS = 21, "the traffic class of the alternate path is invalid";
    INVALID_ALT_HOP_LIMIT = 22, "the hop limit of the alternate path is invalid";
    INVALID_ALT_PACKET_RATE = 23, "the packet rate of the alternate path is invalid";
    PORT_CM_REDIRECT = 24, "another port and its connection manager provide the service";
    PORT_REDIRECT = 25, "another port provides the service";
    INVALID_MTU = 26, "the path MTU is invalid";
    INSUFFICIENT_RESP_RESOURCES = 27, "the responder resources are insufficient";
    CONSUMER_DEFINED = 28, "the application rejected the connection";
    INVALID_RNR_RETRY = 29, "the RNR retry count is invalid";
    DUPLICATE_LOCAL_COMM_ID = 30, "the local communication id is a duplicate";
    INVALID_CLASS_VERSION = 31, "the class version is invalid";
    INVALID_FLOW_LABEL = 32, "the flow label of the primary path is invalid";
    INVALID_ALT_FLOW_LABEL = 33, "the flow label of the alternate path is invalid";
    VENDOR_OPTION_NOT_SUPPORTED = 35, "the vendor option is not supported";
}

impl AdditionalInfo {
    /// No information.
    pub const NONE: AdditionalInfo = AdditionalInfo { len: 0, bytes: [0; 72] };

    /// Copies the information. Bytes after the first 72 are dropped.
    #[must_use]
    pub fn new(info: &[u8]) -> AdditionalInfo {
        let mut bytes = [0; 72];
        let len = info.len().min(bytes.len());
        bytes[..len].copy_from_slice(&info[..len]);
        AdditionalInfo { len: len as u8, bytes }
    }

    /// Returns the first `len` bytes, at most 72.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.bytes.len().min(usize::from(self.len))]
    }
}

impl Answered {
    /// Value of the field in the upper two bits of its byte.
    fn encode(self) -> u8 {
        match self {
            Answered::Req => 0,
            Answered::Rep => 1 << 6,
            Answered::Other => 2 << 6,
        }
    }

    fn decode(byte: u8) -> Answered {
        match byte >> 6 {
            0 => Answered::Req,
            1 => Answered::Rep,
            _ => Answered::Other,
        }
    }
}

impl Mra {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 222;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        to.u32(self.local_id);
        to.u32(self.remote_id);
        to.u8(self.answers.encode());
        to.u8(self.timeout << 3);
        to.put(&self.private_data);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Option<Mra> {
        Some(Mra {
            local_id: from.u32()?,
            remote_id: from.u32()?,
            answers: Answered::decode(from.u8()?),
            timeout: from.u8()? >> 3,
            private_data: from.take()?,
        })
    }
}

impl Rej {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 148;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        to.u32(self.local_id);
        to.u32(self.remote_id);
        to.u8(self.answers.encode());
        to.u8(self.info.len << 1);
        to.u16(self.reason.0);
        to.put(&self.info.bytes);
        to.put(&self.private_data);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Option<Rej> {
        let (local_id, remote_id) = (from.u32()?, from.u32()?);
        let (answers, len) = (Answered::decode(from.u8()?), from.u8()? >> 1);
        let reason = RejectReason(from.u16()?);
        let info = AdditionalInfo { len, bytes: from.take()? };
        Some(Rej { local_id, remote_id, answers, reason, info, private_data: from.take()? })
    }
}
