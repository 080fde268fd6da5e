//! The names that ibv_devinfo prints for values.

use rdma_safe::device::TransportType;
use rdma_sys::*;

pub(crate) fn transport(transport: TransportType) -> String {
    match TransportType::KNOWN.contains(&transport) {
        true => transport.to_string(),
        false => "invalid transport".into(),
    }
}

pub(crate) fn port_state(state: ibv_port_state) -> &'static str {
    match state {
        IBV_PORT_DOWN => "PORT_DOWN",
        IBV_PORT_INIT => "PORT_INIT",
        IBV_PORT_ARMED => "PORT_ARMED",
        IBV_PORT_ACTIVE => "PORT_ACTIVE",
        _ => "invalid state",
    }
}

pub(crate) fn physical_state(state: u8) -> &'static str {
    match state {
        1 => "SLEEP",
        2 => "POLLING",
        3 => "DISABLED",
        4 => "PORT_CONFIGURATION TRAINNING",
        5 => "LINK_UP",
        6 => "LINK_ERROR_RECOVERY",
        7 => "PHY TEST",
        _ => "invalid physical state",
    }
}

pub(crate) fn atomic_capability(capability: ibv_atomic_cap) -> &'static str {
    match capability {
        IBV_ATOMIC_NONE => "ATOMIC_NONE",
        IBV_ATOMIC_HCA => "ATOMIC_HCA",
        IBV_ATOMIC_GLOB => "ATOMIC_GLOB",
        _ => "invalid atomic capability",
    }
}

pub(crate) fn mtu(mtu: ibv_mtu) -> String {
    rdma_safe::Mtu::from_code(mtu.0).bytes().map_or("invalid MTU".into(), |bytes| bytes.to_string())
}

pub(crate) fn width(width: u8) -> &'static str {
    match width {
        1 => "1",
        2 => "4",
        4 => "8",
        8 => "12",
        16 => "2",
        _ => "invalid width",
    }
}

pub(crate) fn speed(speed: u32) -> &'static str {
    match speed {
        1 => "2.5 Gbps",
        2 => "5.0 Gbps",
        4 | 8 => "10.0 Gbps",
        16 => "14.0 Gbps",
        32 => "25.0 Gbps",
        64 => "50.0 Gbps",
        128 => "100.0 Gbps",
        256 => "200.0 Gbps",
        _ => "invalid speed",
    }
}

pub(crate) fn virtual_lanes(code: u8) -> &'static str {
    match code {
        1 => "1",
        2 => "2",
        3 => "4",
        4 => "8",
        5 => "15",
        _ => "invalid value",
    }
}

pub(crate) fn link_layer(layer: u8) -> &'static str {
    match u32::from(layer) {
        IBV_LINK_LAYER_UNSPECIFIED => "Unspecified",
        IBV_LINK_LAYER_INFINIBAND => "InfiniBand",
        IBV_LINK_LAYER_ETHERNET => "Ethernet",
        _ => "Unknown",
    }
}

