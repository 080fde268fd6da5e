//! Limits and capabilities of a device.

mod capabilities;

use std::ffi::CStr;
use std::fmt;

use rdma_sys::{Zeroed, ibv_device_attr_ex};

use crate::Guid;

pub use capabilities::{
    AtomicCapability, CqModeration, DeviceCapabilities, OdpCapabilities, OdpOperations, OnDemandPaging, PacketPacing,
    PciAtomicSizes, PciAtomics, QueuePairTypes, RawPacketCapabilities, ReceiveSideScaling, RxHashFields,
    RxHashFunctions, SegmentationOffload, TagMatching, TagMatchingFlags,
};

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
        /// Most scatter/gather elements in an RDMA read.
        max_sge_rd: u32 = max_sge_rd;
        /// Most RDMA reads and atomics that the device can be the target of at a time.
        max_res_rd_atom: u32 = max_res_rd_atom;
        /// Sizes of memory pages, a bit for each power of two.
        page_size_cap: u64 = page_size_cap;
        /// Largest number of memory windows.
        max_mw: u32 = max_mw;
        /// Largest number of address handles.
        max_ah: u32 = max_ah;
        /// Largest number of multicast groups.
        max_mcast_grp: u32 = max_mcast_grp;
        /// Most queue pairs in a multicast group.
        max_mcast_qp_attach: u32 = max_mcast_qp_attach;
        /// Most queue pairs in all multicast groups together.
        max_total_mcast_qp_attach: u32 = max_total_mcast_qp_attach;
        /// Largest number of raw IPv6 queue pairs.
        max_raw_ipv6_qp: u32 = max_raw_ipv6_qp;
        /// Largest number of raw Ethertype queue pairs.
        max_raw_ethy_qp: u32 = max_raw_ethy_qp;
        /// Largest number of end-to-end contexts (reliable datagrams).
        max_ee: u32 = max_ee;
        /// As `max_qp_rd_atom`, of end-to-end contexts.
        max_ee_rd_atom: u32 = max_ee_rd_atom;
        /// As `max_qp_init_rd_atom`, of end-to-end contexts.
        max_ee_init_rd_atom: u32 = max_ee_init_rd_atom;
        /// Largest number of reliable datagram domains.
        max_rdd: u32 = max_rdd;
        /// Largest number of fast memory regions.
        max_fmr: u32 = max_fmr;
        /// Most mappings of a fast memory region.
        max_map_per_fmr: u32 = max_map_per_fmr;
        /// Largest number of shared receive queues; 0 when there are none.
        max_srq: u32 = max_srq;
        /// Most outstanding work requests on a shared receive queue.
        max_srq_wr: u32 = max_srq_wr;
        /// Most scatter/gather elements in a receive of a shared receive queue.
        max_srq_sge: u32 = max_srq_sge;
        /// Most partition keys of a port.
        max_pkeys: u16 = max_pkeys;
        /// How long the device takes to acknowledge: 4.096 µs times 2 to this power.
        local_ca_ack_delay: u8 = local_ca_ack_delay;
        /// Vendor, as IEEE assigned it.
        vendor_id: u32 = vendor_id;
        /// The vendor's part number.
        vendor_part_id: u32 = vendor_part_id;
        /// Hardware version.
        hw_ver: u32 = hw_ver;
    }

    /// Number of ports, also where it is more than 255.
    #[must_use]
    pub fn physical_ports(&self) -> u32 {
        match self.raw.phys_port_cnt_ex {
            0 => self.ports().into(),
            ports => ports,
        }
    }

    /// What the device says that it can.
    #[must_use]
    pub fn capabilities(&self) -> DeviceCapabilities {
        let basic = u64::from(self.raw.orig_attr.device_cap_flags);
        DeviceCapabilities::from_bits_retain(self.raw.device_cap_flags_ex | basic)
    }

    /// With what an atomic operation of a peer is atomic.
    #[must_use]
    pub fn atomic_capability(&self) -> AtomicCapability {
        AtomicCapability(self.raw.orig_attr.atomic_cap.0)
    }

    /// As [`DeviceAttributes::atomic_capability`], over PCI.
    #[must_use]
    pub fn pci_atomics(&self) -> PciAtomics {
        let caps = &self.raw.pci_atomic_caps;
        PciAtomics {
            fetch_add: PciAtomicSizes::from_bits_retain(caps.fetch_add),
            swap: PciAtomicSizes::from_bits_retain(caps.swap),
            compare_swap: PciAtomicSizes::from_bits_retain(caps.compare_swap),
        }
    }

    /// On-demand paging, if there is any.
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

    /// Segmentation of TCP, if there is any.
    #[must_use]
    pub fn segmentation_offload(&self) -> Option<SegmentationOffload> {
        let caps = &self.raw.tso_caps;
        let qp_types = QueuePairTypes(caps.supported_qpts);
        (caps.max_tso != 0).then_some(SegmentationOffload { max_payload: caps.max_tso, qp_types })
    }

    /// Receive-side scaling, if there is any.
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

    /// Largest number of receive work queues; 0 when there are none.
    #[must_use]
    pub fn max_receive_work_queues(&self) -> u32 {
        self.raw.max_wq_type_rq
    }

    /// Limits to the rate of queue pairs, if there can be any.
    #[must_use]
    pub fn packet_pacing(&self) -> Option<PacketPacing> {
        let caps = &self.raw.packet_pacing_caps;
        (caps.qp_rate_limit_max != 0).then_some(PacketPacing {
            min_kbps: caps.qp_rate_limit_min,
            max_kbps: caps.qp_rate_limit_max,
            qp_types: QueuePairTypes(caps.supported_qpts),
        })
    }

    /// What it can do with raw packets.
    #[must_use]
    pub fn raw_packets(&self) -> RawPacketCapabilities {
        RawPacketCapabilities::from_bits_retain(self.raw.raw_packet_caps)
    }

    /// Matching of tags, if there is any.
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

    /// Moderation of completion events, if there is any.
    #[must_use]
    pub fn cq_moderation(&self) -> Option<CqModeration> {
        let caps = &self.raw.cq_mod_caps;
        let (max_count, max_period) = (caps.max_cq_count, caps.max_cq_period);
        (max_count != 0 && max_period != 0).then_some(CqModeration { max_count, max_period })
    }

    /// Memory of the device that can be allocated, in bytes; 0 when there is none.
    #[must_use]
    pub fn max_device_memory(&self) -> u64 {
        self.raw.max_dm_size
    }

    /// Bits of a completion's timestamp that count; `None` where completions have none.
    #[must_use]
    pub fn completion_timestamp_mask(&self) -> Option<u64> {
        Some(self.raw.completion_timestamp_mask).filter(|mask| *mask != 0)
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
