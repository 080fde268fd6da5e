//! Global route headers of received datagrams.

use std::fmt;
use std::net::Ipv4Addr;

use rdma_sys::ibv_grh;

use crate::Gid;

/// The first [`Grh::LEN`] bytes of a received datagram: `struct ibv_grh`.
///
/// They hold a global route header. With RoCE v2 over IPv6 this is the IPv6 header. With RoCE v2 over IPv4 the last 20
/// bytes are the IPv4 header, and the others are undefined. The bytes are valid only if the completion has the flag
/// [`WcFlags::GRH`](crate::WcFlags::GRH).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Grh([u8; Grh::LEN]);

/// Offset of an IPv4 header.
const IPV4: usize = 20;

impl Grh {
    /// Bytes that a receive needs before the payload.
    pub const LEN: usize = 40;

    /// The header at the start of a received datagram; `None` if that is too short.
    #[must_use]
    pub fn parse(datagram: &[u8]) -> Option<Self> {
        datagram.first_chunk().copied().map(Grh)
    }

    /// The raw bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Grh::LEN] {
        &self.0
    }

    /// Version of the IP header: 4 for RoCE v2 over IPv4, otherwise 6, also on InfiniBand.
    ///
    /// Because the bytes before an IPv4 header are undefined, this inspects both headers. It is 4 if there is an IPv4
    /// header of 20 bytes with a correct checksum, or an IPv4 version without an IPv6 version before it. It is 0 if
    /// there is neither version.
    #[must_use]
    pub fn version(&self) -> u8 {
        let (is_6, is_4) = (self.0[0] >> 4 == 6, self.0[IPV4] >> 4 == 4);
        match (is_6, is_4) {
            (true, true) if self.0[IPV4] & 0xf == 5 && self.ipv4_checksum_fits() => 4,
            (true, _) => 6,
            (false, true) => 4,
            (false, false) => 0,
        }
    }

    fn is_ipv4(&self) -> bool {
        self.version() == 4
    }

    /// RFC 1071: the one's complement sum of the header, including its checksum, is all ones.
    fn ipv4_checksum_fits(&self) -> bool {
        let words = self.0[IPV4..].chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
        let sum: u32 = words.sum();
        (sum & 0xffff) + (sum >> 16) == 0xffff
    }

    /// Traffic class; over IPv4 the type of service.
    #[must_use]
    pub fn traffic_class(&self) -> u8 {
        if self.is_ipv4() { self.0[IPV4 + 1] } else { self.0[0] << 4 | self.0[1] >> 4 }
    }

    /// Flow label, 20 bits; 0 over IPv4, which has none.
    #[must_use]
    pub fn flow_label(&self) -> u32 {
        if self.is_ipv4() { 0 } else { u32::from_be_bytes([0, self.0[1] & 0xf, self.0[2], self.0[3]]) }
    }

    /// Length of the data after this header: other headers, payload and packet checksum.
    #[must_use]
    pub fn payload_len(&self) -> u16 {
        if self.is_ipv4() {
            let header = u16::from(self.0[IPV4] & 0xf) * 4;
            u16::from_be_bytes([self.0[IPV4 + 2], self.0[IPV4 + 3]]).saturating_sub(header)
        } else {
            u16::from_be_bytes([self.0[4], self.0[5]])
        }
    }

    /// Protocol of the next header: 0x1b for InfiniBand, 17 (UDP) for RoCE v2.
    #[must_use]
    pub fn next_header(&self) -> u8 {
        if self.is_ipv4() { self.0[IPV4 + 9] } else { self.0[6] }
    }

    /// Remaining hop limit; over IPv4 the time to live.
    #[must_use]
    pub fn hop_limit(&self) -> u8 {
        if self.is_ipv4() { self.0[IPV4 + 8] } else { self.0[7] }
    }

    /// GID of the sender; over IPv4 the mapped address.
    #[must_use]
    pub fn sgid(&self) -> Gid {
        if self.is_ipv4() { self.ipv4(IPV4 + 12) } else { self.gid(8) }
    }

    /// GID of the destination; over IPv4 the mapped address.
    #[must_use]
    pub fn dgid(&self) -> Gid {
        if self.is_ipv4() { self.ipv4(IPV4 + 16) } else { self.gid(24) }
    }

    fn gid(&self, at: usize) -> Gid {
        Gid(std::array::from_fn(|index| self.0[at + index]))
    }

    fn ipv4(&self, at: usize) -> Gid {
        Gid::from(Ipv4Addr::from(std::array::from_fn::<u8, 4, _>(|index| self.0[at + index])))
    }

    pub(crate) fn to_raw(self) -> ibv_grh {
        const { assert!(size_of::<ibv_grh>() == Grh::LEN) };
        // SAFETY: both have 40 bytes, and the fields of `ibv_grh` are integers, for which any bits are valid.
        unsafe { std::mem::transmute_copy(&self.0) }
    }
}

