//! Protection domains of the devices that connections use.

use std::sync::{Arc, Mutex, PoisonError};

use super::error::failed;
use super::{CmError, Id};
use crate::error::Verb;
use crate::{Device, Errno, ProtectionDomain, Result};

/// One protection domain for each device, opened on first use. Clones share them.
///
/// By default, each connector and each listener opens its devices itself. With the same `Devices`, their endpoints share domains.
/// So they can use the same memory, peers and completion queues:
///
/// ```no_run
/// use rdma_safe::cm::{Connector, Devices, Listener};
///
/// let devices = Devices::default();
/// let listener = Listener::bind("10.0.0.1:7471")?.devices(&devices);
/// let connector = Connector::new().devices(&devices);
/// # Ok::<(), rdma_safe::Error>(())
/// ```
///
/// A device stays open as long as these values exist. A device that was removed and has come back is opened again.
#[derive(Clone, Default, Debug)]
pub struct Devices(Arc<Mutex<Vec<Domain>>>);

#[derive(Clone, Debug)]
struct Domain {
    pd: ProtectionDomain,
    /// Opened here, and not given by the program.
    is_own: bool,
}

impl Domain {
    fn is_of(&self, device: &str) -> bool {
        self.pd.context().device_name() == device
    }

    /// Whether the device was removed since it was opened. Then its calls fail, even if it has come back.
    fn is_removed(&self) -> bool {
        let queried = self.pd.context().query_port(1);
        let errno = queried.err().and_then(|error| error.errno()).map(|errno| errno.0);
        matches!(errno, Some(libc::EIO | libc::ENODEV | libc::ENXIO))
    }
}

impl Devices {
    /// A copy with `pd` for its device.
    pub(super) fn with(&self, pd: &ProtectionDomain) -> Self {
        let mut domains = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        domains.retain(|domain| !domain.is_of(pd.context().device_name()));
        domains.push(Domain { pd: pd.clone(), is_own: false });
        Devices(Arc::new(Mutex::new(domains)))
    }

    /// The domain of the device with this name.
    ///
    /// # Errors
    /// Errors of opening the device.
    pub fn domain(&self, device: &str) -> Result<ProtectionDomain> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().iter().find(|domain| domain.is_of(device)).cloned();
        // Without the lock, since this is a system call.
        let removed = known.filter(|domain| domain.is_own && domain.is_removed());
        let mut domains = lock();
        domains.retain(|domain| removed.as_ref().is_none_or(|removed| !removed.pd.is_same(&domain.pd)));
        if let Some(domain) = domains.iter().find(|domain| domain.is_of(device)) {
            return Ok(domain.pd.clone());
        }
        let pd = Device::by_name(device)?.open()?.alloc_pd()?;
        domains.push(Domain { pd: pd.clone(), is_own: true });
        Ok(pd)
    }

    /// The domain of the device of `id`.
    pub(super) fn domain_of(&self, id: &Id) -> Result<ProtectionDomain> {
        self.domain(&id.device_name().ok_or_else(|| failed(Verb::RdmaResolveAddr, Errno(libc::ENODEV)))?)
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
