//! The UDP socket, and the interface to it that tests replace.

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::{io, mem, process};

use super::interface::Interface;
use super::memory::{self, Memory};
use super::shm::{Shm, ShmSender};
use crate::transport::Time;
use crate::wire::{ICRC, UDP_PORT};

/// A nonblocking UDP socket at the RoCEv2 port, with the endpoint for same-host peers.
pub(crate) struct Socket {
    carrier: Carrier,
    shm: Option<Shm>,
    address: IpAddr,
    interface: u32,
    mtu: u32,
    supports_gso: bool,
    receive_buffer: usize,
}

/// The network that carries the packets.
enum Carrier {
    Udp(UdpSocket),
    Memory(Memory),
}

/// Why a [`Socket`] cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// The address does not belong to this host.
    #[error("{0} is not an address of this machine: use one that `ip address` shows, or none for a loopback address")]
    NotLocal(IpAddr),
    /// The port is in use.
    #[error(
        "UDP port 4791 of {0} is in use: another process has a device there, or the kernel's rxe driver uses the port at all \
         addresses; use another address, `rmmod rdma_rxe`, or a network namespace (`ip netns add`)"
    )]
    InUse(IpAddr),
    /// A system call failed.
    #[error("{call} for UDP port 4791 of {address}: {source}")]
    System {
        /// System call or socket option.
        call: &'static str,
        /// Address of the socket.
        address: IpAddr,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Requested size of the socket buffers: a few round trips of a fast network.
const BUFFER: libc::c_int = 4 << 20;

/// Maximum attempts to find a free loopback address. There are 16 million, so a retry is rare.
const ATTEMPTS: u32 = 16;

impl Socket {
    /// Opens a socket at an address of this host, or at a free loopback address.
    ///
    /// # Errors
    /// [`OpenError`], whose message says what to do.
    pub(crate) fn open(address: Option<IpAddr>) -> Result<Socket, OpenError> {
        let ((shm, socket), address) = match address {
            Some(address) => (bind(address.to_canonical())?, address.to_canonical()),
            None => bind_loopback()?,
        };
        let failed = |call| move |source| OpenError::System { call, address, source };
        socket.set_nonblocking(true).map_err(failed("O_NONBLOCK"))?;
        // Packets must not be fragmented: the invariant CRC covers the "don't fragment" flag.
        let (level, discover, always, name) = match address {
            IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO, "IP_MTU_DISCOVER"),
            IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO, "IPV6_MTU_DISCOVER"),
        };
        set(&socket, level, discover, always).map_err(failed(name))?;
        if address.is_ipv6() {
            // Accept zero UDP checksums over IPv6, which rxe sends and Linux drops by default.
            set(&socket, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1).map_err(failed("UDP_NO_CHECK6_RX"))?;
        }
        let _ = set_buffer_size(socket.as_fd(), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF), BUFFER);
        let receive_buffer = set_buffer_size(socket.as_fd(), (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), BUFFER)
            .map_err(failed("SO_RCVBUF"))?;
        enable_gro(&socket);
        // Kernels before 4.18 do not support segmentation offload. Packets are then sent one by one.
        let supports_gso = set(&socket, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok();
        let interface = Interface::of(address);
        if let Some(interface) = &interface {
            // Send multicast through the interface of the address instead of by route. If this fails, multicast packets are
            // lost.
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
            carrier: Carrier::Udp(socket),
            shm,
            address,
            interface: interface.map_or(0, |interface| interface.index),
            // The Ethernet MTU if the interface is unknown.
            mtu: max_payload(mtu.unwrap_or(1500), &address),
            supports_gso,
            receive_buffer,
        })
    }

    /// Opens an address in the memory of this process, or a free one if it is `None`.
    ///
    /// # Errors
    /// The address is in use, or no descriptors are left.
    pub(crate) fn in_memory(address: Option<IpAddr>) -> Result<Socket, OpenError> {
        let failed = |source: io::Error| {
            let address = address.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
            match source.kind() {
                io::ErrorKind::AddrInUse => OpenError::InUse(address),
                _ => OpenError::System { call: "socketpair", address, source },
            }
        };
        let memory = Memory::open(address.map(|address| address.to_canonical())).map_err(failed)?;
        Ok(Socket {
            shm: None,
            address: memory.address(),
            interface: 0,
            mtu: memory::MTU,
            supports_gso: true,
            receive_buffer: memory::LIMIT,
            carrier: Carrier::Memory(memory),
        })
    }

    /// Address of the socket.
    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }

    /// Maximum RoCE path MTU of the interface, in bytes: 256, 512, 1024, 2048 or 4096.
    pub(crate) fn mtu(&self) -> u32 {
        self.mtu
    }

    /// Interface index, 0 if unknown.
    pub(crate) fn interface(&self) -> u32 {
        self.interface
    }

    /// Descriptor to poll for packets, and for room to send.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match &self.carrier {
            Carrier::Udp(socket) => socket.as_fd(),
            Carrier::Memory(memory) => memory.fd(),
        }
    }

    /// Descriptor to poll for packets of same-host peers.
    pub(crate) fn shm_fd(&self) -> Option<BorrowedFd<'_>> {
        self.shm.as_ref().map(Shm::fd)
    }

    /// Makes the kernel report traffic class and hop limit of each packet. Only datagram queue pairs need them, and it costs
    /// time.
    pub(crate) fn report_headers(&self) {
        if let Carrier::Udp(socket) = &self.carrier {
            report_headers(socket, self.address);
        }
    }

    /// Whether packets stay in the memory of this process.
    pub(super) fn is_in_memory(&self) -> bool {
        matches!(self.carrier, Carrier::Memory(_))
    }

    /// Disables shared memory.
    pub(crate) fn without_shm(self) -> Socket {
        Socket { shm: None, ..self }
    }

    pub(super) fn shm(&self) -> Option<&Shm> {
        self.shm.as_ref()
    }

    #[cfg(test)]
    pub(super) fn shm_mut(&mut self) -> Option<&mut Shm> {
        self.shm.as_mut()
    }

    /// Takes packets that have arrived, like [`receive_messages`].
    ///
    /// # Safety
    /// All that the messages point to is valid for writes.
    pub(super) unsafe fn receive(&self, messages: &mut [libc::mmsghdr]) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.carrier {
                Carrier::Udp(socket) => receive_messages(socket.as_raw_fd(), messages),
                Carrier::Memory(memory) => memory.receive(messages),
            }
        }
    }

    /// Size of the receive buffer as the kernel counts it. Each small packet counts with about 800 bytes of overhead.
    pub(crate) fn receive_buffer(&self) -> usize {
        self.receive_buffer
    }
}

