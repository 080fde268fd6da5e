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

/// Returns why the device could not be created, such as an unknown address in `RDMA_SOFT_ADDR`.
///
/// The reason is also printed to standard error. `None` if the device exists or no program has opened it yet.
#[must_use]
pub fn setup_error() -> Option<&'static str> {
    device::setup_error()
}
