//! The socket that packets go and come by.

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::{io, mem, process};

use super::interface::Interface;
use super::near::{Lane, Near, PREFIX};
use crate::transport::Time;
use crate::wire::{ICRC, UDP_PORT};

/// A UDP socket at the port of RoCEv2, which does not block.
pub(crate) struct Socket {
    socket: UdpSocket,
    near: Option<Near>,
    address: IpAddr,
    interface: u32,
    mtu: u32,
    segments: bool,
    receive_buffer: usize,
}

/// Why there is no [`Socket`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// Nobody can reach a device there.
    #[error("{0} is not an address of this machine: give one that `ip address` shows, or none for one of loopback")]
    NotLocal(IpAddr),
    /// Somebody has the port.
    #[error(
        "UDP port 4791 of {0} is taken: by another process with a device there, or by the rxe driver of the kernel, which takes it \
         at all addresses; give another address, `rmmod rdma_rxe`, or use a network namespace (`ip netns add`)"
    )]
    InUse(IpAddr),
    /// The system refused.
    #[error("{call} for UDP port 4791 of {address}: {source}")]
    System {
        /// What it refused.
        call: &'static str,
        /// Where.
        address: IpAddr,
        /// Why.
        source: io::Error,
    },
}

/// Bytes to ask for as buffers: a few round trips of a fast network.
const BUFFER: libc::c_int = 4 << 20;

/// How many addresses to try: as there are sixteen million, more than one is in use only when all are.
const ATTEMPTS: u32 = 16;

impl Socket {
    /// At that address of this machine; at one of loopback that nobody uses where it is `None`.
    ///
    /// # Errors
    /// [`OpenError`], which says what to do.
    pub(crate) fn open(address: Option<IpAddr>) -> Result<Socket, OpenError> {
        let ((near, socket), address) = match address {
            Some(address) => (bind(address.to_canonical())?, address.to_canonical()),
            None => bind_loopback()?,
        };
        let failed = |call| move |source| OpenError::System { call, address, source };
        socket.set_nonblocking(true).map_err(failed("O_NONBLOCK"))?;
        // No packet is fragmented, as the invariant CRC has it.
        let (level, discover, always, name) = match address {
            IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO, "IP_MTU_DISCOVER"),
            IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO, "IPV6_MTU_DISCOVER"),
        };
        set(&socket, level, discover, always).map_err(failed(name))?;
        if address.is_ipv6() {
            // The checksum of UDP may be zero, which Linux drops by IPv6 unless told: rxe sends it so.
            set(&socket, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1).map_err(failed("UDP_NO_CHECK6_RX"))?;
        }
        let _ = enlarge(socket.as_fd(), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF), BUFFER);
        let receive_buffer =
            enlarge(socket.as_fd(), (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), BUFFER).map_err(failed("SO_RCVBUF"))?;
        take_segments(&socket);
        // Kernels before 4.18 have none of it: then packets go one by one.
        let segments = set(&socket, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok();
        let interface = Interface::of(address);
        if let Some(interface) = &interface {
            // What is for a group goes where the address is, and not where the routes lead. Where there is no way, it is lost.
            let _ = match address {
                IpAddr::V4(_) => {
                    let none = libc::in_addr { s_addr: 0 };
                    let imr_ifindex = interface.index as libc::c_int;
                    let request = libc::ip_mreqn { imr_multiaddr: none, imr_address: none, imr_ifindex };
                    set(&socket, libc::IPPROTO_IP, libc::IP_MULTICAST_IF, request)
                }
                IpAddr::V6(_) => {
                    set(&socket, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, interface.index as libc::c_int)
                }
            };
        }
        let mtu = interface.as_ref().and_then(|interface| interface.mtu(socket.as_fd()));
        Ok(Socket {
            socket,
            near,
            address,
            interface: interface.map_or(0, |interface| interface.index),
            // Where it is unknown, that of Ethernet.
            mtu: payload(mtu.unwrap_or(1500), &address),
            segments,
            receive_buffer,
        })
    }

    /// Where it is.
    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }

    /// The most payload of a packet that its interface takes, in bytes: 256, 512, 1024, 2048 or 4096.
    pub(crate) fn mtu(&self) -> u32 {
        self.mtu
    }

    /// The index of its interface, 0 where it is unknown.
    pub(crate) fn interface(&self) -> u32 {
        self.interface
    }

    /// To wait for packets, and for room for them.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// To wait for packets of peers on this host, which come there.
    pub(crate) fn near_fd(&self) -> Option<BorrowedFd<'_>> {
        self.near.as_ref().map(Near::fd)
    }

    /// Has packets come with their class and hops, which only datagram queue pairs show. Each report takes time.
    pub(crate) fn report_headers(&self) {
        report_headers(&self.socket, self.address);
    }

    /// Without the shorter way.
    pub(crate) fn far(self) -> Socket {
        Socket { near: None, ..self }
    }

    pub(super) fn near(&self) -> Option<&Near> {
        self.near.as_ref()
    }

    pub(super) fn raw(&self) -> libc::c_int {
        self.socket.as_raw_fd()
    }

    /// Bytes of packets that the kernel holds until they are taken, as it counts them: with the memory that it wastes on them, of
    /// small packets some 800 bytes each.
    pub(crate) fn receive_buffer(&self) -> usize {
        self.receive_buffer
    }
}

