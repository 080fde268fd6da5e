//! GIDs and IP addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::net::Origin;

/// The destination of a packet, and the link that sends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Destination {
    pub(crate) link: usize,
    pub(crate) address: IpAddr,
    /// Traffic class.
    pub(crate) class: u8,
}

impl Destination {
    /// A destination that is not set yet. Packets to it are lost.
    pub(crate) const fn unset() -> Self {
        Destination { link: 0, address: IpAddr::V4(Ipv4Addr::UNSPECIFIED), class: 0 }
    }
}

/// The GID of an address. IPv4 addresses are mapped into IPv6.
pub(crate) fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address of a GID. IPv4 multicast groups may have the form ff0e::ffff:a.b.c.d of RoCE.
pub(crate) fn address(gid: [u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(gid);
    match v6.segments() {
        [0xff0e, 0, 0, 0, 0, 0xffff, _, _] => {
            let [.., a, b, c, d] = gid;
            IpAddr::V4(Ipv4Addr::new(a, b, c, d))
        }
        _ => v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4),
    }
}

/// The global route header at the start of a datagram's receive. An IPv4 header is in the second half of its 40 bytes.
pub(crate) fn route_header(origin: Origin, to: IpAddr, datagram: usize) -> [u8; 40] {
    const UDP: u8 = 17;
    let Origin { address: from, class, hops } = origin;
    let mut header = [0; 40];
    let len = (8 + datagram) as u16;
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let ip = &mut header[20..];
            (ip[0], ip[1]) = (0x45, class);
            ip[2..4].copy_from_slice(&(20 + len).to_be_bytes());
            ip[6] = 0x40;
            (ip[8], ip[9]) = (hops, UDP);
            ip[12..16].copy_from_slice(&from.octets());
            ip[16..20].copy_from_slice(&to.octets());
            let sum: u32 = ip.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
            let folded = (sum & 0xffff) + (sum >> 16);
            let checksum = !(((folded & 0xffff) + (folded >> 16)) as u16);
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        _ => {
            (header[0], header[1]) = (0x60 | class >> 4, class << 4);
            header[4..6].copy_from_slice(&len.to_be_bytes());
            (header[6], header[7]) = (UDP, hops);
            header[8..24].copy_from_slice(&gid(from));
            header[24..40].copy_from_slice(&gid(to));
        }
    }
    header
}

/// The RoCE packet type of a datagram, as mlx5 reports it in `wc.sl`.
///
/// Bit 3 means that the packet has a UDP header, and the bits below it name the network header. Ethernet has no service level, so
/// the field is free. UCX reads the type to find the addresses in the route header.
pub(crate) fn packet_type(header: &[u8; 40]) -> u8 {
    const UDP: u8 = 1 << 3;
    const IPV6: u8 = 1;
    const IPV4: u8 = 2;
    if header[0] >> 4 == 6 { UDP | IPV6 } else { UDP | IPV4 }
}

/// Normalizes the GID of a multicast group, which has two forms for IPv4.
pub(crate) fn group_gid(group: [u8; 16]) -> [u8; 16] {
    gid(address(group))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_header_describes_its_packet() {
        let origin = |address| Origin { address, class: 0xb9, hops: 3 };
        let [from, to] = [1, 2].map(|last| IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
        let header = route_header(origin(from), to, 100);
        assert_eq!(header[..20], [0; 20]);
        assert_eq!(header[20..24], [0x45, 0xb9, 0, 128]);
        assert_eq!(header[28..30], [3, 17]);
        assert_eq!(header[32..], [10, 0, 0, 1, 10, 0, 0, 2]);
        let words = header[20..].chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
        let sum: u32 = words.sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "its checksum is right");
        assert_eq!(packet_type(&header), 0xa);
        let six = IpAddr::V6(Ipv6Addr::LOCALHOST);
        let header = route_header(origin(six), six, 100);
        assert_eq!(header[..8], [0x6b, 0x90, 0, 0, 0, 108, 17, 3]);
        assert_eq!(packet_type(&header), 0x9);
    }
}
