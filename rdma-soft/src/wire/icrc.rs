//! The invariant CRC: over what no router changes, and over addresses, as annex A17 of the specification has it and Linux computes
//! it (drivers/infiniband/sw/rxe/rxe_icrc.c).

use std::net::{Ipv4Addr, Ipv6Addr};

use crc32fast::Hasher;

use super::UDP_PORT;

/// Bytes of the invariant CRC, which end a packet.
pub const ICRC: usize = 4;

/// Where in the base transport header the byte is that routers may change.
const VARIANT: usize = 4;

const UDP_HEADER: usize = 8;
const IPV4_HEADER: usize = 20;
/// Bytes of an IPv4 header after its identification.
const AFTER_IDENTIFICATION: usize = 14;

/// Between whom a packet goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Path {
    /// By IPv4.
    V4 {
        /// Who has sent it.
        source: Ipv4Addr,
        /// Whom it is for.
        dest: Ipv4Addr,
        /// The UDP port that it is from.
        source_port: u16,
    },
    /// By IPv6.
    V6 {
        /// Who has sent it.
        source: Ipv6Addr,
        /// Whom it is for.
        dest: Ipv6Addr,
        /// The UDP port that it is from.
        source_port: u16,
    },
}

/// An invariant CRC that is being computed.
#[derive(Clone, Debug)]
pub struct Icrc(Hasher);

impl Icrc {
    /// Of a packet of `len` bytes, its CRC among them, in one IPv4 datagram with that identification (of no meaning to IPv6) which
    /// is not to be fragmented. Its bytes follow, without the CRC, the base transport header first and whole.
    #[must_use]
    pub fn new(path: &Path, identification: u16, len: usize) -> Self {
        // In place of the local route header of InfiniBand.
        let mut hasher = Hasher::new();
        hasher.update(&[0xff; 8]);
        let udp_len = (UDP_HEADER + len) as u16;
        let source_port = match *path {
            Path::V4 { source, dest, source_port } => {
                let mut ip = [0xff; IPV4_HEADER];
                // Type of service, time to live and checksum stay ones.
                ip[0] = 0x45;
                ip[2..4].copy_from_slice(&((IPV4_HEADER as u16).wrapping_add(udp_len)).to_be_bytes());
                ip[4..6].copy_from_slice(&identification.to_be_bytes());
                ip[6..8].copy_from_slice(&0x4000_u16.to_be_bytes());
                ip[9] = 17;
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&dest.octets());
                hasher.update(&ip);
                source_port
            }
            Path::V6 { source, dest, source_port } => {
                let mut ip = [0xff; 40];
                // Traffic class, flow label and hop limit stay ones.
                ip[0] = 0x6f;
                ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
                ip[6] = 17;
                ip[8..24].copy_from_slice(&source.octets());
                ip[24..40].copy_from_slice(&dest.octets());
                hasher.update(&ip);
                source_port
            }
        };
        let mut udp = [0xff; UDP_HEADER];
        udp[..2].copy_from_slice(&source_port.to_be_bytes());
        udp[2..4].copy_from_slice(&UDP_PORT.to_be_bytes());
        udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
        hasher.update(&udp);
        Icrc(hasher)
    }

    /// Adds the headers from the base transport header on.
    pub fn headers(&mut self, headers: &[u8]) {
        let (before, after) = headers.split_at(VARIANT.min(headers.len()));
        self.0.update(before);
        if let Some((_, after)) = after.split_first() {
            self.0.update(&[0xff]);
            self.0.update(after);
        }
    }

    /// Adds payload or padding.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// As it ends the packet.
    #[must_use]
    pub fn finish(self) -> [u8; ICRC] {
        self.0.finalize().to_le_bytes()
    }

    /// Whether a packet came as it was sent.
    ///
    /// A UDP socket does not see the IPv4 identification. It is zero in what this library sends, but Linux numbers its own: then it
    /// is whether there is one with which the packet is right, so that of 2¹⁶ damaged packets one passes. There are none of that
    /// kind by IPv6.
    #[must_use]
    pub fn matches(path: &Path, datagram: &[u8]) -> bool {
        let Some((content, icrc)) = datagram.split_last_chunk::<ICRC>() else { return false };
        let mut computed = Icrc::new(path, 0, datagram.len());
        computed.headers(content);
        let difference = computed.0.finalize() ^ u32::from_le_bytes(*icrc);
        let behind = AFTER_IDENTIFICATION + UDP_HEADER + content.len();
        difference == 0 || (matches!(path, Path::V4 { .. }) && identification(difference, behind).is_some())
    }
}

