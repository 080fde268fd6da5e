//! Memory that can be registered.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use super::{ProviderMemory, Returned};
use crate::{Error, Result};

/// Memory that a region owns. It is freed after the region is deregistered.
///
/// # Safety
///
/// For as long as the value exists, even if it is moved, `address()` and `len()` must return the same values, and
/// `address()..+len()` must be one allocation of at most `isize::MAX` bytes. Its memory must be initialised, readable
/// and writable, and have no other references or pointers that are used to access it. Dropping the value must not read
/// the bytes. If it panics, the process may be aborted. If `provider_memory()` returns memory, the bytes must belong to
/// it.
///
/// [`Pages`] and [`HugePages`](super::HugePages) implement it. For memory of another allocator, implement it like this:
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::ptr::NonNull;
/// use rdma_safe::Device;
/// use rdma_safe::mr::Backing;
///
/// /// Zeroed words, owned by this type alone.
/// struct Words(NonNull<[u64]>);
///
/// impl Words {
///     fn new(count: usize) -> Words {
///         // Keep a pointer, not the `Box`: moving a `Box` asserts unique access to its memory, and the device accesses it.
///         Words(NonNull::from(Box::leak(vec![0; count].into_boxed_slice())))
///     }
/// }
///
/// // SAFETY: the memory is not tied to a thread.
/// unsafe impl Send for Words {}
///
/// // SAFETY: one initialised allocation that never moves. It has no other references, and `drop` does not read it.
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
/// let buffer = pd.register(Words::new(512))?; // frees the words after deregistering them
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

    /// Memory of a provider that the bytes belong to. It is registered by a different verb.
    fn provider_memory(&self) -> Option<&ProviderMemory> {
        None
    }

    /// Called with each dropped buffer of this memory, or part of one. By default frees it.
    ///
    /// Any thread that drops a buffer, or the last owner of buffers in flight, calls it. So it may run
    ///
    /// - during a poll, between `ibv_start_poll(3)` and `ibv_end_poll(3)`, while the provider holds a lock. It must not wait for
    ///   another thread that may poll, post to or destroy objects of the same completion queue: take only locks that no thread
    ///   holds during such a call.
    /// - while a thread unwinds. A panic then aborts the process; it may do so at other times.
    /// - in the destructors of thread-local variables of a thread that ends: use
    ///   [`LocalKey::try_with`](std::thread::LocalKey::try_with).
    /// - in a forked child, where locks that other threads held at the fork stay locked: use
    ///   [`Mutex::try_lock`](std::sync::Mutex::try_lock) if buffers may be dropped there.
    ///
    /// All of this also holds for the destructor of the memory, which runs after the last buffer of the region is freed; in a
    /// forked child it does not run.
    fn take_back(buffer: Returned<Self>)
    where
        Self: Sized,
    {
        drop(buffer);
    }
}

/// Zeroed bytes from the global allocator, aligned to a page.
#[derive(Debug)]
pub struct Pages {
    address: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is owned and not tied to a thread.
unsafe impl Send for Pages {}
// SAFETY: a shared reference gives no access to the memory.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates `len` zeroed bytes.
    ///
    /// # Errors
    /// [`Error::EmptyRegion`] for no bytes; [`Error::Allocate`].
    pub fn new(len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        let layout = Layout::from_size_align(len, Self::page_size()).map_err(|_| Error::Allocate { len })?;
        // SAFETY: the layout has a nonzero size.
        let address = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Error::Allocate { len })?;
        Ok(Pages { address, layout })
    }

    /// Bytes of a page of this host's memory: `sysconf(3)` with `_SC_PAGESIZE`.
    #[must_use]
    pub fn page_size() -> usize {
        // SAFETY: `sysconf` takes a number and accesses no memory of the caller.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size).unwrap_or(4096)
    }
}

// SAFETY: `Pages` owns one zeroed allocation, which is freed on drop with the layout that it was allocated with.
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
}
