//! Handles of queues that know their interface, which is asked for once, before a loop.

use anyhow::{Result, anyhow};
use rdma_safe::{CompletionQueue, Known, Poller, RecvQueue, SendQueue};

use crate::worker::{Lane, LaneMemory};

/// Polls `cq`, which is of the interface `C`.
#[inline(always)]
pub(super) fn poller<C: Known>(cq: &mut CompletionQueue) -> Result<Poller<'_, C>> {
    cq.poller_by().ok_or_else(other_interface)
}

/// The sends of a queue pair, and their memory here and at the peer.
pub(super) struct Sends<'w, P: Known> {
    pub(super) queue: SendQueue<'w, P>,
    pub(super) memory: &'w LaneMemory,
}

/// The receives of a queue pair, and their memory.
pub(super) struct Receives<'w> {
    pub(super) queue: RecvQueue<'w>,
    pub(super) memory: &'w LaneMemory,
}

/// Both queues of a lane that posts by `P`.
pub(super) fn split<P: Known>(lane: &mut Lane) -> Result<(Sends<'_, P>, Receives<'_>)> {
    let Lane { qp, memory, .. } = lane;
    let memory = &*memory;
    let (sends, receives) = qp.split();
    let sends = sends.by().ok_or_else(other_interface)?;
    Ok((Sends { queue: sends, memory }, Receives { queue: receives, memory }))
}

/// The receives of a lane.
pub(super) fn receives(lane: &mut Lane) -> Receives<'_> {
    let Lane { qp, memory, .. } = lane;
    Receives { queue: qp.split().1, memory }
}

#[cold]
fn other_interface() -> anyhow::Error {
    anyhow!("the interface of a queue is another one than was found before; this is a fault of rdma-perf")
}
