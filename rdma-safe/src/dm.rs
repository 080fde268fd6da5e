//! Device memory: memory on the device itself.
//!
//! Start with [`Context::alloc_dm`]. A region of the [`DeviceMemory`] ([`ProtectionDomain::register_dm`]) has the keys
//! for local work and for peers.

use std::ffi::c_int;
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::{check, check_neg, check_ptr};
use crate::error::Verb;
use crate::mr::Registration;
use crate::object::{Object, Parents};
use crate::{Access, Context, Error, ProtectionDomain, RemoteMemory, Result, Sge, bounds};

const FEATURE: &str = "device memory";

/// Memory on the device: `struct ibv_dm`.
///
/// The device accesses it without crossing the bus. It suits, for example, counters and locks of a protocol, or headers
/// that are sent repeatedly. The CPU accesses it with [`DeviceMemory::read`] and [`DeviceMemory::write`], work requests
/// and peers through a [`DeviceRegion`].
pub struct DeviceMemory {
    // A shared reference only reads the memory.
    inner: Arc<Object<MadeFrom>>,
    len: usize,
}

struct MadeFrom {
    context: Context,
    /// Whether it is released by `ibv_unimport_dm`, which leaves the memory to its owner.
    imported: bool,
}

impl Parents for MadeFrom {
    type Raw = ibv_dm;

    const VERB: Verb = Verb::FreeDm;

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_dm) -> c_int {
        if self.imported {
            // SAFETY: the caller's contract.
            unsafe { (self.context.verbs().ibv_unimport_dm)(raw) };
            return 0;
        }
        // SAFETY: the caller's contract.
        unsafe { ibv_free_dm(raw) }
    }
}

impl Context {
    /// Allocates `len` bytes of device memory, aligned to `align` bytes: `ibv_alloc_dm(3)`.
    ///
    /// Atomic operations need an alignment of 8. The contents are undefined.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no such memory; [`Error::AllocateDeviceMemory`], also if the alignment
    /// is not a power of two.
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
        // SAFETY: the context is valid, and `attr` is valid during the call.
        let raw = check_ptr(|| unsafe { ibv_alloc_dm(self.as_raw(), &mut attr) }).map_err(|errno| {
            match errno.is_unsupported() {
                true => self.unsupported(FEATURE),
                false => failed(errno),
            }
        })?;
        // SAFETY: the memory was just allocated, and nobody else has it.
        Ok(unsafe { DeviceMemory::new(raw, self, len, false) })
    }

    /// Imports device memory that another context of the same kernel context has allocated: `ibv_import_dm(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`].
    ///
    /// # Safety
    /// `handle` must be the [`DeviceMemory::handle`] of memory of `len` bytes, in a context that shares its kernel
    /// context with this one (see [`Context::import`]). Its owner must keep it until this is dropped.
    #[doc(alias = "ibv_import_dm")]
    pub unsafe fn import_dm(&self, handle: u32, len: usize) -> Result<DeviceMemory> {
        // SAFETY: the context is valid; the caller vouches for the handle.
        let raw = check_ptr(|| unsafe { (self.verbs().ibv_import_dm)(self.as_raw(), handle) })
            .map_err(|errno| self.feature_error(Verb::ImportDm, "importing device memory", errno))?;
        // SAFETY: the memory was just imported, and nobody else has it.
        Ok(unsafe { DeviceMemory::new(raw, self, len, true) })
    }
}

