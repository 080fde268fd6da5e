//! What the ends of a connection tell each other when they connect.

use std::fmt;
use std::ops::Deref;

use rdma_sys::*;

use super::CmError;
use crate::{AddressVector, Result};

/// Bytes that come with a request, an answer or a refusal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrivateData {
    len: u8,
    bytes: [u8; 255],
}

impl PrivateData {
    /// None.
    pub const EMPTY: PrivateData = PrivateData { len: 0, bytes: [0; 255] };

    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData) for more than `max` bytes.
    pub(super) fn new(data: &[u8], max: u8) -> Result<Self> {
        if data.len() > max.into() {
            return Err(CmError::PrivateData { len: data.len(), max }.into());
        }
        let mut all = PrivateData { len: data.len() as u8, bytes: [0; 255] };
        all.bytes[..data.len()].copy_from_slice(data);
        Ok(all)
    }

    /// # Safety
    /// `data` must be valid to read for `len` bytes, or be NULL.
    unsafe fn from_raw(data: *const std::ffi::c_void, len: u8) -> Self {
        if data.is_null() {
            return PrivateData::EMPTY;
        }
        let mut all = PrivateData { len, bytes: [0; 255] };
        // SAFETY: the caller's contract; there is room for as many as `len` can say.
        unsafe { std::ptr::copy_nonoverlapping(data.cast::<u8>(), all.bytes.as_mut_ptr(), len.into()) };
        all
    }

    pub(super) fn as_raw(&self) -> (*const std::ffi::c_void, u8) {
        (if self.len == 0 { std::ptr::null() } else { self.bytes.as_ptr().cast() }, self.len)
    }
}

impl Default for PrivateData {
    fn default() -> Self {
        PrivateData::EMPTY
    }
}

impl Deref for PrivateData {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len.into()]
    }
}

impl fmt::Debug for PrivateData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b\"{}\"", self.escape_ascii())
    }
}

/// What an end asks for when it connects or accepts: `struct rdma_conn_param`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct ConnectParameters {
    private_data: PrivateData,
    responder_resources: u8,
    initiator_depth: u8,
    flow_control: bool,
    retry_count: u8,
    rnr_retry_count: u8,
    srq: bool,
    qp_num: u32,
}

impl ConnectParameters {
    /// Of the queue pair of that number: [`QueuePair::number`](crate::QueuePair::number).
    pub fn new(qp_num: u32) -> Self {
        ConnectParameters {
            private_data: PrivateData::EMPTY,
            responder_resources: RDMA_MAX_RESP_RES as u8,
            initiator_depth: RDMA_MAX_INIT_DEPTH as u8,
            flow_control: true,
            // 7 is for ever on some devices, see `Quirks::SEVEN_RETRIES_ENDLESS`.
            retry_count: 6,
            rnr_retry_count: 7,
            srq: false,
            qp_num,
        }
    }

    /// Bytes for the peer: of a connection at most 56 with a request and 196 with an answer, of datagrams 180 and 136
    /// (rdma_connect(3), rdma_accept(3)). What the peer gets is padded with zeros to about that length.
    ///
    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData) for more than 196 bytes.
    pub fn private_data(mut self, data: &[u8]) -> Result<Self> {
        self.private_data = PrivateData::new(data, 196)?;
        Ok(self)
    }

    /// Reads and atomics of the peer that this end serves at a time; as many as the device can unless set.
    pub fn responder_resources(mut self, count: u8) -> Self {
        self.responder_resources = count;
        self
    }

    /// Reads and atomics of this end that the peer is to serve at a time; as many as the device can unless set.
    pub fn initiator_depth(mut self, count: u8) -> Self {
        self.initiator_depth = count;
        self
    }

    /// Hardware flow control, on unless set.
    pub fn flow_control(mut self, on: bool) -> Self {
        self.flow_control = on;
        self
    }

    /// Retries after a timeout, 0 to 7; 6 unless set. The passive end does not choose.
    pub fn retry_count(mut self, retries: u8) -> Self {
        self.retry_count = retries.min(7);
        self
    }

    /// Retries of the peer when this end has no receive posted, 0 to 6, or 7 for ever; 7 unless set.
    pub fn rnr_retry_count(mut self, retries: u8) -> Self {
        self.rnr_retry_count = retries.min(7);
        self
    }

    /// Whether the queue pair takes receives from a shared receive queue; not unless set.
    pub fn srq(mut self, srq: bool) -> Self {
        self.srq = srq;
        self
    }

    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData) for more bytes than the call carries.
    pub(super) fn check(&self, max: u8) -> Result<()> {
        match self.private_data.len {
            len if len > max => Err(CmError::PrivateData { len: len.into(), max }.into()),
            _ => Ok(()),
        }
    }

    /// Valid as long as this.
    pub(super) fn as_raw(&self) -> rdma_conn_param {
        let (private_data, private_data_len) = self.private_data.as_raw();
        rdma_conn_param {
            private_data,
            private_data_len,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: self.flow_control.into(),
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry_count,
            srq: self.srq.into(),
            qp_num: self.qp_num,
        }
    }
}

