//! Messages that make a connection: REQ, REP and RTU.

use super::Path;
use crate::wire::fields::{Reader, Writer};

/// Request for communication (REQ): table 106 of the specification.
///
/// The fields for reliable datagrams (EECN) are reserved here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Req {
    /// Communication id of the sender.
    pub local_id: u32,
    /// Vendor id for enhanced connection establishment (ECE), 24 bits. 0 if unused.
    pub vendor_id: u32,
    /// ECE options, in the attribute modifier of the MAD.
    pub ece_options: u32,
    /// Service id. [`service_id`](super::service_id) makes one from a port.
    pub service: u64,
    /// GUID of the sender's device.
    pub guid: u64,
    /// Q_Key of the sender's queue pair. Only for datagram services.
    pub qkey: u32,
    /// Number of the sender's queue pair, 24 bits.
    pub qpn: u32,
    /// RDMA reads and atomics that the sender executes at a time, as the responder.
    pub responder_resources: u8,
    /// RDMA reads and atomics that the sender has outstanding at a time, as the initiator.
    pub initiator_depth: u8,
    /// Time that the receiver has to respond, 5 bits. [`timeout`](super::timeout) converts it.
    pub remote_timeout: u8,
    /// Transport service, 2 bits: 0 RC, 1 UC, 2 RD, 3 the one in `extended_transport`.
    pub transport: u8,
    /// Whether the sender supports end-to-end flow control.
    pub flow_control: bool,
    /// PSN of the first packet that the sender will send, 24 bits.
    pub psn: u32,
    /// Time that the sender takes to respond, 5 bits. [`timeout`](super::timeout) converts it.
    pub local_timeout: u8,
    /// Retries of the queue pair after a timeout or sequence error, 3 bits.
    pub retry_count: u8,
    /// Partition key.
    pub pkey: u16,
    /// Path MTU, 4 bits: 1 for 256 bytes to 5 for 4096 bytes.
    pub mtu: u8,
    /// Whether a reliable datagram channel exists.
    pub rdc_exists: bool,
    /// Retries of the receiver's queue pair after an RNR NAK, 3 bits. 7 means no limit.
    pub rnr_retry_count: u8,
    /// Times that the sender will retransmit each message, 4 bits.
    pub max_cm_retries: u8,
    /// Whether the sender's queue pair uses a shared receive queue.
    pub srq: bool,
    /// Extended transport type, 3 bits: 1 for XRC.
    pub extended_transport: u8,
    /// Primary path.
    pub path: Path,
    /// Alternate path. Decoding gives `None` if the local GID and the local LID are zero.
    pub alternate: Option<Path>,
    /// Private data.
    pub private_data: [u8; Req::PRIVATE_DATA],
}

/// Reply to a request for communication (REP): table 110 of the specification.
///
/// The field for reliable datagrams (EECN) is reserved here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rep {
    /// Communication id of the sender.
    pub local_id: u32,
    /// Communication id of the receiver, from its REQ.
    pub remote_id: u32,
    /// Q_Key of the sender's queue pair. Only for datagram services.
    pub qkey: u32,
    /// Number of the sender's queue pair, 24 bits.
    pub qpn: u32,
    /// PSN of the first packet that the sender will send, 24 bits.
    pub psn: u32,
    /// RDMA reads and atomics that the sender executes at a time, as the responder.
    pub responder_resources: u8,
    /// RDMA reads and atomics that the sender has outstanding at a time, as the initiator.
    pub initiator_depth: u8,
    /// Longest time before the sender's device sends an ACK, 5 bits: 4.096 µs · 2ⁿ.
    pub ack_delay: u8,
    /// Answer to the alternate path, 2 bits: 0 accepted, 1 not supported, 2 rejected.
    pub failover: u8,
    /// Whether the sender supports end-to-end flow control.
    pub flow_control: bool,
    /// Retries of the receiver's queue pair after an RNR NAK, 3 bits. 7 means no limit.
    pub rnr_retry_count: u8,
    /// Whether the sender's queue pair uses a shared receive queue.
    pub srq: bool,
    /// GUID of the sender's device.
    pub guid: u64,
    /// Vendor id for enhanced connection establishment (ECE), 24 bits. 0 if unused.
    pub vendor_id: u32,
    /// ECE options, in the attribute modifier of the MAD.
    pub ece_options: u32,
    /// Private data.
    pub private_data: [u8; Rep::PRIVATE_DATA],
}

/// Ready to use (RTU): table 111 of the specification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rtu {
    /// Communication id of the sender.
    pub local_id: u32,
    /// Communication id of the receiver.
    pub remote_id: u32,
    /// Private data.
    pub private_data: [u8; Rtu::PRIVATE_DATA],
}

