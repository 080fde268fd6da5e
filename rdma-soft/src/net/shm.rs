//! Shared memory between peers on one host.
//!
//! Each side sends through a [`ShmSender`]: a ring in its own memory. It finds the peer by an abstract Unix socket with the
//! peer's IP address in its name, and passes the memory through it. Messages are those that UDP would carry, behind a
//! [prefix](encode_prefix). They take no system call while both sides are awake. None is lost, because the sender sees when the
//! ring is full.
//!
//! Names of abstract sockets belong to a network namespace, as addresses do, and any process may bind any of them. So only
//! peers of the same user use shared memory. An eventfd of the sender wakes a receiver that sleeps. After the handshake the
//! connection has two purposes: a byte of the receiver wakes a sender that waits for room, and its end reports that the peer is
//! gone.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use super::poll::Poll;
use super::ring::{self, RingError};
use super::route::LocalAddresses;
use super::shm_handshake::{self, Descriptors, VERSION};
use super::sockaddr::{SockAddr, is_link_local};
use super::socket::check_neg;
use super::unix::{self, AcceptError, Accepted, Reserve};
use super::wakeup::Wakeup;
use crate::transport::Time;
use crate::wire::Data;

/// Bytes before the packets of a message: segment size, traffic class, and [`Crc`].
pub(super) const PREFIX: usize = 4;

/// Contents of the last four bytes of each packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Crc {
    /// The invariant CRC. Injected faults may have damaged the packet.
    Invariant = 0,
    /// Zeros. Shared memory does not damage packets.
    Omitted = 1,
}

/// Encodes the prefix of a message.
pub(super) fn encode_prefix(segment: usize, class: u8, crc: Crc) -> [u8; PREFIX] {
    let [high, low] = (segment as u16).to_be_bytes();
    [high, low, class, crc as u8]
}

/// Splits a message into segment size, traffic class, kind of CRC, and packets. `None` if the prefix is invalid.
pub(super) fn split_prefix(message: Data<'_>) -> Option<(usize, u8, Crc, Data<'_>)> {
    let (prefix, packets) = message.split_at(PREFIX)?;
    let [high, low, class, crc] = prefix.to_array::<PREFIX>()?;
    let segment = u16::from_be_bytes([high, low]).into();
    let crc = match crc {
        0 => Crc::Invariant,
        1 => Crc::Omitted,
        _ => return None,
    };
    (segment > 0).then_some((segment, class, crc, packets))
}

/// The endpoint for same-host peers: a listening Unix socket at an IP address.
pub(super) struct Shm {
    listener: OwnedFd,
    /// The listener and all connections.
    poll: Poll,
    handshake: [u8; shm_handshake::BYTES],
    /// Addresses of this host when the endpoint was opened.
    local_addresses: LocalAddresses,
}

impl Shm {
    /// Listens at an address. `None` if shared memory is not available there.
    pub(super) fn open(address: IpAddr) -> Option<Shm> {
        if is_link_only(&address) {
            return None;
        }
        let listener = unix::bind(libc::SOCK_SEQPACKET, &name(address)).ok()?;
        unix::listen(listener.as_fd()).ok()?;
        let (poll, handshake) = (Poll::new().ok()?, shm_handshake::encode(address));
        let shm = Shm { listener, poll, handshake, local_addresses: LocalAddresses::now() };
        shm.register(shm.listener.as_fd(), Source::Listener).ok()?;
        Some(shm)
    }

    /// Whether an address belongs to this host. Link-local addresses do not count.
    pub(super) fn is_local(&self, address: &IpAddr) -> bool {
        self.local_addresses.contains(address) && !is_link_only(address)
    }

    /// Like [`is_local`](Shm::is_local), but also true for an address that this host got later.
    pub(super) fn is_local_now(&self, address: &IpAddr) -> bool {
        self.is_local(address) || (LocalAddresses::now().contains(address) && !is_link_only(address))
    }

