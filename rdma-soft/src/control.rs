//! Functions for the device of this process that verbs do not have.

use crate::device::{self, device};
use crate::faults::{Faults, FaultsError};

/// Number of objects in the device of this process. Tests use it to find leaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Objects {
    /// Open contexts.
    pub contexts: usize,
    /// Protection domains.
    pub protection_domains: usize,
    /// Memory regions.
    pub memory_regions: usize,
    /// Memory windows.
    pub memory_windows: usize,
    /// Completion channels.
    pub completion_channels: usize,
    /// Completion queues.
    pub completion_queues: usize,
    /// Queue pairs.
    pub queue_pairs: usize,
    /// Shared receive queues.
    pub shared_receive_queues: usize,
    /// Event channels of connections by address.
    pub event_channels: usize,
    /// Ids of connections by address.
    pub cm_ids: usize,
    /// Connections by address, including those in timewait, which end after about a second.
    pub connections: usize,
}

/// Counts the objects of the device. All zero if the device cannot be created.
#[must_use]
pub fn objects() -> Objects {
    let Some(device) = device() else { return Objects::default() };
    let core = device.lock();
    let state = &core.state;
    let (memory_regions, memory_windows) = state.shared.keys.count();
    Objects {
        contexts: state.shared.events.contexts.iter().count(),
        protection_domains: state.pds.iter().count(),
        memory_regions,
        memory_windows,
        completion_channels: state.shared.events.channels.iter().count(),
        completion_queues: state.shared.cqs.iter().count(),
        queue_pairs: state.qps.len(),
        shared_receive_queues: state.shared.srqs.iter().count(),
        event_channels: state.cma.channels.iter().count(),
        cm_ids: state.cma.ids.iter().count(),
        connections: state.cma.connections(),
    }
}

/// Replaces the faults that are injected into packets from now on. Packets that are held back are sent at once.
///
/// `RDMA_SOFT_FAULTS` sets the initial faults. Does nothing if the device cannot be created.
///
/// # Errors
/// Those of [`Faults::check`]. The faults are then unchanged.
pub fn set_faults(faults: Faults) -> Result<(), FaultsError> {
    faults.check()?;
    let Some(device) = device() else { return Ok(()) };
    let mut core = device.lock();
    let now = device.now();
    core.links.iter_mut().for_each(|link| link.set_faults(faults, now));
    core.send(now);
    device.unlock(core);
    Ok(())
}

/// Removes the device, so that a program can be tested that has to survive the removal of an RNIC.
///
/// - Queue pairs fail, and their work completes with `IBV_WC_WR_FLUSH_ERR`.
/// - Each context gets the asynchronous event `IBV_EVENT_DEVICE_FATAL`, and each `rdma_cm_id` that uses the device the event
///   `RDMA_CM_EVENT_DEVICE_REMOVAL`. Its connection ends. A peer learns that from a disconnect request.
/// - The device is not listed any more. Opening it and resolving addresses fail with `ENODEV`, creating or connecting a queue pair
///   with `EIO`, and calls on ids that have used the device with `ENXIO`.
///
/// Other objects stay valid until they are destroyed. The device does not come back in this process. Does nothing if it cannot be
/// created, or was removed already.
pub fn remove() {
    let Some(device) = device() else { return };
    let mut core = device.lock();
    let now = device.now();
    core.remove_device(now);
    core.send(now);
    device.unlock(core);
}

/// Returns why the device could not be created, such as an unknown address in `RDMA_SOFT_ADDR`.
///
/// The reason is also printed to standard error. `None` if the device exists or no program has opened it yet.
#[must_use]
pub fn setup_error() -> Option<&'static str> {
    device::setup_error()
}
