//! Memory that the provider allocates.

use std::ffi::c_int;
use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdma_sys::*;

use super::Backing;
use crate::errno::{check_neg, check_ptr};
use crate::object::{Object, Parents};
use crate::{Context, Error, ProtectionDomain, Result, bounds};

/// Memory that the provider has allocated as suits its device: `struct ibv_buf`. Zeroed, and aligned to a page.
///
/// It is [`Backing`] for regions of the domain that it was allocated from: [`ProtectionDomain::register`] and
/// [`ProtectionDomain::expose`] take it, as they take [`Pages`](crate::Pages), and register it by `ibv_reg_buf_mr(3)`. Made by
/// [`ProtectionDomain::alloc_buf`].
///
/// ```no_run
/// # use rdma_safe::*;
/// # fn example(pd: &ProtectionDomain) -> rdma_safe::Result<()> {
/// let buffers = pd.register(pd.alloc_buf(1 << 20)?)?.into_chunks(4096)?;
/// # Ok(())
/// # }
/// ```
pub struct ProviderMemory {
    /// Parts that are registered have it, too.
    inner: Arc<Allocation>,
}

pub(super) struct Allocation {
    object: Object<MadeFrom>,
    address: NonNull<u8>,
    len: usize,
}

struct MadeFrom {
    pd: ProtectionDomain,
    calls: Calls,
}

/// The functions, all of which a library has that has one.
#[derive(Clone, Copy)]
struct Calls {
    alloc: ibv_alloc_buf_fn,
    free: ibv_free_buf_fn,
    register: ibv_reg_buf_mr_fn,
}

impl Calls {
    fn of(verbs: &Verbs) -> Option<Self> {
        Some(Calls { alloc: verbs.ibv_alloc_buf?, free: verbs.ibv_free_buf?, register: verbs.ibv_reg_buf_mr? })
    }
}

// SAFETY: `Object` is, and nothing here gives access to the memory.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Parents for MadeFrom {
    type Raw = ibv_buf;

    const VERB: &'static str = "ibv_free_buf";

    fn context(&self) -> &Context {
        self.pd.context()
    }

    unsafe fn destroy(&self, raw: *mut ibv_buf) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.calls.free)(raw) };
        0
    }
}

impl ProtectionDomain {
    /// Has the provider allocate `len` bytes in the way that it has chosen for this domain: `ibv_alloc_buf(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 64; [`Error::EmptyRegion`]; [`Error::Allocate`] when there is not
    /// that much; [`Error::Verb`].
    #[doc(alias = "ibv_alloc_buf")]
    pub fn alloc_buf(&self, len: usize) -> Result<ProviderMemory> {
        const FEATURE: &str = "memory of the provider (ibv_alloc_buf, rdma-core 64)";
        let context = self.context();
        let calls = Calls::of(context.verbs()).ok_or_else(|| context.unsupported(FEATURE))?;
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        if isize::try_from(len).is_err() {
            return Err(Error::Allocate { len });
        }
        let mut raw = null_mut();
        // SAFETY: the domain and the out pointer are valid.
        let address = check_ptr(|| unsafe { (calls.alloc)(self.as_raw(), len, &mut raw) });
        let address = address.map_err(|errno| match errno.0 {
            libc::ENOMEM => Error::Allocate { len },
            _ => context.feature_error("ibv_alloc_buf", FEATURE, errno),
        })?;
        // Without it nothing can be done with the memory.
        let raw = check_ptr(|| raw).map_err(|errno| context.verb_error("ibv_alloc_buf", errno))?;
        let address = address.cast();
        // SAFETY: `len` bytes that were just allocated and nobody else has. The provider need not have written to any of them.
        unsafe { address.write_bytes(0, len) };
        // SAFETY: just allocated, and given to nobody else. What is registered of it holds an `Arc` of it or owns it, and lets go
        // only when it was deregistered.
        let object = unsafe { Object::new(raw, MadeFrom { pd: self.clone(), calls }) };
        Ok(ProviderMemory { inner: Arc::new(Allocation { object, address, len }) })
    }
}

impl ProviderMemory {
    /// A descriptor of it as a DMA-BUF, for other devices and processes, where the provider has made it of one:
    /// `ibv_export_buf_dmabuf_fd(3)`. mlx5 does in a confidential guest, for memory that is not encrypted.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 65; [`Error::Verb`], with `ENODATA` where it is ordinary memory.
    ///
    /// # Safety
    /// Whoever has the descriptor, or a duplicate, a mapping or a registration made from it, reaches the bytes by a way that this
    /// crate does not see. While any of these exists, they must be used by others only as `&[u8]` and `&mut [u8]` of a
    /// [`Buffer`](crate::Buffer) of this memory allow; with an [`ExposedRegion`](crate::ExposedRegion) they may be
    /// written at any time, but not by this process while it writes there, too.
    #[doc(alias = "ibv_export_buf_dmabuf_fd")]
    pub unsafe fn export_dmabuf(&self) -> Result<OwnedFd> {
        const VERB: &str = "ibv_export_buf_dmabuf_fd";
        const FEATURE: &str = "exporting memory of the provider as a DMA-BUF (ibv_export_buf_dmabuf_fd, rdma-core 65)";
        let context = self.pd().context();
        let export = context.verbs().ibv_export_buf_dmabuf_fd.ok_or_else(|| context.unsupported(FEATURE))?;
        // SAFETY: the memory is valid.
        let fd = check_neg(|| unsafe { export(self.as_raw()) })
            .map_err(|errno| context.feature_error(VERB, FEATURE, errno))?;
        // SAFETY: a new descriptor, which is the caller's.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The domain that it was allocated from.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.inner.object.pd
    }

    /// The C object, valid while this memory or a region of it is.
    #[must_use]
    #[doc(alias = "ibv_free_buf")]
    pub fn as_raw(&self) -> *mut ibv_buf {
        self.inner.object.as_raw()
    }

    pub(super) fn reg_buf_mr(&self) -> ibv_reg_buf_mr_fn {
        self.inner.object.calls.register
    }

    /// Where `len` bytes from `offset` on are, if it has them.
    pub(super) fn part(&self, offset: usize, len: usize) -> Result<*mut u8> {
        bounds::check(offset, len, self.inner.len)?;
        // SAFETY: `offset` is at most the length.
        Ok(unsafe { self.inner.address.add(offset) }.as_ptr())
    }

    pub(super) fn share(&self) -> Arc<Allocation> {
        Arc::clone(&self.inner)
    }
}

// SAFETY: the provider has allocated these bytes, at most `isize::MAX`, for this alone; they were zeroed, and are freed after the
// last `Arc` of them is gone. What parts of it are registered for besides is answered for by who has called the `unsafe`
// `register_part`, and what a descriptor is used for by who has called the `unsafe` `export_dmabuf`.
unsafe impl Backing for ProviderMemory {
    fn address(&self) -> NonNull<u8> {
        self.inner.address
    }

    fn len(&self) -> usize {
        self.inner.len
    }

    fn provider_memory(&self) -> Option<&ProviderMemory> {
        Some(self)
    }
}

impl fmt::Debug for ProviderMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProviderMemory").field("len", &self.inner.len).field("pd", self.pd()).finish_non_exhaustive()
    }
}