    /// Descriptor to poll for packets of same-host peers.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.poll.fd()
    }

    /// Connects to the peer at an address. [`Source::Sender`] with this number reports that there is room, or that the connection
    /// has ended.
    ///
    /// # Errors
    /// No process of the same user listens at the address, its backlog is full, or there is no memory.
    pub(super) fn connect(&self, to: IpAddr, number: usize, now: Time) -> io::Result<ShmSender> {
        let connection = unix::socket(libc::SOCK_SEQPACKET)?;
        unix::connect(connection.as_fd(), &name(to))?;
        check_same_user(connection.as_fd())?;
        let (ring, memory) = ring::Sender::new()?;
        let wakeup = Wakeup::new()?;
        // Edge-triggered, so the end is reported once. A child process may keep the connection open when it is closed here.
        let events = libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET;
        self.poll.add(connection.as_fd(), Source::Sender(number).token(), events)?;
        let passed = Descriptors { memory: memory.as_fd(), wakeup: wakeup.fd() };
        shm_handshake::send(connection.as_fd(), &self.handshake, &passed)?;
        Ok(ShmSender { connection, ring, wakeup, checked_at: now, has_sent_since_kick: false })
    }

    /// Closes the connection to a peer. The peer takes the messages that are left, and frees the ring.
    pub(super) fn disconnect(&self, sender: ShmSender) {
        self.unregister(sender.connection.as_fd());
        // The peer gets the end even if a child process holds the connection.
        unix::shut_down(sender.connection.as_fd());
    }

    /// Sends handshakes of a later version, which only receivers of that version understand.
    #[cfg(test)]
    pub(super) fn require_later_version(&mut self) {
        shm_handshake::require_later_version(&mut self.handshake);
    }

    /// Accepts a connection.
    ///
    /// While the process has no free descriptor, connections are closed at once. Their peers use UDP for a while.
    ///
    /// # Errors
    /// No connection is pending, the peer belongs to another user, or the system refuses.
    pub(super) fn accept(&self, reserve: &mut Reserve) -> io::Result<OwnedFd> {
        reserve.refill();
        match unix::accept(self.listener.as_fd(), reserve) {
            Ok(Accepted::Normal(connection)) => check_same_user(connection.as_fd()).map(|()| connection),
            Ok(Accepted::Last(connection)) => {
                unix::shut_down(connection.as_fd());
                drop(connection);
                reserve.refill();
                Err(io::Error::from_raw_os_error(libc::EMFILE))
            }
            Err(AcceptError::Retry(error)) => Err(error),
            Err(AcceptError::Exhausted(error)) => {
                // The connection would stay readable. From now on, new peers use UDP.
                self.unregister(self.listener.as_fd());
                unix::shut_down(self.listener.as_fd());
                Err(error)
            }
        }
    }

    /// Adds a descriptor to the set.
    pub(super) fn register(&self, fd: BorrowedFd<'_>, source: Source) -> io::Result<()> {
        self.poll.add(fd, source.token(), libc::EPOLLIN | libc::EPOLLRDHUP)
    }

    pub(super) fn unregister(&self, fd: BorrowedFd<'_>) {
        self.poll.remove(fd);
    }

    /// Returns descriptors with events, and whether each has ended.
    pub(super) fn ready(&self) -> impl Iterator<Item = (Source, bool)> + use<> {
        self.poll.ready().map(|ready| (Source::of(ready.token), ready.has_ended))
    }
}

/// Whether an address is link-local. Two interfaces may have the same one, so it identifies no process.
fn is_link_only(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if is_link_local(v6))
}

/// A descriptor in the set of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    /// A peer connects.
    Listener,
    /// The connection of the [`ShmSender`] with this number: its peer has made room.
    Sender(usize),
    /// The connection with this number of a peer that sends packets.
    Receiver(u64),
    /// The wake-up of this peer.
    Wakeup(u64),
}

/// Bits of a token for the number. Two bits above it are for the kind.
const NUMBER_BITS: u32 = 62;

impl Source {
    fn token(self) -> u64 {
        let (kind, number) = match self {
            Source::Receiver(number) => (0, number),
            Source::Wakeup(number) => (1, number),
            Source::Sender(number) => (2, number as u64),
            Source::Listener => (3, 0),
        };
        kind << NUMBER_BITS | number
    }