impl DeviceMemory {
    /// # Safety
    /// `raw` must be memory of `context` that nobody else frees or, if it was imported, releases.
    unsafe fn new(raw: NonNull<ibv_dm>, context: &Context, len: usize, imported: bool) -> Self {
        let made_from = MadeFrom { context: context.clone(), imported };
        // SAFETY: the caller's contract. Each region of the memory holds an `Arc` of the memory.
        DeviceMemory { inner: Arc::new(unsafe { Object::new(raw, made_from) }), len }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0, which is only possible for imported memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The context that the memory belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The kernel's handle, for [`Context::import_dm`].
    #[must_use]
    pub fn handle(&self) -> u32 {
        // SAFETY: the memory is valid, and the field does not change.
        unsafe { (*self.as_raw()).handle }
    }

    /// Copies `source` to `offset`: `ibv_memcpy_to_dm(3)`.
    ///
    /// Peers or work that access the bytes at the same time may see a mixture of old and new data.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::Verb`], since some devices require offset and length to be multiples of 4.
    #[doc(alias = "ibv_memcpy_to_dm")]
    pub fn write(&mut self, offset: usize, source: &[u8]) -> Result<()> {
        bounds::check(offset, source.len(), self.len)?;
        let raw = self.as_raw();
        // SAFETY: the memory is valid.
        if unsafe { (*raw).memcpy_to_dm.is_none() } {
            return Err(self.context().unsupported("copies to this device memory (ibv_memcpy_to_dm)"));
        }
        // SAFETY: the memory is valid and has these bytes, the function exists, and `source` is readable.
        check(unsafe { ibv_memcpy_to_dm(raw, offset as u64, source.as_ptr().cast(), source.len()) })
            .map_err(|errno| self.context().verb_error(Verb::MemcpyToDm, errno))
    }

    /// Copies the bytes at `offset` to `target`: `ibv_memcpy_from_dm(3)`.
    ///
    /// # Errors
    /// Those of [`DeviceMemory::write`].
    #[doc(alias = "ibv_memcpy_from_dm")]
    pub fn read(&self, offset: usize, target: &mut [u8]) -> Result<()> {
        bounds::check(offset, target.len(), self.len)?;
        let raw = self.as_raw();
        // SAFETY: the memory is valid.
        if unsafe { (*raw).memcpy_from_dm.is_none() } {
            return Err(self.context().unsupported("copies from this device memory (ibv_memcpy_from_dm)"));
        }
        // SAFETY: the memory is valid and has these bytes, the function exists, and `target` is writable.
        check(unsafe { ibv_memcpy_from_dm(target.as_mut_ptr().cast(), raw, offset as u64, target.len()) })
            .map_err(|errno| self.context().verb_error(Verb::MemcpyFromDm, errno))
    }

    /// Exports the memory as a DMA-BUF, for other devices and processes: `ibv_dm_export_dmabuf_fd(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 62, or a provider or kernel that lacks it;
    /// [`Error::Verb`].
    #[doc(alias = "ibv_dm_export_dmabuf_fd")]
    pub fn export_dmabuf(&self) -> Result<OwnedFd> {
        const FEATURE: &str = "exporting device memory as a DMA-BUF (ibv_dm_export_dmabuf_fd, rdma-core 62)";
        let context = self.context();
        let export = context.verbs().ibv_dm_export_dmabuf_fd.ok_or_else(|| context.unsupported(FEATURE))?;
        // SAFETY: the memory is valid.
        let fd = check_neg(|| unsafe { export(self.as_raw()) })
            .map_err(|errno| context.feature_error(Verb::DmExportDmabufFd, FEATURE, errno))?;
        // SAFETY: this is a new descriptor that the caller owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Frees the memory: `ibv_free_dm(3)`. Dropping does the same once it has no regions, but ignores errors.
    ///
    /// # Errors
    /// [`Error::InUse`] if it has regions: it is freed with the last of them. [`Error::Verb`] if the provider fails;
    /// the memory and its context are then leaked.
    #[doc(alias = "ibv_free_dm")]
    pub fn free(self) -> Result<()> {
        Object::destroy_last(self.inner, "device memory", "regions").map(drop)
    }

    /// The C object, valid while this memory or a region of it exists.
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

/// Registered device memory, addressed by offset. Made by [`ProtectionDomain::register_dm`].
pub struct DeviceRegion {
    // Released before `memory`.
    registration: ManuallyDrop<Registration>,
    memory: ManuallyDrop<Arc<Object<MadeFrom>>>,
    len: usize,
}

impl ProtectionDomain {
    /// Registers `len` bytes of device memory at `offset` with the rights `access`: `ibv_reg_dm_mr(3)`.
    ///
    /// Addresses in the region are offsets from its start.
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
        // SAFETY: domain and memory are valid and belong to the same context. The memory has these bytes, which are not
        // memory of this process.
        let raw = check_ptr(|| unsafe { ibv_reg_dm_mr(self.as_raw(), memory.as_raw(), offset as u64, len, flags) })
            .map_err(|errno| match errno.is_unsupported() {
                true => self.context().unsupported("registering device memory"),
                false => Error::RegisterMemory { len, access, errno },
            })?;
        // SAFETY: the region was just registered, and nobody else has it.
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

    /// `len` bytes at `offset` as a scatter/gather element of the raw interface.
    ///
    /// The address is not an address of this process: read [`RecvBatch`](crate::RecvBatch) before you receive or read
    /// into it.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn sge(&self, offset: usize, len: u32) -> Result<Sge> {
        bounds::check(offset, len as usize, self.len)?;
        Ok(Sge { address: offset as u64, len, lkey: self.lkey() })
    }

    /// Address and key for peers, which need the rights of the registration.
    #[must_use]
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { address: 0, len: self.len as u64, rkey: self.registration.rkey }
    }

    /// The protection domain that the region is registered in.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.registration.pd()
    }

    /// The C object, valid while this region exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_mr {
        self.registration.as_raw()
    }
}

impl Drop for DeviceRegion {
    fn drop(&mut self) {
        if self.registration.release().is_ok() {
            // SAFETY: dropped only here, and not used afterwards. If the region could not be released, the memory is
            // kept, too.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

impl fmt::Debug for DeviceRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRegion").field("len", &self.len).finish_non_exhaustive()
    }
}
