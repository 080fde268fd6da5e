//! Memory allocated by the provider.

use std::ffi::c_int;
use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdma_sys::*;

use super::Backing;
use crate::errno::{check_neg, check_ptr};
use crate::error::Verb;
use crate::object::{Object, Parents};
use crate::{Context, Error, ProtectionDomain, Result, bounds};

/// Memory that the provider has allocated to suit its device: `struct ibv_buf`. Zeroed, and aligned to a page.
///
/// Made by [`ProtectionDomain::alloc_buf`]. It is a [`Backing`] for regions of the domain that it was allocated from:
/// [`ProtectionDomain::register`] and [`ProtectionDomain::expose`] accept it like [`Pages`](crate::mr::Pages), and register
/// it by `ibv_reg_buf_mr(3)`.
///
/// ```no_run
/// # use rdma_safe::*;
/// # fn example(pd: &ProtectionDomain) -> rdma_safe::Result<()> {
/// let buffers = pd.register(pd.alloc_buf(1 << 20)?)?.into_chunks(4096)?;
/// # Ok(())
/// # }
/// ```
pub struct ProviderMemory {
    /// Shared with registered parts.
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

/// The functions. A library has all of them or none.
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

// SAFETY: `Object` is `Send`, and this type gives no access to the memory.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Parents for MadeFrom {
    type Raw = ibv_buf;

    const VERB: Verb = Verb::FreeBuf;

    fn context(&self) -> &Context {
        self.pd.context()
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_buf) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.calls.free)(raw) };
        0
    }
}

impl ProtectionDomain {
    /// Lets the provider allocate `len` bytes in the way it prefers for this domain: `ibv_alloc_buf(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 64; [`Error::EmptyRegion`]; [`Error::Allocate`] when
    /// there is not enough memory; [`Error::Verb`].
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
            _ => context.feature_error(Verb::AllocBuf, FEATURE, errno),
        })?;
        // The memory cannot be used without this object.
        let raw = check_ptr(|| raw).map_err(|errno| context.verb_error(Verb::AllocBuf, errno))?;
        let address = address.cast();
        // SAFETY: `len` bytes that were just allocated and have no other owner. The provider need not have initialised
        // them.
        unsafe { address.write_bytes(0, len) };
        // SAFETY: the memory was just allocated and is not shared. A region of the memory owns it or holds an `Arc`, and
        // releases it only after deregistering.
        let object = unsafe { Object::new(raw, MadeFrom { pd: self.clone(), calls }) };
        Ok(ProviderMemory { inner: Arc::new(Allocation { object, address, len }) })
    }
}

impl ProviderMemory {
    /// Exports the memory as a DMA-BUF for other devices and processes: `ibv_export_buf_dmabuf_fd(3)`.
    ///
    /// This requires that the provider allocated it as a DMA-BUF. mlx5 does so in a confidential guest, for memory that
    /// is not encrypted.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 65; [`Error::Verb`], with `ENODATA` for ordinary memory.
    ///
    /// # Safety
    /// The descriptor, its duplicates, and mappings and registrations made from them give access to the bytes that this
    /// crate does not see. While any of them exists, others must access the bytes only as `&[u8]` and `&mut [u8]` of a
    /// [`Buffer`](crate::Buffer) of this memory allow. Bytes of an [`ExposedRegion`](crate::ExposedRegion) may be
    /// written at any time, except by this process while it also writes through the region.
    #[doc(alias = "ibv_export_buf_dmabuf_fd")]
    pub unsafe fn export_dmabuf(&self) -> Result<OwnedFd> {
        const VERB: Verb = Verb::ExportBufDmabufFd;
        const FEATURE: &str = "exporting memory of the provider as a DMA-BUF (ibv_export_buf_dmabuf_fd, rdma-core 65)";
        let context = self.pd().context();
        let export = context.verbs().ibv_export_buf_dmabuf_fd.ok_or_else(|| context.unsupported(FEATURE))?;
        // SAFETY: the memory is valid.
        let fd = check_neg(|| unsafe { export(self.as_raw()) })
            .map_err(|errno| context.feature_error(VERB, FEATURE, errno))?;
        // SAFETY: a new descriptor that has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The domain that it was allocated from.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.inner.object.pd
    }

    /// The C object, valid while this memory or a region of it exists.
    #[must_use]
    #[doc(alias = "ibv_free_buf")]
    pub fn as_raw(&self) -> *mut ibv_buf {
        self.inner.object.as_raw()
    }

    pub(super) fn reg_buf_mr(&self) -> ibv_reg_buf_mr_fn {
        self.inner.object.calls.register
    }

    /// Address of `len` bytes from `offset`, if they are within the memory.
    pub(super) fn part(&self, offset: usize, len: usize) -> Result<*mut u8> {
        bounds::check(offset, len, self.inner.len)?;
        // SAFETY: `offset` is at most the length.
        Ok(unsafe { self.inner.address.add(offset) }.as_ptr())
    }

    pub(super) fn share(&self) -> Arc<Allocation> {
        Arc::clone(&self.inner)
    }
}

// SAFETY: the provider has allocated these bytes, at most `isize::MAX`, for this object alone. They were zeroed, and
// are freed after the last `Arc` is dropped. Callers of the `unsafe` functions `register_part` and `export_dmabuf` are
// responsible for accesses by other registrations and through a descriptor.
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