    fn of(token: u64) -> Self {
        let number = token & ((1 << NUMBER_BITS) - 1);
        match token >> NUMBER_BITS {
            0 => Source::Receiver(number),
            1 => Source::Wakeup(number),
            2 => Source::Sender(number as usize),
            _ => Source::Listener,
        }
    }
}

/// Name of the socket of an address.
///
/// The name has the version of the protocol. So processes with another protocol do not find each other, and use UDP from their
/// first packet. Before there was a version, the name was only the address.
pub(super) fn name(address: IpAddr) -> SockAddr {
    SockAddr::unix(&format!("shm/{VERSION}/{address}"))
}

/// A connection to a same-host peer, with the ring to send through.
pub(crate) struct ShmSender {
    connection: OwnedFd,
    ring: ring::Sender,
    wakeup: Wakeup,
    /// Time of the last check that the peer exists.
    checked_at: Time,
    /// Whether a message was committed since the last [`kick`](ShmSender::kick).
    has_sent_since_kick: bool,
}

impl ShmSender {
    /// Adds a message to the ring.
    ///
    /// # Errors
    /// Same as [`ShmSender::reserve`].
    pub(super) fn add(&mut self, message: &[u8], now: Time) -> io::Result<()> {
        self.check(now)?;
        self.has_sent_since_kick = true;
        self.ring.add(message).map_err(refusal)
    }

    /// Makes room for the next message, or for more of it, and returns its memory. [`commit`](ShmSender::commit) adds it.
    ///
    /// Until then, `len` bytes may be written there. Bytes that were written before stay. The memory exists as long as this value.
    ///
    /// # Errors
    /// `EAGAIN` if the ring is full. Any other error means that the peer is gone.
    pub(super) fn reserve(&mut self, len: usize, now: Time) -> io::Result<*mut u8> {
        self.check(now)?;
        self.ring.reserve(len).map_err(refusal)
    }

    /// Checks from time to time that the peer exists, and always that it takes messages.
    fn check(&mut self, now: Time) -> io::Result<()> {
        if self.ring.is_closed() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if self.checked_at + CHECK_INTERVAL <= now {
            self.check_alive()?;
            self.checked_at = now;
        }
        Ok(())
    }

    /// Adds the message of `len` bytes whose memory was [reserved](ShmSender::reserve).
    pub(super) fn commit(&mut self, len: usize) {
        self.has_sent_since_kick = true;
        self.ring.commit(len);
    }

    /// Wakes the peer if it has armed its wake-up.
    pub(super) fn wake(&mut self) {
        if self.ring.take_wakeup() {
            self.wakeup.raise();
        }
    }

    /// Wakes the peer's server thread if messages were added since the last call, even if it has not armed its wake-up.
    ///
    /// The server does not arm it while it expects its program to poll. The program may have stopped polling to wait for a
    /// change of memory.
    pub(super) fn kick(&mut self) {
        if std::mem::take(&mut self.has_sent_since_kick) {
            self.wakeup.raise();
        }
    }

    /// Whether the peer has taken a message since the last call.
    pub(super) fn take_moved(&mut self) -> bool {
        self.ring.take_moved()
    }

    /// Asks the peer to wake this process when there is room. Returns `false` if a full ring has room again, or the peer is gone.
    pub(super) fn arm(&mut self) -> bool {
        self.ring.arm()
    }

    /// Reads wake bytes, so that the socket does not fill.
    pub(super) fn drain(&self) {
        drain_wake_bytes(self.connection.as_fd());
    }

    /// Whether no message was added for this time, and the peer has taken all messages.
    pub(super) fn is_unused_for(&self, time: Duration, now: Time) -> bool {
        // The last message was added less than `CHECK_INTERVAL` after the last check.
        self.checked_at + time <= now && self.ring.is_empty()
    }

    /// Whether the peer has ever mapped the ring.
    pub(super) fn was_opened(&self) -> bool {
        self.ring.was_opened()
    }

