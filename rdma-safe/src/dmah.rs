//! DMA handles: hints for the PCIe transactions of the device.
//!
//! Start with [`Context::dma_handle`]. Memory takes the handle when it is registered:
//! [`RegistrationBuilder::dma_handle`](crate::mr::RegistrationBuilder::dma_handle).

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::error::Verb;
use crate::named::named;
use crate::object::{Object, Parents};
use crate::{Context, Errno, Result};

const FEATURE: &str = "DMA handles (ibv_alloc_dmah, rdma-core 59)";
const VERB: Verb = Verb::AllocDmah;

named! {
    /// How the CPU and the device share memory: the two bits of PCIe's TLP processing hint (PH).
    pub struct ProcessingHint(u8) as "processing hint" {
        /// CPU and device both read and write the memory.
        BIDIRECTIONAL = 0 => "bidirectional",
        /// The device reads and writes the memory repeatedly.
        REQUESTER = 1 => "requester",
        /// The device writes data that the CPU reads soon, or the other way round.
        TARGET = 2 => "target",
        /// Like `TARGET`, and the data should stay in the cache in preference to other data.
        TARGET_WITH_PRIORITY = 3 => "target with priority",
    }
}

named! {
    /// Type of the memory for which a CPU's steering tag is used: `enum ibv_tph_mem_type`.
    pub struct TphMemoryType(u8) as "memory type" {
        /// Volatile memory.
        VOLATILE = IBV_TPH_MEM_TYPE_VM.0 as u8 => "volatile",
        /// Persistent memory.
        PERSISTENT = IBV_TPH_MEM_TYPE_PM.0 as u8 => "persistent",
    }
}

/// A DMA handle: `struct ibv_dmah`. Clones share it, and regions that are registered with it keep it alive.
///
/// It tells the host how the device will use memory, with PCIe's TLP processing hints (TPH). For example, received data
/// can go to the cache of the CPU that will read it. It only affects performance. Made by [`Context::dma_handle`], for
/// [`RegistrationBuilder::dma_handle`](crate::mr::RegistrationBuilder::dma_handle).
#[derive(Clone)]
pub struct DmaHandle {
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom {
    context: Context,
    dealloc: ibv_dealloc_dmah_fn,
}

impl Parents for MadeFrom {
    type Raw = ibv_dmah;

    const VERB: Verb = Verb::DeallocDmah;

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_dmah) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.dealloc)(raw) }
    }
}

/// Describes a DMA handle. Made by [`Context::dma_handle`]. Options that are not set are left to the provider.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct DmaHandleBuilder<'a> {
    context: &'a Context,
    cpu: Option<u32>,
    memory_type: Option<TphMemoryType>,
    hint: Option<ProcessingHint>,
}

impl Context {
    /// Starts describing a DMA handle.
    ///
    /// ```no_run
    /// # use rdma_safe::{Access, ProtectionDomain};
    /// use rdma_safe::dmah::{ProcessingHint, TphMemoryType};
    /// use rdma_safe::mr::Pages;
    ///
    /// # fn example(pd: &ProtectionDomain) -> rdma_safe::Result<()> {
    /// let handle = pd.context().dma_handle().hint(ProcessingHint::TARGET).cpu(3).memory_type(TphMemoryType::VOLATILE).build()?;
    /// let buffer = pd.registration(Access::empty()).dma_handle(&handle).register(Pages::new(4096)?)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn dma_handle(&self) -> DmaHandleBuilder<'_> {
        DmaHandleBuilder { context: self, cpu: None, memory_type: None, hint: None }
    }
}

