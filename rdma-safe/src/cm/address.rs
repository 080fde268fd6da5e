//! Addresses of ids: IPv4, IPv6 and native InfiniBand.

use std::fmt;
use std::io::ErrorKind;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, ToSocketAddrs};

use rdma_sys::*;

use super::CmError;
use crate::{Gid, Result};

/// An address of an [`Id`](super::Id).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Address {
    /// An IPv4 or IPv6 address, with a port of the port space.
    Ip(SocketAddr),
    /// A native InfiniBand address, without IP: family `AF_IB`.
    Ib(IbAddress),
}

/// A GID with a service: `struct sockaddr_ib`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub struct IbAddress {
    /// Partition key; 0 for any.
    pub pkey: u16,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// GID of the port.
    pub gid: Gid,
    /// Service ID: the port space in the upper bits, a port in the lower bits.
    pub service_id: u64,
    /// Mask of the significant bits of the service ID.
    pub service_mask: u64,
    /// Scope ID.
    pub scope: u64,
}

impl IbAddress {
    /// The address of a service, with a full service mask.
    #[must_use]
    pub fn new(gid: Gid, service_id: u64) -> Self {
        IbAddress { gid, service_id, service_mask: !0, ..IbAddress::default() }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Address::Ip(address)
    }
}

impl From<SocketAddrV4> for Address {
    fn from(address: SocketAddrV4) -> Self {
        Address::Ip(address.into())
    }
}

impl From<SocketAddrV6> for Address {
    fn from(address: SocketAddrV6) -> Self {
        Address::Ip(address.into())
    }
}

impl<I: Into<IpAddr>> From<(I, u16)> for Address {
    fn from(address: (I, u16)) -> Self {
        Address::Ip(address.into())
    }
}

impl From<IbAddress> for Address {
    fn from(address: IbAddress) -> Self {
        Address::Ib(address)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Ip(address) => address.fmt(f),
            Address::Ib(address) => write!(f, "[{}] service {:#x}", address.gid, address.service_id),
        }
    }
}

impl Address {
    /// The IP address with its port; `None` for a native InfiniBand address.
    #[must_use]
    pub fn ip(&self) -> Option<SocketAddr> {
        match self {
            Address::Ip(address) => Some(*address),
            Address::Ib(_) => None,
        }
    }

    /// The address as a C structure, which must stay in place during the call that reads it.
    pub(super) fn to_raw(self) -> libc::sockaddr_storage {
        match self {
            Address::Ip(SocketAddr::V4(address)) => to_storage(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            }),
            Address::Ip(SocketAddr::V6(address)) => to_storage(libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            }),
            Address::Ib(address) => to_storage(sockaddr_ib {
                sib_family: AF_IB as u16,
                sib_pkey: address.pkey.to_be(),
                sib_flowinfo: address.flow_label.to_be(),
                sib_addr: ib_addr { ib_u: ib_addr__bindgen_ty_1 { uib_addr8: Ipv6Addr::from(address.gid).octets() } },
                sib_sid: address.service_id.to_be(),
                sib_sid_mask: address.service_mask.to_be(),
                sib_scope_id: address.scope,
            }),
        }
    }

    /// Number of valid bytes in [`Address::to_raw`].
    pub(super) fn raw_len(self) -> libc::socklen_t {
        let len = match self {
            Address::Ip(SocketAddr::V4(_)) => size_of::<libc::sockaddr_in>(),
            Address::Ip(SocketAddr::V6(_)) => size_of::<libc::sockaddr_in6>(),
            Address::Ib(_) => size_of::<sockaddr_ib>(),
        };
        len as libc::socklen_t
    }

    /// `None` for no address or an unknown family.
    ///
    /// # Safety
    /// `raw` must be valid for reads of the length of its family.
    pub(super) unsafe fn from_raw(raw: *const libc::sockaddr) -> Option<Self> {
        // SAFETY: the caller's contract. Every address begins with its family.
        let family = unsafe { (*raw).sa_family };
        match i32::from(family) {
            libc::AF_INET => {
                // SAFETY: the caller's contract. The address may be unaligned.
                let raw = unsafe { raw.cast::<libc::sockaddr_in>().read_unaligned() };
                let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
                Some(Address::Ip((ip, u16::from_be(raw.sin_port)).into()))
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let raw = unsafe { raw.cast::<libc::sockaddr_in6>().read_unaligned() };
                let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
                let port = u16::from_be(raw.sin6_port);
                Some(Address::Ip(SocketAddrV6::new(ip, port, raw.sin6_flowinfo, raw.sin6_scope_id).into()))
            }
            AF_IB => {
                // SAFETY: as above.
                let raw = unsafe { raw.cast::<sockaddr_ib>().read_unaligned() };
                // SAFETY: all members of the union have the same sixteen bytes.
                let gid = unsafe { raw.sib_addr.ib_u.uib_addr8 };
                Some(Address::Ib(IbAddress {
                    pkey: u16::from_be(raw.sib_pkey),
                    flow_label: u32::from_be(raw.sib_flowinfo),
                    gid: Gid::from(Ipv6Addr::from(gid)),
                    service_id: u64::from_be(raw.sib_sid),
                    service_mask: u64::from_be(raw.sib_sid_mask),
                    scope: raw.sib_scope_id,
                }))
            }
            _ => None,
        }
    }
}

