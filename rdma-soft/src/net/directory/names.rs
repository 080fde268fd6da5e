//! Names of claims.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::ClaimError;
use crate::net::sockaddr::SockAddr;

/// Addresses of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Addresses {
    /// One address, which is neither unspecified nor an IPv4 address that is mapped into IPv6.
    One(IpAddr),
    /// All IPv4 addresses: `0.0.0.0`.
    AllIpv4,
    /// All IPv6 addresses: `::` of a listener for IPv6 only.
    AllIpv6,
    /// All addresses: `::`.
    All,
}

/// An address family.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    pub(super) fn of(address: &IpAddr) -> Family {
        if address.is_ipv4() { Family::V4 } else { Family::V6 }
    }

    /// The unspecified address, which stands for all addresses.
    fn unspecified(self) -> IpAddr {
        match self {
            Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
            Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
        }
    }
}

impl Addresses {
    /// Addresses of a claim at an address that may be unspecified. `is_ipv6_only` applies to `::`.
    pub(crate) fn new(address: IpAddr, is_ipv6_only: bool) -> Addresses {
        match address.to_canonical() {
            address if !address.is_unspecified() => Addresses::One(address),
            IpAddr::V4(_) => Addresses::AllIpv4,
            IpAddr::V6(_) if is_ipv6_only => Addresses::AllIpv6,
            IpAddr::V6(_) => Addresses::All,
        }
    }

    pub(super) fn families(self) -> &'static [Family] {
        match self {
            Addresses::One(IpAddr::V4(_)) | Addresses::AllIpv4 => &[Family::V4],
            Addresses::One(IpAddr::V6(_)) | Addresses::AllIpv6 => &[Family::V6],
            Addresses::All => &[Family::V4, Family::V6],
        }
    }

    /// Checks that two claims of one port do not conflict.
    ///
    /// The errors are those of Linux (`cma_check_port`): two claims conflict with "in use" only if both are of one address. A
    /// claim of all addresses causes the other error, even if the other claim is of all addresses as well.
    pub(in crate::net) fn check_conflict(self, other: Addresses) -> Result<(), ClaimError> {
        match (self, other) {
            (Addresses::One(one), Addresses::One(other)) if one == other => Err(ClaimError::InUse),
            (Addresses::One(_), Addresses::One(_)) => Ok(()),
            _ if self.families().iter().any(|family| other.families().contains(family)) => Err(ClaimError::Overlap),
            _ => Ok(()),
        }
    }
}

/// A name of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Name {
    /// One address.
    One(IpAddr),
    /// All addresses of a family.
    All(Family),
    /// Some address of a family. The number is below [`SLOTS`](super::claim::SLOTS).
    Slot(Family, u16),
}

/// Version of the rules by which names exclude each other.
///
/// Processes with different versions do not see each other's claims. Changes of the answer have [another](super::answer) version.
const VERSION: u8 = 1;

impl Name {
    /// Socket address of the name for a port.
    pub(super) fn of(self, space: u16, port: u16) -> SockAddr {
        let text = match self {
            Name::One(address) => address.to_string(),
            Name::All(family) => family.unspecified().to_string(),
            Name::Slot(Family::V4, number) => format!("4/{number}"),
            Name::Slot(Family::V6, number) => format!("6/{number}"),
        };
        SockAddr::unix(&format!("cm/{VERSION}/{space:04x}/{port}/{text}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOME: [&str; 6] = ["127.0.0.1", "192.0.2.1", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"];

    fn new(text: &str) -> Addresses {
        Addresses::new(text.parse().unwrap(), false)
    }

    #[test]
    fn unspecified_addresses_are_all_addresses() {
        let one = |text: &str| Addresses::One(text.parse().unwrap());
        let [loopback, other, ipv6] = [SOME[0], SOME[1], SOME[2]].map(one);
        assert_eq!(SOME.map(new), [loopback, other, ipv6, Addresses::AllIpv4, Addresses::All, loopback]);
        assert_eq!(Addresses::new(Ipv6Addr::UNSPECIFIED.into(), true), Addresses::AllIpv6);
        assert_eq!(Addresses::new("::1".parse().unwrap(), true), ipv6);
    }

    #[test]
    fn claims_of_overlapping_addresses_conflict() {
        let (ok, in_use, overlap) = (None, Some(libc::EADDRINUSE), Some(libc::EADDRNOTAVAIL));
        let [one, other, six, all_four, all, _] = SOME.map(new);
        let rows = [
            (one, [in_use, ok, ok, overlap, ok, overlap]),
            (other, [ok, in_use, ok, overlap, ok, overlap]),
            (six, [ok, ok, in_use, ok, overlap, overlap]),
            (all_four, [overlap, overlap, ok, overlap, ok, overlap]),
            (Addresses::AllIpv6, [ok, ok, overlap, ok, overlap, overlap]),
            (all, [overlap; 6]),
        ];
        for (row, expected) in rows {
            let columns = rows.map(|(column, _)| row.check_conflict(column).err().map(|error| error.errno()));
            assert_eq!(columns, expected, "{row:?}");
        }
    }

    #[test]
    fn the_longest_name_fits_a_socket_address() {
        let longest = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap();
        let [one, other] = [65_534, 65_535].map(|port| Name::One(longest).of(u16::MAX, port));
        let whole = std::mem::size_of::<libc::sockaddr_un>() as libc::socklen_t;
        assert!(one.unix_len() < whole && other.unix_len() < whole, "{}", one.unix_len());
    }
}
