//! Huge pages, and memory on a NUMA node.

use std::ffi::{c_int, c_ulong};
use std::ptr::NonNull;

use super::Backing;
use crate::error::{HugePagesError, PagesError};
use crate::{Errno, Error, Result};

/// Zeroed memory in huge pages of 2 MiB. Fewer pages mean fewer entries in the device's translation cache.
///
/// | made by | pages | fails |
/// |---|---|---|
/// | [`HugePages::new`] | reserved by the administrator in `/proc/sys/vm/nr_hugepages` | if too few are free |
/// | [`HugePages::transparent`] | huge where the kernel finds contiguous memory | if the kernel has or allows none |
/// | [`HugePages::or_ordinary`] | the first of these that is available, otherwise ordinary | if the address space is exhausted |
///
/// ```
/// use rdma_safe::mr::{Backing, HugePages, PageKind};
///
/// # fn main() -> rdma_safe::Result<()> {
/// let memory = HugePages::or_ordinary(5 << 20)?;
/// assert_eq!(memory.len(), 6 << 20);
/// if let Some(error) = memory.explicit_error() {
///     eprintln!("{error}; using {:?} pages", memory.kind());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HugePages {
    address: NonNull<u8>,
    len: usize,
    kind: PageKind,
    explicit_error: Option<HugePagesError>,
    transparent_error: Option<PagesError>,
}

/// The kind of pages of [`HugePages`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum PageKind {
    /// Pages of 2 MiB that the administrator has reserved: `MAP_HUGETLB`.
    Explicit,
    /// Pages of 2 MiB where the kernel finds contiguous memory, ordinary pages elsewhere: `MADV_HUGEPAGE`.
    Transparent,
    /// Ordinary pages, of [`Pages::page_size`](super::Pages::page_size) bytes.
    Ordinary,
}

// SAFETY: the mapping is owned and not tied to a thread.
unsafe impl Send for HugePages {}
// SAFETY: a shared reference gives no access to the mapping.
unsafe impl Sync for HugePages {}

impl HugePages {
    const PAGE: usize = 2 << 20;

    /// Maps at least `len` bytes, rounded up to pages of 2 MiB: `mmap(2)` with `MAP_HUGETLB`.
    ///
    /// # Errors
    /// [`Error::MapHugePages`], with `ENOMEM` when not enough huge pages are free: see `/proc/sys/vm/nr_hugepages`.
    /// [`Error::EmptyRegion`] for no bytes; [`Error::Allocate`] if `len` exceeds the address space.
    pub fn new(len: usize) -> Result<Self> {
        let rounded = Self::round(len)?;
        match map(rounded, libc::MAP_HUGETLB | libc::MAP_HUGE_2MB) {
            Ok(address) => Ok(Self::of(address, rounded, PageKind::Explicit)),
            Err(errno) => Err(HugePagesError { len, pages: rounded / Self::PAGE, free: Self::free(), errno }.into()),
        }
    }

    /// Maps at least `len` bytes, rounded up to and aligned to 2 MiB, and asks for transparent huge pages: `madvise(2)` with
    /// `MADV_HUGEPAGE`.
    ///
    /// The kernel provides the pages when they are first accessed or registered. Where it finds no contiguous memory, it
    /// provides ordinary pages and reports nothing: `AnonHugePages` in `/proc/self/smaps` has the outcome.
    ///
    /// # Errors
    /// [`Error::Pages`] with [`PagesError::Never`] or [`PagesError::Transparent`]; [`Error::EmptyRegion`] for no bytes;
    /// [`Error::Allocate`] if the address space or a limit (`ulimit -v`) is exhausted.
    pub fn transparent(len: usize) -> Result<Self> {
        let mut pages = Self::ordinary(len)?;
        pages.advise(len, is_disabled())?;
        Ok(pages)
    }

    /// Maps at least `len` bytes in explicit huge pages if enough are free, otherwise in transparent ones if the kernel allows
    /// these, otherwise in ordinary pages. Rounds up to 2 MiB in each case.
    ///
    /// [`HugePages::kind`] returns the outcome, and [`HugePages::explicit_error`] and [`HugePages::transparent_error`] the
    /// reasons. A program that expects huge pages should report them.
    ///
    /// # Errors
    /// [`Error::EmptyRegion`] for no bytes; [`Error::Allocate`] if the address space or a limit (`ulimit -v`) is exhausted.
    pub fn or_ordinary(len: usize) -> Result<Self> {
        let explicit_error = match Self::new(len) {
            Err(Error::MapHugePages(error)) => error,
            other => return other,
        };
        let mut pages = Self::ordinary(len)?;
        pages.explicit_error = Some(explicit_error);
        pages.transparent_error = pages.advise(len, is_disabled()).err();
        Ok(pages)
    }

