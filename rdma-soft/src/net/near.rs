//! The shorter way between peers on one host: memory that they share, which one hands the other by a Unix socket that it finds by
//! its address.
//!
//! What goes there is what would go by UDP, behind a [`prefix`]. No system call is made for it while both are awake, and
//! nothing gets lost on it: who sends sees when a peer has enough. Names of sockets are of a network namespace, as addresses
//! are, and anybody may have any: so peers only go this way when they are of one user. Each sends by the [`Lane`] that it has
//! made, and takes what comes by those of others. The socket stays for two things: a byte wakes a peer that sleeps, and its end
//! is that of the peer.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;
use std::{mem, ptr};

use super::frame::{control_space, put};
use super::interface;
use super::name::{Name, is_link_local};
use super::ring::{self, Refused};
use super::socket::counted;
use crate::transport::Time;

/// Bytes before the packets of a message: how long each is, but perhaps the last, and their class of traffic.
pub(super) const PREFIX: usize = 4;

/// Peers that may wait to be heard.
const BACKLOG: libc::c_int = 1024;

/// What a message begins with.
pub(super) fn prefix(segment: usize, class: u8) -> [u8; PREFIX] {
    let [high, low] = (segment as u16).to_be_bytes();
    [high, low, class, 0]
}

/// What a message begins with, and its packets.
pub(super) fn split(message: &[u8]) -> Option<(usize, u8, &[u8])> {
    let ([high, low, class, 0], packets) = message.split_first_chunk::<PREFIX>()? else { return None };
    let segment = u16::from_be_bytes([*high, *low]).into();
    (segment > 0).then_some((segment, *class, packets))
}

/// What peers find at an address.
pub(super) struct Near {
    listener: OwnedFd,
    /// Says where something has come.
    poll: OwnedFd,
    address: IpAddr,
    /// Addresses of this host, those of loopback aside.
    own: Vec<IpAddr>,
}

impl Near {
    /// At that address. `None`: there is no such way there.
    pub(super) fn open(address: IpAddr) -> Option<Near> {
        let is_of_link = matches!(address, IpAddr::V6(v6) if is_link_local(&v6));
        if is_of_link {
            return None;
        }
        let (listener, name) = (socket().ok()?, Name::near(address));
        // SAFETY: the name is there, and so long; the rest are numbers.
        let poll = unsafe {
            counted(libc::bind(listener.as_raw_fd(), (&raw const name).cast(), name.near_len())).ok()?;
            counted(libc::listen(listener.as_raw_fd(), BACKLOG)).ok()?;
            owned(libc::epoll_create1(libc::EPOLL_CLOEXEC)).ok()?
        };
        let near = Near { listener, poll, address, own: interface::addresses() };
        near.hear(near.listener.as_fd(), LISTENER).ok()?;
        Some(near)
    }

    /// Whether that is an address of this host, and not of a link only.
    pub(super) fn is_near(&self, address: &IpAddr) -> bool {
        address.is_loopback() || self.own.contains(address)
    }

    /// As [`is_near`](Near::is_near), also of an address that this host was given since.
    pub(super) fn is_near_by_now(&self, address: &IpAddr) -> bool {
        self.is_near(address) || interface::addresses().contains(address)
    }

    /// To wait for what comes.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    /// A way to that peer. Its end is announced by that number: [`Ready::lane`].
    ///
    /// # Errors
    /// Nobody is there, or nobody of the same user, or whoever is there has many to listen to already, or there is no memory.
    pub(super) fn connect(&self, to: IpAddr, number: usize, now: Time) -> io::Result<Lane> {
        let (connection, name) = (socket()?, Name::near(to));
        // SAFETY: the name is there, and so long.
        unsafe { counted(libc::connect(connection.as_raw_fd(), (&raw const name).cast(), name.near_len()))? };
        is_of_this_user(connection.as_fd())?;
        let (ring, memory) = ring::Sender::new()?;
        // One time: a child of this process may keep the connection when it is closed here.
        self.watch(connection.as_fd(), LANE | number as u64, libc::EPOLLRDHUP | libc::EPOLLET)?;
        introduce(connection.as_fd(), self.address, memory.as_fd())?;
        Ok(Lane { connection, ring, seen: now, has_sent: false })
    }

