//! Socket addresses as the kernel has them.

use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::wire::UDP_PORT;

/// What names of Unix sockets begin with.
const NAMES: &str = "rdma-soft/";

/// The address of a peer.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union Name {
    family: libc::sa_family_t,
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
    near: libc::sockaddr_un,
}

impl Name {
    /// Of nobody.
    pub(super) const NONE: Name = Name {
        // SAFETY: zero is a value of each field of a `sockaddr_un`, the longest of them.
        near: unsafe { mem::zeroed() },
    };

    /// The port of RoCEv2 at an address, which is at that interface where it is one of a link only.
    pub(super) fn new(address: IpAddr, interface: u32) -> Name {
        let mut name = Name::NONE;
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

    /// The port of RoCEv2 of a group, as that interface hears it.
    pub(super) fn of_group(address: IpAddr, interface: u32) -> Name {
        let mut name = Name::new(address, interface);
        if address.is_ipv6() {
            name.v6.sin6_scope_id = interface;
        }
        name
    }

    /// Of the Unix socket for that address. What is behind it in memory are zeros.
    pub(super) fn near(address: IpAddr) -> Name {
        let mut name = Name::NONE;
        name.near.sun_family = libc::AF_UNIX as libc::sa_family_t;
        // Behind a zero: abstract, and so not in a file system.
        let text = format!("\0{NAMES}{address}");
        // SAFETY: all bytes are initialised, and any are a value.
        let path = unsafe { &mut name.near.sun_path };
        for (to, from) in path.iter_mut().zip(text.bytes()) {
            *to = from as libc::c_char;
        }
        name
    }

    /// Bytes of one of a Unix socket.
    pub(super) fn near_len(&self) -> libc::socklen_t {
        // SAFETY: as above.
        let path = unsafe { &self.near.sun_path };
        let text = 1 + path[1..].iter().take_while(|byte| **byte != 0).count();
        (mem::offset_of!(libc::sockaddr_un, sun_path) + text) as libc::socklen_t
    }

    /// Bytes of one of that address.
    pub(super) fn len(address: &IpAddr) -> libc::socklen_t {
        let len = match address {
            IpAddr::V4(_) => mem::size_of::<libc::sockaddr_in>(),
            IpAddr::V6(_) => mem::size_of::<libc::sockaddr_in6>(),
        };
        len as libc::socklen_t
    }

    /// The address and the port; `None` where it is of no family that is known.
    pub(super) fn get(&self) -> Option<(IpAddr, u16)> {
        // SAFETY: all fields begin with the family, and all bytes are initialised from `Name::NONE` on.
        match libc::c_int::from(unsafe { self.family }) {
            libc::AF_INET => {
                // SAFETY: of that family, and any bytes are a value of it.
                let name = unsafe { self.v4 };
                let address = Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr));
                Some((address.into(), u16::from_be(name.sin_port)))
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let name = unsafe { self.v6 };
                let address = Ipv6Addr::from(name.sin6_addr.s6_addr);
                Some((address.into(), u16::from_be(name.sin6_port)))
            }
            _ => None,
        }
    }

    /// One that the kernel has written.
    ///
    /// # Safety
    /// Null, or a socket address as long as its family says.
    pub(super) unsafe fn read(from: *const libc::sockaddr) -> Option<Name> {
        // SAFETY: no address is shorter than its family.
        let family = libc::c_int::from(unsafe { from.as_ref() }?.sa_family);
        match family {
            libc::AF_INET => {
                let mut name = Name::NONE;
                // SAFETY: the caller's promise.
                name.v4 = unsafe { from.cast::<libc::sockaddr_in>().read_unaligned() };
                Some(name)
            }
            libc::AF_INET6 => {
                let mut name = Name::NONE;
                // SAFETY: the caller's promise.
                name.v6 = unsafe { from.cast::<libc::sockaddr_in6>().read_unaligned() };
                Some(name)
            }
            _ => None,
        }
    }
}

/// Whether it is of a link only.
pub(super) fn is_link_local(address: &Ipv6Addr) -> bool {
    address.segments()[0] & 0xffc0 == 0xfe80
}
