//! Paths between two ports, and the messages that change them: LAP and APR.

use super::AdditionalInfo;
use crate::wire::fields::{Reader, Writer};

/// A path between two ports. The sender of the message is the local end.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Path {
    /// LID of the sender's port. 0xffff on RoCE.
    pub local_lid: u16,
    /// LID of the receiver's port. 0xffff on RoCE.
    pub remote_lid: u16,
    /// GID of the sender's port.
    pub local_gid: [u8; 16],
    /// GID of the receiver's port.
    pub remote_gid: [u8; 16],
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Packet rate, 6 bits: a value of `enum ibv_rate`.
    pub rate: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Whether both ports are in one subnet.
    pub subnet_local: bool,
    /// ACK timeout of the sender's queue pair, 5 bits: 4.096 µs · 2ⁿ.
    pub ack_timeout: u8,
}

/// Load alternate path (LAP): table 115 of the specification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lap {
    /// Communication id of the sender.
    pub local_id: u32,
    /// Communication id of the receiver.
    pub remote_id: u32,
    /// Number of the receiver's queue pair, 24 bits.
    pub qpn: u32,
    /// Time that the receiver has to respond, 5 bits. [`timeout`](super::timeout) converts it.
    pub remote_timeout: u8,
    /// New alternate path.
    pub alternate: Path,
    /// Private data.
    pub private_data: [u8; Lap::PRIVATE_DATA],
}

/// Alternate path response (APR): table 116 of the specification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Apr {
    /// Communication id of the sender.
    pub local_id: u32,
    /// Communication id of the receiver.
    pub remote_id: u32,
    /// Status: 0 for success, or [`Apr::UNSUPPORTED`] and other values of Linux's `enum ib_cm_apr_status`.
    pub status: u8,
    /// Additional information.
    pub info: AdditionalInfo,
    /// Private data.
    pub private_data: [u8; Apr::PRIVATE_DATA],
}

impl Path {
    /// Whether the local GID or the local LID is set.
    pub(super) fn has_local_address(&self) -> bool {
        self.local_lid != 0 || self.local_gid != [0; 16]
    }

    /// Writes the path in the layout of a REQ.
    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        self.encode_addresses(to);
        to.u32(self.flow_label << 12 | u32::from(self.rate & 0x3f));
        to.u8(self.traffic_class);
        to.u8(self.hop_limit);
        self.encode_levels(to);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Option<Path> {
        let addresses = Path::decode_addresses(from)?;
        let word = from.u32()?;
        let (traffic_class, hop_limit) = (from.u8()?, from.u8()?);
        let levels = addresses.decode_levels(from)?;
        Some(Path { flow_label: word >> 12, rate: word as u8 & 0x3f, traffic_class, hop_limit, ..levels })
    }

    /// Writes the path in the layout of a LAP.
    fn encode_lap(&self, to: &mut Writer<'_>) {
        self.encode_addresses(to);
        to.u32(self.flow_label << 12 | u32::from(self.traffic_class));
        to.u8(self.hop_limit);
        to.u8(self.rate & 0x3f);
        self.encode_levels(to);
    }

    fn decode_lap(from: &mut Reader<'_>) -> Option<Path> {
        let addresses = Path::decode_addresses(from)?;
        let word = from.u32()?;
        let (hop_limit, rate) = (from.u8()?, from.u8()? & 0x3f);
        let levels = addresses.decode_levels(from)?;
        Some(Path { flow_label: word >> 12, rate, traffic_class: word as u8, hop_limit, ..levels })
    }

    fn encode_addresses(&self, to: &mut Writer<'_>) {
        to.u16(self.local_lid);
        to.u16(self.remote_lid);
        to.put(&self.local_gid);
        to.put(&self.remote_gid);
    }

    fn decode_addresses(from: &mut Reader<'_>) -> Option<Path> {
        let (local_lid, remote_lid) = (from.u16()?, from.u16()?);
        let (local_gid, remote_gid) = (from.take()?, from.take()?);
        Some(Path { local_lid, remote_lid, local_gid, remote_gid, ..Path::default() })
    }

    fn encode_levels(&self, to: &mut Writer<'_>) {
        to.u8(self.service_level << 4 | u8::from(self.subnet_local) << 3);
        to.u8(self.ack_timeout << 3);
    }

    fn decode_levels(self, from: &mut Reader<'_>) -> Option<Path> {
        let (level, ack) = (from.u8()?, from.u8()?);
        Some(Path { service_level: level >> 4, subnet_local: level & 8 != 0, ack_timeout: ack >> 3, ..self })
    }
}

impl Lap {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 168;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        to.u32(self.local_id);
        to.u32(self.remote_id);
        to.u32(0);
        to.u24_and_byte(self.qpn, self.remote_timeout << 3);
        to.u32(0);
        self.alternate.encode_lap(to);
        to.put(&self.private_data);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Option<Lap> {
        let (local_id, remote_id, _reserved) = (from.u32()?, from.u32()?, from.u32()?);
        let (qpn, timeout) = from.u24_and_byte()?;
        let _reserved = from.u32()?;
        Some(Lap {
            local_id,
            remote_id,
            qpn,
            remote_timeout: timeout >> 3,
            alternate: Path::decode_lap(from)?,
            private_data: from.take()?,
        })
    }
}

impl Apr {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 148;

    /// Status: the sender does not support alternate paths.
    pub const UNSUPPORTED: u8 = 2;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        to.u32(self.local_id);
        to.u32(self.remote_id);
        to.u8(self.info.len);
        to.u8(self.status);
        to.u16(0);
        to.put(&self.info.bytes);
        to.put(&self.private_data);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Option<Apr> {
        let (local_id, remote_id) = (from.u32()?, from.u32()?);
        let (len, status, _reserved) = (from.u8()?, from.u8()?, from.u16()?);
        let info = AdditionalInfo { len, bytes: from.take()? };
        Some(Apr { local_id, remote_id, status, info, private_data: from.take()? })
    }
}
