//! Peers on this host that violate the protocol of shared memory.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use super::shm::{is_woken, open};
use super::*;
use crate::net::Inbox;
use crate::net::shm_handshake::{self, Passed};
use crate::net::{ring, shm, unix};

/// A connection to this address, with a handshake that passes this descriptor as the wake-up.
fn connect(to: &Socket, wakeup: &OwnedFd) -> OwnedFd {
    let connection = unix::socket(libc::SOCK_SEQPACKET).unwrap();
    unix::connect(connection.as_fd(), &shm::name(to.address())).unwrap();
    let (_ring, memory) = ring::Sender::new().unwrap();
    let passed = Passed { memory: memory.as_fd(), wakeup: wakeup.as_fd() };
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
fn a_wakeup_that_would_block_is_refused() {
    let (to, mut inbox) = (open(), Inbox::new());
    for (wakeup, is_accepted) in [(eventfd(0), false), (eventfd(libc::EFD_NONBLOCK), true)] {
        let connection = connect(&to, &wakeup);
        assert!(!inbox.receive(&to, |_, _| unreachable!()));
        assert_eq!(is_closed(&connection), !is_accepted);
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_wakeup_that_has_ended_ends_the_connection() {
    let _lock = without_new_processes();
    let (to, mut inbox) = (open(), Inbox::new());
    let [read, write] = pipe(libc::O_NONBLOCK);
    let connection = connect(&to, &read);
    assert!(!inbox.receive(&to, |_, _| unreachable!()) && !is_closed(&connection));
    drop(write);
    assert!(!inbox.receive(&to, |_, _| unreachable!()) && is_closed(&connection));
    assert!(!is_woken(&to), "it does not wake this side again and again");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn bytes_after_the_handshake_end_the_connection() {
    let (to, mut inbox) = (open(), Inbox::new());
    let connection = connect(&to, &eventfd(libc::EFD_NONBLOCK));
    assert!(!inbox.receive(&to, |_, _| unreachable!()) && !is_closed(&connection));
    // SAFETY: the byte is valid.
    assert_eq!(unsafe { libc::send(connection.as_raw_fd(), [0_u8].as_ptr().cast(), 1, 0) }, 1);
    assert!(!inbox.receive(&to, |_, _| unreachable!()) && is_closed(&connection));
    assert!(!is_woken(&to));
}
