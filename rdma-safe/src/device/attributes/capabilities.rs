//! Optional capabilities of a device: flags, and the parts of `struct ibv_device_attr_ex`.

use bitflags::bitflags;
use rdma_sys::*;

use crate::QueuePairType;
use crate::named::named;

bitflags! {
    /// Capability flags of a device: `enum ibv_device_cap_flags` and `device_cap_flags_ex`.
    ///
    /// Some devices report capabilities that they lack; SoftRoCE, for example, reports automatic path migration.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct DeviceCapabilities: u64 {
        /// The number of outstanding work requests of a queue pair can be changed.
        const RESIZE_MAX_WR = IBV_DEVICE_RESIZE_MAX_WR.0 as u64;
        /// Counts bad partition keys.
        const BAD_PKEY_CNTR = IBV_DEVICE_BAD_PKEY_CNTR.0 as u64;
        /// Counts bad queue keys.
        const BAD_QKEY_CNTR = IBV_DEVICE_BAD_QKEY_CNTR.0 as u64;
        /// Multicast of raw packets.
        const RAW_MULTI = IBV_DEVICE_RAW_MULTI.0 as u64;
        /// Automatic path migration.
        const AUTO_PATH_MIG = IBV_DEVICE_AUTO_PATH_MIG.0 as u64;
        /// The port of a queue pair can be changed.
        const CHANGE_PHY_PORT = IBV_DEVICE_CHANGE_PHY_PORT.0 as u64;
        /// Checks that an address handle has the port of the queue pair.
        const UD_AV_PORT_ENFORCE = IBV_DEVICE_UD_AV_PORT_ENFORCE.0 as u64;
        /// Evaluates `IBV_QP_CUR_STATE`.
        const CURR_QP_STATE_MOD = IBV_DEVICE_CURR_QP_STATE_MOD.0 as u64;
        /// Ports can be shut down.
        const SHUTDOWN_PORT = IBV_DEVICE_SHUTDOWN_PORT.0 as u64;
        /// The type of initialization can be set.
        const INIT_TYPE = IBV_DEVICE_INIT_TYPE.0 as u64;
        /// Raises an event when a port becomes active.
        const PORT_ACTIVE_EVENT = IBV_DEVICE_PORT_ACTIVE_EVENT.0 as u64;
        /// The system image GUID can be set.
        const SYS_IMAGE_GUID = IBV_DEVICE_SYS_IMAGE_GUID.0 as u64;
        /// A reliable connection without a posted receive sends RNR NAKs.
        const RC_RNR_NAK_GEN = IBV_DEVICE_RC_RNR_NAK_GEN.0 as u64;
        /// Shared receive queues can be resized.
        const SRQ_RESIZE = IBV_DEVICE_SRQ_RESIZE.0 as u64;
        /// Raises events after a number of completions.
        const N_NOTIFY_CQ = IBV_DEVICE_N_NOTIFY_CQ.0 as u64;
        /// Memory windows of type 1.
        const MEM_WINDOW = IBV_DEVICE_MEM_WINDOW.0 as u64;
        /// IP checksum offload for datagrams.
        const UD_IP_CSUM = IBV_DEVICE_UD_IP_CSUM.0 as u64;
        /// Extended reliable connections.
        const XRC = IBV_DEVICE_XRC.0 as u64;
        /// Send with invalidate, local invalidation, and registration by work request.
        const MEM_MGT_EXTENSIONS = IBV_DEVICE_MEM_MGT_EXTENSIONS.0 as u64;
        /// Memory windows of type 2A.
        const MEM_WINDOW_TYPE_2A = IBV_DEVICE_MEM_WINDOW_TYPE_2A.0 as u64;
        /// Memory windows of type 2B.
        const MEM_WINDOW_TYPE_2B = IBV_DEVICE_MEM_WINDOW_TYPE_2B.0 as u64;
        /// IP checksum offload for reliable connections.
        const RC_IP_CSUM = IBV_DEVICE_RC_IP_CSUM.0 as u64;
        /// IP checksum offload for raw packets.
        const RAW_IP_CSUM = IBV_DEVICE_RAW_IP_CSUM.0 as u64;
        /// Flow steering by user space.
        const MANAGED_FLOW_STEERING = IBV_DEVICE_MANAGED_FLOW_STEERING.0 as u64;
        /// Raw packets can be received with their frame check sequence.
        const RAW_SCATTER_FCS = IBV_DEVICE_RAW_SCATTER_FCS;
        /// PCI writes can be padded to whole cache lines.
        const PCI_WRITE_END_PADDING = IBV_DEVICE_PCI_WRITE_END_PADDING;
        /// Flush that makes data globally visible (kernel 6.2; verbs.h has no name for it).
        const FLUSH_GLOBAL = 1 << 38;
        /// Flush that makes data persistent (kernel 6.2; verbs.h has no name for it).
        const FLUSH_PERSISTENT = 1 << 39;
        /// Atomic write (kernel 6.2; verbs.h has no name for it).
        const ATOMIC_WRITE = 1 << 40;
        /// DMA needs bounce buffers: a confidential guest.
        const CC_DMA_BOUNCE = IBV_DEVICE_CC_DMA_BOUNCE;

        const _ = !0;
    }

    /// On-demand paging support: `enum ibv_odp_general_caps`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct OdpCapabilities: u64 {
        /// Regions that are not pinned.
        const SUPPORTED = IBV_ODP_SUPPORT.0 as u64;
        /// One region for the whole address space.
        const IMPLICIT = IBV_ODP_SUPPORT_IMPLICIT.0 as u64;

        const _ = !0;
    }

    /// Operations that may access memory with on-demand paging: `enum ibv_odp_transport_cap_bits`.
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
        /// Receives from shared receive queues.
        const SRQ_RECV = IBV_ODP_SUPPORT_SRQ_RECV.0;
        /// Flush.
        const FLUSH = IBV_ODP_SUPPORT_FLUSH.0;
        /// Atomic writes.
        const ATOMIC_WRITE = IBV_ODP_SUPPORT_ATOMIC_WRITE.0;

        const _ = !0;
    }

    /// Raw packet capabilities: `enum ibv_raw_packet_caps`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct RawPacketCapabilities: u32 {
        /// VLAN tags can be stripped.
        const CVLAN_STRIPPING = IBV_RAW_PACKET_CAP_CVLAN_STRIPPING.0;
        /// Frames can be received with their frame check sequence.
        const SCATTER_FCS = IBV_RAW_PACKET_CAP_SCATTER_FCS.0;
        /// IP checksum offload.
        const IP_CSUM = IBV_RAW_PACKET_CAP_IP_CSUM.0;
        /// Packets without a receive are delayed before they are dropped.
        const DELAY_DROP = IBV_RAW_PACKET_CAP_DELAY_DROP.0;

        const _ = !0;
    }

    /// Fields of a packet that receive-side scaling can hash: `enum ibv_rx_hash_fields`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct RxHashFields: u64 {
        /// IPv4 source address.
        const SRC_IPV4 = IBV_RX_HASH_SRC_IPV4.0 as u64;
        /// IPv4 destination address.
        const DST_IPV4 = IBV_RX_HASH_DST_IPV4.0 as u64;
        /// IPv6 source address.
        const SRC_IPV6 = IBV_RX_HASH_SRC_IPV6.0 as u64;
        /// IPv6 destination address.
        const DST_IPV6 = IBV_RX_HASH_DST_IPV6.0 as u64;
        /// TCP source port.
        const SRC_PORT_TCP = IBV_RX_HASH_SRC_PORT_TCP.0 as u64;
        /// TCP destination port.
        const DST_PORT_TCP = IBV_RX_HASH_DST_PORT_TCP.0 as u64;
        /// UDP source port.
        const SRC_PORT_UDP = IBV_RX_HASH_SRC_PORT_UDP.0 as u64;
        /// UDP destination port.
        const DST_PORT_UDP = IBV_RX_HASH_DST_PORT_UDP.0 as u64;
        /// IPsec security parameter index.
        const IPSEC_SPI = IBV_RX_HASH_IPSEC_SPI.0 as u64;
        /// Use the inner packet of a tunnel.
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

    /// Transports with tag matching: `enum ibv_tm_cap_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct TagMatchingFlags: u32 {
        /// Reliable connections.
        const RC = IBV_TM_CAP_RC.0;

        const _ = !0;
    }

    /// Operand sizes of PCI atomic operations: `enum ibv_pci_atomic_op_size`.
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
    /// Scope of atomicity of a peer's atomic operations: `enum ibv_atomic_cap`.
    pub struct AtomicCapability(u32) as "atomic capability" {
        /// Atomic operations are not supported.
        NONE = IBV_ATOMIC_NONE.0 => "none",
        /// Atomic with respect to the same device.
        HCA = IBV_ATOMIC_HCA.0 => "device",
        /// Atomic with respect to the whole host, including its CPUs.
        GLOBAL = IBV_ATOMIC_GLOB.0 => "global",
    }
}