impl DmaHandleBuilder<'_> {
    /// How the memory is used. mlx5 requires it.
    pub fn hint(mut self, hint: ProcessingHint) -> Self {
        self.hint = Some(hint);
        self
    }

    /// The CPU whose cache the data should go to. The calling thread must be allowed to run on it
    /// (`sched_getaffinity(2)`). Requires [`DmaHandleBuilder::memory_type`].
    pub fn cpu(mut self, cpu: u32) -> Self {
        self.cpu = Some(cpu);
        self
    }

    /// Whether the memory is volatile or persistent. Requires [`DmaHandleBuilder::cpu`].
    pub fn memory_type(mut self, memory_type: TphMemoryType) -> Self {
        self.memory_type = Some(memory_type);
        self
    }

    /// Allocates the handle: `ibv_alloc_dmah(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) with a library before rdma-core 59, or a device or kernel
    /// without DMA handles; [`Error::Verb`](crate::Error::Verb) with `EINVAL` for a hint of more than two bits, before
    /// the call, or a combination of options that the device refuses; with `EPERM`, before the call, for a CPU that the
    /// thread may not run on.
    #[doc(alias = "ibv_alloc_dmah")]
    pub fn build(self) -> Result<DmaHandle> {
        let context = self.context;
        let (alloc, _) = calls(context)?;
        let mut attr = ibv_dmah_init_attr::zeroed();
        if let Some(hint) = self.hint {
            if hint > ProcessingHint::TARGET_WITH_PRIORITY {
                return Err(context.verb_error(VERB, Errno(libc::EINVAL)));
            }
            attr.comp_mask |= IBV_DMAH_INIT_ATTR_MASK_PH.0;
            attr.ph = hint.0;
        }
        if let Some(cpu) = self.cpu {
            // Some kernels look up any CPU number in a shorter mask.
            if !may_run_on(cpu) {
                return Err(context.verb_error(VERB, Errno(libc::EPERM)));
            }
            attr.comp_mask |= IBV_DMAH_INIT_ATTR_MASK_CPU_ID.0;
            attr.cpu_id = cpu;
        }
        if let Some(memory_type) = self.memory_type {
            attr.comp_mask |= IBV_DMAH_INIT_ATTR_MASK_TPH_MEM_TYPE.0;
            attr.tph_mem_type = memory_type.0;
        }
        // SAFETY: the context is valid, and `attr` is valid during the call.
        let raw = check_ptr(|| unsafe { alloc(context.as_raw(), &mut attr) })
            .map_err(|errno| context.feature_error(VERB, FEATURE, errno))?;
        // SAFETY: the handle was just allocated, and nobody else has it.
        unsafe { DmaHandle::from_raw(context, raw) }
    }
}

impl DmaHandle {
    /// Adopts a handle that other code has allocated. It is deallocated with the last region that is registered with
    /// it.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) with a library before rdma-core 59.
    ///
    /// # Safety
    /// `raw` must be a DMA handle of `context` that nobody else deallocates. Regions of other code that use it must be
    /// deregistered before it is deallocated.
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_dmah>) -> Result<DmaHandle> {
        let (_, dealloc) = calls(context)?;
        let parents = MadeFrom { context: context.clone(), dealloc };
        // SAFETY: the caller's contract. Each region that is registered with the handle holds an `Arc` of the handle.
        Ok(DmaHandle { inner: Arc::new(unsafe { Object::new(raw, parents) }) })
    }

    /// Deallocates the handle: `ibv_dealloc_dmah(3)`. Dropping does the same, but ignores errors.
    ///
    /// # Errors
    /// [`Error::InUse`](crate::Error::InUse) if it has clones or regions are registered with it: it is deallocated with
    /// the last of them. [`Error::Verb`](crate::Error::Verb) if the provider fails; the handle and its context are then
    /// leaked.
    #[doc(alias = "ibv_dealloc_dmah")]
    pub fn deallocate(self) -> Result<()> {
        Object::destroy_last(self.inner, "DMA handle", "regions or clones").map(drop)
    }

    /// The context that the handle belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.inner.context()
    }

    /// The C object, valid while this handle or a region that is registered with it exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_dmah {
        self.inner.as_raw()
    }
}

impl fmt::Debug for DmaHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaHandle").field("device", &self.context().device_name()).finish_non_exhaustive()
    }
}

/// The functions of DMA handles. A library has both of them or none.
fn calls(context: &Context) -> Result<(ibv_alloc_dmah_fn, ibv_dealloc_dmah_fn)> {
    let verbs = context.verbs();
    verbs.ibv_alloc_dmah.zip(verbs.ibv_dealloc_dmah).ok_or_else(|| context.unsupported(FEATURE))
}

/// Whether the calling thread may run on this CPU.
fn may_run_on(cpu: u32) -> bool {
    // Many more CPUs than a kernel can be built for.
    let mut mask = [0_u64; 1024];
    // SAFETY: the mask has the size that is passed along; `cpu_set_t` is an array of words of any length.
    let result = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    let word = mask.get(cpu as usize / 64).copied().unwrap_or(0);
    result == 0 && word >> (cpu % 64) & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn may_run_on_accepts_the_current_cpu_and_refuses_missing_ones() {
        // SAFETY: the function has no arguments.
        let cpu = unsafe { libc::sched_getcpu() };
        assert!(may_run_on(cpu as u32), "{cpu}");
        for cpu in [65_535, 65_536, u32::MAX] {
            assert!(!may_run_on(cpu), "{cpu}");
        }
    }

    #[test]
    fn hints_have_the_values_of_pcie_and_unknown_ones_print_as_numbers() {
        assert_eq!(ProcessingHint::KNOWN.iter().map(|hint| hint.0).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(ProcessingHint(4).to_string(), "processing hint 4");
        assert_eq!((TphMemoryType::VOLATILE.0, TphMemoryType::PERSISTENT.0), (0, 1));
    }
}