/// The identification that makes that difference to a CRC when so many bytes come after it.
///
/// CRCs are remainders of polynomials over GF(2), so that the difference is the identification times a power of x; the inverse of
/// that power brings it back.
fn identification(difference: u32, behind: usize) -> Option<u16> {
    let mut bytes = behind + 2;
    let mut value = difference;
    for power in &BACK {
        if bytes & 1 != 0 {
            value = product(value, *power);
        }
        bytes >>= 1;
    }
    // More bytes than a datagram can have.
    if bytes != 0 {
        return None;
    }
    // The first byte is in the lowest eight bits.
    u16::try_from(value).ok().map(u16::swap_bytes)
}

/// The polynomial of the CRC, the coefficient of x⁰ in the highest bit.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The product modulo the polynomial.
const fn product(a: u32, b: u32) -> u32 {
    let (mut sum, mut b, mut bit) = (0, b, 1_u32 << 31);
    while bit != 0 {
        if a & bit != 0 {
            sum ^= b;
        }
        // Times x.
        b = if b & 1 != 0 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
        bit >>= 1;
    }
    sum
}

/// For each i, x⁻⁸ to the power of 2 to the i: what takes back as many zero bytes.
const BACK: [u32; 17] = {
    // As x is of order 2³² − 1, its inverse is x to the power of 2³² − 2.
    let (mut square, mut inverse, mut bit) = (1_u32 << 30, 1_u32 << 31, 0);
    while bit < 32 {
        if bit > 0 {
            inverse = product(inverse, square);
        }
        square = product(square, square);
        bit += 1;
    }
    let mut power = inverse;
    let mut doublings = 0;
    while doublings < 3 {
        power = product(power, power);
        doublings += 1;
    }
    let mut back = [0; 17];
    let mut i = 0;
    while i < back.len() {
        back[i] = power;
        power = product(power, power);
        i += 1;
    }
    back
};

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: Path =
        Path::V4 { source: Ipv4Addr::new(10, 0, 0, 1), dest: Ipv4Addr::new(10, 0, 0, 2), source_port: 49_152 };

    fn datagram(path: &Path, identification: u16, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..len - ICRC).map(|index| (index * 7) as u8).collect();
        let mut icrc = Icrc::new(path, identification, len);
        icrc.headers(&bytes[..12]);
        icrc.update(&bytes[12..]);
        bytes.extend(icrc.finish());
        bytes
    }

    #[test]
    fn x_times_its_inverse_is_one() {
        let x_to_the_8 = 1_u32 << (31 - 8);
        assert_eq!(product(BACK[0], x_to_the_8), 1 << 31);
    }

    #[test]
    fn whatever_its_identification_a_packet_is_right() {
        for len in [16, 20, 60, 4112] {
            for identification in [0, 1, 0x1234, 0xff00, 0xffff] {
                assert!(Icrc::matches(&PATH, &datagram(&PATH, identification, len)), "{len} {identification:#x}");
            }
        }
    }

    #[test]
    fn the_identification_is_found_again() {
        let mut number = 1_u16;
        for behind in 0..2000 {
            number = number.wrapping_mul(25_173).wrapping_add(13_849);
            let mut zero = Hasher::new();
            zero.update(&[0, 0]);
            zero.update(&vec![0; behind]);
            let mut numbered = Hasher::new();
            numbered.update(&number.to_be_bytes());
            numbered.update(&vec![0; behind]);
            assert_eq!(identification(zero.finalize() ^ numbered.finalize(), behind), Some(number), "{behind}");
        }
    }

    #[test]
    fn damage_of_any_one_byte_is_found() {
        let whole = datagram(&PATH, 0x4321, 100);
        for at in (0..whole.len()).filter(|at| *at != VARIANT) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            assert!(!Icrc::matches(&PATH, &damaged), "{at}");
        }
        let mut routed = whole;
        routed[VARIANT] ^= 0xff;
        assert!(Icrc::matches(&PATH, &routed), "what routers may change is not covered");
    }

    #[test]
    fn addresses_and_ports_are_covered() {
        let whole = datagram(&PATH, 0, 100);
        let other =
            Path::V4 { source: Ipv4Addr::new(10, 0, 0, 3), dest: Ipv4Addr::new(10, 0, 0, 2), source_port: 49_152 };
        assert!(!Icrc::matches(&other, &whole));
        let six = |source_port| Path::V6 { source: Ipv6Addr::LOCALHOST, dest: Ipv6Addr::LOCALHOST, source_port };
        assert!(!Icrc::matches(&six(1), &whole));
        assert!(Icrc::matches(&six(1), &datagram(&six(1), 7, 100)));
        assert!(!Icrc::matches(&six(2), &datagram(&six(1), 0, 100)));
    }

    #[test]
    fn what_is_too_short_is_wrong() {
        for len in 0..12 {
            assert!(!Icrc::matches(&PATH, &vec![0; len]));
        }
    }
}
