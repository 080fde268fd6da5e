//! Ports: state, link, MTU and table sizes.
//!
//! Start with [`Context::query_port`](crate::Context::query_port), which returns [`PortAttributes`].

mod capabilities;
mod link;

use std::fmt;

use rdma_sys::*;

use crate::named::named;

pub use capabilities::{PortCapabilities, PortCapabilities2};
pub use link::{LinkSpeed, LinkWidth, PhysicalState};

named! {
    /// Logical state of a port: `enum ibv_port_state`.
    pub struct PortState(u32) as "port state" {
        /// No state change is reported.
        NOP = IBV_PORT_NOP.0 => "PORT_NOP",
        /// No link.
        DOWN = IBV_PORT_DOWN.0 => "PORT_DOWN",
        /// Link up, not configured by the subnet manager.
        INIT = IBV_PORT_INIT.0 => "PORT_INIT",
        /// Configured, waiting for activation.
        ARMED = IBV_PORT_ARMED.0 => "PORT_ARMED",
        /// Ready for traffic.
        ACTIVE = IBV_PORT_ACTIVE.0 => "PORT_ACTIVE",
        /// Active, with a deferred link failure.
        ACTIVE_DEFER = IBV_PORT_ACTIVE_DEFER.0 => "PORT_ACTIVE_DEFER",
    }
}

named! {
    /// Link layer of a port: `IBV_LINK_LAYER_*`.
    pub struct LinkLayer(u8) as "link layer" {
        /// Unspecified: older InfiniBand drivers.
        UNSPECIFIED = IBV_LINK_LAYER_UNSPECIFIED as u8 => "Unspecified",
        /// InfiniBand: addressed by LID.
        INFINIBAND = IBV_LINK_LAYER_INFINIBAND as u8 => "InfiniBand",
        /// Ethernet (RoCE, iWARP): addressed by GID.
        ETHERNET = IBV_LINK_LAYER_ETHERNET as u8 => "Ethernet",
    }
}

/// Path MTU, as its code in `enum ibv_mtu`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(into = "u32", try_from = "u32"))]
pub struct Mtu(u32);

impl Mtu {
    /// 256 bytes.
    pub const MTU_256: Mtu = Mtu(1);
    /// 512 bytes.
    pub const MTU_512: Mtu = Mtu(2);
    /// 1024 bytes.
    pub const MTU_1024: Mtu = Mtu(3);
    /// 2048 bytes.
    pub const MTU_2048: Mtu = Mtu(4);
    /// 4096 bytes.
    pub const MTU_4096: Mtu = Mtu(5);

    /// The MTU with this code in `enum ibv_mtu`. For a number of bytes, use `Mtu::try_from`.
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        Mtu(code)
    }

    /// Code in `enum ibv_mtu`.
    #[must_use]
    pub const fn code(self) -> u32 {
        self.0
    }

    /// Payload of a packet in bytes; `None` for an undefined code.
    #[must_use]
    pub fn bytes(self) -> Option<u32> {
        matches!(self.0, 1..=5).then(|| 128 << self.0)
    }
}

/// The error for a number of bytes that is not a path MTU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0} is not a path MTU: it is 256, 512, 1024, 2048 or 4096 bytes")]
pub struct InvalidMtu(pub u32);

impl TryFrom<u32> for Mtu {
    type Error = InvalidMtu;

    /// Converts a number of bytes.
    fn try_from(bytes: u32) -> Result<Self, InvalidMtu> {
        (1..=5).map(Mtu).find(|mtu| mtu.bytes() == Some(bytes)).ok_or(InvalidMtu(bytes))
    }
}

impl From<Mtu> for u32 {
    /// Number of bytes, or 0 for an undefined code.
    fn from(mtu: Mtu) -> u32 {
        mtu.bytes().unwrap_or(0)
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes() {
            Some(bytes) => write!(f, "{bytes}"),
            None => write!(f, "MTU code {}", self.0),
        }
    }
}

impl fmt::Debug for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mtu({}: {self})", self.0)
    }
}

/// Attributes of a port: `ibv_query_port(3)`.
#[derive(Clone, Copy)]
pub struct PortAttributes {
    raw: ibv_port_attr,
}

impl PortAttributes {
    pub(crate) fn from_raw(raw: ibv_port_attr) -> Self {
        PortAttributes { raw }
    }

    /// Logical state; traffic flows in [`PortState::ACTIVE`].
    #[must_use]
    pub fn state(&self) -> PortState {
        PortState(self.raw.state.0)
    }

    /// Link layer.
    #[must_use]
    pub fn link_layer(&self) -> LinkLayer {
        LinkLayer(self.raw.link_layer)
    }

    /// Largest MTU that the port supports.
    #[must_use]
    pub fn max_mtu(&self) -> Mtu {
        Mtu(self.raw.max_mtu.0)
    }

    /// Active MTU.
    #[must_use]
    pub fn active_mtu(&self) -> Mtu {
        Mtu(self.raw.active_mtu.0)
    }

