//! Multicast groups, as an interface hears them.

use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};

use super::name::Name;
use super::socket::{Socket, counted, report_headers, set, take_segments};

/// A group that was joined: it is left when this is dropped.
pub(crate) struct Group {
    socket: UdpSocket,
    address: IpAddr,
}

impl Group {
    /// Joins it at the interface of that socket.
    ///
    /// # Errors
    /// What the system refuses, as of another family.
    pub(crate) fn join(link: &Socket, address: IpAddr) -> io::Result<Group> {
        if link.address().is_ipv4() != address.is_ipv4() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let index = link.interface();
        let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: numbers; a descriptor that is new.
        let socket = unsafe { UdpSocket::from_raw_fd(counted(libc::socket(family, kind, 0))? as libc::c_int) };
        // Others on this host may be in the group as well.
        set(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        // At any other port of the group is something else.
        let name = Name::of_group(address, index);
        // SAFETY: the name is there, and so long.
        counted(unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), Name::len(&address)) })?;
        match address {
            IpAddr::V4(group) => {
                let request = libc::ip_mreqn {
                    imr_multiaddr: libc::in_addr { s_addr: u32::from(group).to_be() },
                    imr_address: libc::in_addr { s_addr: 0 },
                    imr_ifindex: index as libc::c_int,
                };
                set(&socket, libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, request)?;
                // Not what other sockets have joined at other interfaces.
                set(&socket, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
            }
            IpAddr::V6(group) => {
                let request = libc::ipv6_mreq {
                    ipv6mr_multiaddr: libc::in6_addr { s6_addr: group.octets() },
                    ipv6mr_interface: index,
                };
                set(&socket, libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP, request)?;
            }
        }
        take_segments(&socket);
        report_headers(&socket, address);
        Ok(Group { socket, address })
    }

    /// Which it is.
    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }

    /// To wait for packets.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
