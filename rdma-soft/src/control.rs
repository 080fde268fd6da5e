//! What a program can ask and tell the device that it has in itself, beyond verbs.

use crate::device::{self, device};
use crate::faults::{Faults, FaultsError};

/// How many objects there are in the device of this process: what a test counts that looks for what was left behind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Objects {
    /// Opened contexts.
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
}

/// Counts the objects of the device of this process; none where the device cannot be made.
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
    }
}

/// Packets that this process sends from now on meet with that; what was held back before goes at once. It is what
/// `RDMA_SOFT_FAULTS` sets at the start. Where the device cannot be made, there is nothing to be done.
///
/// # Errors
/// Those of [`Faults::check`]: nothing has changed then.
pub fn set_faults(faults: Faults) -> Result<(), FaultsError> {
    faults.check()?;
    let Some(device) = device() else { return Ok(()) };
    let mut core = device.lock();
    let now = device.now();
    core.links.iter_mut().for_each(|link| link.set_faults(faults, now));
    core.send(now);
    device.leave(core);
    Ok(())
}

/// Why the device of this process could not be made when a program opened it, such as an address of no interface in
/// `RDMA_SOFT_ADDR`. It was written to standard error, too. `None` where it was made, or nobody has asked for it.
#[must_use]
pub fn setup_error() -> Option<&'static str> {
    device::setup_error()
}
