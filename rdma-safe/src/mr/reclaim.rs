//! Taking memory back from its region.

use std::any::{TypeId, type_name};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::{Buffer, ExposedRegion, Memory, Region};
use crate::{Errno, Error, Result};

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
