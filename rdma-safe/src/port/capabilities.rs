//! Capabilities of ports.

use bitflags::bitflags;
use rdma_sys::*;

bitflags! {
    /// Capability flags of a port: `enum ibv_port_cap_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct PortCapabilities: u32 {
        /// The subnet manager runs here.
        const SM = IBV_PORT_SM.0;
        /// Notices.
        const NOTICE = IBV_PORT_NOTICE_SUP.0;
        /// Traps.
        const TRAP = IBV_PORT_TRAP_SUP.0;
        /// Optional inter-packet delays.
        const OPT_IPD = IBV_PORT_OPT_IPD_SUP.0;
        /// Automatic path migration.
        const AUTO_MIGR = IBV_PORT_AUTO_MIGR_SUP.0;
        /// Mapping of service levels to virtual lanes.
        const SL_MAP = IBV_PORT_SL_MAP_SUP.0;
        /// The management key survives a restart.
        const MKEY_NVRAM = IBV_PORT_MKEY_NVRAM.0;
        /// Partition keys survive a restart.
        const PKEY_NVRAM = IBV_PORT_PKEY_NVRAM.0;
        /// An LED that can be set.
        const LED_INFO = IBV_PORT_LED_INFO_SUP.0;
        /// The system image GUID can be set.
        const SYS_IMAGE_GUID = IBV_PORT_SYS_IMAGE_GUID_SUP.0;
        /// Partition key traps by the switch's external port.
        const PKEY_SW_EXT_PORT_TRAP = IBV_PORT_PKEY_SW_EXT_PORT_TRAP_SUP.0;
        /// Link speeds from FDR on.
        const EXTENDED_SPEEDS = IBV_PORT_EXTENDED_SPEEDS_SUP.0;
        /// [`PortCapabilities2`] is valid.
        const CAP_MASK2 = IBV_PORT_CAP_MASK2_SUP.0;
        /// Communication management.
        const CM = IBV_PORT_CM_SUP.0;
        /// SNMP tunneling.
        const SNMP_TUNNEL = IBV_PORT_SNMP_TUNNEL_SUP.0;
        /// Reinitialization.
        const REINIT = IBV_PORT_REINIT_SUP.0;
        /// Device management.
        const DEVICE_MGMT = IBV_PORT_DEVICE_MGMT_SUP.0;
        /// Vendor-defined management classes.
        const VENDOR_CLASS = IBV_PORT_VENDOR_CLASS_SUP.0;
        /// Notices over directed routes.
        const DR_NOTICE = IBV_PORT_DR_NOTICE_SUP.0;
        /// A notice when these flags change.
        const CAP_MASK_NOTICE = IBV_PORT_CAP_MASK_NOTICE_SUP.0;
        /// Boot management.
        const BOOT_MGMT = IBV_PORT_BOOT_MGMT_SUP.0;
        /// The round-trip latency of the link is measured.
        const LINK_LATENCY = IBV_PORT_LINK_LATENCY_SUP.0;
        /// The subnet manager can request clients to register again.
        const CLIENT_REG = IBV_PORT_CLIENT_REG_SUP.0;
        /// GIDs are derived from IP addresses.
        const IP_BASED_GIDS = IBV_PORT_IP_BASED_GIDS.0;

        const _ = !0;
    }

    /// Further capability flags of a port: `enum ibv_port_cap_flags2`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct PortCapabilities2: u16 {
        /// The node description can be set.
        const SET_NODE_DESC = IBV_PORT_SET_NODE_DESC_SUP.0 as u16;
        /// Extended information.
        const INFO_EXT = IBV_PORT_INFO_EXT_SUP.0 as u16;
        /// Virtual ports.
        const VIRT = IBV_PORT_VIRT_SUP.0 as u16;
        /// A table of the switch's port states.
        const SWITCH_PORT_STATE_TABLE = IBV_PORT_SWITCH_PORT_STATE_TABLE_SUP.0 as u16;
        /// Links of two lanes.
        const LINK_WIDTH_2X = IBV_PORT_LINK_WIDTH_2X_SUP.0 as u16;
        /// HDR.
        const LINK_SPEED_HDR = IBV_PORT_LINK_SPEED_HDR_SUP.0 as u16;
        /// NDR.
        const LINK_SPEED_NDR = IBV_PORT_LINK_SPEED_NDR_SUP.0 as u16;
        /// XDR.
        const LINK_SPEED_XDR = IBV_PORT_LINK_SPEED_XDR_SUP.0 as u16;

        const _ = !0;
    }
}
