//! Memory of the device itself.

use std::ffi::c_int;
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::{check, check_neg, check_ptr};
use crate::mr::Registration;
use crate::object::{Object, Parents};
use crate::{Access, Context, Error, ProtectionDomain, RemoteMemory, Result, Sge, bounds};

const FEATURE: &str = "device memory";

/// Memory on the device: `struct ibv_dm`. What is there need not cross the bus for the device to get at it: counters and locks
/// of a protocol, headers that are sent again and again.
///
/// The CPU reaches it by [`DeviceMemory::read`] and [`DeviceMemory::write`], work requests and peers by a [`DeviceRegion`].
pub struct DeviceMemory {
    // By a shared reference the memory is only read.
    inner: Arc<Object<MadeFrom>>,
    len: usize,
}

struct MadeFrom {
    context: Context,
    /// Given back by `ibv_unimport_dm`, which leaves the memory to whoever has allocated it.
    imported: bool,
}

impl Parents for MadeFrom {
    type Raw = ibv_dm;

    const VERB: &'static str = "ibv_free_dm";

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&self, raw: *mut ibv_dm) -> c_int {
        if self.imported {
            // SAFETY: the caller's contract.
            unsafe { (self.context.verbs().ibv_unimport_dm)(raw) };
            return 0;
        }
        // SAFETY: as above.
        unsafe { ibv_free_dm(raw) }
    }
}

impl Context {
    /// Allocates `len` bytes of memory of the device at a multiple of `align` bytes: `ibv_alloc_dm(3)`. Atomic operations need an
    /// alignment of 8. The bytes are whatever was there before.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has none to give; [`Error::AllocateDeviceMemory`], also for an alignment that is no
    /// power of two.
    #[doc(alias = "ibv_alloc_dm")]
    pub fn alloc_dm(&self, len: usize, align: usize) -> Result<DeviceMemory> {
        let max = self.attributes().max_device_memory();
        if max == 0 {
            return Err(self.unsupported(FEATURE));
        }
        let failed = |errno| Error::AllocateDeviceMemory { len, align, max, errno };
        if len == 0 || !align.is_power_of_two() {
            return Err(failed(crate::Errno(libc::EINVAL)));
        }
        let mut attr = ibv_alloc_dm_attr { length: len, log_align_req: align.ilog2(), comp_mask: 0 };
        // SAFETY: the context is valid, and `attr` is for the duration of the call.
        let raw = check_ptr(|| unsafe { ibv_alloc_dm(self.as_raw(), &mut attr) }).map_err(|errno| {
            match errno.is_unsupported() {
                true => self.unsupported(FEATURE),
                false => failed(errno),
            }
        })?;
        // SAFETY: just allocated, and given to nobody else.
        Ok(unsafe { DeviceMemory::new(raw, self, len, false) })
    }

    /// Takes part in the use of device memory that another context of the same kernel context has allocated: `ibv_import_dm(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`].
    ///
    /// # Safety
    /// `handle` must be the [`DeviceMemory::handle`] of memory of `len` bytes in a context that shares the kernel's with this one
    /// (see [`Context::import`]), and whoever has allocated it must keep it until this is gone.
    #[doc(alias = "ibv_import_dm")]
    pub unsafe fn import_dm(&self, handle: u32, len: usize) -> Result<DeviceMemory> {
        // SAFETY: the context is valid; the caller vouches for the handle.
        let raw = check_ptr(|| unsafe { (self.verbs().ibv_import_dm)(self.as_raw(), handle) })
            .map_err(|errno| self.feature_error("ibv_import_dm", "importing device memory", errno))?;
        // SAFETY: just imported, and given to nobody else.
        Ok(unsafe { DeviceMemory::new(raw, self, len, true) })
    }
}

