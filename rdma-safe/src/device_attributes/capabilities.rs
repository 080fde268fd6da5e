//! What a device can beyond the basics: flags, and the parts of `struct ibv_device_attr_ex`.

use bitflags::bitflags;
use rdma_sys::*;

use crate::QueuePairType;
use crate::named::named;

bitflags! {
    /// What a device can: `enum ibv_device_cap_flags`, and those of `device_cap_flags_ex`.
    ///
    /// Some devices claim more than they do: SoftRoCE, for one, automatic path migration.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct DeviceCapabilities: u64 {
        /// The number of outstanding work requests of a queue pair can change.
        const RESIZE_MAX_WR = IBV_DEVICE_RESIZE_MAX_WR.0 as u64;
        /// Bad partition keys are counted.
        const BAD_PKEY_CNTR = IBV_DEVICE_BAD_PKEY_CNTR.0 as u64;
        /// Bad queue keys are counted.
        const BAD_QKEY_CNTR = IBV_DEVICE_BAD_QKEY_CNTR.0 as u64;
        /// Multicast of raw packets.
        const RAW_MULTI = IBV_DEVICE_RAW_MULTI.0 as u64;
        /// Automatic path migration.
        const AUTO_PATH_MIG = IBV_DEVICE_AUTO_PATH_MIG.0 as u64;
        /// The port of a queue pair can change.
        const CHANGE_PHY_PORT = IBV_DEVICE_CHANGE_PHY_PORT.0 as u64;
        /// The port of an address handle is checked against that of the queue pair.
        const UD_AV_PORT_ENFORCE = IBV_DEVICE_UD_AV_PORT_ENFORCE.0 as u64;
        /// `IBV_QP_CUR_STATE` is looked at.
        const CURR_QP_STATE_MOD = IBV_DEVICE_CURR_QP_STATE_MOD.0 as u64;
        /// Ports can be shut down.
        const SHUTDOWN_PORT = IBV_DEVICE_SHUTDOWN_PORT.0 as u64;
        /// The type of initialisation can be set.
        const INIT_TYPE = IBV_DEVICE_INIT_TYPE.0 as u64;
        /// An event tells of a port that is up.
        const PORT_ACTIVE_EVENT = IBV_DEVICE_PORT_ACTIVE_EVENT.0 as u64;
        /// The GUID of the system can be set.
        const SYS_IMAGE_GUID = IBV_DEVICE_SYS_IMAGE_GUID.0 as u64;
        /// A reliable connection without a receive says so to its peer.
        const RC_RNR_NAK_GEN = IBV_DEVICE_RC_RNR_NAK_GEN.0 as u64;
        /// Shared receive queues can be resized.
        const SRQ_RESIZE = IBV_DEVICE_SRQ_RESIZE.0 as u64;
        /// Events after a number of completions.
        const N_NOTIFY_CQ = IBV_DEVICE_N_NOTIFY_CQ.0 as u64;
        /// Memory windows of type 1.
        const MEM_WINDOW = IBV_DEVICE_MEM_WINDOW.0 as u64;
        /// Checksums of IP over datagrams.
        const UD_IP_CSUM = IBV_DEVICE_UD_IP_CSUM.0 as u64;
        /// Extended reliable connections.
        const XRC = IBV_DEVICE_XRC.0 as u64;
        /// Send with invalidate, local invalidation, registration by work request.
        const MEM_MGT_EXTENSIONS = IBV_DEVICE_MEM_MGT_EXTENSIONS.0 as u64;
        /// Memory windows of type 2A.
        const MEM_WINDOW_TYPE_2A = IBV_DEVICE_MEM_WINDOW_TYPE_2A.0 as u64;
        /// Memory windows of type 2B.
        const MEM_WINDOW_TYPE_2B = IBV_DEVICE_MEM_WINDOW_TYPE_2B.0 as u64;
        /// Checksums of IP over reliable connections.
        const RC_IP_CSUM = IBV_DEVICE_RC_IP_CSUM.0 as u64;
        /// Checksums of IP in raw packets.
        const RAW_IP_CSUM = IBV_DEVICE_RAW_IP_CSUM.0 as u64;
        /// Flow steering by the user.
        const MANAGED_FLOW_STEERING = IBV_DEVICE_MANAGED_FLOW_STEERING.0 as u64;
        /// Raw packets can be received with their frame check sequence.
        const RAW_SCATTER_FCS = IBV_DEVICE_RAW_SCATTER_FCS;
        /// Writes over PCI can be padded to whole cache lines.
        const PCI_WRITE_END_PADDING = IBV_DEVICE_PCI_WRITE_END_PADDING;
        /// Flush that makes data visible to all (kernel 6.2; verbs.h has no name for it).
        const FLUSH_GLOBAL = 1 << 38;
        /// Flush that makes data persistent (kernel 6.2; verbs.h has no name for it).
        const FLUSH_PERSISTENT = 1 << 39;
        /// Atomic write (kernel 6.2; verbs.h has no name for it).
        const ATOMIC_WRITE = 1 << 40;
        /// Memory must be bounced for DMA: a confidential guest.
        const CC_DMA_BOUNCE = IBV_DEVICE_CC_DMA_BOUNCE;

        const _ = !0;
    }

    /// What of on-demand paging a device has: `enum ibv_odp_general_caps`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct OdpCapabilities: u64 {
        /// Regions that are not pinned.
        const SUPPORTED = IBV_ODP_SUPPORT.0 as u64;
        /// One region for the whole address space.
        const IMPLICIT = IBV_ODP_SUPPORT_IMPLICIT.0 as u64;

        const _ = !0;
    }

    /// Operations that may touch memory that is paged on demand: `enum ibv_odp_transport_cap_bits`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct OdpOperations: u32 {
        /// Sends.
        const SEND = IBV_ODP_SUPPORT_SEND.0;
        /// Receives.
        const RECV = IBV_ODP_SUPPORT_RECV.0;
        /// RDMA writes.
        const WRITE = IBV_ODP_SUPPORT_WRITE.0;
        /// RDMA reads.
        const READ = IBV_ODP_SUPPORT_READ.0;
        /// Atomics.
        const ATOMIC = IBV_ODP_SUPPORT_ATOMIC.0;
        /// Receives of shared receive queues.
        const SRQ_RECV = IBV_ODP_SUPPORT_SRQ_RECV.0;
        /// Flush.
        const FLUSH = IBV_ODP_SUPPORT_FLUSH.0;
        /// Atomic writes.
        const ATOMIC_WRITE = IBV_ODP_SUPPORT_ATOMIC_WRITE.0;

        const _ = !0;
    }

    /// What a device can do with raw packets: `enum ibv_raw_packet_caps`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct RawPacketCapabilities: u32 {
        /// VLAN tags are taken off.
        const CVLAN_STRIPPING = IBV_RAW_PACKET_CAP_CVLAN_STRIPPING.0;
        /// Frames can be received with their check sequence.
        const SCATTER_FCS = IBV_RAW_PACKET_CAP_SCATTER_FCS.0;
        /// Checksums of IP.
        const IP_CSUM = IBV_RAW_PACKET_CAP_IP_CSUM.0;
        /// Packets wait for a while instead of being dropped.
        const DELAY_DROP = IBV_RAW_PACKET_CAP_DELAY_DROP.0;

        const _ = !0;
    }

    /// Fields of a packet that receive-side scaling can hash: `enum ibv_rx_hash_fields`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct RxHashFields: u64 {
        /// Source address, IPv4.
        const SRC_IPV4 = IBV_RX_HASH_SRC_IPV4.0 as u64;
        /// Destination address, IPv4.
        const DST_IPV4 = IBV_RX_HASH_DST_IPV4.0 as u64;
        /// Source address, IPv6.
        const SRC_IPV6 = IBV_RX_HASH_SRC_IPV6.0 as u64;
        /// Destination address, IPv6.
        const DST_IPV6 = IBV_RX_HASH_DST_IPV6.0 as u64;
        /// Source port, TCP.
        const SRC_PORT_TCP = IBV_RX_HASH_SRC_PORT_TCP.0 as u64;
        /// Destination port, TCP.
        const DST_PORT_TCP = IBV_RX_HASH_DST_PORT_TCP.0 as u64;
        /// Source port, UDP.
        const SRC_PORT_UDP = IBV_RX_HASH_SRC_PORT_UDP.0 as u64;
        /// Destination port, UDP.
        const DST_PORT_UDP = IBV_RX_HASH_DST_PORT_UDP.0 as u64;
        /// Security parameter index of IPsec.
        const IPSEC_SPI = IBV_RX_HASH_IPSEC_SPI.0 as u64;
        /// Of the inner packet of a tunnel.
        const INNER = IBV_RX_HASH_INNER.0 as u64;

        const _ = !0;
    }

    /// Hash functions of receive-side scaling: `enum ibv_rx_hash_function_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct RxHashFunctions: u8 {
        /// Toeplitz.
        const TOEPLITZ = IBV_RX_HASH_FUNC_TOEPLITZ.0 as u8;

        const _ = !0;
    }

    /// What tag matching works with: `enum ibv_tm_cap_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct TagMatchingFlags: u32 {
        /// Reliable connections.
        const RC = IBV_TM_CAP_RC.0;

        const _ = !0;
    }

    /// Sizes of operands of atomic operations over PCI: `enum ibv_pci_atomic_op_size`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct PciAtomicSizes: u16 {
        /// 4 bytes.
        const BYTES_4 = IBV_PCI_ATOMIC_OPERATION_4_BYTE_SIZE_SUP.0 as u16;
        /// 8 bytes.
        const BYTES_8 = IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP.0 as u16;
        /// 16 bytes.
        const BYTES_16 = IBV_PCI_ATOMIC_OPERATION_16_BYTE_SIZE_SUP.0 as u16;

        const _ = !0;
    }
}

