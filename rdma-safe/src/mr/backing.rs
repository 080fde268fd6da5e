//! Memory that can be registered.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use super::ProviderMemory;
use crate::{Errno, Error, HugePagesError, Result};

/// Memory that a region owns: it is freed after the region was deregistered.
///
/// # Safety
///
/// For as long as the value exists, wherever it is moved, `address()` and `len()` return the same, and `address()..+len()`
/// is one allocation of at most `isize::MAX` bytes, of initialised, readable and writable memory that nothing else refers to or
/// reaches by another pointer. Dropping it must not read the bytes. Where that panics, the process may be aborted. If
/// `provider_memory()` is any, the bytes are its.
///
/// [`Pages`] and [`HugePages`] implement it. For memory of another allocator, implement it like this:
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::ptr::NonNull;
/// use rdma_safe::{Backing, Device};
///
/// /// Zeroed words, whose owner is this type alone.
/// struct Words(NonNull<[u64]>);
///
/// impl Words {
///     fn new(count: usize) -> Words {
///         // Keep a pointer, not the `Box`: moving a `Box` asserts unique access to its memory, and the device accesses it.
///         Words(NonNull::from(Box::leak(vec![0; count].into_boxed_slice())))
///     }
/// }
///
/// // SAFETY: the memory has no tie to a thread.
/// unsafe impl Send for Words {}
///
/// // SAFETY: one initialised allocation that never moves. Nothing else refers to it, and `drop` does not read it.
/// unsafe impl Backing for Words {
///     fn address(&self) -> NonNull<u8> {
///         self.0.cast()
///     }
///
///     fn len(&self) -> usize {
///         self.0.len() * size_of::<u64>()
///     }
/// }
///
/// impl Drop for Words {
///     fn drop(&mut self) {
///         // SAFETY: leaked by `new`, and freed once.
///         drop(unsafe { Box::from_raw(self.0.as_ptr()) });
///     }
/// }
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// let buffer = pd.register(Words::new(512))?; // frees the words after it has deregistered them
/// assert_eq!(buffer.capacity(), 4096);
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
pub unsafe trait Backing: Send + 'static {
    /// Start of the memory.
    fn address(&self) -> NonNull<u8>;

    /// Length in bytes.
    fn len(&self) -> usize;

    /// Whether there are no bytes; such memory cannot be registered.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory of a provider that this is, or is made of, which is registered by a verb of its own.
    fn provider_memory(&self) -> Option<&ProviderMemory> {
        None
    }
}

/// Zeroed bytes from the global allocator, aligned to a page.
#[derive(Debug)]
pub struct Pages {
    address: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is owned and has no tie to a thread.
unsafe impl Send for Pages {}

impl Pages {
    const ALIGN: usize = 4096;

    /// Allocates `len` zeroed bytes.
    ///
    /// # Errors
    /// [`Error::EmptyRegion`] for no bytes; [`Error::Allocate`].
    pub fn new(len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        let layout = Layout::from_size_align(len, Self::ALIGN).map_err(|_| Error::Allocate { len })?;
        // SAFETY: the layout has a size other than zero.
        let address = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Error::Allocate { len })?;
        Ok(Pages { address, layout })
    }
}

// SAFETY: `Pages` owns one allocation that was zeroed and is freed on drop, with the layout that it was allocated with.
unsafe impl Backing for Pages {
    fn address(&self) -> NonNull<u8> {
        self.address
    }

    fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed once.
        unsafe { dealloc(self.address.as_ptr(), self.layout) }
    }
}

/// Zeroed huge pages: `mmap(2)` with `MAP_HUGETLB`. Fewer pages mean fewer entries in the device's translation cache.
#[derive(Debug)]
pub struct HugePages {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned and has no tie to a thread.
unsafe impl Send for HugePages {}

impl HugePages {
    const PAGE: usize = 2 << 20;

    /// Maps at least `len` bytes, rounded up to pages of 2 MiB.
    ///
    /// # Errors
    /// [`Error::MapHugePages`], with `ENOMEM` when not enough huge pages are free: see `/proc/sys/vm/nr_hugepages`.
    /// [`Error::EmptyRegion`] for no bytes; [`Error::Allocate`] if `len` exceeds the address space.
    pub fn new(len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        let rounded = len.checked_next_multiple_of(Self::PAGE).ok_or(Error::Allocate { len })?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory of ours.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), rounded, protection, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            let (errno, pages) = (Errno::last(), rounded / Self::PAGE);
            return Err(HugePagesError { len, pages, free: Self::free(), errno }.into());
        }
        let address = NonNull::new(address.cast()).ok_or(Error::Allocate { len })?;
        Ok(HugePages { address, len: rounded })
    }

    /// Number of free pages, if the kernel has pages of this size.
    fn free() -> Option<usize> {
        let text = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").ok()?;
        text.trim().parse().ok()
    }
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
        // SAFETY: mapped in `new` with this length, and unmapped once.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

/// The allocation of a boxed slice, without the uniqueness that moving a `Box` asserts.
struct Boxed(NonNull<[u8]>);

// SAFETY: the allocation is owned and has no tie to a thread.
unsafe impl Send for Boxed {}

impl Drop for Boxed {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `register_boxed`, and freed once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

// SAFETY: `Boxed` owns the allocation of a `Box<[u8]>`, which is initialised and does not move.
unsafe impl Backing for Boxed {
    fn address(&self) -> NonNull<u8> {
        self.0.cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl crate::ProtectionDomain {
    /// Registers bytes that were allocated elsewhere, for local use, as [`ProtectionDomain::register`] does.
    ///
    /// # Errors
    /// As [`ProtectionDomain::register`]; the bytes are then dropped.
    ///
    /// [`ProtectionDomain::register`]: crate::ProtectionDomain::register
    pub fn register_boxed(&self, bytes: Box<[u8]>) -> Result<crate::Buffer> {
        // SAFETY: `Box::into_raw` never returns NULL.
        self.register(Boxed(unsafe { NonNull::new_unchecked(Box::into_raw(bytes)) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned_zeroed_and_never_empty() {
        let pages = Pages::new(100).unwrap();
        assert_eq!(pages.len(), 100);
        assert_eq!(pages.address().as_ptr() as usize % 4096, 0);
        // SAFETY: 100 initialised bytes, owned by `pages`.
        let bytes = unsafe { std::slice::from_raw_parts(pages.address().as_ptr(), 100) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert!(matches!(Pages::new(0), Err(Error::EmptyRegion)));
        assert!(matches!(Pages::new(usize::MAX), Err(Error::Allocate { .. })));
    }

    #[test]
    #[cfg(not(miri))]
    fn huge_pages_that_cannot_be_had_are_an_error() {
        let error = HugePages::new(1 << 50).unwrap_err();
        assert_eq!(error.errno(), Some(Errno(libc::ENOMEM)), "{error}");
        let needed = format!("{} pages of 2 MiB are needed", 1_u64 << 29);
        assert!(error.to_string().contains(&needed) && error.to_string().contains("nr_hugepages"), "{error}");
    }
}
