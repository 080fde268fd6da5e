//! The state of one thread between sizes.

use super::receiver::Receiver;
use super::shared::SharedReceiveState;
use crate::clock::Clock;
use crate::endpoint::worker::Worker;
use crate::plan::{Plan, Role};

/// A worker with the state that lasts from one size to the next.
pub(crate) struct Runner {
    pub(crate) worker: Worker,
    pub(super) receiver: Receiver,
    /// State of shared receives, in place of `receiver`.
    pub(super) shared: Option<SharedReceiveState>,
    pub(super) role: Role,
    pub(super) clock: Clock,
}

impl Runner {
    pub(crate) fn new(worker: Worker, plan: &Plan, role: Role, clock: Clock) -> Self {
        let shared = worker.srq.is_some().then(|| SharedReceiveState::new(plan, &worker));
        Runner { worker, receiver: Receiver::new(plan), shared, role, clock }
    }

    /// Messages of the current size whose bytes were compared on arrival.
    pub(super) fn validated(&self) -> u64 {
        self.shared.as_ref().map_or_else(|| self.receiver.validated(), |shared| shared.validated)
    }
}
