//! The shorter way between peers on one host: Unix sockets, which one peer finds by the address of the other.
//!
//! What goes there is what would go by UDP, behind a [`prefix`]. It takes less time, and nothing gets lost on it: the kernel says
//! when a peer has enough. Names are of a network namespace, as addresses are, and anybody may have any: so peers only go this way
//! when they are of one user. Each sends on the connection that it has made, and takes what comes on those of others.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::{mem, ptr};

use super::LONGEST;
use super::interface;
use super::name::{Name, is_link_local};
use super::socket::{counted, enlarge};

/// Bytes before the packets of a message: how long each is, but perhaps the last, and their class of traffic.
pub(super) const PREFIX: usize = 4;

/// Bytes that a connection may hold: a peer that has to wait for a processor finds enough to do then.
const BUFFER: libc::c_int = 4 << 20;

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
        near.watch(near.listener.as_fd(), LISTENER).ok()?;
        Some(near)
    }

    /// Whether that is an address of this host, and not of a link only.
    pub(super) fn is_near(&self, address: &IpAddr) -> bool {
        address.is_loopback() || self.own.contains(address)
    }

    /// To wait for what comes.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    /// A way to that peer.
    ///
    /// # Errors
    /// Nobody is there, or nobody of the same user, or whoever is there has many to listen to already.
    pub(super) fn connect(&self, to: IpAddr) -> io::Result<OwnedFd> {
        let (connection, name) = (socket()?, Name::near(to));
        let room = enlarge(connection.as_fd(), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF), BUFFER)?;
        // Of what a socket may hold, the longest message takes more than its bytes.
        if room < 2 * LONGEST {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let hello = self.address.to_string();
        // SAFETY: the name and the text are there, and so long.
        unsafe {
            counted(libc::connect(connection.as_raw_fd(), (&raw const name).cast(), name.near_len()))?;
            is_of_this_user(connection.as_fd())?;
            let fd = connection.as_raw_fd();
            counted(libc::send(fd, hello.as_ptr().cast(), hello.len(), libc::MSG_NOSIGNAL) as libc::c_int)?;
        }
        Ok(connection)
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
    pub(super) fn watch(&self, fd: BorrowedFd<'_>, number: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: number };
        // SAFETY: the event is there.
        let result =
            unsafe { libc::epoll_ctl(self.poll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) };
        counted(result).map(drop)
    }

    pub(super) fn forget(&self, fd: BorrowedFd<'_>) {
        // SAFETY: numbers.
        unsafe { libc::epoll_ctl(self.poll.as_raw_fd(), libc::EPOLL_CTL_DEL, fd.as_raw_fd(), ptr::null_mut()) };
    }

    /// Where something has come, as it is numbered.
    pub(super) fn ready(&self) -> impl Iterator<Item = u64> + use<> {
        const MOST: usize = 16;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MOST];
        // SAFETY: so many are there.
        let count = unsafe { libc::epoll_wait(self.poll.as_raw_fd(), events.as_mut_ptr(), MOST as libc::c_int, 0) };
        events.into_iter().take(usize::try_from(count).unwrap_or(0)).map(|event| event.u64)
    }
}

/// What somebody new is announced by.
pub(super) const LISTENER: u64 = u64::MAX;

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
}