    /// Base local identifier; 0 on Ethernet.
    #[must_use]
    pub fn lid(&self) -> u16 {
        self.raw.lid
    }

    /// LID mask control (LMC): number of low LID bits that path bits can vary.
    #[must_use]
    pub fn lid_mask_bits(&self) -> u8 {
        self.raw.lmc
    }

    /// Local identifier of the subnet manager; 0 on Ethernet.
    #[must_use]
    pub fn subnet_manager_lid(&self) -> u16 {
        self.raw.sm_lid
    }

    /// Service level of the path to the subnet manager.
    #[must_use]
    pub fn subnet_manager_sl(&self) -> u8 {
        self.raw.sm_sl
    }

    /// Subnet timeout, the longest time of a packet in the subnet: 4.096 µs · 2^value.
    #[must_use]
    pub fn subnet_timeout(&self) -> u8 {
        self.raw.subnet_timeout
    }

    /// Type of initialization that the subnet manager has done, as coded by the InfiniBand specification.
    #[must_use]
    pub fn init_type_reply(&self) -> u8 {
        self.raw.init_type_reply
    }

    /// Number of virtual lanes; `None` for an undefined code, and on Ethernet.
    #[must_use]
    pub fn virtual_lanes(&self) -> Option<u8> {
        [1, 2, 4, 8, 15].get(usize::from(self.raw.max_vl_num).checked_sub(1)?).copied()
    }

    /// Width of the link.
    #[must_use]
    pub fn active_width(&self) -> LinkWidth {
        LinkWidth(self.raw.active_width)
    }

    /// Speed per lane of the link.
    #[must_use]
    pub fn active_speed(&self) -> LinkSpeed {
        // From 200 Gbit/s on, the code does not fit in the older field.
        match self.raw.active_speed_ex {
            0 => LinkSpeed(self.raw.active_speed.into()),
            speed => LinkSpeed(speed),
        }
    }

    /// Nominal rate of the link in Mbit/s: lanes times speed. `None` if either code is undefined.
    ///
    /// The actual speed may be lower: see [`Context::port_speed`](crate::Context::port_speed).
    #[must_use]
    pub fn nominal_mbps(&self) -> Option<u64> {
        Some(u64::from(self.active_width().lanes()?) * u64::from(self.active_speed().lane_mbps()?))
    }

    /// Physical state of the link.
    #[must_use]
    pub fn physical_state(&self) -> PhysicalState {
        PhysicalState(self.raw.phys_state)
    }

    /// Capability flags.
    #[must_use]
    pub fn capabilities(&self) -> PortCapabilities {
        PortCapabilities::from_bits_retain(self.raw.port_cap_flags)
    }

    /// Further capability flags.
    #[must_use]
    pub fn capabilities2(&self) -> PortCapabilities2 {
        PortCapabilities2::from_bits_retain(self.raw.port_cap_flags2)
    }

    /// Whether all address vectors need a global route.
    #[must_use]
    pub fn needs_global_route(&self) -> bool {
        u32::from(self.raw.flags) & IBV_QPF_GRH_REQUIRED.0 != 0
    }

    /// Packets with a bad partition key since the port came up.
    #[must_use]
    pub fn bad_pkeys(&self) -> u32 {
        self.raw.bad_pkey_cntr
    }

    /// Packets with a bad queue key since the port came up.
    #[must_use]
    pub fn bad_qkeys(&self) -> u32 {
        self.raw.qkey_viol_cntr
    }

    /// Number of entries in the GID table, including empty ones.
    #[must_use]
    pub fn gid_table_len(&self) -> u32 {
        self.raw.gid_tbl_len.max(0) as u32
    }

    /// Number of entries in the P_Key table.
    #[must_use]
    pub fn pkey_table_len(&self) -> u16 {
        self.raw.pkey_tbl_len
    }

    /// Largest message in bytes.
    #[must_use]
    pub fn max_message_size(&self) -> u32 {
        self.raw.max_msg_sz
    }

    /// All fields in C's representation.
    #[must_use]
    pub fn as_raw(&self) -> &ibv_port_attr {
        &self.raw
    }
}

impl fmt::Debug for PortAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortAttributes")
            .field("state", &self.state())
            .field("link_layer", &self.link_layer())
            .field("active_width", &self.active_width())
            .field("active_speed", &self.active_speed())
            .field("active_mtu", &self.active_mtu())
            .field("max_mtu", &self.max_mtu())
            .field("lid", &self.lid())
            .field("gid_table_len", &self.gid_table_len())
            .field("pkey_table_len", &self.pkey_table_len())
            .field("max_message_size", &self.max_message_size())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes_and_bytes_agree() {
        for (code, bytes) in [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)] {
            assert_eq!(Mtu(code).bytes(), Some(bytes));
            assert_eq!(Mtu::try_from(bytes), Ok(Mtu(code)));
        }
        assert_eq!(Mtu(0).bytes(), None);
        assert_eq!(Mtu(6).bytes(), None);
        assert_eq!(Mtu::try_from(1500), Err(InvalidMtu(1500)));
    }
}
