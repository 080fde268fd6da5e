//! Global identifiers of ports (GID) and of hardware (GUID).

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use rdma_sys::{IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2};

use crate::named::named;

/// A 128-bit global identifier, in network byte order.
///
/// On RoCE v2 it is an IPv6 address, or an IPv4 address mapped as `::ffff:a.b.c.d`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(into = "String", try_from = "String")
)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The all-zero GID: an empty entry of a GID table.
    pub const ZERO: Gid = Gid([0; 16]);

    /// Whether all bits are zero: an empty table entry, or "no GID" in an address exchange.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self == Gid::ZERO
    }

    /// Whether it is link-local (`fe80::/10`), that is, valid on one link only.
    #[must_use]
    pub fn is_link_local(self) -> bool {
        self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80
    }

    /// Whether it is a multicast group: `ff00::/8`, or an IPv4 address of `224.0.0.0/4`.
    #[must_use]
    pub fn is_multicast(self) -> bool {
        self.0[0] == 0xff || self.ipv4().is_some_and(|address| address.is_multicast())
    }

    /// The IPv4 address, if it is an IPv4-mapped address.
    #[must_use]
    pub fn ipv4(self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    pub(crate) fn from_raw(raw: rdma_sys::ibv_gid) -> Self {
        // SAFETY: `ibv_gid` is a union of 16 bytes and two 64-bit integers over the same bytes. Any bits are a valid
        // `[u8; 16]`.
        Gid(unsafe { raw.raw })
    }

    pub(crate) fn to_raw(self) -> rdma_sys::ibv_gid {
        rdma_sys::ibv_gid { raw: self.0 }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

impl From<Ipv6Addr> for Gid {
    fn from(address: Ipv6Addr) -> Self {
        Gid(address.octets())
    }
}

impl From<Ipv4Addr> for Gid {
    fn from(address: Ipv4Addr) -> Self {
        Gid(address.to_ipv6_mapped().octets())
    }
}

impl From<Gid> for Ipv6Addr {
    fn from(gid: Gid) -> Self {
        Ipv6Addr::from(gid.0)
    }
}

impl From<Gid> for String {
    fn from(gid: Gid) -> Self {
        gid.to_string()
    }
}

impl FromStr for Gid {
    type Err = std::net::AddrParseError;

    /// Parses the IPv6 notation, with or without zero compression.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse::<Ipv6Addr>().map(Gid::from)
    }
}

impl TryFrom<String> for Gid {
    type Error = std::net::AddrParseError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// A 64-bit hardware identifier (EUI-64), in host byte order.
///
/// Prints like `ibv_devinfo`: `0200:00ff:fe00:0001`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct Guid(pub u64);

impl Guid {
    /// From the big-endian form of the C API (`__be64`).
    pub(crate) fn from_be(raw: u64) -> Self {
        Guid(u64::from_be(raw))
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d] = [48, 32, 16, 0].map(|shift| (self.0 >> shift) as u16);
        write!(f, "{a:04x}:{b:04x}:{c:04x}:{d:04x}")
    }
}

impl fmt::Debug for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guid({self})")
    }
}

/// The error for text that is not a GUID.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a GUID: it is 16 hexadecimal digits, such as 0200:00ff:fe00:0001")]
pub struct InvalidGuid(pub String);

impl FromStr for Guid {
    type Err = InvalidGuid;

    /// Parses 16 hexadecimal digits, with or without colons between them.
    fn from_str(text: &str) -> Result<Self, InvalidGuid> {
        let digits = text.replace(':', "");
        if digits.len() != 16 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(InvalidGuid(text.to_owned()));
        }
        u64::from_str_radix(&digits, 16).map(Guid).map_err(|_| InvalidGuid(text.to_owned()))
    }
}