impl fmt::Debug for Grh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grh")
            .field("version", &self.version())
            .field("traffic_class", &self.traffic_class())
            .field("flow_label", &self.flow_label())
            .field("payload_len", &self.payload_len())
            .field("next_header", &self.next_header())
            .field("hop_limit", &self.hop_limit())
            .field("sgid", &self.sgid())
            .field("dgid", &self.dgid())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The well-known example of RFC 1071 arithmetic, whose checksum is 0xb861.
    const IPV4_HEADER: [u8; 20] =
        [0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0xb8, 0x61, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7];

    fn ipv4(before: u8) -> [u8; 40] {
        let mut bytes = [before; 40];
        bytes[20..].copy_from_slice(&IPV4_HEADER);
        bytes
    }

    fn ipv6() -> [u8; 40] {
        let mut bytes = [0; 40];
        bytes[..8].copy_from_slice(&[0x6a, 0xb1, 0x23, 0x45, 0x01, 0x02, 0x1b, 63]);
        bytes[8..24].copy_from_slice(&"fe80::1".parse::<Gid>().unwrap().0);
        bytes[24..].copy_from_slice(&"fe80::2".parse::<Gid>().unwrap().0);
        bytes
    }

    #[test]
    fn every_field_of_an_ipv6_header_is_parsed() {
        let grh = Grh::parse(&ipv6()).unwrap();
        assert_eq!((grh.version(), grh.traffic_class(), grh.flow_label()), (6, 0xab, 0x1_2345));
        assert_eq!((grh.payload_len(), grh.next_header(), grh.hop_limit()), (0x102, 0x1b, 63));
        assert_eq!((grh.sgid().to_string(), grh.dgid().to_string()), ("fe80::1".into(), "fe80::2".into()));
        assert_eq!(grh.as_bytes(), &ipv6());
    }

    #[test]
    fn an_ipv4_header_is_found_after_any_bytes() {
        for before in [0, 0xff, 0x60, 0x45] {
            let grh = Grh::parse(&ipv4(before)).unwrap();
            assert_eq!((grh.version(), grh.traffic_class(), grh.flow_label()), (4, 0, 0));
            assert_eq!((grh.payload_len(), grh.next_header(), grh.hop_limit()), (0x73 - 20, 17, 64));
            assert_eq!(grh.sgid(), Gid::from(Ipv4Addr::new(192, 168, 0, 1)));
            assert_eq!(grh.dgid(), Gid::from(Ipv4Addr::new(192, 168, 0, 199)));
        }
    }

    #[test]
    fn the_checksum_distinguishes_an_ipv4_header_from_an_ipv6_address() {
        let mut bytes = ipv6();
        bytes[20] = 0x45;
        assert_eq!(Grh::parse(&bytes).unwrap().version(), 6);
        let mut broken = ipv4(0x60);
        broken[39] ^= 1;
        assert_eq!(Grh::parse(&broken).unwrap().version(), 6);
        broken[0] = 0;
        assert_eq!(Grh::parse(&broken).unwrap().version(), 4, "without an IPv6 version only IPv4 is possible");
        assert_eq!(Grh::parse(&[0; 40]).unwrap().version(), 0);
    }

    #[test]
    fn a_header_has_forty_bytes() {
        assert_eq!(Grh::parse(&[0x60; 39]), None);
        let mut long = ipv6().to_vec();
        long.push(7);
        assert_eq!(Grh::parse(&long).unwrap().as_bytes(), &ipv6());
    }

    #[test]
    fn c_sees_the_same_bytes() {
        let raw = Grh::parse(&ipv6()).unwrap().to_raw();
        assert_eq!(u32::from_be(raw.version_tclass_flow), 0x6ab1_2345);
        assert_eq!((u16::from_be(raw.paylen), raw.next_hdr, raw.hop_limit), (0x102, 0x1b, 63));
        assert_eq!(Gid::from_raw(raw.dgid).to_string(), "fe80::2");
    }
}
