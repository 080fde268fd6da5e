//! Messages that end a connection: DREQ and DREP.

use crate::wire::fields::{Reader, Writer};

/// Request for communication release (DREQ): table 112 of the specification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dreq {
    /// Communication id of the sender.
    pub local_id: u32,
    /// Communication id of the receiver.
    pub remote_id: u32,
    /// Number of the receiver's queue pair, 24 bits.
    pub remote_qpn: u32,
    /// Private data.
    pub private_data: [u8; Dreq::PRIVATE_DATA],
}

/// Reply to a request for communication release (DREP): table 113 of the specification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Drep {
    /// Communication id of the sender.
    pub local_id: u32,
    /// Communication id of the receiver.
    pub remote_id: u32,
    /// Private data.
    pub private_data: [u8; Drep::PRIVATE_DATA],
}

impl Dreq {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 220;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        to.u32(self.local_id);
        to.u32(self.remote_id);
        to.u24_and_byte(self.remote_qpn, 0);
        to.put(&self.private_data);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Option<Dreq> {
        let (local_id, remote_id) = (from.u32()?, from.u32()?);
        let (remote_qpn, _reserved) = from.u24_and_byte()?;
        Some(Dreq { local_id, remote_id, remote_qpn, private_data: from.take()? })
    }
}

impl Drep {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 224;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        to.u32(self.local_id);
        to.u32(self.remote_id);
        to.put(&self.private_data);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Option<Drep> {
        Some(Drep { local_id: from.u32()?, remote_id: from.u32()?, private_data: from.take()? })
    }
}
