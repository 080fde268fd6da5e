//! Connections by IP address: service ids of ports, and the header in the private data.
//!
//! Annex A11 of the specification. Linux does this in drivers/infiniband/core/cma.c.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::wire::fields::{Reader, Writer};

/// Port space of connections: `RDMA_PS_TCP`.
pub const PS_TCP: u16 = 0x0106;
/// Port space of datagrams: `RDMA_PS_UDP`.
pub const PS_UDP: u16 = 0x0111;

/// Returns the service id of a port in a port space.
#[must_use]
pub const fn service_id(space: u16, port: u16) -> u64 {
    (space as u64) << 16 | port as u64
}

/// Returns the port space and port of a service id. `None` if the upper 32 bits are not zero.
#[must_use]
pub const fn service_port(service: u64) -> Option<(u16, u16)> {
    if service >> 32 == 0 { Some(((service >> 16) as u16, service as u16)) } else { None }
}

/// The rdma_cm header at the start of the private data of a REQ or SIDR_REQ.
///
/// The destination port is in the service id of the message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpHeader {
    /// Address and port of the sender. The scope and flow label of an IPv6 address are not encoded.
    pub source: SocketAddr,
    /// Address of the receiver.
    pub destination: IpAddr,
}

/// Version of the header.
const VERSION: u8 = 0;

impl IpHeader {
    /// Length in bytes. The data of the application follows.
    pub const LEN: usize = 36;

    /// Encodes the header.
    ///
    /// If only one of the addresses is an IPv4 address, it is encoded as an IPv4-mapped IPv6 address.
    #[must_use]
    pub fn encode(&self) -> [u8; IpHeader::LEN] {
        let mut bytes = [0; IpHeader::LEN];
        let mut to = Writer(&mut bytes);
        let (source, destination) = (self.source.ip(), self.destination);
        let ipv4 = source.is_ipv4() && destination.is_ipv4();
        to.u8(VERSION);
        to.u8(if ipv4 { 4 } else { 6 } << 4);
        to.u16(self.source.port());
        for address in [source, destination] {
            to.put(&match address {
                // The address is in the last 4 of 16 bytes, after zeros.
                IpAddr::V4(address) if ipv4 => u128::from(address.to_bits()).to_be_bytes(),
                IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                IpAddr::V6(address) => address.octets(),
            });
        }
        bytes
    }

    /// Decodes the header at the start of the private data.
    ///
    /// `None` if the data is too short, or has another header version or IP version.
    #[must_use]
    pub fn decode(private_data: &[u8]) -> Option<IpHeader> {
        let mut from = Reader(private_data);
        let (version, ip_version, port) = (from.u8()?, from.u8()? >> 4, from.u16()?);
        let address = match (version, ip_version) {
            (VERSION, 4) => |bytes| IpAddr::V4(Ipv4Addr::from_bits(u128::from_be_bytes(bytes) as u32)),
            (VERSION, 6) => |bytes| IpAddr::V6(Ipv6Addr::from(bytes)),
            _ => return None,
        };
        let source = SocketAddr::new(address(from.take()?), port);
        Some(IpHeader { source, destination: address(from.take()?) })
    }
}