/// What the peer said of itself: of a connection, or of datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Parameters {
    /// Of a connection.
    Connected(PeerParameters),
    /// Of datagrams.
    Datagrams(UdParameters),
}

impl Parameters {
    /// What came with it.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        match self {
            Parameters::Connected(peer) => &peer.private_data,
            Parameters::Datagrams(peer) => &peer.private_data,
        }
    }

    pub(super) fn said(&self) -> PrivateData {
        match self {
            Parameters::Connected(peer) => peer.private_data,
            Parameters::Datagrams(peer) => peer.private_data,
        }
    }

    /// # Safety
    /// `event` must be one that was not acknowledged yet, of an id with that port space.
    pub(super) unsafe fn of(event: &rdma_cm_event, space: rdma_port_space) -> Self {
        match space {
            RDMA_PS_UDP | RDMA_PS_IPOIB => {
                // SAFETY: for these port spaces that is the member which is set.
                let raw = unsafe { event.param.ud };
                Parameters::Datagrams(UdParameters {
                    // SAFETY: the data is part of the event.
                    private_data: unsafe { PrivateData::from_raw(raw.private_data, raw.private_data_len) },
                    address: AddressVector::from_raw(&raw.ah_attr),
                    qp_num: raw.qp_num,
                    qkey: raw.qkey,
                })
            }
            _ => {
                // SAFETY: for all others this one is.
                let raw = unsafe { event.param.conn };
                Parameters::Connected(PeerParameters {
                    // SAFETY: the data is part of the event.
                    private_data: unsafe { PrivateData::from_raw(raw.private_data, raw.private_data_len) },
                    responder_resources: raw.responder_resources,
                    initiator_depth: raw.initiator_depth,
                    flow_control: raw.flow_control != 0,
                    retry_count: raw.retry_count,
                    rnr_retry_count: raw.rnr_retry_count,
                    srq: raw.srq != 0,
                    qp_num: raw.qp_num,
                })
            }
        }
    }
}

/// What the peer of a connection said: `struct rdma_conn_param`, seen from here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PeerParameters {
    /// What came with it, padded with zeros.
    pub private_data: PrivateData,
    /// Reads and atomics that this end may have to serve at a time: what the peer asked for as its depth.
    pub responder_resources: u8,
    /// Reads and atomics that the peer serves at a time.
    pub initiator_depth: u8,
    /// Hardware flow control.
    pub flow_control: bool,
    /// Retries after a timeout.
    pub retry_count: u8,
    /// Retries when there is no receive.
    pub rnr_retry_count: u8,
    /// Whether the peer takes its receives from a shared receive queue.
    pub srq: bool,
    /// Number of its queue pair.
    pub qp_num: u32,
}

/// What the peer of datagrams said: `struct rdma_ud_param`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct UdParameters {
    /// What came with it, padded with zeros.
    pub private_data: PrivateData,
    /// The way to it, for [`ProtectionDomain::address_handle`](crate::ProtectionDomain::address_handle).
    pub address: AddressVector,
    /// Number of its queue pair, or of the group.
    pub qp_num: u32,
    /// Its queue key.
    pub qkey: u32,
}

impl UdParameters {
    /// Of a group, with which no bytes come: librdmacm has the context of whoever joined in their place.
    ///
    /// # Safety
    /// `event` must be of a group, and not be acknowledged yet.
    pub(super) unsafe fn of_group(event: &rdma_cm_event) -> Self {
        // SAFETY: of a group that is the member which is set.
        let raw = unsafe { event.param.ud };
        let address = AddressVector::from_raw(&raw.ah_attr);
        UdParameters { private_data: PrivateData::EMPTY, address, qp_num: raw.qp_num, qkey: raw.qkey }
    }
}
