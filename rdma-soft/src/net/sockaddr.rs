//! Socket addresses in the kernel's format.

use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::wire::UDP_PORT;

/// Start of the names of Unix sockets.
const UNIX_PREFIX: &str = "rdma-soft/";

/// A socket address.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union SockAddr {
    family: libc::sa_family_t,
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
    unix: libc::sockaddr_un,
}

impl SockAddr {
    /// All bytes zero.
    pub(super) const ZERO: SockAddr = SockAddr {
        // SAFETY: all fields of `sockaddr_un`, the longest variant, may be zero.
        unix: unsafe { mem::zeroed() },
    };

    /// The RoCEv2 port at an address. `interface` is the scope of a link-local address.
    pub(super) fn new(address: IpAddr, interface: u32) -> SockAddr {
        let mut name = SockAddr::ZERO;
        match address {
            IpAddr::V4(address) => {
                name.v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: UDP_PORT.to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from(address).to_be() },
                    sin_zero: [0; 8],
                };
            }
            IpAddr::V6(address) => {
                name.v6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: UDP_PORT.to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: address.octets() },
                    sin6_scope_id: if is_link_local(&address) { interface } else { 0 },
                };
            }
        }
        name
    }

    /// The RoCEv2 port of a multicast group at an interface.
    pub(super) fn group(address: IpAddr, interface: u32) -> SockAddr {
        let mut name = SockAddr::new(address, interface);
        if address.is_ipv6() {
            name.v6.sin6_scope_id = interface;
        }
        name
    }

    /// Abstract name of a Unix socket, at most 90 bytes. The rest of the structure is zero.
    pub(super) fn unix(text: &str) -> SockAddr {
        let mut name = SockAddr::ZERO;
        name.unix.sun_family = libc::AF_UNIX as libc::sa_family_t;
        // A leading zero byte selects the abstract namespace (`unix(7)`), so no file is created.
        let text = format!("\0{UNIX_PREFIX}{text}");
        // SAFETY: all bytes are initialised, and any bytes are a valid path.
        let path = unsafe { &mut name.unix.sun_path };
        for (to, from) in path.iter_mut().zip(text.bytes()) {
            *to = from as libc::c_char;
        }
        name
    }

    /// Length of a Unix socket's address.
    pub(super) fn unix_len(&self) -> libc::socklen_t {
        // SAFETY: all bytes are initialised, and any bytes are a valid path.
        let path = unsafe { &self.unix.sun_path };
        let text = 1 + path[1..].iter().take_while(|byte| **byte != 0).count();
        (mem::offset_of!(libc::sockaddr_un, sun_path) + text) as libc::socklen_t
    }

    /// Length of an IP socket address.
    pub(super) fn len(address: &IpAddr) -> libc::socklen_t {
        let len = match address {
            IpAddr::V4(_) => mem::size_of::<libc::sockaddr_in>(),
            IpAddr::V6(_) => mem::size_of::<libc::sockaddr_in6>(),
        };
        len as libc::socklen_t
    }

    /// Returns address and port, or `None` if the family is not IP.
    pub(super) fn get(&self) -> Option<(IpAddr, u16)> {
        // SAFETY: each variant starts with the family, and `SockAddr::ZERO` initialises all bytes.
        match libc::c_int::from(unsafe { self.family }) {
            libc::AF_INET => {
                // SAFETY: the family selects this variant, and any bytes are a valid value.
                let name = unsafe { self.v4 };
                let address = Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr));
                Some((address.into(), u16::from_be(name.sin_port)))
            }
            libc::AF_INET6 => {
                // SAFETY: the family selects this variant, and any bytes are a valid value.
                let name = unsafe { self.v6 };
                let address = Ipv6Addr::from(name.sin6_addr.s6_addr);
                Some((address.into(), u16::from_be(name.sin6_port)))
            }
            _ => None,
        }
    }

    /// Copies a socket address from the kernel.
    ///
    /// # Safety
    /// `from` is null or points to a complete socket address of its family.
    pub(super) unsafe fn read(from: *const libc::sockaddr) -> Option<SockAddr> {
        // SAFETY: any socket address has at least a family.
        let family = libc::c_int::from(unsafe { from.as_ref() }?.sa_family);
        match family {
            libc::AF_INET => {
                let mut name = SockAddr::ZERO;
                // SAFETY: the caller's promise.
                name.v4 = unsafe { from.cast::<libc::sockaddr_in>().read_unaligned() };
                Some(name)
            }
            libc::AF_INET6 => {
                let mut name = SockAddr::ZERO;
                // SAFETY: the caller's promise.
                name.v6 = unsafe { from.cast::<libc::sockaddr_in6>().read_unaligned() };
                Some(name)
            }
            _ => None,
        }
    }
}

/// Returns the 16 bytes of an address. An IPv4 address is mapped into IPv6.
pub(super) fn to_bytes(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Returns the address with these [bytes](to_bytes).
pub(super) fn from_bytes(bytes: &[u8; 16]) -> IpAddr {
    IpAddr::from(*bytes).to_canonical()
}

/// Whether the address is link-local.
pub(super) fn is_link_local(address: &Ipv6Addr) -> bool {
    address.segments()[0] & 0xffc0 == 0xfe80
}
