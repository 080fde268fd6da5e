//! Reading the program's memory, which may be unmapped or changed at any time.

#![allow(unsafe_code)]

use std::io;

/// Copies memory of this process to `to`. Returns `false` if a part of it is not readable.
///
/// The kernel copies, so memory that the program unmaps or writes at the same time does no harm.
pub(super) fn read(address: u64, to: &mut [u8]) -> bool {
    let mut done = 0;
    while done < to.len() {
        let local = libc::iovec { iov_base: to[done..].as_mut_ptr().cast(), iov_len: to.len() - done };
        let remote = libc::iovec { iov_base: (address as usize + done) as *mut libc::c_void, iov_len: to.len() - done };
        match copy(&local, &[remote]) {
            Ok(0) | Err(()) => return false,
            Ok(count) => done += count,
        }
    }
    true
}

/// Whether the first and the last byte of a range are readable.
pub(crate) fn is_readable(address: u64, len: u64) -> bool {
    if len == 0 {
        return true;
    }
    let mut bytes = [0_u8; 2];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 2 };
    let ends = [address, address + (len - 1)];
    let remote = ends.map(|at| libc::iovec { iov_base: at as usize as *mut libc::c_void, iov_len: 1 });
    copy(&local, &remote) == Ok(2)
}

/// Copies memory of this process. A kernel or a sandbox that refuses the call counts as if all memory were readable and zero.
fn copy(local: &libc::iovec, remote: &[libc::iovec]) -> Result<usize, ()> {
    // SAFETY: `local` describes bytes that the caller borrows mutably. The kernel checks the remote addresses.
    let count =
        unsafe { libc::process_vm_readv(libc::getpid(), local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
    match usize::try_from(count) {
        Ok(count) => Ok(count),
        Err(_) if io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) => Err(()),
        Err(_) => Ok(local.iov_len),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "it calls the kernel")]
    fn memory_is_read_unless_it_is_inaccessible() {
        const LEN: usize = 8192;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping overlaps no memory that is in use.
        let address = unsafe {
            let at = libc::mmap(std::ptr::null_mut(), LEN, protection, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            at.cast::<u8>().write(7);
            at as u64
        };
        let mut bytes = [1; LEN];
        assert!(read(address, &mut bytes) && is_readable(address, LEN as u64));
        assert_eq!((bytes[0], bytes[LEN - 1]), (7, 0));
        // A page that is only unmapped could be mapped again by another thread.
        // SAFETY: nothing refers to the page.
        let second = unsafe {
            let second = (address + 4096) as usize as *mut libc::c_void;
            libc::mmap(second, 4096, libc::PROT_NONE, flags | libc::MAP_FIXED, -1, 0)
        };
        assert_eq!(second as u64, address + 4096);
        assert!(is_readable(address, 4096) && !is_readable(address, 4097));
        assert!(!read(address, &mut bytes));
        // SAFETY: both pages are still mapped, and nothing refers to them.
        assert_eq!(unsafe { libc::munmap(address as usize as *mut libc::c_void, LEN) }, 0);
    }
}
