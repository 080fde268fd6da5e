//! Protection domains of the devices that connections use.

use std::sync::{Arc, Mutex, PoisonError};

use super::error::failed;
use super::{CmError, Id};
use crate::error::Verb;
use crate::{Device, Errno, ProtectionDomain, Result};

/// One protection domain for each device, opened on first use. Clones share them.
#[derive(Clone, Default, Debug)]
pub(super) struct Devices(Arc<Mutex<Vec<ProtectionDomain>>>);

impl Devices {
    /// Uses `pd` for its device.
    pub(super) fn set(&self, pd: &ProtectionDomain) {
        let mut domains = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        domains.retain(|own| own.context().device_name() != pd.context().device_name());
        domains.push(pd.clone());
    }

    /// The domain of the device of `id`.
    pub(super) fn domain_of(&self, id: &Id) -> Result<ProtectionDomain> {
        let name = id.device_name().ok_or_else(|| failed(Verb::RdmaResolveAddr, Errno(libc::ENODEV)))?;
        let mut domains = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pd) = domains.iter().find(|pd| pd.context().device_name() == name) {
            return Ok(pd.clone());
        }
        let pd = Device::by_name(&name)?.open()?.alloc_pd()?;
        domains.push(pd.clone());
        Ok(pd)
    }
}

/// Checks that `pd` belongs to the device of `id`.
pub(super) fn require_device(id: &Id, pd: &ProtectionDomain) -> Result<()> {
    let (device, own) = (id.device_name().unwrap_or_default(), pd.context().device_name());
    match device == own {
        true => Ok(()),
        false => Err(CmError::OtherDevice { device, endpoint: own.to_owned() }.into()),
    }
}
