//! Peers on this host that violate the protocol of shared memory.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use super::shm::{is_woken, open};
use super::*;
use crate::net::Inbox;
use crate::net::shm_handshake::{self, Descriptors};
use crate::net::{ring, shm, unix};

/// A connection to this address, with a handshake that passes this descriptor as the wake-up.
fn connect(to: &Socket, wakeup: &OwnedFd) -> OwnedFd {
    let connection = unix::socket(libc::SOCK_SEQPACKET).unwrap();
    unix::connect(connection.as_fd(), &shm::name(to.address())).unwrap();
    let (_ring, memory) = ring::Sender::new().unwrap();
    let passed = Descriptors { memory: memory.as_fd(), wakeup: wakeup.as_fd() };
    shm_handshake::send(connection.as_fd(), &shm_handshake::encode(to.address()), &passed).unwrap();
    connection
}

fn eventfd(flags: libc::c_int) -> OwnedFd {
    // SAFETY: the arguments are numbers, and the descriptor is new and owned by nobody else.
    unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC | flags)) }
}

fn pipe(flags: libc::c_int) -> [OwnedFd; 2] {
    let mut ends = [0; 2];
    // SAFETY: there is room for two descriptors, which are new and owned by nobody else.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | flags), 0);
        ends.map(|end| OwnedFd::from_raw_fd(end))
    }
}

/// Whether `to` has closed the connection.
fn is_closed(connection: &OwnedFd) -> bool {
    let mut poll = libc::pollfd { fd: connection.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: the array has one valid entry.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn only_an_eventfd_is_accepted_as_a_wakeup() {
    let (to, mut inbox) = (open(), Inbox::new());
    // SAFETY: the argument is a number, and the descriptor is new and owned by nobody else.
    let epoll = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
    let [read, _write] = pipe(libc::O_NONBLOCK);
    let socket = unix::socket(libc::SOCK_SEQPACKET).unwrap();
    let random = OwnedFd::from(std::fs::File::open("/dev/urandom").unwrap());
    let refused = [epoll, read, socket, random].map(|descriptor| (descriptor, false));
    // Reads do not wait, whatever its flags.
    let accepted = [0, libc::EFD_NONBLOCK].map(|flags| (eventfd(flags), true));
    for (at, (wakeup, is_accepted)) in refused.into_iter().chain(accepted).enumerate() {
        let connection = connect(&to, &wakeup);
        assert!(!inbox.receive(&to, |_, _| unreachable!()));
        assert_eq!(is_closed(&connection), !is_accepted, "{at}");
    }
    assert!(inbox.arm_wakeup(), "nothing waits, although one eventfd would block");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_that_raises_its_wakeup_without_end_is_disconnected() {
    let (to, mut inbox) = (open(), Inbox::new());
    let wakeup = eventfd(libc::EFD_NONBLOCK | libc::EFD_SEMAPHORE);
    // Each read takes one.
    let count = 1_u64 << 40;
    // SAFETY: the call reads eight bytes, the size of `count`.
    assert_eq!(unsafe { libc::write(wakeup.as_raw_fd(), (&raw const count).cast(), 8) }, 8);
    let connection = connect(&to, &wakeup);
    let mut raised = 0;
    while !is_closed(&connection) {
        assert!(!inbox.receive(&to, |_, _| unreachable!()));
        inbox.arm_wakeup();
        raised += 1;
        assert!(raised < 10_000, "it is still connected");
    }
    assert!(raised > 100, "{raised}: a few are possible");
    assert!(!is_woken(&to));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn bytes_after_the_handshake_end_the_connection() {
    let (to, mut inbox) = (open(), Inbox::new());
    let connection = connect(&to, &eventfd(libc::EFD_NONBLOCK));
    assert!(!inbox.receive(&to, |_, _| unreachable!()));
    assert!(!is_closed(&connection));
    // SAFETY: the byte is valid.
    assert_eq!(unsafe { libc::send(connection.as_raw_fd(), [0_u8].as_ptr().cast(), 1, 0) }, 1);
    assert!(!inbox.receive(&to, |_, _| unreachable!()));
    assert!(is_closed(&connection));
    assert!(!is_woken(&to));
}