    /// Prefers a NUMA node for the memory: `mbind(2)` with `MPOL_PREFERRED`. See
    /// [`Context::numa_node`](crate::Context::numa_node) for the node of a device.
    ///
    /// The pages come from other nodes once this one is out of memory.
    ///
    /// # Errors
    /// [`Error::Pages`] with [`PagesError::Node`]; the memory is then unmapped.
    #[doc(alias = "mbind")]
    pub fn on_node(self, node: u32) -> Result<Self> {
        /// `CONFIG_NODES_SHIFT` is at most 10.
        const MAX_NODES: usize = 1024;
        const BITS: usize = c_ulong::BITS as usize;
        let failed = |errno| PagesError::Node { node, len: self.len, errno };
        let mut mask: [c_ulong; MAX_NODES / BITS] = [0; MAX_NODES / BITS];
        let word = mask.get_mut(node as usize / BITS).ok_or(failed(Errno(libc::EINVAL)))?;
        *word = 1 << (node as usize % BITS);
        let (address, len) = (self.address.as_ptr(), self.len as c_ulong);
        // The kernel reads one bit less than the given number.
        let bits = MAX_NODES as c_ulong + 1;
        // Not `c_int`: the kernel reads whole registers.
        let (mode, flags) = (libc::MPOL_PREFERRED as c_ulong, 0 as c_ulong);
        // SAFETY: the range is one mapping of `self`, whose contents a memory policy does not change. The kernel reads
        // `MAX_NODES` bits, which is the size of the mask.
        match unsafe { libc::syscall(libc::SYS_mbind, address, len, mode, mask.as_ptr(), bits, flags) } {
            0 => Ok(self),
            _ => Err(failed(Errno::last()).into()),
        }
    }

    /// The kind of pages that was mapped.
    #[must_use]
    pub fn kind(&self) -> PageKind {
        self.kind
    }

    /// The reason why [`HugePages::or_ordinary`] has mapped no explicit huge pages.
    #[must_use]
    pub fn explicit_error(&self) -> Option<&HugePagesError> {
        self.explicit_error.as_ref()
    }

    /// The reason why [`HugePages::or_ordinary`] has mapped no transparent huge pages either.
    #[must_use]
    pub fn transparent_error(&self) -> Option<&PagesError> {
        self.transparent_error.as_ref()
    }

    /// Maps ordinary pages, rounded up to and aligned to 2 MiB.
    fn ordinary(len: usize) -> Result<Self> {
        let rounded = Self::round(len)?;
        let mapped = rounded.checked_add(Self::PAGE).ok_or(Error::Allocate { len })?;
        let start = map(mapped, 0).map_err(|_| Error::Allocate { len })?;
        let before = start.align_offset(Self::PAGE).min(Self::PAGE);
        // SAFETY: the aligned range of `rounded` bytes lies within the mapping, which has one page more. The bytes before and
        // after it are whole ordinary pages of the new mapping that nothing uses.
        let address = unsafe {
            let (address, after) = (start.add(before), Self::PAGE - before);
            if before != 0 {
                libc::munmap(start.as_ptr().cast(), before);
            }
            if after != 0 {
                libc::munmap(address.add(rounded).as_ptr().cast(), after);
            }
            address
        };
        Ok(Self::of(address, rounded, PageKind::Ordinary))
    }

    /// Asks for transparent huge pages, of which the administrator may have `disabled` all.
    fn advise(&mut self, len: usize, disabled: bool) -> Result<(), PagesError> {
        if disabled {
            return Err(PagesError::Never { len });
        }
        // SAFETY: the range is one mapping of `self`, whose contents the advice does not change.
        if unsafe { libc::madvise(self.address.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) } != 0 {
            return Err(PagesError::Transparent { len, errno: Errno::last() });
        }
        self.kind = PageKind::Transparent;
        Ok(())
    }

    fn of(address: NonNull<u8>, len: usize, kind: PageKind) -> Self {
        HugePages { address, len, kind, explicit_error: None, transparent_error: None }
    }

    fn round(len: usize) -> Result<usize> {
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        len.checked_next_multiple_of(Self::PAGE).ok_or(Error::Allocate { len })
    }

    /// Number of free explicit pages, if the kernel has pages of this size.
    fn free() -> Option<usize> {
        let text = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").ok()?;
        text.trim().parse().ok()
    }
}

/// Whether the administrator has disabled transparent huge pages. `madvise(2)` succeeds then, too.
fn is_disabled() -> bool {
    let modes = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    modes.is_ok_and(|modes| modes.contains("[never]"))
}

