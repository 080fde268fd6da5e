//! Queue handles that know their verbs interface, which is determined once before a loop.

use anyhow::{Result, anyhow};
use rdma_safe::CompletionQueue;
use rdma_safe::cq::Poller;
use rdma_safe::interface::Known;
use rdma_safe::post::{RecvQueue, SendQueue};

use crate::endpoint::memory::LaneMemory;
use crate::endpoint::worker::Lane;

/// Returns a poller of `cq`, which uses interface `C`.
#[inline(always)]
pub(super) fn poller<C: Known>(cq: &mut CompletionQueue) -> Result<Poller<'_, C>> {
    cq.poller_with_interface().ok_or_else(other_interface)
}

/// Send queue of a lane, with its memory here and at the peer.
pub(super) struct Sends<'w, P: Known> {
    pub(super) queue: SendQueue<'w, P>,
    pub(super) memory: &'w LaneMemory,
}

/// Receive queue of a lane, with its memory.
pub(super) struct Receives<'w> {
    pub(super) queue: RecvQueue<'w>,
    pub(super) memory: &'w LaneMemory,
}

/// Both queues of a lane that posts by `P`.
pub(super) fn split<P: Known>(lane: &mut Lane) -> Result<(Sends<'_, P>, Receives<'_>)> {
    let Lane { qp, memory, .. } = lane;
    let memory = &*memory;
    let (sends, receives) = qp.split();
    let sends = sends.with_interface().ok_or_else(other_interface)?;
    Ok((Sends { queue: sends, memory }, Receives { queue: receives, memory }))
}

/// Receive queue of a lane.
pub(super) fn receives(lane: &mut Lane) -> Receives<'_> {
    let Lane { qp, memory, .. } = lane;
    Receives { queue: qp.split().1, memory }
}

#[cold]
fn other_interface() -> anyhow::Error {
    anyhow!("the interface of a queue has changed; this is a bug in rdma-perf")
}
