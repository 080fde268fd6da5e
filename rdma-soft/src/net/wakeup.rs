//! What wakes a same-host peer that sleeps: an `eventfd(2)`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use super::socket::{check_neg, owned};

/// An eventfd that the sender raises. The receiver watches it with epoll.
///
/// To pass a byte through a socket would take 1.5 µs longer: the kernel allocates a message for it.
///
/// Both ends share its count and its flags. A receiver that fills the count and lets the descriptor block could make
/// [`raise`](Wakeup::raise) wait. Reads never wait.
pub(super) struct Wakeup(OwnedFd);

/// Bytes of a count.
const COUNT: usize = size_of::<u64>();

impl Wakeup {
    /// An eventfd to pass to the receiver.
    pub(super) fn new() -> io::Result<Wakeup> {
        // SAFETY: the arguments are numbers, and the descriptor is new.
        unsafe { owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }.map(Wakeup)
    }

    /// The eventfd that a sender has passed.
    ///
    /// # Errors
    /// It is another kind of descriptor, which may wait when it is read, or stay readable.
    pub(super) fn from_peer(fd: OwnedFd) -> io::Result<Wakeup> {
        let wakeup = Wakeup(fd);
        // First, because `fstat` of some files waits. They cannot be read without waiting.
        wakeup.clear()?;
        // SAFETY: all fields may be zero.
        let mut stat = unsafe { std::mem::zeroed::<libc::stat>() };
        // SAFETY: `stat` is valid for writes.
        check_neg(unsafe { libc::fstat(wakeup.0.as_raw_fd(), &raw mut stat) })?;
        // Sockets, pipes and files have a type. Of the others that can be read like this, none is always readable.
        if stat.st_mode & libc::S_IFMT == 0 { Ok(wakeup) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Wakes the receiver.
    pub(super) fn raise(&self) {
        let one = 1_u64;
        // SAFETY: the call reads eight bytes, the size of `one`. It fails only if the receiver has not cleared the maximum.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), COUNT) };
    }

    /// Forgets all wake-ups so far.
    ///
    /// # Errors
    /// It is no eventfd.
    pub(super) fn clear(&self) -> io::Result<()> {
        let read = if reads_without_waiting() { read_now(self.fd()) } else { read(self.fd()) };
        match read {
            Ok(COUNT) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Ok(_) => Err(io::ErrorKind::InvalidData.into()),
            Err(error) => Err(error),
        }
    }
}

/// Whether [`read_now`] reads eventfds: since Linux 5.8.
fn reads_without_waiting() -> bool {
    static READS: OnceLock<bool> = OnceLock::new();
    *READS.get_or_init(|| {
        let read = Wakeup::new().and_then(|own| read_now(own.fd()));
        read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    })
}

/// Reads a count. Fails instead of waiting, whatever the flags of the descriptor.
fn read_now(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut count = 0_u64;
    let part = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: COUNT };
    let here: libc::c_long = -1;
    // SAFETY: the kernel writes at most eight bytes, the size of `count`. The offset -1 is the current position: `preadv2(2)`.
    let read =
        unsafe { libc::syscall(libc::SYS_preadv2, fd.as_raw_fd(), &raw const part, 1, here, here, libc::RWF_NOWAIT) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// Reads a count. Waits only if the peer has changed the flags of the descriptor.
fn read(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut count = 0_u64;
    // SAFETY: the kernel writes at most eight bytes, the size of `count`.
    let read = unsafe { libc::read(fd.as_raw_fd(), (&raw mut count).cast(), COUNT) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}