/// Receives without blocking. Returns how many messages were filled, at least one.
///
/// # Safety
/// All pointers of the messages are valid for the kernel to write.
pub(super) unsafe fn receive_messages(fd: libc::c_int, messages: &mut [libc::mmsghdr]) -> io::Result<usize> {
    let (count, flags) = (messages.len() as libc::c_uint, libc::MSG_DONTWAIT as _);
    loop {
        // SAFETY: the caller's promise. The slice has that many messages.
        match check_neg(unsafe { libc::recvmmsg(fd, messages.as_mut_ptr(), count, flags, std::ptr::null_mut()) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Sends without blocking. Returns how many messages were sent, at least one.
///
/// # Safety
/// All pointers of the messages are valid for the kernel to read.
unsafe fn send_messages(fd: libc::c_int, messages: &mut [libc::mmsghdr]) -> io::Result<usize> {
    let (count, flags) = (messages.len() as libc::c_uint, (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _);
    loop {
        // SAFETY: the caller's promise. The slice has that many messages.
        let sent = unsafe {
            match &*messages {
                // Faster than `sendmmsg`. It returns the number of bytes.
                [message] => (libc::sendmsg(fd, &raw const message.msg_hdr, flags as _) as libc::c_int).min(1),
                _ => libc::sendmmsg(fd, messages.as_mut_ptr(), count, flags),
            }
        };
        match check_neg(sent) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Transmission of packets, which tests replace.
pub(crate) trait Link {
    /// Source address.
    fn address(&self) -> IpAddr;

    /// Interface index, 0 if unknown.
    fn interface(&self) -> u32;

    /// Whether messages may have several segments (GSO).
    fn supports_gso(&self) -> bool;

    /// Whether an address belongs to this host, so that peers there may be reached through shared memory.
    fn is_local(&self, address: &IpAddr) -> bool;

    /// Connects to a same-host peer.
    ///
    /// [`Inbox::take_ready_senders`](super::Inbox::take_ready_senders) reports room and the end of the connection by `number`.
    ///
    /// # Errors
    /// Shared memory is not available to this peer.
    fn connect(&self, to: IpAddr, number: usize, now: Time) -> io::Result<ShmSender>;

    /// Closes a connection to a same-host peer, which frees the ring.
    fn disconnect(&self, sender: ShmSender);

    /// Sends over UDP without blocking. Returns how many messages were sent, at least one.
    ///
    /// # Safety
    /// All pointers of the messages are valid for the kernel to read.
    unsafe fn send(&self, messages: &mut [libc::mmsghdr]) -> io::Result<usize>;
}

impl Link for Socket {
    fn address(&self) -> IpAddr {
        self.address
    }

    fn interface(&self) -> u32 {
        self.interface
    }

    fn supports_gso(&self) -> bool {
        self.supports_gso
    }

    fn is_local(&self, address: &IpAddr) -> bool {
        self.shm.as_ref().is_some_and(|shm| shm.is_local(address))
    }

    fn connect(&self, to: IpAddr, number: usize, now: Time) -> io::Result<ShmSender> {
        self.shm.as_ref().ok_or(io::ErrorKind::Unsupported)?.connect(to, number, now)
    }

    fn disconnect(&self, sender: ShmSender) {
        if let Some(shm) = &self.shm {
            shm.disconnect(sender);
        }
    }

    unsafe fn send(&self, messages: &mut [libc::mmsghdr]) -> io::Result<usize> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.carrier {
                Carrier::Udp(socket) => send_messages(socket.as_raw_fd(), messages),
                Carrier::Memory(memory) => Ok(memory.send(messages)),
            }
        }
    }
}

/// Converts a result of −1 to the error in `errno`, and any other result to a number.
pub(super) fn check_neg(result: libc::c_int) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Converts a result of −1 to the error in `errno`, and any other result to a descriptor.
///
/// # Safety
/// `fd` is a new descriptor that nobody else owns, or negative, with the error in `errno`.
pub(super) unsafe fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    check_neg(fd)?;
    // SAFETY: the caller's promise.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn bind(address: IpAddr) -> Result<(Option<Shm>, UdpSocket), OpenError> {
    // The CRC covers the destination address, so the socket needs a specific one.
    if address.is_unspecified() || address.is_multicast() {
        return Err(OpenError::NotLocal(address));
    }
    let name = match address {
        IpAddr::V4(_) => SocketAddr::new(address, UDP_PORT),
        IpAddr::V6(v6) => {
            let scope = match super::sockaddr::is_link_local(&v6) {
                true => Interface::of(address).map_or(0, |interface| interface.index),
                false => 0,
            };
            SocketAddrV6::new(v6, UDP_PORT, 0, scope).into()
        }
    };
    // Open this before the UDP socket, so that a peer that is reachable over UDP can already connect here.
    let shm = Shm::open(address);
    UdpSocket::bind(name).map(|socket| (shm, socket)).map_err(|source| match source.raw_os_error() {
        Some(libc::EADDRINUSE) => OpenError::InUse(address),
        Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT) => OpenError::NotLocal(address),
        _ => OpenError::System { call: "bind", address, source },
    })
}

fn bind_loopback() -> Result<((Option<Shm>, UdpSocket), IpAddr), OpenError> {
    let random = RandomState::new();
    let mut attempt = 0;
    loop {
        let [first, second, third, ..] = random.hash_one((process::id(), attempt)).to_ne_bytes();
        // Avoid 127.0.0.x, which other programs use, and the first and last address of each /24 network.
        let address = Ipv4Addr::new(127, first.clamp(1, 254), second, third.clamp(1, 254)).into();
        match bind(address) {
            Err(OpenError::InUse(_)) if attempt < ATTEMPTS => attempt += 1,
            result => return result.map(|sockets| (sockets, address)),
        }
    }
}

/// Maximum payload of packets within `mtu`, with the longest headers before a payload: BTH, RETH and ImmDt.
fn max_payload(mtu: u32, address: &IpAddr) -> u32 {
    let ip = if address.is_ipv4() { 20 } else { 40 };
    let around = ip + 8 + 12 + 16 + 4 + ICRC as u32;
    [4096, 2048, 1024, 512].into_iter().find(|payload| payload + around <= mtu).unwrap_or(256)
}

/// Requests a buffer size, first with the privileged option, then with the other. Returns the resulting size.
fn set_buffer_size(
    socket: BorrowedFd<'_>,
    (forced, polite): (libc::c_int, libc::c_int),
    bytes: libc::c_int,
) -> io::Result<usize> {
    // The privileged option exceeds the system limit. The other is capped by it.
    let _ = set(&socket, libc::SOL_SOCKET, forced, bytes).or_else(|_| set(&socket, libc::SOL_SOCKET, polite, bytes));
    get(&socket, libc::SOL_SOCKET, polite).map(|bytes| usize::try_from(bytes).unwrap_or(0))
}

/// Enables receive offload (GRO): the kernel delivers consecutive packets of one sender together.
pub(super) fn enable_gro(socket: &impl AsRawFd) {
    // Kernels before 5.0 do not support it. Packets then arrive one by one.
    let _ = set(socket, libc::SOL_UDP, libc::UDP_GRO, 1);
}

/// Makes the kernel report traffic class and hop limit of each packet.
pub(super) fn report_headers(socket: &impl AsRawFd, address: IpAddr) {
    let (level, options) = match address {
        IpAddr::V4(_) => (libc::IPPROTO_IP, [libc::IP_RECVTOS, libc::IP_RECVTTL]),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, [libc::IPV6_RECVTCLASS, libc::IPV6_RECVHOPLIMIT]),
    };
    for option in options {
        // Failing is harmless, because only datagram queue pairs report them.
        let _ = set(socket, level, option, 1);
    }
}

pub(super) fn set<T: Copy>(socket: &impl AsRawFd, level: libc::c_int, name: libc::c_int, value: T) -> io::Result<()> {
    let len = mem::size_of::<T>() as libc::socklen_t;
    // SAFETY: the value is valid for reads of this length.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    check_neg(result).map(drop)
}

fn get(socket: &impl AsRawFd, level: libc::c_int, name: libc::c_int) -> io::Result<libc::c_int> {
    let (mut value, mut len) = (0, mem::size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: both variables are valid for writes, and `len` is the size of the first.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut value).cast(), &mut len) };
    check_neg(result).map(|_| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mtu_leaves_room_for_the_longest_headers() {
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
            assert_eq!(max_payload(mtu, &address), expected, "{mtu} {address}");
        }
    }
}
