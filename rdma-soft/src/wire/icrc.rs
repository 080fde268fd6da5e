//! The invariant CRC. It covers the addresses and everything that routers do not change.
//!
//! Annex A17 of the specification defines it, and Linux computes it in drivers/infiniband/sw/rxe/rxe_icrc.c.

use std::net::{Ipv4Addr, Ipv6Addr};

use crc32fast::Hasher;

use super::UDP_PORT;

/// Bytes of the invariant CRC at the end of a packet.
pub const ICRC: usize = 4;

/// Offset of resv8a in the base transport header. Routers may change this byte (FECN and BECN).
const RESV8A: usize = 4;

const UDP_HEADER: usize = 8;
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
/// Bytes between the IPv4 identification and the base transport header.
const AFTER_IDENTIFICATION: usize = 14 + UDP_HEADER;

/// Addresses and source port of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Path {
    /// IPv4.
    V4 {
        /// Source address.
        source: Ipv4Addr,
        /// Destination address.
        dest: Ipv4Addr,
        /// UDP source port.
        source_port: u16,
    },
    /// IPv6.
    V6 {
        /// Source address.
        source: Ipv6Addr,
        /// Destination address.
        dest: Ipv6Addr,
        /// UDP source port.
        source_port: u16,
    },
}

/// CRC of the IP and UDP headers of a path, with lengths and identification zero.
///
/// CRCs are linear, so the lengths and the identification of a packet are added by XOR.
#[derive(Clone, Copy, Debug)]
pub struct IcrcSeed {
    value: u32,
    is_v4: bool,
}

impl IcrcSeed {
    /// Hashes the headers of a path.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        // Eight bytes of ones replace InfiniBand's local route header.
        let mut hasher = Hasher::new();
        hasher.update(&[0xff; 8]);
        let source_port = match *path {
            Path::V4 { source, dest, source_port } => {
                let mut ip = [0xff; IPV4_HEADER];
                // Type of service, time to live and checksum are hashed as ones. The flags are "don't fragment".
                ip[0] = 0x45;
                ip[2..6].fill(0);
                ip[6..8].copy_from_slice(&0x4000_u16.to_be_bytes());
                ip[9] = 17;
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&dest.octets());
                hasher.update(&ip);
                source_port
            }
            Path::V6 { source, dest, source_port } => {
                let mut ip = [0xff; IPV6_HEADER];
                // Traffic class, flow label and hop limit are hashed as ones.
                ip[0] = 0x6f;
                ip[4..6].fill(0);
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
        udp[4..6].fill(0);
        hasher.update(&udp);
        IcrcSeed { value: hasher.finalize(), is_v4: matches!(path, Path::V4 { .. }) }
    }

    /// Starts the CRC of a packet of `len` bytes, including its CRC.
    ///
    /// `identification` is ignored for IPv6. The caller then hashes the packet without its CRC.
    fn begin(&self, identification: u16, len: usize) -> Hasher {
        let udp_len = (UDP_HEADER + len) as u16;
        let lengths_and_identification = if self.is_v4 {
            let len = udp_len.wrapping_add(IPV4_HEADER as u16);
            difference(&V4_LENGTH, len) ^ difference(&V4_IDENTIFICATION, identification)
        } else {
            difference(&V6_LENGTH, udp_len)
        };
        Hasher::new_with_initial(self.value ^ difference(&UDP_LENGTH, udp_len) ^ lengths_and_identification)
    }

    /// Writes the CRC to the last four bytes of a packet. `identification` is the IPv4 identification.
    pub fn write(&self, identification: u16, packet: &mut [u8]) {
        let computed = self.compute(identification, packet);
        if let Some(icrc) = packet.last_chunk_mut::<ICRC>() {
            *icrc = computed.to_le_bytes();
        }
    }

    /// Computes the CRC of a packet whose last four bytes are reserved for it.
    ///
    /// Masks one byte during the computation, and restores it.
    fn compute(&self, identification: u16, packet: &mut [u8]) -> u32 {
        let mut hasher = self.begin(identification, packet.len());
        let content = packet.len().saturating_sub(ICRC);
        let content = &mut packet[..content];
        // Hashing one slice is faster than hashing two.
        let resv8a = content.get_mut(RESV8A).map(|byte| std::mem::replace(byte, 0xff));
        hasher.update(content);
        if let Some(resv8a) = resv8a {
            content[RESV8A] = resv8a;
        }
        hasher.finalize()
    }