    /// Checks that the peer has not closed the connection.
    pub(super) fn check_alive(&self) -> io::Result<()> {
        // Check only for the end of the connection. The peer may have sent bytes before.
        let mut poll = libc::pollfd { fd: self.connection.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: the array has one valid entry. `revents` has the result.
        unsafe { libc::poll(&raw mut poll, 1, 0) };
        if poll.revents == 0 { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    }
}

/// The error of [`ShmSender::reserve`].
fn refusal(error: RingError) -> io::Error {
    match error {
        RingError::Full => io::Error::from_raw_os_error(libc::EAGAIN),
        RingError::Broken => io::ErrorKind::InvalidData.into(),
    }
}

/// Wakes a sender that waits for room.
pub(super) fn send_wake_byte(connection: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the byte is valid.
    let sent = unsafe { libc::send(connection.as_raw_fd(), [0_u8].as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
    match check_neg(sent as libc::c_int) {
        // The socket is full of wake bytes, so the peer is being woken.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        result => result.map(drop),
    }
}

/// Reads the wake bytes of a connection.
fn drain_wake_bytes(connection: BorrowedFd<'_>) {
    /// Maximum reads. A peer normally has only one byte pending.
    const MOST: usize = 16;
    let mut bytes = [0_u8; 16];
    for _ in 0..MOST {
        // SAFETY: the buffer has that many bytes. The call has no room for descriptors, so the kernel discards any that arrive.
        let received = unsafe { libc::recv(connection.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if received <= 0 {
            break;
        }
    }
}

/// Interval between checks that a peer exists.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

fn check_same_user(peer: BorrowedFd<'_>) -> io::Result<()> {
    if unix::peer_user(peer)? == unix::own_user() { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_round_trips() {
        let numbers = [0, 1, (1 << NUMBER_BITS) - 1];
        let of_peers = numbers
            .into_iter()
            .flat_map(|number| [Source::Sender(number as usize), Source::Receiver(number), Source::Wakeup(number)]);
        for source in of_peers.chain([Source::Listener]) {
            assert_eq!(Source::of(source.token()), source);
        }
    }

    #[test]
    fn a_prefix_round_trips() {
        for crc in [Crc::Invariant, Crc::Omitted] {
            let message = [&encode_prefix(0xfe01, 0xb8, crc)[..], b"packets"].concat();
            assert_eq!(split_prefix((&message).into()), Some((0xfe01, 0xb8, crc, b"packets".into())));
        }
        for wrong in [&b""[..], b"\0\x01\0", b"\0\0\0\0packet", b"\0\x01\0\x02packet"] {
            assert_eq!(split_prefix(wrong.into()), None, "{wrong:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_connection_that_a_child_process_holds_is_closed() {
        let [from, to] = ["127.77.3.10", "127.77.3.11"].map(|address| Shm::open(address.parse().unwrap()).unwrap());
        let sender = from.connect("127.77.3.11".parse().unwrap(), 5, Time(0)).unwrap();
        let _of_child = sender.connection.try_clone().unwrap();
        from.disconnect(sender);
        assert_eq!(from.ready().count(), 0, "this side has closed it");
        let connection = to.accept(&mut Reserve::default()).unwrap();
        let (address, passed) = shm_handshake::receive(connection.as_fd()).unwrap();
        assert_eq!(address.to_string(), "127.77.3.10");
        assert!(!ring::Receiver::new(passed.memory.as_fd()).unwrap().has_message());
        to.register(connection.as_fd(), Source::Receiver(7)).unwrap();
        assert_eq!(to.ready().collect::<Vec<_>>(), [(Source::Receiver(7), true)]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn an_address_added_later_is_local() {
        let mut shm = Shm::open("127.77.3.9".parse().unwrap()).unwrap();
        for address in shm.local_addresses.take() {
            if is_link_only(&address) {
                assert!(!shm.is_local_now(&address), "{address}");
                continue;
            }
            assert!(!shm.is_local(&address) && shm.is_local_now(&address), "{address}");
        }
        assert!(!shm.is_local_now(&"203.0.113.5".parse().unwrap()));
    }
}
