//! What wakes a same-host peer that sleeps: an `eventfd(2)`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::socket::owned;

/// An eventfd, whose sender raises it, and whose receiver has it in a set of descriptors.
///
/// To pass a byte through a socket would take 1.5 µs longer: the kernel allocates a message for it.
pub(super) struct Wakeup(OwnedFd);

impl Wakeup {
    /// An eventfd to pass to the receiver.
    pub(super) fn new() -> io::Result<Wakeup> {
        // SAFETY: the arguments are numbers, and the descriptor is new.
        unsafe { owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }.map(Wakeup)
    }

    /// The eventfd that a sender has passed.
    pub(super) fn passed(fd: OwnedFd) -> Wakeup {
        Wakeup(fd)
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
    pub(super) fn clear(&self) {
        let mut count = 0_u64;
        // SAFETY: the kernel writes at most eight bytes, the size of `count`. The call fails if there were none.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), size_of_val(&count)) };
    }
}
