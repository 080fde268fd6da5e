//! Limits and capabilities of a device.

use std::ffi::CStr;
use std::fmt;

use rdma_sys::{Zeroed, ibv_device_attr_ex};

use crate::Guid;

/// What `ibv_query_device_ex(3)` reports; the extended part is zero where the provider lacks that verb.
#[derive(Clone, Copy)]
pub struct DeviceAttributes {
    raw: ibv_device_attr_ex,
}

macro_rules! limits {
    ($($(#[$meta:meta])* $name:ident: $type:ty = $field:ident;)+) => {
        $($(#[$meta])*
        #[must_use]
        pub fn $name(&self) -> $type {
            // C has some of these limits as `int`; a provider that reports a negative one has none.
            <$type>::try_from(self.raw.orig_attr.$field).unwrap_or(0)
        })+
    };
}

impl DeviceAttributes {
    pub(crate) fn from_raw(raw: ibv_device_attr_ex) -> Self {
        DeviceAttributes { raw }
    }

    pub(crate) fn zeroed() -> Self {
        DeviceAttributes { raw: ibv_device_attr_ex::zeroed() }
    }

    limits! {
        /// Number of ports; they count from 1.
        ports: u8 = phys_port_cnt;
        /// Largest number of queue pairs.
        max_qp: u32 = max_qp;
        /// Most outstanding work requests on a work queue.
        max_qp_wr: u32 = max_qp_wr;
        /// Most scatter/gather elements in a work request.
        max_sge: u32 = max_sge;
        /// Largest number of completion queues.
        max_cq: u32 = max_cq;
        /// Most entries in a completion queue.
        max_cqe: u32 = max_cqe;
        /// Largest number of memory regions.
        max_mr: u32 = max_mr;
        /// Longest memory region in bytes.
        max_mr_size: u64 = max_mr_size;
        /// Largest number of protection domains.
        max_pd: u32 = max_pd;
        /// Most RDMA reads and atomics that a queue pair can be the target of at a time.
        max_qp_rd_atom: u32 = max_qp_rd_atom;
        /// Most RDMA reads and atomics that a queue pair can have outstanding.
        max_qp_init_rd_atom: u32 = max_qp_init_rd_atom;
        /// Largest number of shared receive queues; 0 when there are none.
        max_srq: u32 = max_srq;
        /// Vendor, as IEEE assigned it.
        vendor_id: u32 = vendor_id;
        /// The vendor's part number.
        vendor_part_id: u32 = vendor_part_id;
        /// Hardware version.
        hw_ver: u32 = hw_ver;
    }

    /// Rate of the clock that completions are stamped by, in kHz; 0 where there is none or it is not known.
    #[must_use]
    pub fn hca_core_clock(&self) -> u64 {
        self.raw.hca_core_clock
    }

    /// Firmware version as text.
    #[must_use]
    pub fn firmware_version(&self) -> String {
        let bytes = self.raw.orig_attr.fw_ver.map(|byte| byte as u8);
        CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// GUID of the node.
    #[must_use]
    pub fn node_guid(&self) -> Guid {
        Guid::from_be(self.raw.orig_attr.node_guid)
    }

    /// GUID of the system that the node is part of.
    #[must_use]
    pub fn sys_image_guid(&self) -> Guid {
        Guid::from_be(self.raw.orig_attr.sys_image_guid)
    }

    /// Every field as C has it.
    #[must_use]
    pub fn as_raw(&self) -> &ibv_device_attr_ex {
        &self.raw
    }
}

impl fmt::Debug for DeviceAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceAttributes")
            .field("firmware_version", &self.firmware_version())
            .field("node_guid", &self.node_guid())
            .field("ports", &self.ports())
            .field("max_qp", &self.max_qp())
            .field("max_qp_wr", &self.max_qp_wr())
            .field("max_sge", &self.max_sge())
            .field("max_cqe", &self.max_cqe())
            .finish_non_exhaustive()
    }
}
