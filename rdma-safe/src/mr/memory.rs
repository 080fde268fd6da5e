//! Memory that is moved into a region, and comes back.

use std::any::{TypeId, type_name};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Backing, Buffer, ExposedRegion, Region, RegistrationBuilder};
use crate::{Access, Errno, Error, ProtectionDomain, Result};

/// Memory that [`ProtectionDomain::register`] takes and [`Buffer::into_memory`] returns.
///
/// It is a `Vec<u8>`, a `Box<[u8]>`, a `memmap2::MmapMut` (feature `memmap2`) or any [`Backing`].
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
/// let buffer = pd.register(b"hello".to_vec())?; // registers the bytes where they are
/// let (mut head, tail) = buffer.into_split(1)?;
/// head[0] = b'j';
///
/// // The memory comes back when the last part is no longer used.
/// let error = head.into_memory::<Vec<u8>>().unwrap_err();
/// assert_eq!(error.to_string(), "the memory cannot be returned: 1 other part of it is held or in flight");
/// drop(tail);
/// assert_eq!(error.part.unwrap().into_memory::<Vec<u8>>()?, b"jello");
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
pub trait Memory: Sized + 'static {
    /// What a region keeps.
    type Backing: Backing;

    /// Gives the memory to a region.
    fn into_backing(self) -> Self::Backing;

    /// Takes the memory back from a region, which is deregistered.
    fn from_backing(backing: Self::Backing) -> Self;
}

impl<B: Backing> Memory for B {
    type Backing = B;

    fn into_backing(self) -> B {
        self
    }

    fn from_backing(backing: B) -> B {
        backing
    }
}

