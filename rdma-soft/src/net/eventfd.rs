//! Reading `eventfd(2)`s.

use std::io;
use std::os::fd::RawFd;

/// Bytes of a count.
const BYTES: usize = size_of::<u64>();

/// Reads a count without waiting, whatever the flags of the descriptor.
///
/// # Errors
/// `EAGAIN` if the count is zero. Before Linux 5.8, another error. Other descriptors may also return fewer bytes.
pub(crate) fn read_now(fd: RawFd) -> io::Result<()> {
    let mut count = 0_u64;
    let part = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: BYTES };
    let here: libc::c_long = -1;
    // SAFETY: the kernel writes at most eight bytes, the size of `count`. The offset -1 is the current file position: `preadv2(2)`.
    check(unsafe { libc::syscall(libc::SYS_preadv2, fd, &raw const part, 1, here, here, libc::RWF_NOWAIT) } as isize)
}

/// Reads a count. Waits while it is zero, unless the descriptor is non-blocking.
///
/// # Errors
/// `EAGAIN`, `EINTR`. Other descriptors may also return fewer bytes.
pub(crate) fn read(fd: RawFd) -> io::Result<()> {
    let mut count = 0_u64;
    // SAFETY: the kernel writes at most eight bytes, the size of `count`.
    check(unsafe { libc::read(fd, (&raw mut count).cast(), BYTES) })
}

fn check(read: isize) -> io::Result<()> {
    match usize::try_from(read) {
        Ok(BYTES) => Ok(()),
        Ok(_) => Err(io::ErrorKind::InvalidData.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
