//! Whether memory that a program registers is mapped.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Pages from which two queries are faster than populating resident memory, which takes about 0.2 µs a page.
const MANY_PAGES: u64 = 24;

/// Whether the pages of a range are readable, and if `is_written` writable. Populates them, as a device that pins them would,
/// except anonymous memory that is resident already (Linux 6.11).
///
/// Linux before 5.14 cannot populate pages, so every range passes there.
pub(super) fn is_mapped(address: u64, len: u64, is_written: bool) -> bool {
    let page = page_size();
    let start = address & !(page - 1);
    let Some(end) = address.checked_add(len).and_then(|end| end.checked_next_multiple_of(page)) else { return false };
    let is_large = end - start >= MANY_PAGES * page;
    let permission = if is_written { WRITABLE } else { READABLE };
    // There is memory that the kernel refuses for other reasons, such as a protection key. So try a page of each mapping.
    let takes_page = |start| populate(start..start + page, is_written);
    let is_known = is_large && is_resident(start..end) && check_anonymous(start..end, permission, takes_page).is_ok();
    is_known || populate(start..end, is_written)
}

fn populate(range: Range<u64>, is_written: bool) -> bool {
    let advice = if is_written { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    let (start, len) = (range.start as usize as *mut libc::c_void, (range.end - range.start) as usize);
    // SAFETY: populating pages changes no content. It fails if no memory is mapped.
    let failed = unsafe { libc::madvise(start, len, advice) } != 0;
    !failed || io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) && !supports_populate()
}

fn supports_populate() -> bool {
    let (byte, page) = (0_u8, page_size());
    let start = (&raw const byte).addr() & !(page as usize - 1);
    // SAFETY: populating a page of the stack changes nothing.
    unsafe { libc::madvise(start as *mut libc::c_void, page as usize, libc::MADV_POPULATE_READ) == 0 }
}

/// The page size of this machine, a power of two.
fn page_size() -> u64 {
    // SAFETY: the function takes a number and returns one.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

/// Whether all pages of a range are in memory: `mincore(2)`.
fn is_resident(range: Range<u64>) -> bool {
    // Miri has no pages.
    if cfg!(miri) {
        return false;
    }
    let (mut resident, page) = ([0_u8; 1024], page_size());
    let step = resident.len() as u64 * page;
    let mut starts = (range.start..range.end).step_by(step as usize);
    starts.all(|start| {
        let len = step.min(range.end - start);
        let resident = &mut resident[..(len / page) as usize];
        // SAFETY: the kernel writes a byte for each page, and reads no memory of the range.
        let result = unsafe { libc::mincore(start as usize as *mut libc::c_void, len as usize, resident.as_mut_ptr()) };
        result == 0 && resident.iter().all(|byte| byte & 1 != 0)
    })
}

/// The question `PROCMAP_QUERY` about a mapping, and its answer: `struct procmap_query` of Linux's `linux/fs.h`.
#[derive(Default)]
#[repr(C)]
struct MappingQuery {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    permissions: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: u64 = 3 << 30 | (size_of::<MappingQuery>() as u64) << 16 | (b'f' as u64) << 8 | 17;

const READABLE: u64 = 1;
const WRITABLE: u64 = 2;

/// Checks that a range has only anonymous memory with this permission, by `PROCMAP_QUERY` of `/proc/self/maps`. `is_usable`
/// decides on the start of each mapping.
///
/// Memory of files does not count: `mincore(2)` reports each page of a file that the process may not write as resident.
///
/// # Errors
/// A part is something else, there is no `/proc`, or Linux is older than 6.11.
fn check_anonymous(range: Range<u64>, permission: u64, is_usable: impl Fn(u64) -> bool) -> io::Result<()> {
    // `/proc/self` is of no use after the main thread has ended.
    let maps = File::open("/proc/thread-self/maps")?;
    let mut at = range.start;
    while at < range.end {
        let size = size_of::<MappingQuery>() as u64;
        let mut query = MappingQuery { size, address: at, ..MappingQuery::default() };
        // SAFETY: the kernel reads and writes the structure, which has the size that it states. It asks for no name and no build
        // id, whose addresses are null.
        if unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let is_file = query.inode != 0 || query.device != [0, 0];
        if query.permissions & permission == 0 || is_file || query.end <= at || !is_usable(at) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        at = query.end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    const PAGES: u64 = 64;

    /// Anonymous memory of [`PAGES`] pages.
    struct Pages(u64);

    impl Pages {
        fn new() -> Pages {
            let len = (PAGES * page_size()) as usize;
            let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: the kernel chooses the address.
            let mapped = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, -1, 0) };
            assert_ne!(mapped, libc::MAP_FAILED);
            Pages(mapped.addr() as u64)
        }

        fn range(&self) -> Range<u64> {
            self.0..self.0 + PAGES * page_size()
        }

        fn page(&self, at: u64) -> *mut libc::c_void {
            (self.0 + at * page_size()) as usize as *mut libc::c_void
        }

        fn is_mapped(&self, is_written: bool) -> bool {
            is_mapped(self.0, PAGES * page_size(), is_written)
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the range was mapped by `new`, and nothing refers to it.
            unsafe { libc::munmap(self.page(0), (PAGES * page_size()) as usize) };
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps memory")]
    fn memory_that_was_not_touched_is_populated() {
        let pages = Pages::new();
        assert!(!is_resident(pages.range()));
        assert!(pages.is_mapped(true));
        assert!(is_resident(pages.range()) && pages.is_mapped(true));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps memory")]
    fn resident_memory_whose_last_page_is_read_only_may_be_read_but_not_written() {
        let pages = Pages::new();
        assert!(pages.is_mapped(true));
        // SAFETY: the page is mapped, and nothing refers to it.
        assert_eq!(unsafe { libc::mprotect(pages.page(PAGES - 1), page_size() as usize, libc::PROT_READ) }, 0);
        assert!(is_resident(pages.range()));
        assert!(pages.is_mapped(false) && !pages.is_mapped(true));
        // SAFETY: as above.
        assert_eq!(unsafe { libc::mprotect(pages.page(PAGES - 1), page_size() as usize, libc::PROT_NONE) }, 0);
        assert!(!pages.is_mapped(false) && !pages.is_mapped(true));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it asks the kernel")]
    fn the_kernel_says_which_memory_is_anonymous_and_writable() {
        let pages = Pages::new();
        match check_anonymous(pages.range(), WRITABLE, |start| start == pages.0) {
            Ok(()) => {
                assert!(pages.is_mapped(true) && is_resident(pages.range()));
                assert!(check_anonymous(pages.range(), WRITABLE, |_| false).is_err());
                let code = is_mapped as *const () as u64;
                assert!(check_anonymous(code..code + 1, READABLE, |_| true).is_err(), "the code is from a file");
            }
            // Linux before 6.11.
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOTTY)),
        }
    }
}