named! {
    /// With what an atomic operation of a peer is atomic: `enum ibv_atomic_cap`.
    pub struct AtomicCapability(u32) as "atomic capability" {
        /// There are no atomic operations.
        NONE = IBV_ATOMIC_NONE.0 => "none",
        /// With others of the same device.
        HCA = IBV_ATOMIC_HCA.0 => "device",
        /// With all of the machine, those of its processors included.
        GLOBAL = IBV_ATOMIC_GLOB.0 => "global",
    }
}

/// A set of types of queue pairs, as capabilities have it: a bit for each number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct QueuePairTypes(pub u32);

impl QueuePairTypes {
    /// Whether `qp_type` is one of them: `ibv_is_qpt_supported` of verbs.h.
    #[must_use]
    #[doc(alias = "ibv_is_qpt_supported")]
    pub fn contains(self, qp_type: QueuePairType) -> bool {
        // Types of vendors (255) have no bit.
        1_u32.checked_shl(qp_type.0).is_some_and(|bit| self.0 & bit != 0)
    }
}

/// On-demand paging: `struct ibv_odp_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OnDemandPaging {
    /// What there is of it.
    pub general: OdpCapabilities,
    /// Of reliable connections.
    pub rc: OdpOperations,
    /// Of unreliable connections.
    pub uc: OdpOperations,
    /// Of unreliable datagrams.
    pub ud: OdpOperations,
    /// Of extended reliable connections.
    pub xrc: OdpOperations,
}