impl DeviceMemory {
    /// # Safety
    /// `raw` must be memory of `context`, and be this one's alone to free or, if it was imported, to give back.
    unsafe fn new(raw: NonNull<ibv_dm>, context: &Context, len: usize, imported: bool) -> Self {
        let made_from = MadeFrom { context: context.clone(), imported };
        // SAFETY: the caller's contract; a region of it holds an `Arc` of it.
        DeviceMemory { inner: Arc::new(unsafe { Object::new(raw, made_from) }), len }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes, as only imported memory may.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The kernel's handle, by which it can be imported: [`Context::import_dm`].
    #[must_use]
    pub fn handle(&self) -> u32 {
        // SAFETY: the memory is valid, and the field does not change.
        unsafe { (*self.as_raw()).handle }
    }

    /// Copies `source` to `offset`: `ibv_memcpy_to_dm(3)`. A peer or work that reaches the bytes at the same time sees some of the
    /// old and some of the new.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::Verb`]: some devices want offset and length to be multiples of 4.
    #[doc(alias = "ibv_memcpy_to_dm")]
    pub fn write(&mut self, offset: usize, source: &[u8]) -> Result<()> {
        bounds::check(offset, source.len(), self.len)?;
        let raw = self.as_raw();
        // SAFETY: the memory is valid.
        if unsafe { (*raw).memcpy_to_dm.is_none() } {
            return Err(self.context().unsupported("copies to this device memory (ibv_memcpy_to_dm)"));
        }
        // SAFETY: the memory is valid and has these bytes, the function is there, and `source` is readable.
        check(unsafe { ibv_memcpy_to_dm(raw, offset as u64, source.as_ptr().cast(), source.len()) })
            .map_err(|errno| self.context().verb_error("ibv_memcpy_to_dm", errno))
    }

    /// Copies bytes from `offset` on into `target`: `ibv_memcpy_from_dm(3)`.
    ///
    /// # Errors
    /// As [`DeviceMemory::write`].
    #[doc(alias = "ibv_memcpy_from_dm")]
    pub fn read(&self, offset: usize, target: &mut [u8]) -> Result<()> {
        bounds::check(offset, target.len(), self.len)?;
        let raw = self.as_raw();
        // SAFETY: the memory is valid.
        if unsafe { (*raw).memcpy_from_dm.is_none() } {
            return Err(self.context().unsupported("copies from this device memory (ibv_memcpy_from_dm)"));
        }
        // SAFETY: the memory is valid and has these bytes, the function is there, and `target` is writable.
        check(unsafe { ibv_memcpy_from_dm(target.as_mut_ptr().cast(), raw, offset as u64, target.len()) })
            .map_err(|errno| self.context().verb_error("ibv_memcpy_from_dm", errno))
    }

    /// A descriptor of it as a DMA-BUF, for other devices and processes: `ibv_dm_export_dmabuf_fd(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 62, or a provider or kernel that cannot; [`Error::Verb`].
    #[doc(alias = "ibv_dm_export_dmabuf_fd")]
    pub fn export_dmabuf(&self) -> Result<OwnedFd> {
        const FEATURE: &str = "exporting device memory as a DMA-BUF (ibv_dm_export_dmabuf_fd, rdma-core 62)";
        let context = self.context();
        let export = context.verbs().ibv_dm_export_dmabuf_fd.ok_or_else(|| context.unsupported(FEATURE))?;
        // SAFETY: the memory is valid.
        let fd = check_neg(|| unsafe { export(self.as_raw()) })
            .map_err(|errno| context.feature_error("ibv_dm_export_dmabuf_fd", FEATURE, errno))?;
        // SAFETY: a new descriptor, which is the caller's.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Frees it: `ibv_free_dm(3)`. Dropping does the same, when no region of it is left, and tells nobody.
    ///
    /// # Errors
    /// [`Error::InUse`] while there are regions of it: it is freed when the last of them is gone. [`Error::Verb`] with the
    /// provider's answer; it, and its device, then stay until the process ends.
    #[doc(alias = "ibv_free_dm")]
    pub fn free(self) -> Result<()> {
        Object::destroy_last(self.inner, "device memory", "regions").map(drop)
    }

    /// The C object, valid while this memory or a region of it is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_dm {
        self.inner.as_raw()
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory")
            .field("device", &self.context().device_name())
            .field("len", &self.len)
            .field("imported", &self.inner.imported)
            .finish_non_exhaustive()
    }
}

/// Registered memory of the device, named by the offset of a byte. Made by [`ProtectionDomain::register_dm`].
pub struct DeviceRegion {
    // First, so that it goes first.
    registration: ManuallyDrop<Registration>,
    memory: ManuallyDrop<Arc<Object<MadeFrom>>>,
    len: usize,
}

impl ProtectionDomain {
    /// Registers `len` bytes of device memory from `offset` on, for what `access` says: `ibv_reg_dm_mr(3)`. Its bytes are named by
    /// their offset from there.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::EmptyRegion`], [`Error::ForeignContext`]; [`Error::Unsupported`];
    /// [`Error::RegisterMemory`].
    #[doc(alias = "ibv_reg_dm_mr")]
    pub fn register_dm(
        &self,
        memory: &DeviceMemory,
        offset: usize,
        len: usize,
        access: Access,
    ) -> Result<DeviceRegion> {
        self.context().require_same(memory.context(), "device memory")?;
        bounds::check(offset, len, memory.len)?;
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        let flags = access.bits() | IBV_ACCESS_ZERO_BASED.0;
        // SAFETY: domain and memory are valid, of one context, and the memory has these bytes, which are none of this process.
        let raw = check_ptr(|| unsafe { ibv_reg_dm_mr(self.as_raw(), memory.as_raw(), offset as u64, len, flags) })
            .map_err(|errno| match errno.is_unsupported() {
                true => self.context().unsupported("registering device memory"),
                false => Error::RegisterMemory { len, access, errno },
            })?;
        // SAFETY: just made, and given to nobody else.
        let registration = ManuallyDrop::new(unsafe { Registration::from_raw(raw, self, access) });
        Ok(DeviceRegion { registration, memory: ManuallyDrop::new(Arc::clone(&memory.inner)), len })
    }
}

impl DeviceRegion {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always `false`: a region has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Local key.
    #[must_use]
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.registration.lkey
    }

    /// `len` bytes from `offset` on, as a scatter/gather element for the raw door. Its address is none of this process: see
    /// [`RecvBatch`](crate::RecvBatch) before something is received or read into it.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn sge(&self, offset: usize, len: u32) -> Result<Sge> {
        bounds::check(offset, len as usize, self.len)?;
        Ok(Sge { address: offset as u64, len, lkey: self.lkey() })
    }

    /// What a peer needs to reach it, as far as it was registered for that.
    #[must_use]
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { address: 0, len: self.len as u64, rkey: self.registration.rkey }
    }

    /// The domain it is registered in.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.registration.pd()
    }

    /// The C object, valid while this region is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_mr {
        self.registration.as_raw()
    }
}

impl Drop for DeviceRegion {
    fn drop(&mut self) {
        if self.registration.release().is_ok() {
            // SAFETY: dropped here only, and not used after. Otherwise the memory stays, as the region does.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

impl fmt::Debug for DeviceRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRegion").field("len", &self.len).finish_non_exhaustive()
    }
}
