//! A registration with the memory that it is about.

use std::any::{TypeId, type_name};
use std::ptr::NonNull;
use std::sync::Arc;

use super::builder::Range;
use super::{Access, Backing, Registration, RegistrationBuilder, Returned, buffer};
use crate::{Errno, Error, Result};

/// A registration with its memory, which outlives it.
pub(crate) struct Region {
    pub(crate) registration: Registration,
    pub(super) address: NonNull<u8>,
    pub(super) len: usize,
    /// Address of the first byte for work requests and peers.
    pub(super) iova: u64,
    pub(super) backing: std::mem::ManuallyDrop<Box<dyn Backing>>,
    /// [`Returned::take_back`] for the type of the backing.
    pub(super) take_back: unsafe fn(Box<buffer::Part>),
    /// Type of the backing.
    pub(super) type_id: TypeId,
    /// Name of the type that was registered, for errors.
    pub(super) type_name: &'static str,
}

// SAFETY: `Registration` is `Send`, and so is the backing. The address is used by the owners of the range.
unsafe impl Send for Region {}
// SAFETY: as above. A shared reference to this type gives no access to the memory, and to the backing only if that is `Sync`.
unsafe impl Sync for Region {}

impl Region {
    /// Registers `backing`, which was made of a `T`, under the address `iova`, or under its own.
    pub(super) fn new<T, B: Backing>(
        builder: RegistrationBuilder<'_>,
        backing: Box<B>,
        iova: Option<u64>,
    ) -> Result<Arc<Self>, (Error, Box<B>)> {
        let (address, len) = (backing.address(), backing.len());
        // SAFETY: by the contract of `Backing`, the memory exists until the backing is dropped, which `drop` below does only after
        // the registration is released. `Buffer` and `ExposedRegion` control access to the bytes.
        let registration = match unsafe { Region::registration(builder, &*backing, iova) } {
            Ok(registration) => registration,
            Err(error) => return Err((error, backing)),
        };
        let iova = iova.unwrap_or(address.as_ptr() as u64);
        let backing = std::mem::ManuallyDrop::new(backing as Box<dyn Backing>);
        let (take_back, type_id, type_name) = (Returned::<B>::take_back as _, TypeId::of::<B>(), type_name::<T>());
        Ok(Arc::new(Region { registration, address, len, iova, backing, take_back, type_id, type_name }))
    }

    /// # Safety
    ///
    /// The contract of [`RegistrationBuilder::registration`] applies to the memory.
    unsafe fn registration(
        builder: RegistrationBuilder<'_>,
        backing: &dyn Backing,
        iova: Option<u64>,
    ) -> Result<Registration> {
        let (address, len, access) = (backing.address(), backing.len(), builder.access);
        if !(Access::all() - Access::RAW).contains(access) {
            // An access flag unknown to this crate might let peers access memory behind a slice.
            return Err(Error::RegisterMemory { len, access, errno: Errno(libc::EINVAL) });
        }
        // The device accesses the memory by address alone, so its provenance is exposed once.
        let _ = address.as_ptr().expose_provenance();
        let range = Range { address: address.as_ptr(), len, iova, of: backing.provider_memory() };
        // SAFETY: the caller's contract is the same.
        unsafe { builder.registration(range) }
    }

    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.registration.lkey
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.registration.release().is_ok() {
            // SAFETY: dropped only here, and not used later.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.backing) }
        }
    }
}