    /// One who has come.
    ///
    /// # Errors
    /// Nobody, or what the system refuses.
    pub(super) fn accept(&self) -> io::Result<OwnedFd> {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no name is asked for.
        let accepted =
            unsafe { owned(libc::accept4(self.listener.as_raw_fd(), ptr::null_mut(), ptr::null_mut(), flags)) };
        match accepted {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR | libc::ECONNABORTED)) => {
                // There are too many: others go by UDP.
                self.forget(self.listener.as_fd());
                // SAFETY: numbers.
                unsafe { libc::shutdown(self.listener.as_raw_fd(), libc::SHUT_RDWR) };
                Err(error)
            }
            accepted => accepted.and_then(|caller| is_of_this_user(caller.as_fd()).map(|()| caller)),
        }
    }

    /// Says by that number when something has come there.
    pub(super) fn hear(&self, fd: BorrowedFd<'_>, number: u64) -> io::Result<()> {
        self.watch(fd, number, libc::EPOLLIN | libc::EPOLLRDHUP)
    }

    fn watch(&self, fd: BorrowedFd<'_>, number: u64, events: libc::c_int) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: number };
        // SAFETY: the event is there.
        let result =
            unsafe { libc::epoll_ctl(self.poll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) };
        counted(result).map(drop)
    }

    pub(super) fn forget(&self, fd: BorrowedFd<'_>) {
        // SAFETY: numbers.
        unsafe { libc::epoll_ctl(self.poll.as_raw_fd(), libc::EPOLL_CTL_DEL, fd.as_raw_fd(), ptr::null_mut()) };
    }

    /// Where something has come.
    pub(super) fn ready(&self) -> impl Iterator<Item = Ready> + use<> {
        const MOST: usize = 16;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MOST];
        // SAFETY: so many are there.
        let count = unsafe { libc::epoll_wait(self.poll.as_raw_fd(), events.as_mut_ptr(), MOST as libc::c_int, 0) };
        events.into_iter().take(usize::try_from(count).unwrap_or(0)).map(|event| Ready {
            number: event.u64,
            has_ended: event.events & (libc::EPOLLHUP | libc::EPOLLRDHUP | libc::EPOLLERR) as u32 != 0,
        })
    }
}

/// Where something has come.
pub(super) struct Ready {
    /// As it was [numbered](Near::hear).
    pub(super) number: u64,
    /// What comes is the last.
    pub(super) has_ended: bool,
}

impl Ready {
    /// The number of a way to a peer, which has ended.
    pub(super) fn lane(&self) -> Option<usize> {
        let is_lane = self.number & LANE != 0 && self.number != LISTENER;
        is_lane.then_some((self.number & !LANE) as usize)
    }
}

/// A way to a peer.
pub(crate) struct Lane {
    connection: OwnedFd,
    ring: ring::Sender,
    /// When it was known to be there.
    seen: Time,
    /// Something was added since the last [`kick`](Lane::kick).
    has_sent: bool,
}

impl Lane {
    /// Adds a message.
    ///
    /// # Errors
    /// `EAGAIN`: it takes no more for now. Any other: it is not there any more.
    pub(super) fn add(&mut self, message: &[u8], now: Time) -> io::Result<()> {
        if self.ring.is_closed() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if self.seen + SEEN <= now {
            self.look()?;
            self.seen = now;
        }
        self.has_sent = true;
        self.ring.add(message).map_err(|refused| match refused {
            Refused::Full => io::Error::from_raw_os_error(libc::EAGAIN),
            Refused::Broken => io::ErrorKind::InvalidData.into(),
        })
    }

    /// Wakes the peer, if it sleeps, for what was added. That it is not there any more is found later.
    pub(super) fn wake(&mut self) {
        if self.ring.wakes() && self.send_byte().is_err() {
            self.ring.sleeps_on();
        }
    }

