//! Packet headers that flows match.

use std::net::{Ipv4Addr, Ipv6Addr};

use rdma_sys::*;

/// A header that a flow can match. Numbers are in host byte order.
pub trait FlowHeader: sealed::Header + Copy {}

mod sealed {
    use rdma_sys::ibv_flow_spec;

    /// Sealed, because the provider trusts the specification that it returns.
    pub trait Header {
        /// The specification of the fields of `self` under `mask`, with its type and exact size.
        fn spec(self, mask: Self) -> ibv_flow_spec;
    }
}

/// Ethernet header: `struct ibv_flow_eth_filter`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct EthernetHeader {
    /// Destination MAC address.
    pub dst_mac: [u8; 6],
    /// Source MAC address.
    pub src_mac: [u8; 6],
    /// EtherType after the last VLAN tag.
    pub ether_type: u16,
    /// 802.1Q tag: 3 bits of priority, 1 of drop eligibility, 12 of VLAN ID.
    pub vlan_tag: u16,
}

/// IPv4 addresses: `struct ibv_flow_ipv4_filter`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ipv4Header {
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
}

impl Default for Ipv4Header {
    /// All zeros.
    fn default() -> Self {
        Ipv4Header { src: Ipv4Addr::UNSPECIFIED, dst: Ipv4Addr::UNSPECIFIED }
    }
}

/// IPv4 header with more fields: `struct ibv_flow_ipv4_ext_filter`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ipv4ExtHeader {
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
    /// Protocol number.
    pub protocol: u8,
    /// Type of service.
    pub tos: u8,
    /// Time to live.
    pub ttl: u8,
    /// Fragmentation flags.
    pub flags: u8,
}

impl Default for Ipv4ExtHeader {
    /// All zeros.
    fn default() -> Self {
        let Ipv4Header { src, dst } = Ipv4Header::default();
        Ipv4ExtHeader { src, dst, protocol: 0, tos: 0, ttl: 0, flags: 0 }
    }
}

/// IPv6 header: `struct ibv_flow_ipv6_filter`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ipv6Header {
    /// Source address.
    pub src: Ipv6Addr,
    /// Destination address.
    pub dst: Ipv6Addr,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Type of the next header.
    pub next_header: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
}

impl Default for Ipv6Header {
    /// All zeros.
    fn default() -> Self {
        let (src, dst) = (Ipv6Addr::UNSPECIFIED, Ipv6Addr::UNSPECIFIED);
        Ipv6Header { src, dst, flow_label: 0, next_header: 0, traffic_class: 0, hop_limit: 0 }
    }
}

/// TCP ports: `struct ibv_flow_tcp_udp_filter`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct TcpHeader {
    /// Destination port.
    pub dst_port: u16,
    /// Source port.
    pub src_port: u16,
}

/// UDP ports: `struct ibv_flow_tcp_udp_filter`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct UdpHeader {
    /// Destination port.
    pub dst_port: u16,
    /// Source port.
    pub src_port: u16,
}

/// VXLAN header: `struct ibv_flow_tunnel_filter`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct VxlanHeader {
    /// VXLAN network identifier (VNI), 24 bits.
    pub vni: u32,
}

/// GRE header: `struct ibv_flow_gre_filter`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct GreHeader {
    /// The first 16 bits: presence flags and version.
    pub flags: u16,
    /// Protocol, as an EtherType.
    pub protocol: u16,
    /// Key.
    pub key: u32,
}

/// MPLS label: `struct ibv_flow_mpls_filter`. Its position among the headers of a flow matters.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct MplsHeader {
    /// The whole label stack entry: 20 bits of label, 3 of traffic class, 1 for bottom of stack, 8 of time to live.
    pub entry: u32,
}

/// IPsec ESP header: `struct ibv_flow_esp_filter`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct EspHeader {
    /// Security parameter index.
    pub spi: u32,
    /// Sequence number.
    pub seq: u32,
}