/// Calls `attempt` with each address until it succeeds. Otherwise returns the error of the last address.
pub(super) fn try_each<T>(addresses: impl ToSocketAddrs, attempt: impl Fn(SocketAddr) -> Result<T>) -> Result<T> {
    let addresses = addresses.to_socket_addrs().map_err(|error| {
        let reason = match error.kind() {
            ErrorKind::InvalidInput => {
                format!("{error}; a port is part of it, as in \"10.0.0.2:7471\" or \"[fe80::1%2]:7471\"")
            }
            _ => error.to_string(),
        };
        CmError::NoAddress { reason }
    })?;
    let mut last = CmError::NoAddress { reason: "the name has no address".to_owned() }.into();
    for address in addresses {
        match attempt(address) {
            Ok(made) => return Ok(made),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Stores `T`, one of the address structures, in a structure that fits all of them.
fn to_storage<T: Copy>(address: T) -> libc::sockaddr_storage {
    const { assert!(size_of::<T>() <= size_of::<libc::sockaddr_storage>()) }
    let mut storage = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    // SAFETY: the storage has room for `T`, as asserted above, and is aligned for any address.
    unsafe { storage.as_mut_ptr().cast::<T>().write(address) };
    // SAFETY: the fields are integers, and all bytes were at least zeroed. The address structures have no padding.
    unsafe { storage.assume_init() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_conversion_to_c() {
        let ib = IbAddress {
            pkey: 0xffff,
            flow_label: 7,
            scope: 3,
            ..IbAddress::new(Gid::from(Ipv6Addr::from([9; 16])), 0x0106_1d2f)
        };
        let v6 = SocketAddrV6::new(Ipv6Addr::LOCALHOST, 7471, 5, 2);
        for address in [Address::from((Ipv4Addr::new(10, 0, 0, 2), 7471)), v6.into(), ib.into()] {
            let raw = address.to_raw();
            // SAFETY: the storage holds an address.
            assert_eq!(unsafe { Address::from_raw((&raw const raw).cast()) }, Some(address), "{address}");
        }
    }

    #[test]
    fn ports_and_service_ids_are_in_network_byte_order() {
        let raw = Address::from((Ipv4Addr::new(10, 0, 0, 2), 0x1d2f)).to_raw();
        // SAFETY: the storage holds an address of that type.
        let raw = unsafe { (&raw const raw).cast::<libc::sockaddr_in>().read() };
        assert_eq!((raw.sin_port.to_ne_bytes(), raw.sin_addr.s_addr.to_ne_bytes()), ([0x1d, 0x2f], [10, 0, 0, 2]));
    }

    #[test]
    fn zeros_are_not_an_address() {
        // SAFETY: zeros are an address without a family.
        let nothing: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        assert_eq!(unsafe { Address::from_raw((&raw const nothing).cast()) }, None);
    }
}
