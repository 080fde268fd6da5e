//! The whole address space as one region.

use super::RawMemoryRegion;
use crate::device::OdpCapabilities;
use crate::{Access, ProtectionDomain, Result};

impl ProtectionDomain {
    /// Registers all present and future memory of this process as one region, paged on demand.
    ///
    /// The device faults pages in when work names them. Calls `ibv_reg_mr(3)` for `SIZE_MAX` bytes from NULL, with
    /// `access` and [`Access::ON_DEMAND`].
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported), before the call, unless the device has
    /// [`OdpCapabilities::IMPLICIT`]; [`Error::RegisterMemory`](crate::Error::RegisterMemory), also for remote access,
    /// which few devices support here.
    ///
    /// # Safety
    ///
    /// All work requests that use its keys, local ones and those of peers with remote access, must name only memory
    /// that satisfies the contract of [`ProtectionDomain::register_raw`]. Nothing else prevents the device from writing
    /// to any memory of this process.
    #[doc(alias = "ibv_reg_mr")]
    pub unsafe fn register_implicit(&self, access: Access) -> Result<RawMemoryRegion> {
        let paging = self.context().attributes().on_demand_paging();
        if !paging.is_some_and(|paging| paging.general.contains(OdpCapabilities::IMPLICIT)) {
            return Err(self.context().unsupported("registering all memory at once (OdpCapabilities::IMPLICIT)"));
        }
        // SAFETY: no memory is named yet. The caller guarantees the contract for later work.
        unsafe { self.registration(access | Access::ON_DEMAND).register_raw(std::ptr::null_mut(), usize::MAX) }
    }
}