/// The bytes of a `Vec<u8>` up to its length. Its spare capacity is kept, but not registered.
#[derive(Debug)]
pub struct VecBacking {
    address: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: the allocation is owned and not tied to a thread.
unsafe impl Send for VecBacking {}

// SAFETY: `VecBacking` owns the allocation of a `Vec<u8>`, whose first `len` bytes are initialised, and which does not move.
unsafe impl Backing for VecBacking {
    fn address(&self) -> NonNull<u8> {
        self.address
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for VecBacking {
    fn drop(&mut self) {
        // SAFETY: these are the parts of a `Vec<u8>`, which `into_backing` has taken apart. `from_backing`, the only other
        // place that puts it together again, prevents this call.
        drop(unsafe { Vec::from_raw_parts(self.address.as_ptr(), self.len, self.capacity) });
    }
}

impl Memory for Vec<u8> {
    type Backing = VecBacking;

    fn into_backing(self) -> VecBacking {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: the pointer of a `Vec` is never null.
        let address = unsafe { NonNull::new_unchecked(this.as_mut_ptr()) };
        VecBacking { address, len: this.len(), capacity: this.capacity() }
    }

    fn from_backing(backing: VecBacking) -> Self {
        let VecBacking { address, len, capacity } = *ManuallyDrop::new(backing);
        // SAFETY: these are the parts of a `Vec<u8>`, as in `VecBacking::drop`, which is not called.
        unsafe { Vec::from_raw_parts(address.as_ptr(), len, capacity) }
    }
}

/// The allocation of a boxed slice, without the uniqueness that moving a `Box` asserts.
#[derive(Debug)]
pub struct BoxBacking(NonNull<[u8]>);

// SAFETY: the allocation is owned and not tied to a thread.
unsafe impl Send for BoxBacking {}

// SAFETY: `BoxBacking` owns the allocation of a `Box<[u8]>`, which is initialised and does not move.
unsafe impl Backing for BoxBacking {
    fn address(&self) -> NonNull<u8> {
        self.0.cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl Drop for BoxBacking {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `into_backing`. `from_backing`, the only other place that makes a box of it,
        // prevents this call.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Memory for Box<[u8]> {
    type Backing = BoxBacking;

    fn into_backing(self) -> BoxBacking {
        // SAFETY: `Box::into_raw` never returns NULL.
        BoxBacking(unsafe { NonNull::new_unchecked(Box::into_raw(self)) })
    }

    fn from_backing(backing: BoxBacking) -> Self {
        // SAFETY: made by `Box::into_raw`, as in `BoxBacking::drop`, which is not called.
        unsafe { Box::from_raw(ManuallyDrop::new(backing).0.as_ptr()) }
    }
}

/// A mapping of a file, or an anonymous one.
#[cfg(feature = "memmap2")]
#[derive(Debug)]
pub struct MmapBacking {
    map: memmap2::MmapMut,
    address: NonNull<u8>,
}

// SAFETY: the mapping is owned and not tied to a thread.
#[cfg(feature = "memmap2")]
unsafe impl Send for MmapBacking {}

// SAFETY: the mapping is owned, initialised and writable, and stays where it is until it is dropped, also if the value moves.
// `MmapMut` refers to it by a raw pointer. It has no other references: the caller of memmap2's `unsafe`
// function guarantees that no other process changes or truncates the file. An empty mapping is not registered.
#[cfg(feature = "memmap2")]
unsafe impl Backing for MmapBacking {
    fn address(&self) -> NonNull<u8> {
        self.address
    }

    fn len(&self) -> usize {
        self.map.len()
    }
}

#[cfg(feature = "memmap2")]
impl Memory for memmap2::MmapMut {
    type Backing = MmapBacking;

    fn into_backing(mut self) -> MmapBacking {
        // SAFETY: the pointer of a mapping is never null.
        let address = unsafe { NonNull::new_unchecked(self.as_mut_ptr()) };
        MmapBacking { map: self, address }
    }

    fn from_backing(backing: MmapBacking) -> Self {
        backing.map
    }
}

/// A failed registration, with the memory.
#[non_exhaustive]
pub struct RegisterError<M> {
    /// Reason of the failure.
    pub error: Error,
    /// The memory, unchanged.
    pub memory: M,
}

/// Failed return of memory, with the part of it that was passed.
#[non_exhaustive]
pub struct ReclaimError<P> {
    /// Reason of the failure.
    pub reason: ReclaimReason,
    /// The unchanged part. `None` after [`ReclaimReason::Deregister`].
    pub part: Option<P>,
}

/// Why memory cannot be returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReclaimReason {
    /// Other parts of the memory are held by the program, or in flight, or windows are bound to it.
    #[error(fmt = in_use)]
    InUse {
        /// Number of other parts. It may already have changed.
        others: usize,
    },
    /// The registered memory has a different type.
    #[error("it was registered as {registered}, not as {expected}")]
    OtherType {
        /// Name of the requested type.
        expected: &'static str,
        /// Name of the type that was registered.
        registered: &'static str,
    },
    /// The region could not be deregistered. The memory is leaked, because the device may still use it.
    #[error("ibv_dereg_mr failed: {errno}; the memory is leaked, because the device may still use it")]
    Deregister {
        /// The reported error.
        errno: Errno,
    },
}

fn in_use(others: &usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match others {
        1 => write!(f, "1 other part of it is held or in flight"),
        others => write!(f, "{others} other parts of it are held or in flight"),
    }
}

impl Region {
    /// Why the region cannot return its memory as an `M`, if it cannot. `this` is one of the owners.
    pub(super) fn reclaimable<M: Memory>(this: &mut Arc<Self>) -> Result<(), ReclaimReason> {
        if this.type_id != TypeId::of::<M::Backing>() {
            return Err(this.other_type::<M>());
        }
        match Arc::get_mut(this) {
            Some(_) => Ok(()),
            None => Err(ReclaimReason::InUse { others: Arc::strong_count(this).saturating_sub(1).max(1) }),
        }
    }

    /// The reason if the memory is requested as a `T`, but was registered as another type.
    pub(super) fn other_type<T>(&self) -> ReclaimReason {
        ReclaimReason::OtherType { expected: type_name::<T>(), registered: self.type_name }
    }

    /// Deregisters the region and returns its memory.
    ///
    /// # Safety
    /// [`Region::reclaimable`] with the same type must have succeeded.
    pub(super) unsafe fn reclaim<M: Memory>(this: Arc<Self>) -> Result<M, ReclaimReason> {
        let Ok(region) = Arc::try_unwrap(this) else { return Err(ReclaimReason::InUse { others: 1 }) };
        // Not dropped. If it cannot be deregistered, it is leaked.
        let mut region = ManuallyDrop::new(region);
        region.registration.release().map_err(|errno| ReclaimReason::Deregister { errno })?;
        // SAFETY: `region` is neither used nor dropped afterwards, so each field is taken once. `release` has succeeded, so the
        // device no longer uses the memory. `Region::new` made the box from one of this type, as `reclaimable` has checked.
        let backing = unsafe {
            std::ptr::drop_in_place(&mut region.registration);
            Box::from_raw(Box::into_raw(ManuallyDrop::take(&mut region.backing)).cast::<M::Backing>())
        };
        Ok(M::from_backing(*backing))
    }
}

impl Buffer {
    /// Deregisters the region and returns the memory that was registered.
    ///
    /// It must be the last part of its region. The other parts are dropped, or [joined](Buffer::join) with this one, and nothing
    /// of the region is in flight. The whole memory is returned, even if this is a part of it.
    ///
    /// # Errors
    /// [`ReclaimError`] returns the buffer.
    pub fn into_memory<M: Memory>(mut self) -> std::result::Result<M, ReclaimError<Buffer>> {
        match Region::reclaimable::<M>(self.region_mut()) {
            Err(reason) => Err(ReclaimError { reason, part: Some(self) }),
            Ok(()) => {
                // SAFETY: it is reclaimable.
                let memory = unsafe { Region::reclaim(self.into_region()) };
                memory.map_err(|reason| ReclaimError { reason, part: None })
            }
        }
    }
}

impl ExposedRegion {
    /// Deregisters the region, which ends all access of peers, and returns the memory that was registered.
    ///
    /// # Errors
    /// [`ReclaimError`] returns the region, with [`ReclaimReason::InUse`] also while windows that were bound to it exist.
    pub fn into_memory<M: Memory>(mut self) -> std::result::Result<M, ReclaimError<ExposedRegion>> {
        match Region::reclaimable::<M>(&mut self.region) {
            Err(reason) => Err(ReclaimError { reason, part: Some(self) }),
            Ok(()) => {
                // SAFETY: it is reclaimable.
                let memory = unsafe { Region::reclaim(self.region) };
                memory.map_err(|reason| ReclaimError { reason, part: None })
            }
        }
    }
}

impl ProtectionDomain {
    /// Like [`ProtectionDomain::register`], but returns the memory if it cannot be registered.
    ///
    /// # Errors
    /// [`RegisterError`], with the errors of [`ProtectionDomain::register`].
    pub fn try_register<M: Memory>(&self, memory: M) -> std::result::Result<Buffer, RegisterError<M>> {
        self.registration(Access::empty()).try_register(memory)
    }
}

impl RegistrationBuilder<'_> {
    /// Like [`ProtectionDomain::try_register`].
    ///
    /// # Errors
    /// Like [`ProtectionDomain::register_with`]; see also [`RegistrationBuilder::dma_handle`].
    pub fn try_register<M: Memory>(self, memory: M) -> std::result::Result<Buffer, RegisterError<M>> {
        let access = self.access & Access::EXPOSING;
        if !access.is_empty() {
            return Err(RegisterError { error: Error::BufferAccess { access }, memory });
        }
        match Region::new::<M, _>(self.with_local_write(), Box::new(memory.into_backing()), None) {
            Ok(region) => Ok(Buffer::whole(region)),
            Err((error, backing)) => Err(RegisterError { error, memory: M::from_backing(*backing) }),
        }
    }
}

impl<M> fmt::Display for RegisterError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<M> fmt::Debug for RegisterError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisterError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<M> std::error::Error for RegisterError<M> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<M> From<RegisterError<M>> for Error {
    /// Drops the memory.
    fn from(failed: RegisterError<M>) -> Self {
        failed.error
    }
}

impl<P> fmt::Display for ReclaimError<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Error::Reclaim(self.reason).fmt(f)
    }
}

impl<P> fmt::Debug for ReclaimError<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReclaimError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<P> std::error::Error for ReclaimError<P> {}

impl<P> From<ReclaimError<P>> for Error {
    /// Drops the part.
    fn from(failed: ReclaimError<P>) -> Self {
        Error::Reclaim(failed.reason)
    }
}