/// Takes what has come, without waiting: how many of the messages are filled, at least one.
///
/// # Safety
/// All that the messages point to is there, for the kernel to write.
pub(super) unsafe fn receive_messages(fd: libc::c_int, messages: &mut [libc::mmsghdr]) -> io::Result<usize> {
    let (count, flags) = (messages.len() as libc::c_uint, libc::MSG_DONTWAIT as _);
    loop {
        // SAFETY: the caller's promise; so many messages are there.
        match counted(unsafe { libc::recvmmsg(fd, messages.as_mut_ptr(), count, flags, std::ptr::null_mut()) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Sends messages, without waiting: how many have gone, from the first, at least one.
///
/// # Safety
/// All that the messages point to is there, for the kernel to read.
pub(super) unsafe fn send_messages(fd: libc::c_int, messages: &mut [libc::mmsghdr]) -> io::Result<usize> {
    let (count, flags) = (messages.len() as libc::c_uint, (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _);
    loop {
        // SAFETY: the caller's promise; so many messages are there.
        let sent = unsafe {
            match &*messages {
                // Which says how many bytes, and takes less time.
                [only] => (libc::sendmsg(fd, &raw const only.msg_hdr, flags as _) as libc::c_int).min(1),
                _ => libc::sendmmsg(fd, messages.as_mut_ptr(), count, flags),
            }
        };
        match counted(sent) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Which way packets go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// By UDP.
    Wire,
    /// By shared memory, between peers on one host.
    Near,
}

impl Way {
    /// Bytes before the packets of a message.
    pub(super) const fn prefix(self) -> usize {
        match self {
            Way::Wire => 0,
            Way::Near => PREFIX,
        }
    }
}

/// What packets go by.
pub(crate) trait Link {
    /// Where they are from.
    fn address(&self) -> IpAddr;

    /// The index of the interface, 0 where it is unknown.
    fn interface(&self) -> u32;

    /// Whether messages of several packets go by it.
    fn takes_segments(&self) -> bool;

    /// Whether an address is one of this host, whose peers may be reached by the shorter way.
    fn is_near(&self, address: &IpAddr) -> bool;

    /// The shorter way to a peer. That it has ended is told by that number: [`Inbox::ended`](super::Inbox::ended).
    ///
    /// # Errors
    /// There is none.
    fn connect(&self, to: IpAddr, number: usize, now: Time) -> io::Result<Lane>;

    /// Sends messages by UDP, without waiting: how many have gone, from the first, at least one.
    ///
    /// # Safety
    /// All that the messages point to is there, for the kernel to read.
    unsafe fn send(&self, messages: &mut [libc::mmsghdr]) -> io::Result<usize>;
}

impl Link for Socket {
    fn address(&self) -> IpAddr {
        self.address
    }

    fn interface(&self) -> u32 {
        self.interface
    }

    fn takes_segments(&self) -> bool {
        self.segments
    }

    fn is_near(&self, address: &IpAddr) -> bool {
        self.near.as_ref().is_some_and(|near| near.is_near(address))
    }

    fn connect(&self, to: IpAddr, number: usize, now: Time) -> io::Result<Lane> {
        self.near.as_ref().ok_or(io::ErrorKind::Unsupported)?.connect(to, number, now)
    }

    unsafe fn send(&self, messages: &mut [libc::mmsghdr]) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        unsafe { send_messages(self.raw(), messages) }
    }
}

pub(super) fn counted(result: libc::c_int) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn bind(address: IpAddr) -> Result<(Option<Near>, UdpSocket), OpenError> {
    // Packets are for an address, and the CRC is over it.
    if address.is_unspecified() || address.is_multicast() {
        return Err(OpenError::NotLocal(address));
    }
    let name = match address {
        IpAddr::V4(_) => SocketAddr::new(address, UDP_PORT),
        IpAddr::V6(v6) => {
            let scope = match super::name::is_link_local(&v6) {
                true => Interface::of(address).map_or(0, |interface| interface.index),
                false => 0,
            };
            SocketAddrV6::new(v6, UDP_PORT, 0, scope).into()
        }
    };
    // First, so that a peer that can be reached by UDP can be reached here.
    let near = Near::open(address);
    UdpSocket::bind(name).map(|socket| (near, socket)).map_err(|source| match source.raw_os_error() {
        Some(libc::EADDRINUSE) => OpenError::InUse(address),
        Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT) => OpenError::NotLocal(address),
        _ => OpenError::System { call: "bind", address, source },
    })
}

fn bind_loopback() -> Result<((Option<Near>, UdpSocket), IpAddr), OpenError> {
    let random = RandomState::new();
    let mut attempt = 0;
    loop {
        let [first, second, third, ..] = random.hash_one((process::id(), attempt)).to_ne_bytes();
        // Not 127.0.0.x, which people use, nor the first and last of a network.
        let address = Ipv4Addr::new(127, first.clamp(1, 254), second, third.clamp(1, 254)).into();
        match bind(address) {
            Err(OpenError::InUse(_)) if attempt < ATTEMPTS => attempt += 1,
            result => return result.map(|sockets| (sockets, address)),
        }
    }
}

/// The most payload of packets so long, with the longest headers of any that has payload: base, remote range and immediate data.
fn payload(mtu: u32, address: &IpAddr) -> u32 {
    let ip = if address.is_ipv4() { 20 } else { 40 };
    let around = ip + 8 + 12 + 16 + 4 + ICRC as u32;
    [4096, 2048, 1024, 512].into_iter().find(|payload| payload + around <= mtu).unwrap_or(256)
}

/// Asks for a large buffer, by that option with privileges and by that without; how many bytes it is then.
fn enlarge(
    socket: BorrowedFd<'_>,
    (forced, polite): (libc::c_int, libc::c_int),
    bytes: libc::c_int,
) -> io::Result<usize> {
    // Privilege goes beyond the limits of the system; without it the kernel gives as much as they allow.
    let _ = set(&socket, libc::SOL_SOCKET, forced, bytes).or_else(|_| set(&socket, libc::SOL_SOCKET, polite, bytes));
    get(&socket, libc::SOL_SOCKET, polite).map(|bytes| usize::try_from(bytes).unwrap_or(0))
}

/// Has the kernel deliver packets of one sender together.
pub(super) fn take_segments(socket: &impl AsRawFd) {
    // Kernels before 5.0 have none of it: then packets come one by one.
    let _ = set(socket, libc::SOL_UDP, libc::UDP_GRO, 1);
}

/// Has the kernel report the class and the hops of each packet.
pub(super) fn report_headers(socket: &impl AsRawFd, address: IpAddr) {
    let (level, told) = match address {
        IpAddr::V4(_) => (libc::IPPROTO_IP, [libc::IP_RECVTOS, libc::IP_RECVTTL]),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, [libc::IPV6_RECVTCLASS, libc::IPV6_RECVHOPLIMIT]),
    };
    for option in told {
        // Only datagrams show it, so that a system that refuses does no harm.
        let _ = set(socket, level, option, 1);
    }
}

pub(super) fn set<T: Copy>(socket: &impl AsRawFd, level: libc::c_int, name: libc::c_int, value: T) -> io::Result<()> {
    let len = mem::size_of::<T>() as libc::socklen_t;
    // SAFETY: the value is there and so long.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    counted(result).map(drop)
}

fn get(socket: &impl AsRawFd, level: libc::c_int, name: libc::c_int) -> io::Result<libc::c_int> {
    let (mut value, mut len) = (0, mem::size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: both are there, and the value is so long.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut value).cast(), &mut len) };
    counted(result).map(|_| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_what_fits_with_the_longest_headers() {
        let (four, six) = (Ipv4Addr::LOCALHOST.into(), std::net::Ipv6Addr::LOCALHOST.into());
        for (mtu, address, expected) in [
            (65_536, four, 4096),
            (4160, four, 4096),
            (4159, four, 2048),
            (4180, six, 4096),
            (4179, six, 2048),
            (1500, four, 1024),
            (1280, six, 1024),
            (576, four, 512),
            (68, four, 256),
        ] {
            assert_eq!(payload(mtu, &address), expected, "{mtu} {address}");
        }
    }
}