/// A set of queue pair types in capabilities: one bit per type number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct QueuePairTypes(pub u32);

impl QueuePairTypes {
    /// Whether the set has `qp_type`: `ibv_is_qpt_supported` of verbs.h.
    #[must_use]
    #[doc(alias = "ibv_is_qpt_supported")]
    pub fn contains(self, qp_type: QueuePairType) -> bool {
        // The vendor type (255) has no bit.
        1_u32.checked_shl(qp_type.0).is_some_and(|bit| self.0 & bit != 0)
    }
}

/// On-demand paging capabilities: `struct ibv_odp_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OnDemandPaging {
    /// General capabilities.
    pub general: OdpCapabilities,
    /// Operations of reliable connections.
    pub rc: OdpOperations,
    /// Operations of unreliable connections.
    pub uc: OdpOperations,
    /// Operations of unreliable datagrams.
    pub ud: OdpOperations,
    /// Operations of extended reliable connections.
    pub xrc: OdpOperations,
}

/// TCP segmentation offload capabilities: `struct ibv_tso_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SegmentationOffload {
    /// Largest payload in bytes.
    pub max_payload: u32,
    /// Queue pair types that support it.
    pub qp_types: QueuePairTypes,
}

/// Receive-side scaling capabilities: `struct ibv_rss_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ReceiveSideScaling {
    /// Queue pair types that support it.
    pub qp_types: QueuePairTypes,
    /// Largest number of indirection tables.
    pub max_indirection_tables: u32,
    /// Largest number of work queues in an indirection table.
    pub max_indirection_table_size: u32,
    /// Fields that can be hashed.
    pub hash_fields: RxHashFields,
    /// Hash functions.
    pub hash_functions: RxHashFunctions,
}

/// Rate limit capabilities of queue pairs: `struct ibv_packet_pacing_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PacketPacing {
    /// Lowest limit in kbit/s.
    pub min_kbps: u32,
    /// Highest limit in kbit/s.
    pub max_kbps: u32,
    /// Queue pair types that support it.
    pub qp_types: QueuePairTypes,
}

/// Tag matching capabilities of shared receive queues: `struct ibv_tm_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TagMatching {
    /// Largest header of a rendezvous request in bytes.
    pub max_rendezvous_header: u32,
    /// Largest number of tagged buffers in a list.
    pub max_tags: u32,
    /// Supported transports.
    pub flags: TagMatchingFlags,
    /// Largest number of outstanding operations on a list.
    pub max_ops: u32,
    /// Largest number of scatter/gather elements of a tagged buffer.
    pub max_sge: u32,
}

/// Completion event moderation capabilities: `struct ibv_cq_moderation_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CqModeration {
    /// Largest number of completions per event.
    pub max_count: u16,
    /// Longest delay of an event, in microseconds.
    pub max_period: u16,
}

/// PCI atomic operations: `struct ibv_pci_atomic_caps`.
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
    fn each_queue_pair_type_has_the_bit_of_its_number() {
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
