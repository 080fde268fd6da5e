//! All of the address space as one region.

use super::RawMemoryRegion;
use crate::{Access, OdpCapabilities, ProtectionDomain, Result};

impl ProtectionDomain {
    /// Registers all memory that this process has, and will have, as one region, whose pages the device faults in as work names
    /// them: `ibv_reg_mr(3)` of `SIZE_MAX` bytes from NULL on, with `access` and [`Access::ON_DEMAND`].
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported), before the call, unless the device has [`OdpCapabilities::IMPLICIT`];
    /// [`Error::RegisterMemory`](crate::Error::RegisterMemory), also for rights of peers, which few devices give here.
    ///
    /// # Safety
    ///
    /// Whoever names bytes by its keys, here or with a remote right at a peer, must name only such as the contract of
    /// [`ProtectionDomain::register_raw`] holds for: nothing else keeps the device from writing to any of this process.
    #[doc(alias = "ibv_reg_mr")]
    pub unsafe fn register_implicit(&self, access: Access) -> Result<RawMemoryRegion> {
        let paging = self.context().attributes().on_demand_paging();
        if !paging.is_some_and(|paging| paging.general.contains(OdpCapabilities::IMPLICIT)) {
            return Err(self.context().unsupported("registering all memory at once (OdpCapabilities::IMPLICIT)"));
        }
        // SAFETY: nothing is named yet; the caller vouches for those who will.
        unsafe { self.registration(access | Access::ON_DEMAND).register_raw(std::ptr::null_mut(), usize::MAX) }
    }
}