/// Maps `len` zeroed bytes.
fn map(len: usize, flags: c_int) -> Result<NonNull<u8>, Errno> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: a new anonymous mapping at an address chosen by the kernel affects no existing memory.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    NonNull::new(address.cast()).ok_or(Errno(libc::ENOMEM))
}

// SAFETY: `HugePages` owns one anonymous mapping, zeroed by the kernel, unmapped on drop.
unsafe impl Backing for HugePages {
    fn address(&self) -> NonNull<u8> {
        self.address
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, apart from bytes that `ordinary` has unmapped, and unmapped once.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn unavailable_huge_pages_are_an_error() {
        let error = HugePages::new(1 << 50).unwrap_err();
        assert_eq!(error.errno(), Some(Errno(libc::ENOMEM)), "{error}");
        let needed = format!("{} pages of 2 MiB are needed", 1_u64 << 29);
        assert!(error.to_string().contains(&needed) && error.to_string().contains("nr_hugepages"), "{error}");
    }

    /// Checks the address and length, and that all bytes are zero and writable.
    #[track_caller]
    fn check(pages: &HugePages, len: usize) {
        assert_eq!((pages.len(), pages.address().as_ptr() as usize % HugePages::PAGE), (len, 0));
        // SAFETY: initialised bytes, owned by `pages`.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pages.address().as_ptr(), len) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes.fill(1);
    }

    #[test]
    fn memory_falls_back_to_other_pages_and_says_why() {
        let len = (3 << 20) + 1;
        let pages = HugePages::or_ordinary(len).unwrap();
        check(&pages, 4 << 20);
        match pages.kind() {
            PageKind::Explicit => assert!(pages.explicit_error().is_none() && pages.transparent_error().is_none()),
            kind => {
                let error = pages.explicit_error().expect("the reason");
                assert_eq!((error.len, error.pages, error.errno), (len, 2, Errno(libc::ENOMEM)));
                assert_eq!(pages.transparent_error().is_some(), kind == PageKind::Ordinary);
            }
        }
        // More than any host has reserved: the kernel maps it lazily, or refuses it in each way.
        match HugePages::or_ordinary(1 << 40) {
            Ok(pages) => assert!(pages.kind() != PageKind::Explicit && pages.explicit_error().is_some()),
            Err(error) => assert!(matches!(error, Error::Allocate { .. }), "{error:?}"),
        }
        assert!(matches!(HugePages::or_ordinary(0), Err(Error::EmptyRegion)));
        assert!(matches!(HugePages::transparent(0), Err(Error::EmptyRegion)));
        assert!(matches!(HugePages::transparent(usize::MAX), Err(Error::Allocate { .. })));
        assert!(matches!(HugePages::transparent(usize::MAX - HugePages::PAGE + 1), Err(Error::Allocate { .. })));
    }

    #[test]
    fn transparent_pages_are_aligned_or_refused_with_a_reason() {
        for len in [1, 2 << 20, (2 << 20) + 1] {
            match HugePages::transparent(len) {
                Ok(pages) => {
                    assert_eq!(pages.kind(), PageKind::Transparent);
                    check(&pages, len.next_multiple_of(2 << 20));
                }
                Err(error @ Error::Pages(PagesError::Never { .. })) => {
                    assert!(is_disabled() && error.to_string().contains("transparent_hugepage/enabled"), "{error}");
                }
                Err(error) => assert_eq!(error.errno(), Some(Errno(libc::EINVAL)), "{error}"),
            }
        }
        let mut pages = HugePages::ordinary(1).unwrap();
        assert_eq!(pages.advise(1, true), Err(PagesError::Never { len: 1 }));
        assert_eq!(pages.kind(), PageKind::Ordinary);
    }

    #[test]
    fn memory_is_placed_on_a_node_that_exists() {
        match HugePages::ordinary(1).unwrap().on_node(0) {
            Ok(pages) => check(&pages, 2 << 20),
            Err(error) => {
                // A kernel without NUMA, or a container that forbids the call.
                let expected = [libc::ENOSYS, libc::EPERM].map(|errno| Some(Errno(errno)));
                assert!(expected.contains(&error.errno()), "{error}");
            }
        }
        for node in [1023, 1024, u32::MAX] {
            let error = HugePages::ordinary(1).unwrap().on_node(node).unwrap_err();
            assert!(
                matches!(error, Error::Pages(PagesError::Node { node: found, len: 0x20_0000, .. }) if found == node)
            );
            assert!(error.to_string().contains(&format!("NUMA node {node}")), "{error}");
        }
    }
}