pub(crate) const DEVICE_CAPS: &[(u64, &str)] = &[
    (IBV_DEVICE_RESIZE_MAX_WR.0 as u64, "RESIZE_MAX_WR"),
    (IBV_DEVICE_BAD_PKEY_CNTR.0 as u64, "BAD_PKEY_CNTR"),
    (IBV_DEVICE_BAD_QKEY_CNTR.0 as u64, "BAD_QKEY_CNTR"),
    (IBV_DEVICE_RAW_MULTI.0 as u64, "RAW_MULTI"),
    (IBV_DEVICE_AUTO_PATH_MIG.0 as u64, "AUTO_PATH_MIG"),
    (IBV_DEVICE_CHANGE_PHY_PORT.0 as u64, "CHANGE_PHY_PORT"),
    (IBV_DEVICE_UD_AV_PORT_ENFORCE.0 as u64, "UD_AV_PORT_ENFORCE"),
    (IBV_DEVICE_CURR_QP_STATE_MOD.0 as u64, "CURR_QP_STATE_MOD"),
    (IBV_DEVICE_SHUTDOWN_PORT.0 as u64, "SHUTDOWN_PORT"),
    (IBV_DEVICE_INIT_TYPE.0 as u64, "INIT_TYPE"),
    (IBV_DEVICE_PORT_ACTIVE_EVENT.0 as u64, "PORT_ACTIVE_EVENT"),
    (IBV_DEVICE_SYS_IMAGE_GUID.0 as u64, "SYS_IMAGE_GUID"),
    (IBV_DEVICE_RC_RNR_NAK_GEN.0 as u64, "RC_RNR_NAK_GEN"),
    (IBV_DEVICE_SRQ_RESIZE.0 as u64, "SRQ_RESIZE"),
    (IBV_DEVICE_N_NOTIFY_CQ.0 as u64, "N_NOTIFY_CQ"),
    (IBV_DEVICE_MEM_WINDOW.0 as u64, "MEM_WINDOW"),
    (IBV_DEVICE_UD_IP_CSUM.0 as u64, "UD_IP_CSUM"),
    (IBV_DEVICE_XRC.0 as u64, "XRC"),
    (IBV_DEVICE_MEM_MGT_EXTENSIONS.0 as u64, "MEM_MGT_EXTENSIONS"),
    (IBV_DEVICE_MEM_WINDOW_TYPE_2A.0 as u64, "MEM_WINDOW_TYPE_2A"),
    (IBV_DEVICE_MEM_WINDOW_TYPE_2B.0 as u64, "MEM_WINDOW_TYPE_2B"),
    (IBV_DEVICE_RC_IP_CSUM.0 as u64, "RC_IP_CSUM"),
    (IBV_DEVICE_RAW_IP_CSUM.0 as u64, "RAW_IP_CSUM"),
    (IBV_DEVICE_MANAGED_FLOW_STEERING.0 as u64, "MANAGED_FLOW_STEERING"),
];

pub(crate) const DEVICE_CAPS_EX: &[(u64, &str)] =
    &[(IBV_DEVICE_RAW_SCATTER_FCS, "RAW_SCATTER_FCS"), (IBV_DEVICE_PCI_WRITE_END_PADDING, "PCI_WRITE_END_PADDING")];

pub(crate) const ODP_GENERAL: &[(u64, &str)] =
    &[(IBV_ODP_SUPPORT.0 as u64, "ODP_SUPPORT"), (IBV_ODP_SUPPORT_IMPLICIT.0 as u64, "ODP_SUPPORT_IMPLICIT")];

pub(crate) const ODP_TRANSPORT: &[(u64, &str)] = &[
    (IBV_ODP_SUPPORT_SEND.0 as u64, "SUPPORT_SEND"),
    (IBV_ODP_SUPPORT_RECV.0 as u64, "SUPPORT_RECV"),
    (IBV_ODP_SUPPORT_WRITE.0 as u64, "SUPPORT_WRITE"),
    (IBV_ODP_SUPPORT_READ.0 as u64, "SUPPORT_READ"),
    (IBV_ODP_SUPPORT_ATOMIC.0 as u64, "SUPPORT_ATOMIC"),
    (IBV_ODP_SUPPORT_SRQ_RECV.0 as u64, "SUPPORT_SRQ"),
];

pub(crate) const QP_TYPES: &[(u64, &str)] =
    &[(1 << IBV_QPT_RAW_PACKET.0, "SUPPORT_RAW_PACKET"), (1 << IBV_QPT_UD.0, "SUPPORT_UD")];

pub(crate) const RAW_PACKET: &[(u64, &str)] = &[
    (IBV_RAW_PACKET_CAP_CVLAN_STRIPPING.0 as u64, "C-VLAN stripping offload"),
    (IBV_RAW_PACKET_CAP_SCATTER_FCS.0 as u64, "Scatter FCS offload"),
    (IBV_RAW_PACKET_CAP_IP_CSUM.0 as u64, "IP csum offload"),
    (IBV_RAW_PACKET_CAP_DELAY_DROP.0 as u64, "Delay drop"),
];
