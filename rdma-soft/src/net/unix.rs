//! Unix sockets with names in the abstract namespace.
//!
//! Such a name belongs to a network namespace, as addresses do. Any process may bind any free name, and the kernel frees it when
//! its last owner exits. Sockets of different types do not share their names.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::{io, mem, ptr};

use super::sockaddr::SockAddr;
use super::socket::{check_neg, owned};

/// Maximum connections that wait to be accepted. The kernel may have a lower limit (`net.core.somaxconn`).
const BACKLOG: libc::c_int = 1024;

/// Creates a nonblocking socket of this type.
pub(super) fn socket(kind: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the arguments are numbers, and the descriptor is new.
    unsafe { owned(libc::socket(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0)) }
}

/// Creates a socket with a name.
///
/// # Errors
/// `EADDRINUSE` if another socket of this type has the name.
pub(super) fn bind(kind: libc::c_int, name: &SockAddr) -> io::Result<OwnedFd> {
    let socket = socket(kind)?;
    // SAFETY: the name is valid and has this length.
    check_neg(unsafe { libc::bind(socket.as_raw_fd(), (&raw const *name).cast(), name.unix_len()) })?;
    Ok(socket)
}

/// Makes a socket accept connections.
pub(super) fn listen(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the arguments are numbers.
    check_neg(unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) }).map(drop)
}

/// Connects a socket to the socket with a name. The call never waits.
///
/// # Errors
/// `ECONNREFUSED` if no socket has the name, or if it does not listen. `EAGAIN` if too many connections wait there.
pub(super) fn connect(socket: BorrowedFd<'_>, name: &SockAddr) -> io::Result<()> {
    // SAFETY: the name is valid and has this length.
    check_neg(unsafe { libc::connect(socket.as_raw_fd(), (&raw const *name).cast(), name.unix_len()) }).map(drop)
}

/// Ends all communication of a socket, even if a child process holds it.
pub(super) fn shut_down(socket: BorrowedFd<'_>) {
    // SAFETY: the arguments are numbers. The call fails only if the socket is not connected.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Returns the user of the process at the other end: the one that has connected, or the one that listens.
pub(super) fn peer_user(connection: BorrowedFd<'_>) -> io::Result<libc::uid_t> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = mem::size_of::<libc::ucred>() as libc::socklen_t;
    let to = (&raw mut credentials).cast();
    // SAFETY: both variables are valid for writes, and `len` is the size of the first.
    check_neg(unsafe {
        libc::getsockopt(connection.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut len)
    })?;
    Ok(credentials.uid)
}

/// Returns the user of this process.
pub(super) fn own_user() -> libc::uid_t {
    // SAFETY: the call has no arguments.
    unsafe { libc::geteuid() }
}

/// A descriptor that is closed to accept one more connection while the process has no free descriptor.
///
/// A connection that cannot be accepted would stay readable forever, so a thread that waits for it would spin.
#[derive(Default)]
pub(super) struct Reserve(Option<OwnedFd>);

impl Reserve {
    /// Opens the descriptor again if it was used and another one has become free.
    pub(super) fn refill(&mut self) {
        if self.0.is_none() {
            // SAFETY: the arguments are numbers, and the descriptor is new.
            self.0 = unsafe { owned(libc::eventfd(0, libc::EFD_CLOEXEC)) }.ok();
        }
    }
}

/// A connection that was accepted.
pub(super) enum Accepted {
    Normal(OwnedFd),
    /// It took the [`Reserve`]. Close it at once, and refill the reserve.
    Last(OwnedFd),
}

/// Why no connection was accepted.
pub(super) enum AcceptError {
    /// No connection is pending, or it has ended.
    Retry(io::Error),
    /// The system has no descriptor or memory. The connection stays pending.
    Exhausted(io::Error),
}

/// Accepts a connection. It is nonblocking.
pub(super) fn accept(listener: BorrowedFd<'_>, reserve: &mut Reserve) -> Result<Accepted, AcceptError> {
    let accept = || {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: null pointers request no address, and the descriptor is new.
        unsafe { owned(libc::accept4(listener.as_raw_fd(), ptr::null_mut(), ptr::null_mut(), flags)) }.map_err(classify)
    };
    match accept() {
        // Closing a descriptor does not help if memory is missing, but does no harm either.
        Err(AcceptError::Exhausted(_)) if reserve.0.take().is_some() => {
            accept().map(Accepted::Last).inspect_err(|_| {
                reserve.refill();
            })
        }
        result => result.map(Accepted::Normal),
    }
}

fn classify(error: io::Error) -> AcceptError {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR | libc::ECONNABORTED) => AcceptError::Retry(error),
        _ => AcceptError::Exhausted(error),
    }
}
