//! Changing a registration in place.

use std::sync::Arc;

use rdma_sys::*;

use super::{RawMemoryRegion, Registration};
use crate::errno::check_neg;
use crate::{Access, Errno, ProtectionDomain};

/// What to change of a region: the argument of [`RawMemoryRegion::reregister`]. What is not set stays.
#[derive(Clone, Debug)]
#[must_use]
pub struct Reregistration {
    memory: Option<(*mut u8, usize)>,
    pd: Option<ProtectionDomain>,
    access: Option<Access>,
}

/// A registration that was not changed as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReregisterError {
    /// Nothing has changed, and the region can be used as before. With an [`Errno::is_unsupported`] the device cannot change
    /// registrations; with `EBUSY` it did not try, since there is a memory window that was bound to the region.
    #[error("ibv_rereg_mr failed and left the region as it was: {errno}")]
    Unchanged {
        /// The region.
        region: RawMemoryRegion,
        /// As reported.
        errno: Errno,
    },

    /// The domain belongs to another context; nothing has changed.
    #[error("the protection domain belongs to another context: make both from clones of one Context")]
    ForeignContext {
        /// The region.
        region: RawMemoryRegion,
    },

    /// The region has changed as asked; what it covered before stays out of children of this process (`ibv_fork_init(3)`).
    #[error("ibv_rereg_mr changed the region, but could not give its former memory back to children: {errno}")]
    Changed {
        /// The region.
        region: RawMemoryRegion,
        /// As reported.
        errno: Errno,
    },

    /// The region was of no more use, and was deregistered: the former memory and the new are the caller's.
    #[error("ibv_rereg_mr failed and left the region unusable, so it was deregistered: {errno}")]
    Lost {
        /// As reported.
        errno: Errno,
    },

    /// The region is of no more use, and could not be deregistered either: the device may use the former memory and the new, which
    /// have to stay as they are until the process ends. So do the domains.
    #[error("ibv_rereg_mr failed ({errno}) and left a region that cannot be deregistered: its memory has to stay")]
    Leaked {
        /// As reported by `ibv_rereg_mr(3)`.
        errno: Errno,
    },
}

impl ReregisterError {
    /// The region, where it can still be used.
    #[must_use]
    pub fn into_region(self) -> Option<RawMemoryRegion> {
        match self {
            Self::Unchanged { region, .. } | Self::ForeignContext { region } | Self::Changed { region, .. } => {
                Some(region)
            }
            Self::Lost { .. } | Self::Leaked { .. } => None,
        }
    }
}

impl Reregistration {
    /// Changes nothing yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Reregistration { memory: None, pd: None, access: None }
    }

    /// Covers `len` bytes at `address` instead.
    pub fn memory(mut self, address: *mut u8, len: usize) -> Self {
        self.memory = Some((address, len));
        self
    }

    /// Moves it to `pd`, which must be of the same context.
    pub fn pd(mut self, pd: &ProtectionDomain) -> Self {
        self.pd = Some(pd.clone());
        self
    }

    /// Allows exactly `access` instead.
    pub fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }
}

impl RawMemoryRegion {
    /// Changes what the region covers, its domain or its access, which can be cheaper than to deregister and register:
    /// `ibv_rereg_mr(3)`. Its keys may be others afterwards.
    ///
    /// # Errors
    /// [`ReregisterError`] has the region, where it can still be used.
    ///
    /// # Safety
    ///
    /// The contract of [`ProtectionDomain::register_raw`] holds for the memory and the access of before until this returns, and for
    /// those asked for from the call on. After [`ReregisterError::Unchanged`] and [`ReregisterError::ForeignContext`] it holds for
    /// those of before, after [`ReregisterError::Lost`] for neither, after [`ReregisterError::Leaked`] for both until the
    /// process ends. No work request that names its keys may be in flight.
    #[doc(alias = "ibv_rereg_mr")]
    pub unsafe fn reregister(mut self, change: Reregistration) -> Result<RawMemoryRegion, ReregisterError> {
        let Reregistration { memory, pd, access } = change;
        if pd.as_ref().is_some_and(|pd| !pd.context().is_same(self.pd().context())) {
            return Err(ReregisterError::ForeignContext { region: self });
        }
        if Arc::get_mut(&mut self.inner).is_none() {
            return Err(ReregisterError::Unchanged { region: self, errno: Errno(libc::EBUSY) });
        }
        let flag = |is_set: bool, flag: ibv_rereg_mr_flags| if is_set { flag.0 } else { 0 };
        let flags = flag(memory.is_some(), IBV_REREG_MR_CHANGE_TRANSLATION)
            | flag(pd.is_some(), IBV_REREG_MR_CHANGE_PD)
            | flag(access.is_some(), IBV_REREG_MR_CHANGE_ACCESS);
        let (address, len) = memory.unwrap_or((std::ptr::null_mut(), 0));
        // The device reaches it by address alone.
        let _ = address.expose_provenance();
        let verbs = self.pd().context().verbs();
        let mut code = 0;
        let outcome = check_neg(|| {
            // SAFETY: the region and the domain, which is of the same context, are valid; the caller vouches for the memory.
            code = unsafe {
                (verbs.ibv_rereg_mr)(
                    self.as_raw(),
                    flags as i32,
                    pd.as_ref().map_or(std::ptr::null_mut(), ProtectionDomain::as_raw),
                    address.cast(),
                    len,
                    access.unwrap_or(Access::empty()).bits() as i32,
                )
            };
            code
        });
        let errno = outcome.err().unwrap_or(Errno(0));
        match ibv_rereg_mr_err_code(code) {
            ibv_rereg_mr_err_code(0) | IBV_REREG_MR_ERR_DO_FORK_OLD => {}
            IBV_REREG_MR_ERR_INPUT | IBV_REREG_MR_ERR_DONT_FORK_NEW => {
                return Err(ReregisterError::Unchanged { region: self, errno });
            }
            // What a library or a device does not have has done nothing.
            IBV_REREG_MR_ERR_CMD if errno.is_unsupported() => {
                return Err(ReregisterError::Unchanged { region: self, errno });
            }
            // It may be as it was, as it was to be, or neither.
            _ => {
                return Err(match Arc::get_mut(&mut self.inner).map_or(Ok(()), Registration::release) {
                    Ok(()) => ReregisterError::Lost { errno },
                    Err(_) => {
                        // The region may be in the new domain as well as in the former, which `release` has leaked.
                        std::mem::forget(pd);
                        ReregisterError::Leaked { errno }
                    }
                });
            }
        }
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.changed(pd, access);
        }
        if let Some((address, len)) = memory {
            (self.address, self.len) = (address.addr() as u64, len);
        }
        match code {
            0 => Ok(self),
            _ => Err(ReregisterError::Changed { region: self, errno }),
        }
    }
}