/// Segmentation of TCP by the device: `struct ibv_tso_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SegmentationOffload {
    /// Longest payload in bytes.
    pub max_payload: u32,
    /// Types of queue pairs that have it.
    pub qp_types: QueuePairTypes,
}

/// Receive-side scaling: `struct ibv_rss_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ReceiveSideScaling {
    /// Types of queue pairs that have it.
    pub qp_types: QueuePairTypes,
    /// Largest number of indirection tables.
    pub max_indirection_tables: u32,
    /// Most work queues in an indirection table.
    pub max_indirection_table_size: u32,
    /// Fields that can be hashed.
    pub hash_fields: RxHashFields,
    /// Hash functions.
    pub hash_functions: RxHashFunctions,
}

/// Limits to the rate of a queue pair: `struct ibv_packet_pacing_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PacketPacing {
    /// Lowest limit in kbit/s.
    pub min_kbps: u32,
    /// Highest limit in kbit/s.
    pub max_kbps: u32,
    /// Types of queue pairs that have it.
    pub qp_types: QueuePairTypes,
}

/// Matching of tags by shared receive queues: `struct ibv_tm_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TagMatching {
    /// Longest header of a rendezvous request in bytes.
    pub max_rendezvous_header: u32,
    /// Most tagged buffers in a list.
    pub max_tags: u32,
    /// What it works with.
    pub flags: TagMatchingFlags,
    /// Most outstanding operations on a list.
    pub max_ops: u32,
    /// Most scatter/gather elements of a tagged buffer.
    pub max_sge: u32,
}

/// Moderation of completion events: `struct ibv_cq_moderation_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CqModeration {
    /// Most completions that an event can wait for.
    pub max_count: u16,
    /// Longest time that an event can wait, in microseconds.
    pub max_period: u16,
}

/// Atomic operations over PCI: `struct ibv_pci_atomic_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PciAtomics {
    /// Fetch and add.
    pub fetch_add: PciAtomicSizes,
    /// Unconditional swap.
    pub swap: PciAtomicSizes,
    /// Compare and swap.
    pub compare_swap: PciAtomicSizes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_queue_pairs_are_counted_by_their_number() {
        let types = QueuePairTypes(1 << 8 | 1 << 2);
        assert!(types.contains(QueuePairType::RC) && types.contains(QueuePairType::RAW_PACKET));
        assert!(!types.contains(QueuePairType::UD));
        assert!(!QueuePairTypes(u32::MAX).contains(QueuePairType::DRIVER), "no bit, and no overflow");
    }

    #[test]
    fn flags_without_a_name_are_kept() {
        assert_eq!(DeviceCapabilities::from_bits_retain(1 << 63).bits(), 1 << 63);
        assert_eq!(DeviceCapabilities::from_bits_truncate(1 << 63).bits(), 1 << 63);
        assert_eq!(PciAtomicSizes::BYTES_16.bits(), 4);
    }
}
