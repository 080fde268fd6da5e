//! Multicast groups.

use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};

use super::sockaddr::SockAddr;
use super::socket::{Socket, check_neg, enable_gro, report_headers, set};

/// Membership of a multicast group, with its packets. Dropping it leaves the group.
pub(crate) struct Group {
    socket: UdpSocket,
    address: IpAddr,
}

/// Membership of a multicast group without its packets. Dropping it leaves the group.
///
/// The network forwards the packets of the group to this host. So a program can join a group before it attaches a queue pair.
pub(crate) struct Membership {
    _socket: UdpSocket,
}

impl Membership {
    /// Joins a group at the interface of `link`.
    ///
    /// # Errors
    /// Like those of [`Group::join`].
    pub(crate) fn join(link: &Socket, address: IpAddr) -> io::Result<Membership> {
        let socket = new_socket(link, address)?;
        // The socket has no port, so the kernel delivers nothing to it.
        join(&socket, link, address)?;
        Ok(Membership { _socket: socket })
    }
}

impl Group {
    /// Joins a group at the interface of `link`.
    ///
    /// # Errors
    /// An error of a system call, or `Unsupported` for a group of another address family and for a socket in memory.
    pub(crate) fn join(link: &Socket, address: IpAddr) -> io::Result<Group> {
        let socket = new_socket(link, address)?;
        // Other sockets on this host may join the same group.
        set(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        // Bind to the group's address, so that the socket receives only datagrams for the group.
        let name = SockAddr::group(address, link.interface());
        // SAFETY: the name is valid, and the length is that of its family.
        check_neg(unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), SockAddr::len(&address)) })?;
        join(&socket, link, address)?;
        enable_gro(&socket);
        report_headers(&socket, address);
        Ok(Group { socket, address })
    }

    /// Address of the group.
    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }

    /// Descriptor to poll for packets.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Creates a socket of the family of a group.
fn new_socket(link: &Socket, address: IpAddr) -> io::Result<UdpSocket> {
    if link.is_in_memory() || link.address().is_ipv4() != address.is_ipv4() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the arguments are numbers, and the descriptor is new.
    Ok(unsafe { UdpSocket::from_raw_fd(check_neg(libc::socket(family, kind, 0))? as libc::c_int) })
}

/// Makes a socket a member of a group at the interface of `link`.
fn join(socket: &UdpSocket, link: &Socket, address: IpAddr) -> io::Result<()> {
    match address {
        IpAddr::V4(group) => {
            let request = libc::ip_mreqn {
                imr_multiaddr: libc::in_addr { s_addr: u32::from(group).to_be() },
                imr_address: libc::in_addr { s_addr: 0 },
                imr_ifindex: link.interface() as libc::c_int,
            };
            set(socket, libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, request)?;
            // Do not receive groups that other sockets have joined at other interfaces.
            set(socket, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)
        }
        IpAddr::V6(group) => {
            let request = libc::ipv6_mreq {
                ipv6mr_multiaddr: libc::in6_addr { s6_addr: group.octets() },
                ipv6mr_interface: link.interface(),
            };
            set(socket, libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP, request)
        }
    }
}