    /// Returns the IPv4 identification with which the packet's CRC matches, if there is one.
    ///
    /// The expected identification is found fastest. IPv6 has none, so `expected` is returned. Masks one byte of the packet during
    /// the computation, and restores it.
    #[must_use]
    pub fn identify(&self, expected: u16, packet: &mut [u8]) -> Option<u16> {
        let icrc = u32::from_le_bytes(*packet.last_chunk()?);
        let content = packet.len() - ICRC;
        let difference = self.compute(expected, packet) ^ icrc;
        if difference == 0 {
            return Some(expected);
        }
        if !self.is_v4 {
            return None;
        }
        find_identification(difference, AFTER_IDENTIFICATION + content).map(|found| found ^ expected)
    }

    /// Whether the CRC of a packet matches.
    ///
    /// A UDP socket does not report the IPv4 identification. This library sends zero, but Linux numbers its own packets. So a
    /// packet matches if any identification makes the CRC match, and one of 2¹⁶ damaged packets passes. IPv6 has no identification.
    #[must_use]
    pub fn matches(&self, packet: &[u8]) -> bool {
        self.identify(0, &mut packet.to_vec()).is_some()
    }
}

/// Change of the CRC for each value of the first and the second byte of a field.
type Field = [[u32; 256]; 2];

static V4_LENGTH: Field = field_differences(16 + UDP_HEADER);
static V4_IDENTIFICATION: Field = field_differences(AFTER_IDENTIFICATION);
static V6_LENGTH: Field = field_differences(34 + UDP_HEADER);
static UDP_LENGTH: Field = field_differences(2);

fn difference(field: &Field, value: u16) -> u32 {
    let [first, second] = value.to_be_bytes().map(usize::from);
    field[0][first] ^ field[1][second]
}

/// Computes the changes for a two-byte field that `bytes_after` bytes follow.
const fn field_differences(bytes_after: usize) -> Field {
    // Multiply by x⁸ for each byte that follows.
    let mut power = 1 << 31;
    let mut bytes = 0;
    while bytes < bytes_after {
        power = product(power, X8);
        bytes += 1;
    }
    let mut differences = [[0; 256]; 2];
    let mut place = 2;
    while place > 0 {
        place -= 1;
        power = product(power, X8);
        let mut bit = 0;
        while bit < 8 {
            let difference = product(power, 1 << bit);
            let mut low = 0;
            while low < 1 << bit {
                differences[place][1 << bit | low] = difference ^ differences[place][low];
                low += 1;
            }
            bit += 1;
        }
    }
    differences
}

/// Finds the identification that changes the CRC by `difference` if `bytes_after` bytes follow.
///
/// CRCs are remainders of polynomials over GF(2). The difference is the identification times a power of x. Multiplying by the
/// inverse of that power recovers the identification.
fn find_identification(difference: u32, bytes_after: usize) -> Option<u16> {
    let mut bytes = bytes_after + 2;
    let mut value = difference;
    for power in &INVERSE_POWERS {
        if bytes & 1 != 0 {
            value = product(value, *power);
        }
        bytes >>= 1;
    }
    // Longer than any datagram.
    if bytes != 0 {
        return None;
    }
    // The first byte is in the lowest eight bits.
    u16::try_from(value).ok().map(u16::swap_bytes)
}

/// The CRC polynomial. The highest bit is the coefficient of x⁰.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// x⁸.
const X8: u32 = 1 << (31 - 8);

/// Multiplies modulo the polynomial.
const fn product(a: u32, b: u32) -> u32 {
    let (mut sum, mut b, mut bit) = (0, b, 1_u32 << 31);
    while bit != 0 {
        if a & bit != 0 {
            sum ^= b;
        }
        // Multiply by x.
        b = if b & 1 != 0 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
        bit >>= 1;
    }
    sum
}