    /// Wakes the peer's server if packets were added since the last call, although it has not asked to be woken.
    ///
    /// The server does not ask while it counts on its program to poll. The program may have stopped, and wait for memory to change.
    pub(super) fn kick(&mut self) {
        if std::mem::take(&mut self.has_sent) {
            // If the peer has ended, that is found later.
            _ = self.send_byte();
        }
    }

    fn send_byte(&self) -> io::Result<()> {
        // SAFETY: the byte is there.
        let sent = unsafe { libc::send(self.connection.as_raw_fd(), [0_u8].as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
        match counted(sent as libc::c_int) {
            // The socket is full of bytes that wake the peer already.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result.map(drop),
        }
    }

    /// Whether the peer has ever listened.
    pub(super) fn was_open(&self) -> bool {
        self.ring.was_open()
    }

    /// Whether the peer is there.
    pub(super) fn look(&self) -> io::Result<()> {
        // Whatever it has sent before: nothing is to come by this connection but its end.
        let mut poll = libc::pollfd { fd: self.connection.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one entry, and it is there. What it returns is looked at in the entry.
        unsafe { libc::poll(&raw mut poll, 1, 0) };
        if poll.revents == 0 { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    }
}

/// Says by a connection of which address it is, and hands over the memory by which packets come.
fn introduce(connection: BorrowedFd<'_>, address: IpAddr, memory: BorrowedFd<'_>) -> io::Result<()> {
    let hello = address.to_string();
    let mut part = libc::iovec { iov_base: hello.as_ptr().cast_mut().cast(), iov_len: hello.len() };
    let mut control = Descriptor::default();
    put(&mut control.0, (libc::SOL_SOCKET, libc::SCM_RIGHTS), &memory.as_raw_fd().to_ne_bytes());
    // SAFETY: zero is a value of each field. The message points to the text and the descriptor, which are there.
    unsafe {
        let mut header = mem::zeroed::<libc::msghdr>();
        (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
        (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), DESCRIPTOR as _);
        counted(libc::sendmsg(connection.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) as libc::c_int).map(drop)
    }
}

/// What a peer says first: of which address it is, and the memory by which its packets come.
///
/// # Errors
/// `WouldBlock`: nothing yet. Any other: it is no peer.
pub(super) fn introduction(connection: BorrowedFd<'_>) -> io::Result<(IpAddr, OwnedFd)> {
    let mut text = [0_u8; 64];
    let mut part = libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: text.len() };
    let mut control = Descriptor::default();
    // SAFETY: zero is a value of each field. The message points to where there is room for the text and one descriptor. What
    // the kernel writes there is whole, as is a descriptor in it, which is new and nobody else's; those without room it closes.
    // There would be room for a second one in what is there for alignment alone, of which it is not told.
    let (len, memory) = unsafe {
        let mut header = mem::zeroed::<libc::msghdr>();
        (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
        let len_of_one = libc::CMSG_LEN(mem::size_of::<libc::c_int>() as u32);
        (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), len_of_one as _);
        let len =
            counted(libc::recvmsg(connection.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) as libc::c_int)?;
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        let is_one = !first.is_null()
            && ((*first).cmsg_level, (*first).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS)
            && (*first).cmsg_len as usize == len_of_one as usize;
        let fd = is_one.then(|| libc::CMSG_DATA(first).cast::<libc::c_int>().read_unaligned());
        (len, fd.map(|fd| OwnedFd::from_raw_fd(fd)))
    };
    let address = std::str::from_utf8(&text[..len]).ok().and_then(|text| text.parse().ok());
    address.zip(memory).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reads one of the bytes by which a peer wakes this end.
pub(super) fn take_wake(connection: BorrowedFd<'_>) {
    // SAFETY: there is room for a byte. The call has no room for descriptors, so the kernel discards any that arrive.
    unsafe { libc::recv(connection.as_raw_fd(), [0_u8].as_mut_ptr().cast(), 1, 0) };
}

/// Takes away the bytes that peers send by a connection after that. What is left of many is announced again, as is an end.
pub(super) fn take_wakes(connection: BorrowedFd<'_>) {
    /// Peers send one until it is taken.
    const MOST: usize = 16;
    let mut bytes = [0_u8; 16];
    for _ in 0..MOST {
        // SAFETY: so many bytes are there to be written. Without room for them, descriptors that come go nowhere.
        let came = unsafe { libc::recv(connection.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if came <= 0 {
            break;
        }
    }
}

/// Bytes of a control message with one descriptor.
const DESCRIPTOR: usize = control_space(mem::size_of::<libc::c_int>());

/// Memory for it, aligned as it has to be.
#[derive(Default)]
#[repr(C, align(8))]
struct Descriptor([u8; DESCRIPTOR]);

/// For how long a peer is taken to be there that was.
const SEEN: Duration = Duration::from_millis(1);

/// What somebody new is announced by,
pub(super) const LISTENER: u64 = u64::MAX;

/// and, with its number, the end of a way to a peer.
const LANE: u64 = 1 << 63;

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: numbers.
    unsafe { owned(libc::socket(libc::AF_UNIX, kind, 0)) }
}

/// # Safety
/// A new descriptor, or negative and `errno` says why.
unsafe fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    counted(fd)?;
    // SAFETY: the caller's promise.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn is_of_this_user(peer: BorrowedFd<'_>) -> io::Result<()> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both are there, and the first is so long.
    let (result, own) = unsafe {
        let to = (&raw mut credentials).cast();
        (libc::getsockopt(peer.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len), libc::geteuid())
    };
    counted(result)?;
    if credentials.uid == own { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_read_as_it_was_written() {
        let message = [&prefix(0xfe01, 0xb8)[..], b"packets"].concat();
        assert_eq!(split(&message), Some((0xfe01, 0xb8, &b"packets"[..])));
        for wrong in [&b""[..], b"\0\x01\0", b"\0\0\0\0packet", b"\0\x01\0\x01packet"] {
            assert_eq!(split(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn of_two_descriptors_none_stays() {
        let (mut ends, mut pipe) = ([0; 2], [0; 2]);
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: there is room for two descriptors, twice.
        unsafe {
            counted(libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr())).unwrap();
            counted(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK)).unwrap();
        }
        // SAFETY: descriptors that were made just now.
        let [from, to, read, write] =
            [ends[0], ends[1], pipe[0], pipe[1]].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let mut part = libc::iovec { iov_base: c"127.0.0.1".as_ptr().cast_mut().cast(), iov_len: 9 };
        let mut control = [0_u64; 4];
        // SAFETY: zero is a value of each field. The message points to what is there.
        unsafe {
            let two = [write.as_raw_fd(); 2].map(i32::to_ne_bytes).concat();
            let bytes = std::slice::from_raw_parts_mut(control.as_mut_ptr().cast::<u8>(), mem::size_of_val(&control));
            let len = put(bytes, (libc::SOL_SOCKET, libc::SCM_RIGHTS), &two);
            let mut header = mem::zeroed::<libc::msghdr>();
            (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
            (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), len as _);
            counted(libc::sendmsg(from.as_raw_fd(), &raw const header, 0) as libc::c_int).unwrap();
        }
        drop(introduction(to.as_fd()));
        drop(write);
        // SAFETY: there is room for a byte.
        let end = unsafe { libc::read(read.as_raw_fd(), [0_u8].as_mut_ptr().cast(), 1) };
        assert_eq!(end, 0, "somebody has the other end still");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn an_address_that_came_later_is_near() {
        let mut near = Near::open("127.77.3.9".parse().unwrap()).unwrap();
        for address in std::mem::take(&mut near.own) {
            assert!(!near.is_near(&address) && near.is_near_by_now(&address), "{address}");
        }
        assert!(!near.is_near_by_now(&"203.0.113.5".parse().unwrap()));
    }
}
