//! The allocators that are compared.

use rdma_pool::Budget;

/// Allocates blocks that are freed on drop.
pub(crate) trait Allocator: Sync {
    /// A block with one owner.
    type Block: Send;

    /// A block of at least `len` bytes.
    fn get(&self, len: usize) -> Self::Block;
}

/// `malloc` and `free` of the C library.
pub(crate) struct Glibc;

/// A block of the C library.
pub(crate) struct GlibcBlock(*mut libc::c_void);

// SAFETY: `free` accepts blocks of all threads.
unsafe impl Send for GlibcBlock {}

impl Allocator for Glibc {
    type Block = GlibcBlock;

    #[inline(always)]
    fn get(&self, len: usize) -> GlibcBlock {
        // SAFETY: any length is allowed.
        let block = unsafe { libc::malloc(len) };
        assert!(!block.is_null());
        GlibcBlock(block)
    }
}

impl Drop for GlibcBlock {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: allocated by `malloc`, and freed once.
        unsafe { libc::free(self.0) }
    }
}

/// jemalloc, under its own names.
#[cfg(feature = "jemalloc")]
pub(crate) struct Jemalloc;

/// A block of jemalloc.
#[cfg(feature = "jemalloc")]
pub(crate) struct JemallocBlock(*mut libc::c_void);

// SAFETY: `free` accepts blocks of all threads.
#[cfg(feature = "jemalloc")]
unsafe impl Send for JemallocBlock {}

#[cfg(feature = "jemalloc")]
impl Allocator for Jemalloc {
    type Block = JemallocBlock;

    #[inline(always)]
    fn get(&self, len: usize) -> JemallocBlock {
        // SAFETY: any length is allowed.
        let block = unsafe { tikv_jemalloc_sys::malloc(len) };
        assert!(!block.is_null());
        JemallocBlock(block)
    }
}

#[cfg(feature = "jemalloc")]
impl Drop for JemallocBlock {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: allocated by this `malloc`, and freed once.
        unsafe { tikv_jemalloc_sys::free(self.0) }
    }
}

/// A pool of soft0.
pub(crate) struct Registered(rdma_pool::Pool);

impl Registered {
    /// A pool whose memory is registered before the first get.
    pub(crate) fn new() -> crate::Result<Self> {
        rdma_safe::soft::install()?;
        let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
        Ok(Registered(rdma_pool::Pool::builder(&pd).share(Budget::Sends, 8 << 20).build()?))
    }
}

impl Allocator for Registered {
    type Block = rdma_safe::Buffer;

    #[inline(always)]
    fn get(&self, len: usize) -> rdma_safe::Buffer {
        self.0.try_get(Budget::Sends, len).expect("more memory than the loops hold")
    }
}