named! {
    /// RDMA protocol of a GID table entry: `enum ibv_gid_type`.
    pub struct GidType(u32) as "GID type" {
        /// InfiniBand.
        INFINIBAND = IBV_GID_TYPE_IB.0 => "IB",
        /// RoCE version 1: Ethernet without IP.
        ROCE_V1 = IBV_GID_TYPE_ROCE_V1.0 => "RoCE v1",
        /// RoCE version 2: UDP port 4791 over IPv4 or IPv6.
        ROCE_V2 = IBV_GID_TYPE_ROCE_V2.0 => "RoCE v2",
    }
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct GidEntry {
    /// The address.
    pub gid: Gid,
    /// Index in the port's table: `sgid_index` of an address vector.
    pub index: u32,
    /// The port, counted from 1.
    pub port: u8,
    /// The protocol.
    pub gid_type: GidType,
    /// Index of the network interface that owns the address (`if_indextoname(3)`); 0 if there is none or it is unknown.
    pub interface_index: u32,
}

/// The entry that suits most connections, see [`Context::recommended_gid`](crate::Context::recommended_gid).
pub(crate) fn recommended(entries: &[GidEntry]) -> Option<GidEntry> {
    let rank = |entry: &GidEntry| {
        let protocol = match entry.gid_type {
            GidType::ROCE_V2 => 0,
            GidType::INFINIBAND => 1,
            GidType::ROCE_V1 => 2,
            _ => 3,
        };
        (protocol, entry.gid.is_link_local(), entry.gid.ipv4().is_none(), entry.index)
    };
    // `sgid_index` of an address vector has eight bits.
    let usable = |entry: &&GidEntry| !entry.gid.is_zero() && entry.index <= u32::from(u8::MAX);
    entries.iter().filter(usable).min_by_key(|entry| rank(entry)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, gid: &str, gid_type: GidType) -> GidEntry {
        GidEntry { gid: gid.parse().unwrap(), index, port: 1, gid_type, interface_index: 0 }
    }

    #[test]
    fn a_guid_prints_most_significant_byte_first() {
        let guid = Guid::from_be(u64::from_ne_bytes([0x02, 0, 0, 0xff, 0xfe, 0, 0, 0x01]));
        assert_eq!(guid.to_string(), "0200:00ff:fe00:0001");
        assert_eq!("0200:00ff:fe00:0001".parse::<Guid>().unwrap(), guid);
        assert_eq!("020000fffe000001".parse::<Guid>().unwrap(), guid);
        for text in ["", "1", ":::1", "+20000fffe000001", "0200:00ff:fe00:0001:02"] {
            assert_eq!(text.parse::<Guid>(), Err(InvalidGuid(text.into())));
        }
    }

    #[test]
    fn the_recommended_gid_is_roce_v2_and_routable() {
        let entries = [
            entry(0, "fe80::1", GidType::ROCE_V1),
            entry(1, "fe80::1", GidType::ROCE_V2),
            entry(2, "::ffff:10.9.9.1", GidType::ROCE_V1),
            entry(3, "2001:db8::1", GidType::ROCE_V2),
            entry(4, "::ffff:10.9.9.1", GidType::ROCE_V2),
            entry(5, "::ffff:10.9.9.2", GidType::ROCE_V2),
        ];
        assert_eq!(recommended(&entries).unwrap().index, 4);
        assert_eq!(recommended(&entries[..4]).unwrap().index, 3);
        assert_eq!(recommended(&entries[..2]).unwrap().index, 1, "link-local RoCE v2 before RoCE v1");
        assert_eq!(
            recommended(&[entry(300, "::ffff:10.9.9.1", GidType::ROCE_V2)]),
            None,
            "the index exceeds eight bits"
        );
        assert_eq!(recommended(&[entry(0, "::", GidType::ROCE_V2)]), None, "an empty entry is not an address");
    }

    #[test]
    fn a_mapped_gid_has_an_ipv4_address() {
        let gid = Gid::from(Ipv4Addr::new(10, 9, 9, 1));
        assert_eq!(gid.to_string(), "::ffff:10.9.9.1");
        assert_eq!(gid.ipv4(), Some(Ipv4Addr::new(10, 9, 9, 1)));
        assert_eq!("fe80::1".parse::<Gid>().unwrap().ipv4(), None);
    }
}