/// A zeroed specification except for `member`, which contains its type and size.
pub(super) fn spec_of(member: ibv_flow_spec__bindgen_ty_1) -> ibv_flow_spec {
    ibv_flow_spec { __bindgen_anon_1: member }
}

/// Implements `FlowHeader`: a C structure of type, size, value and mask.
macro_rules! headers {
    ($($header:ident as $member:ident: $spec:ident { $type:expr, |$of:ident| $filter:expr })+) => {$(
        impl FlowHeader for $header {}

        impl sealed::Header for $header {
            fn spec(self, mask: Self) -> ibv_flow_spec {
                let filter = |$of: Self| $filter;
                let (val, mask) = (filter(self), filter(mask));
                let spec = $spec { type_: $type, size: size_of::<$spec>() as u16, val, mask };
                spec_of(ibv_flow_spec__bindgen_ty_1 { $member: spec })
            }
        }
    )+};
}

/// The address in network byte order.
fn ipv4(address: Ipv4Addr) -> u32 {
    u32::from_ne_bytes(address.octets())
}

headers! {
    EthernetHeader as eth: ibv_flow_spec_eth { IBV_FLOW_SPEC_ETH, |of| ibv_flow_eth_filter {
        dst_mac: of.dst_mac,
        src_mac: of.src_mac,
        ether_type: of.ether_type.to_be(),
        vlan_tag: of.vlan_tag.to_be(),
    } }
    Ipv4Header as ipv4: ibv_flow_spec_ipv4 { IBV_FLOW_SPEC_IPV4, |of| ibv_flow_ipv4_filter {
        src_ip: ipv4(of.src),
        dst_ip: ipv4(of.dst),
    } }
    Ipv4ExtHeader as ipv4_ext: ibv_flow_spec_ipv4_ext { IBV_FLOW_SPEC_IPV4_EXT, |of| ibv_flow_ipv4_ext_filter {
        src_ip: ipv4(of.src),
        dst_ip: ipv4(of.dst),
        proto: of.protocol,
        tos: of.tos,
        ttl: of.ttl,
        flags: of.flags,
    } }
    Ipv6Header as ipv6: ibv_flow_spec_ipv6 { IBV_FLOW_SPEC_IPV6, |of| ibv_flow_ipv6_filter {
        src_ip: of.src.octets(),
        dst_ip: of.dst.octets(),
        flow_label: of.flow_label.to_be(),
        next_hdr: of.next_header,
        traffic_class: of.traffic_class,
        hop_limit: of.hop_limit,
    } }
    TcpHeader as tcp_udp: ibv_flow_spec_tcp_udp { IBV_FLOW_SPEC_TCP, |of| ibv_flow_tcp_udp_filter {
        dst_port: of.dst_port.to_be(),
        src_port: of.src_port.to_be(),
    } }
    UdpHeader as tcp_udp: ibv_flow_spec_tcp_udp { IBV_FLOW_SPEC_UDP, |of| ibv_flow_tcp_udp_filter {
        dst_port: of.dst_port.to_be(),
        src_port: of.src_port.to_be(),
    } }
    VxlanHeader as tunnel: ibv_flow_spec_tunnel { IBV_FLOW_SPEC_VXLAN_TUNNEL, |of| ibv_flow_tunnel_filter {
        tunnel_id: of.vni.to_be(),
    } }
    GreHeader as gre: ibv_flow_spec_gre { IBV_FLOW_SPEC_GRE, |of| ibv_flow_gre_filter {
        c_ks_res0_ver: of.flags.to_be(),
        protocol: of.protocol.to_be(),
        key: of.key.to_be(),
    } }
    MplsHeader as mpls: ibv_flow_spec_mpls { IBV_FLOW_SPEC_MPLS, |of| ibv_flow_mpls_filter { label: of.entry.to_be() } }
    EspHeader as esp: ibv_flow_spec_esp { IBV_FLOW_SPEC_ESP, |of| ibv_flow_esp_filter {
        spi: of.spi.to_be(),
        seq: of.seq.to_be(),
    } }
}
