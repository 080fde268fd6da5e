//! Connection parameters and private data.

use std::fmt;
use std::ops::Deref;

use rdma_sys::*;

use super::CmError;
use crate::Result;
use crate::address::AddressVector;

/// Private data of a request, a reply or a rejection.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrivateData {
    len: u8,
    bytes: [u8; 255],
}

impl PrivateData {
    /// No private data.
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
    /// `data` must be NULL, or valid for reads of `len` bytes.
    unsafe fn from_raw(data: *const std::ffi::c_void, len: u8) -> Self {
        if data.is_null() {
            return PrivateData::EMPTY;
        }
        let mut all = PrivateData { len, bytes: [0; 255] };
        // SAFETY: the caller's contract. The array has room for the maximum of `len`.
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

/// Without zeros at the end, since data of a peer is padded with them.
impl fmt::Debug for PrivateData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len = self.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        write!(f, "b\"{}\"", self[..len].escape_ascii())
    }
}

/// Parameters for connecting or accepting: `struct rdma_conn_param`.
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
    /// Parameters for the queue pair with this number: [`QueuePair::number`](crate::QueuePair::number).
    pub fn new(qp_num: u32) -> Self {
        ConnectParameters {
            private_data: PrivateData::EMPTY,
            responder_resources: RDMA_MAX_RESP_RES as u8,
            initiator_depth: RDMA_MAX_INIT_DEPTH as u8,
            flow_control: true,
            // 7 means unlimited on some devices, see `Quirks::RETRY_COUNT_7_IS_INFINITE`.
            retry_count: 6,
            rnr_retry_count: 7,
            srq: false,
            qp_num,
        }
    }

    /// Private data for the peer.
    ///
    /// The maximum is 56 bytes in a request and 196 in a reply, or for datagrams 180 and 136 (rdma_connect(3),
    /// rdma_accept(3)). The peer receives it padded with zeros to about that length.
    ///
    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData) for more than 196 bytes.
    pub fn private_data(mut self, data: &[u8]) -> Result<Self> {
        self.private_data = PrivateData::new(data, 196)?;
        Ok(self)
    }

    /// Maximum number of outstanding reads and atomics from the peer; the device's maximum by default.
    pub fn responder_resources(mut self, count: u8) -> Self {
        self.responder_resources = count;
        self
    }

    /// Maximum number of outstanding reads and atomics to the peer; the device's maximum by default.
    pub fn initiator_depth(mut self, count: u8) -> Self {
        self.initiator_depth = count;
        self
    }

    /// Hardware flow control; on by default.
    pub fn flow_control(mut self, on: bool) -> Self {
        self.flow_control = on;
        self
    }

    /// Retries after a timeout, 0 to 7; 6 by default. The value of the passive end is ignored.
    pub fn retry_count(mut self, retries: u8) -> Self {
        self.retry_count = retries.min(7);
        self
    }

    /// Retries of the peer when this end has no receive posted, 0 to 6, or 7 for unlimited; 7 by default.
    pub fn rnr_retry_count(mut self, retries: u8) -> Self {
        self.rnr_retry_count = retries.min(7);
        self
    }

    /// Whether the queue pair uses a shared receive queue; false by default.
    pub fn srq(mut self, srq: bool) -> Self {
        self.srq = srq;
        self
    }

    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData) for more bytes than the call can carry.
    pub(super) fn check(&self, max: u8) -> Result<()> {
        match self.private_data.len {
            len if len > max => Err(CmError::PrivateData { len: len.into(), max }.into()),
            _ => Ok(()),
        }
    }

    /// The parameters as a C structure, valid while `self` is.
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

/// Parameters of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Parameters {
    /// Parameters of a connection.
    Connected(PeerParameters),
    /// Parameters for datagrams.
    Datagrams(UdParameters),
}

impl Parameters {
    /// The private data.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        match self {
            Parameters::Connected(peer) => &peer.private_data,
            Parameters::Datagrams(peer) => &peer.private_data,
        }
    }

    pub(super) fn private_data_owned(&self) -> PrivateData {
        match self {
            Parameters::Connected(peer) => peer.private_data,
            Parameters::Datagrams(peer) => peer.private_data,
        }
    }

    /// # Safety
    /// `event` must be an event that was not acknowledged yet, of an id with that port space.
    pub(super) unsafe fn of(event: &rdma_cm_event, space: rdma_port_space) -> Self {
        match space {
            RDMA_PS_UDP | RDMA_PS_IPOIB => {
                // SAFETY: this member is set for these port spaces.
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
                // SAFETY: this member is set for all other port spaces.
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

/// Parameters of the peer of a connection, as seen from this end: `struct rdma_conn_param`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PeerParameters {
    /// The private data, padded with zeros.
    pub private_data: PrivateData,
    /// Maximum number of outstanding reads and atomics from the peer: its requested depth.
    pub responder_resources: u8,
    /// Maximum number of outstanding reads and atomics that the peer accepts.
    pub initiator_depth: u8,
    /// Hardware flow control.
    pub flow_control: bool,
    /// Retries after a timeout.
    pub retry_count: u8,
    /// Retries when there is no receive (RNR).
    pub rnr_retry_count: u8,
    /// Whether the peer uses a shared receive queue.
    pub srq: bool,
    /// Number of the peer's queue pair.
    pub qp_num: u32,
}

/// Parameters of the peer for datagrams: `struct rdma_ud_param`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct UdParameters {
    /// The private data, padded with zeros.
    pub private_data: PrivateData,
    /// The address of the peer, for [`ProtectionDomain::address_handle`](crate::ProtectionDomain::address_handle).
    pub address: AddressVector,
    /// Destination queue pair number: the peer's, or the multicast one for a group.
    pub qp_num: u32,
    /// Queue key.
    pub qkey: u32,
}

impl UdParameters {
    /// Parameters of a group. They have no private data: the fields hold the context of the join instead.
    ///
    /// # Safety
    /// `event` must be an event of a group that was not acknowledged yet.
    pub(super) unsafe fn of_group(event: &rdma_cm_event) -> Self {
        // SAFETY: this member is set for groups.
        let raw = unsafe { event.param.ud };
        let address = AddressVector::from_raw(&raw.ah_attr);
        UdParameters { private_data: PrivateData::EMPTY, address, qp_num: raw.qp_num, qkey: raw.qkey }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_is_printed_without_its_padding() {
        let printed = |data: &[u8]| format!("{:?}", PrivateData::new(data, 196).unwrap());
        assert_eq!(printed(b"busy\0\"\0\0\0"), r#"b"busy\x00\"""#);
        assert_eq!((printed(&[0; 148]), printed(b"")), (r#"b"""#.to_owned(), r#"b"""#.to_owned()));
    }
}
