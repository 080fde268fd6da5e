//! Reading the program's memory, which may be unmapped or changed at any time.

#![allow(unsafe_code)]

use std::io;

/// Largest block that is read at once, so that it stays in the processor's cache. It lies in one page of any machine.
const BLOCK: u64 = 4096;

/// Memory for a block, so that not every comparison has to initialise some.
pub(super) type Scratch = [u8; BLOCK as usize];

/// The parts of a range in each page.
fn blocks(address: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = address + len;
    let next = move |at: u64| (at < end).then(|| (at, end.min((at / BLOCK + 1) * BLOCK)));
    std::iter::successors(next(address), move |(_, until)| next(*until)).map(|(from, until)| (from, until - from))
}

/// Copies memory of this process to `to`. Returns `false` if a part of it is not readable.
pub(super) fn read(address: u64, to: &mut [u8]) -> bool {
    let len = to.len() as u64;
    blocks(address, len).all(|(at, len)| {
        let from = (at - address) as usize;
        is_page_readable(at) && {
            read_page(at, &mut to[from..from + len as usize]);
            true
        }
    })
}

/// Compares memory of this process with `expected`, and copies it there. Returns the offset of the first difference.
///
/// Memory that is not readable is not compared. With `is_readable` the caller has checked that.
pub(super) fn update(address: u64, expected: &mut [u8], is_readable: bool, scratch: &mut Scratch) -> Option<usize> {
    let mut first = None;
    for (at, len) in blocks(address, expected.len() as u64) {
        if !is_readable && !is_page_readable(at) {
            continue;
        }
        let from = (at - address) as usize;
        let (expected, found) = (&mut expected[from..from + len as usize], &mut scratch[..len as usize]);
        read_page(at, found);
        if expected != found {
            first = first.or_else(|| {
                let differs = |(expected, found): (&u8, &u8)| expected != found;
                expected.iter().zip(found.iter()).position(differs).map(|offset| from + offset)
            });
            expected.copy_from_slice(found);
        }
    }
    first
}

/// Whether all pages of a range are readable.
pub(crate) fn is_readable(address: u64, len: u64) -> bool {
    blocks(address, len).all(|(at, _)| is_page_readable(at))
}

/// Reads memory in a page that was readable a moment ago.
///
/// A program that unmaps the page at this moment in another thread crashes, as it may without the checker.
fn read_page(address: u64, to: &mut [u8]) {
    // SAFETY: the page is readable. The program may write to it at the same time, so this reads atomically. `to` is borrowed
    // mutably.
    unsafe { rdma_sys::dma::read(address as usize as *const u8, to.as_mut_ptr(), to.len()) };
}

/// Whether the page of an address is readable.
///
/// `rt_sigprocmask(2)` reads a word of memory, and then fails because of its first argument. It is the fastest system call that
/// reports a fault.
fn is_page_readable(address: u64) -> bool {
    const WORD: u64 = 8;
    let word = (address & !(WORD - 1)) as usize;
    // SAFETY: the kernel reads the word if it can, and changes nothing.
    let result = unsafe { libc::syscall(libc::SYS_rt_sigprocmask, -1, word, 0, WORD) };
    result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
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
        bytes[9] = 1;
        let mut scratch = [0; BLOCK as usize];
        assert_eq!((update(address, &mut bytes, false, &mut scratch), bytes[9]), (Some(9), 0));
        assert_eq!(update(address, &mut bytes, false, &mut scratch), None);
        // SAFETY: both pages are still mapped, and nothing refers to them.
        assert_eq!(unsafe { libc::munmap(address as usize as *mut libc::c_void, LEN) }, 0);
    }
}
