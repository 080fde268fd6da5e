//! Removal of the device, as if it were unplugged.

use std::sync::atomic::{AtomicBool, Ordering};

use rdma_sys::{IBV_EVENT_DEVICE_FATAL, IBV_QPS_RESET};

use super::Core;
use super::state::State;
use crate::transport::Time;

/// Never reset. The flag is stored with the device locked.
static REMOVED: AtomicBool = AtomicBool::new(false);

/// Whether the device was removed.
pub(crate) fn is_removed() -> bool {
    REMOVED.load(Ordering::Relaxed)
}

impl Core {
    /// Fails all queue pairs and ids, and reports that to each context and id. Objects can still be destroyed.
    pub(crate) fn remove_device(&mut self, now: Time) {
        if REMOVED.swap(true, Ordering::Relaxed) {
            return;
        }
        let State { qps, shared, .. } = &mut self.state;
        for qp in qps.values_mut().filter(|qp| qp.state != IBV_QPS_RESET) {
            qp.fail(shared);
        }
        let contexts: Vec<u32> = shared.events.contexts.iter().map(|(number, _)| number).collect();
        contexts.into_iter().for_each(|context| shared.events.raise(context, IBV_EVENT_DEVICE_FATAL, 0));
        self.remove_ids(now);
    }
}