impl Req {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 92;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        to.u32(self.local_id);
        to.u32(self.vendor_id & 0xff_ffff);
        to.u64(self.service);
        to.u64(self.guid);
        to.u32(0);
        to.u32(self.qkey);
        to.u24_and_byte(self.qpn, self.responder_resources);
        to.u24_and_byte(0, self.initiator_depth);
        let flow_control = u8::from(self.flow_control);
        to.u24_and_byte(0, self.remote_timeout << 3 | (self.transport & 3) << 1 | flow_control);
        to.u24_and_byte(self.psn, self.local_timeout << 3 | self.retry_count & 7);
        to.u16(self.pkey);
        to.u8(self.mtu << 4 | u8::from(self.rdc_exists) << 3 | self.rnr_retry_count & 7);
        to.u8(self.max_cm_retries << 4 | u8::from(self.srq) << 3 | self.extended_transport & 7);
        self.path.encode(to);
        self.alternate.unwrap_or_default().encode(to);
        to.put(&self.private_data);
    }

    pub(super) fn decode(ece_options: u32, from: &mut Reader<'_>) -> Option<Req> {
        let local_id = from.u32()?;
        let (_, vendor_id) = from.byte_and_u24()?;
        let (service, guid) = (from.u64()?, from.u64()?);
        let (_reserved, qkey) = (from.u32()?, from.u32()?);
        let (qpn, responder_resources) = from.u24_and_byte()?;
        let (_local_eecn, initiator_depth) = from.u24_and_byte()?;
        let (_remote_eecn, transport) = from.u24_and_byte()?;
        let (psn, retry) = from.u24_and_byte()?;
        let (pkey, mtu, cm_retries) = (from.u16()?, from.u8()?, from.u8()?);
        let (path, alternate) = (Path::decode(from)?, Path::decode(from)?);
        Some(Req {
            local_id,
            vendor_id,
            ece_options,
            service,
            guid,
            qkey,
            qpn,
            responder_resources,
            initiator_depth,
            remote_timeout: transport >> 3,
            transport: transport >> 1 & 3,
            flow_control: transport & 1 != 0,
            psn,
            local_timeout: retry >> 3,
            retry_count: retry & 7,
            pkey,
            mtu: mtu >> 4,
            rdc_exists: mtu & 8 != 0,
            rnr_retry_count: mtu & 7,
            max_cm_retries: cm_retries >> 4,
            srq: cm_retries & 8 != 0,
            extended_transport: cm_retries & 7,
            path,
            alternate: alternate.has_local_address().then_some(alternate),
            private_data: from.take()?,
        })
    }
}

impl Rep {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 196;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        // The vendor id is in three bytes that were reserved before ECE.
        let [_, high, middle, low] = self.vendor_id.to_be_bytes();
        to.u32(self.local_id);
        to.u32(self.remote_id);
        to.u32(self.qkey);
        to.u24_and_byte(self.qpn, high);
        to.u24_and_byte(0, middle);
        to.u24_and_byte(self.psn, low);
        to.u8(self.responder_resources);
        to.u8(self.initiator_depth);
        to.u8(self.ack_delay << 3 | (self.failover & 3) << 1 | u8::from(self.flow_control));
        to.u8(self.rnr_retry_count << 5 | u8::from(self.srq) << 4);
        to.u64(self.guid);
        to.put(&self.private_data);
    }

    pub(super) fn decode(ece_options: u32, from: &mut Reader<'_>) -> Option<Rep> {
        let (local_id, remote_id, qkey) = (from.u32()?, from.u32()?, from.u32()?);
        let (qpn, high) = from.u24_and_byte()?;
        let (_eecn, middle) = from.u24_and_byte()?;
        let (psn, low) = from.u24_and_byte()?;
        let (responder_resources, initiator_depth) = (from.u8()?, from.u8()?);
        let (ack, retry) = (from.u8()?, from.u8()?);
        Some(Rep {
            local_id,
            remote_id,
            qkey,
            qpn,
            psn,
            responder_resources,
            initiator_depth,
            ack_delay: ack >> 3,
            failover: ack >> 1 & 3,
            flow_control: ack & 1 != 0,
            rnr_retry_count: retry >> 5,
            srq: retry & 0x10 != 0,
            guid: from.u64()?,
            vendor_id: u32::from_be_bytes([0, high, middle, low]),
            ece_options,
            private_data: from.take()?,
        })
    }
}

impl Rtu {
    /// Length of the private data in bytes.
    pub const PRIVATE_DATA: usize = 224;

    pub(super) fn encode(&self, to: &mut Writer<'_>) {
        to.u32(self.local_id);
        to.u32(self.remote_id);
        to.put(&self.private_data);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Option<Rtu> {
        Some(Rtu { local_id: from.u32()?, remote_id: from.u32()?, private_data: from.take()? })
    }
}
