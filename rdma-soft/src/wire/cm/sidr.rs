//! Messages that resolve a service id to a queue pair: SIDR_REQ and SIDR_REP.

use std::fmt;

use super::AdditionalInfo;
use crate::wire::fields::{Reader, Writer};

/// Service id resolution request (SIDR_REQ): table 119 of the specification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SidrReq {
    /// Request id.
    pub id: u32,
    /// Partition key.
    pub pkey: u16,
    /// Service id. [`service_id`](super::service_id) makes one from a port.
    pub service: u64,
    /// Private data.
    pub private_data: [u8; SidrReq::PRIVATE_DATA],
}

/// Service id resolution response (SIDR_REP): table 120 of the specification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SidrRep {
    /// Request id, from the SIDR_REQ.
    pub id: u32,
    /// Status.
    pub status: SidrStatus,
    /// Number of the queue pair that provides the service, 24 bits.
    pub qpn: u32,
    /// Service id.
    pub service: u64,
    /// Q_Key of the queue pair.
    pub qkey: u32,
    /// Additional information.
    pub info: AdditionalInfo,
    /// Vendor id for enhanced connection establishment (ECE), 24 bits. 0 if unused.
    pub vendor_id: u32,
    /// ECE options, in the attribute modifier of the MAD.
    pub ece_options: u32,
    /// Private data.
    pub private_data: [u8; SidrRep::PRIVATE_DATA],
}

/// Status of a SIDR_REP: `enum ib_cm_sidr_status` of Linux.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SidrStatus(pub u8);

impl SidrStatus {
    /// The queue pair and the Q_Key are valid.
    pub const SUCCESS: SidrStatus = SidrStatus(0);
    /// The service id is not supported.
    pub const UNSUPPORTED: SidrStatus = SidrStatus(1);
    /// The service provider rejected the request.
    pub const REJECT: SidrStatus = SidrStatus(2);
    /// No queue pair is available.
    pub const NO_QP: SidrStatus = SidrStatus(3);
    /// The request must be sent to another address.
    pub const REDIRECT: SidrStatus = SidrStatus(4);
    /// The class version is not supported.
    pub const UNSUPPORTED_VERSION: SidrStatus = SidrStatus(5);
}

impl fmt::Display for SidrStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            SidrStatus::SUCCESS => "success",
            SidrStatus::UNSUPPORTED => "the service id is not supported",
            SidrStatus::REJECT => "the service provider rejected the request",
            SidrStatus::NO_QP => "no queue pair is available",
            SidrStatus::REDIRECT => "the request must be sent to another address",
            SidrStatus::UNSUPPORTED_VERSION => "the class version is not supported",
            SidrStatus(code) => return write!(f, "unknown service id resolution status {code}"),
        })
    }
}

impl SidrReq {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 216;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        to.u32(self.id);
        to.u16(self.pkey);
        to.u16(0);
        to.u64(self.service);
        to.put(&self.private_data);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Option<SidrReq> {
        let (id, pkey, _reserved) = (from.u32()?, from.u16()?, from.u16()?);
        Some(SidrReq { id, pkey, service: from.u64()?, private_data: from.take()? })
    }
}

impl SidrRep {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 136;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        to.u32(self.id);
        to.u8(self.status.0);
        to.u8(self.info.len);
        // The vendor id is in three bytes that were reserved before ECE.
        to.u16((self.vendor_id >> 8) as u16);
        to.u24_and_byte(self.qpn, self.vendor_id as u8);
        to.u64(self.service);
        to.u32(self.qkey);
        to.put(&self.info.bytes);
        to.put(&self.private_data);
    }

    pub(super) fn decode(ece_options: u32, from: &mut Reader<'_>) -> Option<SidrRep> {
        let (id, status, len) = (from.u32()?, SidrStatus(from.u8()?), from.u8()?);
        let high = from.u16()?;
        let (qpn, low) = from.u24_and_byte()?;
        let (service, qkey) = (from.u64()?, from.u32()?);
        Some(SidrRep {
            id,
            status,
            qpn,
            service,
            qkey,
            info: AdditionalInfo { len, bytes: from.take()? },
            vendor_id: u32::from(high) << 8 | u32::from(low),
            ece_options,
            private_data: from.take()?,
        })
    }
}
