//! Socket addresses.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use core::ffi::c_int;
use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage};

/// Reads a socket address.
///
/// # Errors
/// `ENODEV` for InfiniBand addresses, as the kernel says where no device has them, and `EAFNOSUPPORT` for other families than IPv4
/// and IPv6.
///
/// # Safety
/// `from` points to a socket address of the size of its family.
pub(super) unsafe fn read(from: *const sockaddr) -> Result<SocketAddr, c_int> {
    // SAFETY: every socket address begins with its family.
    let family = unsafe { (&raw const (*from).sa_family).read_unaligned() };
    match c_int::from(family) {
        libc::AF_INET => {
            // SAFETY: the address has the size of its family. It may be unaligned.
            let raw = unsafe { from.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
            Ok(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let raw = unsafe { from.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            Ok(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), raw.sin6_flowinfo, raw.sin6_scope_id).into())
        }
        libc::AF_IB => Err(libc::ENODEV),
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// Writes a socket address.
///
/// # Safety
/// `to` is valid for writes of a `sockaddr_storage`.
pub(super) unsafe fn write(to: *mut sockaddr_storage, address: SocketAddr) {
    match address {
        SocketAddr::V4(v4) => {
            let raw = sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage is large enough for every family.
            unsafe { to.cast::<sockaddr_in>().write_unaligned(raw) };
        }
        SocketAddr::V6(v6) => {
            let raw = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { to.cast::<sockaddr_in6>().write_unaligned(raw) };
        }
    }
}