/// x⁻⁸ to the power of 2ⁱ, for each i: undoes 2ⁱ bytes.
const INVERSE_POWERS: [u32; 17] = {
    // x has order 2³² − 1, so its inverse is x to the power of 2³² − 2.
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
    let mut powers = [0; 17];
    let mut i = 0;
    while i < powers.len() {
        powers[i] = power;
        power = product(power, power);
        i += 1;
    }
    powers
};

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: Path =
        Path::V4 { source: Ipv4Addr::new(10, 0, 0, 1), dest: Ipv4Addr::new(10, 0, 0, 2), source_port: 49_152 };

    fn datagram(path: &Path, identification: u16, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..len).map(|index| (index * 7) as u8).collect();
        IcrcSeed::new(path).write(identification, &mut bytes);
        bytes
    }

    #[test]
    fn x_times_its_inverse_is_one() {
        assert_eq!(product(INVERSE_POWERS[0], X8), 1 << 31);
    }

    #[test]
    fn lengths_and_identifications_are_hashed_at_their_offsets() {
        let (source, dest) = (Ipv6Addr::LOCALHOST, Ipv6Addr::from([0xfe; 16]));
        let six = Path::V6 { source, dest, source_port: 49_152 };
        for (len, identification) in
            [(16, 0), (20, 1), (64, 0x100), (0x1234 - 28, 0x4321), (4132, 63), (65_507, 0xffff)]
        {
            let bytes = |word: usize| (word as u16).to_be_bytes();
            let udp = [&bytes(49_152)[..], &bytes(4791), &bytes(8 + len), &[0xff; 2]].concat();
            let v4 = [&[0x45, 0xff][..], &bytes(28 + len), &bytes(identification), &[0x40, 0, 0xff, 17, 0xff, 0xff]];
            let v4 = [&v4.concat()[..], &[10, 0, 0, 1], &[10, 0, 0, 2]].concat();
            let v6 = [&[0x6f, 0xff, 0xff, 0xff][..], &bytes(8 + len), &[17, 0xff]].concat();
            let v6 = [&v6[..], &source.octets(), &dest.octets()].concat();
            for (path, ip) in [(PATH, v4), (six, v6)] {
                let expected = crc32fast::hash(&[&[0xff; 8][..], &ip, &udp].concat()).to_le_bytes();
                let computed = IcrcSeed::new(&path).begin(identification as u16, len).finalize();
                assert_eq!(computed.to_le_bytes(), expected, "{len} {identification}");
            }
        }
    }

    #[test]
    fn a_crc_matches_with_any_identification() {
        for len in [16, 20, 60, 4112].into_iter().step_by(if cfg!(miri) { 2 } else { 1 }) {
            for identification in [0, 1, 0x1234, 0xff00, 0xffff] {
                let whole = datagram(&PATH, identification, len);
                assert!(IcrcSeed::new(&PATH).matches(&whole), "{len} {identification:#x}");
                for expected in [0, identification, 0x8765] {
                    assert_eq!(IcrcSeed::new(&PATH).identify(expected, &mut whole.clone()), Some(identification));
                }
            }
        }
    }

    #[test]
    fn an_identification_is_recovered_from_the_crc() {
        let mut number = 1_u16;
        for bytes_after in (0..2000).step_by(if cfg!(miri) { 199 } else { 1 }) {
            number = number.wrapping_mul(25_173).wrapping_add(13_849);
            let mut zero = Hasher::new();
            zero.update(&[0, 0]);
            zero.update(&vec![0; bytes_after]);
            let mut numbered = Hasher::new();
            numbered.update(&number.to_be_bytes());
            numbered.update(&vec![0; bytes_after]);
            assert_eq!(
                find_identification(zero.finalize() ^ numbered.finalize(), bytes_after),
                Some(number),
                "{bytes_after}"
            );
        }
    }

    #[test]
    fn damage_to_any_byte_is_detected() {
        let whole = datagram(&PATH, 0x4321, 100);
        for at in (0..whole.len()).filter(|at| *at != RESV8A).step_by(if cfg!(miri) { 8 } else { 1 }) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            assert!(!IcrcSeed::new(&PATH).matches(&damaged), "{at}");
        }
        let mut routed = whole;
        routed[RESV8A] ^= 0xff;
        assert!(IcrcSeed::new(&PATH).matches(&routed), "the CRC must not cover bits that routers change");
    }

    #[test]
    fn addresses_and_ports_are_covered() {
        let whole = datagram(&PATH, 0, 100);
        let other =
            Path::V4 { source: Ipv4Addr::new(10, 0, 0, 3), dest: Ipv4Addr::new(10, 0, 0, 2), source_port: 49_152 };
        assert!(!IcrcSeed::new(&other).matches(&whole));
        let six = |source_port| Path::V6 { source: Ipv6Addr::LOCALHOST, dest: Ipv6Addr::LOCALHOST, source_port };
        assert!(!IcrcSeed::new(&six(1)).matches(&whole));
        assert!(IcrcSeed::new(&six(1)).matches(&datagram(&six(1), 7, 100)));
        assert!(!IcrcSeed::new(&six(2)).matches(&datagram(&six(1), 0, 100)));
    }

    #[test]
    fn a_packet_that_is_too_short_does_not_match() {
        for len in 0..12 {
            assert!(!IcrcSeed::new(&PATH).matches(&vec![0; len]));
        }
    }
}
