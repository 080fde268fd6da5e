//! Changing a registration in place.

use rdma_sys::*;

use super::{RawMemoryRegion, Registration};
use crate::errno::check_neg;
use crate::{Access, Errno, ProtectionDomain};

/// Changes to a region, for [`RawMemoryRegion::reregister`]. Properties that are not set stay unchanged.
#[derive(Clone, Debug)]
#[must_use]
pub struct Reregistration {
    memory: Option<(*mut u8, usize)>,
    pd: Option<ProtectionDomain>,
    access: Option<Access>,
}

/// An error of [`RawMemoryRegion::reregister`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReregisterError {
    /// Nothing has changed, and the region is still usable.
    ///
    /// If [`Errno::is_unsupported`], the device cannot change registrations. With `EBUSY` the device was not asked,
    /// because a memory window was bound to the region.
    #[error("ibv_rereg_mr failed and left the region unchanged: {errno}")]
    Unchanged {
        /// The region.
        region: RawMemoryRegion,
        /// The reported error.
        errno: Errno,
    },

    /// The domain belongs to another context. Nothing has changed.
    #[error("the protection domain belongs to another context: create both from clones of one Context")]
    ForeignContext {
        /// The region.
        region: RawMemoryRegion,
    },

    /// The region has changed as requested, but child processes still lack its former memory (`ibv_fork_init(3)`).
    #[error(
        "ibv_rereg_mr changed the region, but could not make its former memory available to child processes: {errno}"
    )]
    Changed {
        /// The region.
        region: RawMemoryRegion,
        /// The reported error.
        errno: Errno,
    },

    /// The region became unusable and was deregistered. The caller may reuse the former and the new memory.
    #[error("ibv_rereg_mr failed and left the region unusable, so it was deregistered: {errno}")]
    Lost {
        /// The reported error.
        errno: Errno,
    },

    /// The region became unusable and could not be deregistered.
    ///
    /// The device may use the former and the new memory, which must be kept until the process ends. The domains are
    /// kept as well.
    #[error("ibv_rereg_mr failed ({errno}) and left a region that cannot be deregistered: its memory must be kept")]
    Leaked {
        /// The error of `ibv_rereg_mr(3)`.
        errno: Errno,
    },
}

impl ReregisterError {
    /// The region, if it is still usable.
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
    /// Changes nothing by default.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Reregistration { memory: None, pd: None, access: None }
    }

    /// Changes the memory to `len` bytes at `address`.
    pub fn memory(mut self, address: *mut u8, len: usize) -> Self {
        self.memory = Some((address, len));
        self
    }

    /// Changes the domain to `pd`, which must belong to the same context.
    pub fn pd(mut self, pd: &ProtectionDomain) -> Self {
        self.pd = Some(pd.clone());
        self
    }

    /// Changes the access to exactly `access`.
    pub fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }
}

impl RawMemoryRegion {
    /// Changes the memory, domain or access of the region: `ibv_rereg_mr(3)`.
    ///
    /// This can be cheaper than deregistering and registering. It may change the keys.
    ///
    /// # Errors
    /// [`ReregisterError`] contains the region, if it is still usable.
    ///
    /// # Safety
    ///
    /// The contract of [`ProtectionDomain::register_raw`] applies to the former memory and access until this returns,
    /// and to the requested ones from the call on. After [`ReregisterError::Unchanged`] and
    /// [`ReregisterError::ForeignContext`] it applies to the former ones, after [`ReregisterError::Lost`] to neither,
    /// and after [`ReregisterError::Leaked`] to both until the process ends. No work request that uses the region's
    /// keys may be in flight.
    #[doc(alias = "ibv_rereg_mr")]
    pub unsafe fn reregister(mut self, change: Reregistration) -> Result<RawMemoryRegion, ReregisterError> {
        let Reregistration { memory, pd, access } = change;
        if pd.as_ref().is_some_and(|pd| !pd.context().is_same(self.pd().context())) {
            return Err(ReregisterError::ForeignContext { region: self });
        }
        if self.inner.exclusive().is_none() {
            return Err(ReregisterError::Unchanged { region: self, errno: Errno(libc::EBUSY) });
        }
        let flag = |is_set: bool, flag: ibv_rereg_mr_flags| if is_set { flag.0 } else { 0 };
        let flags = flag(memory.is_some(), IBV_REREG_MR_CHANGE_TRANSLATION)
            | flag(pd.is_some(), IBV_REREG_MR_CHANGE_PD)
            | flag(access.is_some(), IBV_REREG_MR_CHANGE_ACCESS);
        let (address, len) = memory.unwrap_or((std::ptr::null_mut(), 0));
        // The device accesses the memory by address alone.
        let _ = address.expose_provenance();
        let verbs = self.pd().context().verbs();
        let mut code = 0;
        let outcome = check_neg(|| {
            // SAFETY: the region and the domain, which belongs to the same context, are valid. The caller guarantees
            // the contract for the memory.
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
            // A command that the library or device does not support has changed nothing.
            IBV_REREG_MR_ERR_CMD if errno.is_unsupported() => {
                return Err(ReregisterError::Unchanged { region: self, errno });
            }
            // The region may be unchanged, changed or neither.
            _ => {
                return Err(match self.inner.exclusive().map_or(Ok(()), Registration::release) {
                    Ok(()) => ReregisterError::Lost { errno },
                    Err(_) => {
                        // The region may be in the new or the former domain. `release` has leaked the former one.
                        std::mem::forget(pd);
                        ReregisterError::Leaked { errno }
                    }
                });
            }
        }
        if let Some(inner) = self.inner.exclusive() {
            inner.update(pd, access);
        }
        self.inner = self.inner.refreshed();
        if let Some((address, len)) = memory {
            (self.address, self.len) = (address.addr() as u64, len);
        }
        match code {
            0 => Ok(self),
            _ => Err(ReregisterError::Changed { region: self, errno }),
        }
    }
}
