//! Attributes of a device: limits and capabilities.

mod capabilities;

use std::ffi::CStr;
use std::fmt;

use rdma_sys::{Zeroed, ibv_device_attr_ex};

use crate::address::Guid;

pub use capabilities::{
    AtomicCapability, CqModeration, DeviceCapabilities, OdpCapabilities, OdpOperations, OnDemandPaging, PacketPacing,
    PciAtomicSizes, PciAtomics, QueuePairTypes, RawPacketCapabilities, ReceiveSideScaling, RxHashFields,
    RxHashFunctions, SegmentationOffload, TagMatching, TagMatchingFlags,
};

/// Attributes of a device: `ibv_query_device_ex(3)`. The extended part is zero if the provider lacks that verb.
#[derive(Clone, Copy)]
pub struct DeviceAttributes {
    raw: ibv_device_attr_ex,
}

macro_rules! limits {
    ($($(#[$meta:meta])* $name:ident: $type:ty = $field:ident;)+) => {
        $($(#[$meta])*
        #[must_use]
        pub fn $name(&self) -> $type {
            // Some of these limits are `int` in C. A negative value counts as 0.
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
        /// Largest number of outstanding work requests per queue.
        max_qp_wr: u32 = max_qp_wr;
        /// Largest number of scatter/gather elements per work request.
        max_sge: u32 = max_sge;
        /// Largest number of completion queues.
        max_cq: u32 = max_cq;
        /// Largest number of entries in a completion queue.
        max_cqe: u32 = max_cqe;
        /// Largest number of memory regions.
        max_mr: u32 = max_mr;
        /// Largest memory region in bytes.
        max_mr_size: u64 = max_mr_size;
        /// Largest number of protection domains.
        max_pd: u32 = max_pd;
        /// Largest number of RDMA reads and atomics in progress per queue pair, as responder.
        max_qp_rd_atom: u32 = max_qp_rd_atom;
        /// Largest number of outstanding RDMA reads and atomics per queue pair, as requester.
        max_qp_init_rd_atom: u32 = max_qp_init_rd_atom;
        /// Largest number of scatter/gather elements per RDMA read.
        max_sge_rd: u32 = max_sge_rd;
        /// Largest number of RDMA reads and atomics in progress on the device, as responder.
        max_res_rd_atom: u32 = max_res_rd_atom;
        /// Supported page sizes: one bit per power of two.
        page_size_cap: u64 = page_size_cap;
        /// Largest number of memory windows.
        max_mw: u32 = max_mw;
        /// Largest number of address handles.
        max_ah: u32 = max_ah;
        /// Largest number of multicast groups.
        max_mcast_grp: u32 = max_mcast_grp;
        /// Largest number of queue pairs per multicast group.
        max_mcast_qp_attach: u32 = max_mcast_qp_attach;
        /// Largest number of queue pairs in all multicast groups together.
        max_total_mcast_qp_attach: u32 = max_total_mcast_qp_attach;
        /// Largest number of raw IPv6 queue pairs.
        max_raw_ipv6_qp: u32 = max_raw_ipv6_qp;
        /// Largest number of raw Ethertype queue pairs.
        max_raw_ethy_qp: u32 = max_raw_ethy_qp;
        /// Largest number of end-to-end contexts (reliable datagrams).
        max_ee: u32 = max_ee;
        /// Like `max_qp_rd_atom`, per end-to-end context.
        max_ee_rd_atom: u32 = max_ee_rd_atom;
        /// Like `max_qp_init_rd_atom`, per end-to-end context.
        max_ee_init_rd_atom: u32 = max_ee_init_rd_atom;
        /// Largest number of reliable datagram domains.
        max_rdd: u32 = max_rdd;
        /// Largest number of fast memory regions.
        max_fmr: u32 = max_fmr;
        /// Largest number of mappings per fast memory region.
        max_map_per_fmr: u32 = max_map_per_fmr;
        /// Largest number of shared receive queues; 0 if not supported.
        max_srq: u32 = max_srq;
        /// Largest number of outstanding work requests per shared receive queue.
        max_srq_wr: u32 = max_srq_wr;
        /// Largest number of scatter/gather elements per receive of a shared receive queue.
        max_srq_sge: u32 = max_srq_sge;
        /// Largest number of partition keys per port.
        max_pkeys: u16 = max_pkeys;
        /// Acknowledgement delay of the device: 4.096 µs · 2^value.
        local_ca_ack_delay: u8 = local_ca_ack_delay;
        /// Vendor id assigned by IEEE.
        vendor_id: u32 = vendor_id;
        /// Part number assigned by the vendor.
        vendor_part_id: u32 = vendor_part_id;
        /// Hardware version.
        hw_ver: u32 = hw_ver;
    }

    /// Number of ports, even if it exceeds 255.
    #[must_use]
    pub fn physical_ports(&self) -> u32 {
        match self.raw.phys_port_cnt_ex {
            0 => self.ports().into(),
            ports => ports,
        }
    }

    /// Capability flags.
    #[must_use]
    pub fn capabilities(&self) -> DeviceCapabilities {
        let basic = u64::from(self.raw.orig_attr.device_cap_flags);
        DeviceCapabilities::from_bits_retain(self.raw.device_cap_flags_ex | basic)
    }

    /// Scope of atomicity of a peer's atomic operations.
    #[must_use]
    pub fn atomic_capability(&self) -> AtomicCapability {
        AtomicCapability(self.raw.orig_attr.atomic_cap.0)
    }

    /// Supported PCI atomic operations.
    #[must_use]
    pub fn pci_atomics(&self) -> PciAtomics {
        let caps = &self.raw.pci_atomic_caps;
        PciAtomics {
            fetch_add: PciAtomicSizes::from_bits_retain(caps.fetch_add),
            swap: PciAtomicSizes::from_bits_retain(caps.swap),
            compare_swap: PciAtomicSizes::from_bits_retain(caps.compare_swap),
        }
    }

    /// On-demand paging, if supported.
    #[must_use]
    pub fn on_demand_paging(&self) -> Option<OnDemandPaging> {
        let caps = &self.raw.odp_caps;
        let general = OdpCapabilities::from_bits_retain(caps.general_caps);
        let operations = OdpOperations::from_bits_retain;
        general.contains(OdpCapabilities::SUPPORTED).then(|| OnDemandPaging {
            general,
            rc: operations(caps.per_transport_caps.rc_odp_caps),
            uc: operations(caps.per_transport_caps.uc_odp_caps),
            ud: operations(caps.per_transport_caps.ud_odp_caps),
            xrc: operations(self.raw.xrc_odp_caps),
        })
    }

    /// TCP segmentation offload, if supported.
    #[must_use]
    pub fn segmentation_offload(&self) -> Option<SegmentationOffload> {
        let caps = &self.raw.tso_caps;
        let qp_types = QueuePairTypes(caps.supported_qpts);
        (caps.max_tso != 0).then_some(SegmentationOffload { max_payload: caps.max_tso, qp_types })
    }

    /// Receive-side scaling, if supported.
    #[must_use]
    pub fn receive_side_scaling(&self) -> Option<ReceiveSideScaling> {
        let caps = &self.raw.rss_caps;
        (caps.supported_qpts != 0).then(|| ReceiveSideScaling {
            qp_types: QueuePairTypes(caps.supported_qpts),
            max_indirection_tables: caps.max_rwq_indirection_tables,
            max_indirection_table_size: caps.max_rwq_indirection_table_size,
            hash_fields: RxHashFields::from_bits_retain(caps.rx_hash_fields_mask),
            hash_functions: RxHashFunctions::from_bits_retain(caps.rx_hash_function),
        })
    }

    /// Largest number of receive work queues; 0 if not supported.
    #[must_use]
    pub fn max_receive_work_queues(&self) -> u32 {
        self.raw.max_wq_type_rq
    }

    /// Rate limits of queue pairs, if supported.
    #[must_use]
    pub fn packet_pacing(&self) -> Option<PacketPacing> {
        let caps = &self.raw.packet_pacing_caps;
        (caps.qp_rate_limit_max != 0).then_some(PacketPacing {
            min_kbps: caps.qp_rate_limit_min,
            max_kbps: caps.qp_rate_limit_max,
            qp_types: QueuePairTypes(caps.supported_qpts),
        })
    }

    /// Raw packet capabilities.
    #[must_use]
    pub fn raw_packets(&self) -> RawPacketCapabilities {
        RawPacketCapabilities::from_bits_retain(self.raw.raw_packet_caps)
    }

    /// Tag matching, if supported.
    #[must_use]
    pub fn tag_matching(&self) -> Option<TagMatching> {
        let caps = &self.raw.tm_caps;
        (caps.max_num_tags != 0).then(|| TagMatching {
            max_rendezvous_header: caps.max_rndv_hdr_size,
            max_tags: caps.max_num_tags,
            flags: TagMatchingFlags::from_bits_retain(caps.flags),
            max_ops: caps.max_ops,
            max_sge: caps.max_sge,
        })
    }

    /// Moderation of completion events, if supported.
    #[must_use]
    pub fn cq_moderation(&self) -> Option<CqModeration> {
        let caps = &self.raw.cq_mod_caps;
        let (max_count, max_period) = (caps.max_cq_count, caps.max_cq_period);
        (max_count != 0 && max_period != 0).then_some(CqModeration { max_count, max_period })
    }

    /// Device memory that can be allocated, in bytes; 0 if not supported.
    #[must_use]
    pub fn max_device_memory(&self) -> u64 {
        self.raw.max_dm_size
    }

    /// Valid bits of completion timestamps; `None` if completions have no timestamp.
    #[must_use]
    pub fn completion_timestamp_mask(&self) -> Option<u64> {
        Some(self.raw.completion_timestamp_mask).filter(|mask| *mask != 0)
    }

    /// Frequency of the clock that timestamps completions, in kHz; 0 if there is none or it is unknown.
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

    /// Node GUID.
    #[must_use]
    pub fn node_guid(&self) -> Guid {
        Guid::from_be(self.raw.orig_attr.node_guid)
    }

    /// System image GUID, which identifies the system that contains the node.
    #[must_use]
    pub fn sys_image_guid(&self) -> Guid {
        Guid::from_be(self.raw.orig_attr.sys_image_guid)
    }

    /// All fields in C's representation.
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
