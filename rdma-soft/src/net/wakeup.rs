//! What wakes a same-host peer that sleeps: an `eventfd(2)`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use super::eventfd;
use super::socket::{check_neg, owned};

/// An eventfd that the sender raises. The receiver watches it with epoll.
///
/// To pass a byte through a socket would take 1.5 µs longer: the kernel allocates a message for it.
///
/// Both ends share its count and its flags. A receiver that fills the count and lets the descriptor block could make
/// [`raise`](Wakeup::raise) wait. Before Linux 5.8, a sender could make [`clear`](Wakeup::clear) wait in the same way.
pub(super) struct Wakeup(OwnedFd);

impl Wakeup {
    /// An eventfd to pass to the receiver.
    pub(super) fn new() -> io::Result<Wakeup> {
        // SAFETY: the arguments are numbers, and the descriptor is new.
        unsafe { owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }.map(Wakeup)
    }

    /// The eventfd that a sender has passed.
    ///
    /// # Errors
    /// It is another kind of descriptor: to read it may take for ever, or it may always be readable.
    pub(super) fn from_peer(fd: OwnedFd) -> io::Result<Wakeup> {
        let wakeup = Wakeup(fd);
        // First, because `fstat` of some files waits. They cannot be read without waiting.
        wakeup.clear()?;
        // SAFETY: all fields may be zero.
        let mut stat = unsafe { std::mem::zeroed::<libc::stat>() };
        // SAFETY: `stat` is valid for writes.
        check_neg(unsafe { libc::fstat(wakeup.0.as_raw_fd(), &raw mut stat) })?;
        // Sockets, pipes and files have a type. A peer that keeps another descriptor readable is disconnected later.
        if stat.st_mode & libc::S_IFMT == 0 { Ok(wakeup) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Wakes the receiver.
    pub(super) fn raise(&self) {
        let one = 1_u64;
        // SAFETY: the call reads eight bytes, the size of `one`. It fails only if the receiver has not cleared the maximum.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), size_of_val(&one)) };
    }

    /// Forgets all wake-ups so far.
    ///
    /// # Errors
    /// It is no eventfd.
    pub(super) fn clear(&self) -> io::Result<()> {
        let fd = self.0.as_raw_fd();
        let read = if reads_without_waiting() { eventfd::read_now(fd) } else { eventfd::read(fd) };
        match read {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            read => read,
        }
    }
}

/// Whether [`eventfd::read_now`] reads eventfds: since Linux 5.8.
fn reads_without_waiting() -> bool {
    static READS: OnceLock<bool> = OnceLock::new();
    *READS.get_or_init(|| {
        let read = Wakeup::new().and_then(|own| eventfd::read_now(own.0.as_raw_fd()));
        read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    })
}
