//! The domains of the devices that connections are made on.

use std::sync::{Arc, Mutex, PoisonError};

use super::error::failed;
use super::{CmError, Id};
use crate::{Device, Errno, ProtectionDomain, Result};

/// A domain for each device, opened when it is needed first. Clones share them.
#[derive(Clone, Default, Debug)]
pub(super) struct Devices(Arc<Mutex<Vec<ProtectionDomain>>>);

impl Devices {
    /// Uses `pd` for its device.
    pub(super) fn set(&self, pd: &ProtectionDomain) {
        let mut domains = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        domains.retain(|own| own.context().device_name() != pd.context().device_name());
        domains.push(pd.clone());
    }

    /// That of the device of `id`, which has one.
    pub(super) fn of(&self, id: &Id) -> Result<ProtectionDomain> {
        let name = id.device_name().ok_or_else(|| failed("rdma_resolve_addr", Errno(libc::ENODEV)))?;
        let mut domains = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pd) = domains.iter().find(|pd| pd.context().device_name() == name) {
            return Ok(pd.clone());
        }
        let pd = Device::by_name(&name)?.open()?.alloc_pd()?;
        domains.push(pd.clone());
        Ok(pd)
    }
}

/// Whether `pd` is of the device of `id`.
pub(super) fn require(id: &Id, pd: &ProtectionDomain) -> Result<()> {
    let (device, own) = (id.device_name().unwrap_or_default(), pd.context().device_name());
    match device == own {
        true => Ok(()),
        false => Err(CmError::OtherDevice { device, endpoint: own.to_owned() }.into()),
    }
}
