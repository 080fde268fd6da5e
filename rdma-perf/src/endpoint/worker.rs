//! The verbs objects of one thread.

use anyhow::{Context as _, Result, bail};
use rdma_safe::cm::Id;
use rdma_safe::{
    Access, CompletionQueue, ConnectOptions, InitOptions, ProtectionDomain, QueuePair, QueuePairAddress, RemoteMemory,
    SharedReceiveQueue,
};
use serde::{Deserialize, Serialize};

use super::cm::CmQueuePair;
use super::credits::CreditConnection;
use super::datagram::{Destination, QKEY};
use super::memory::{LaneMemory, Regions};
use super::queue::completion_queue;
use crate::interrupt::Check;
use crate::plan::layout::Layout;
use crate::plan::receives::RECEIVE_BATCH;
use crate::plan::{Interface, Plan, Role};
use crate::transport::Transport;

/// Addresses that the peer of a worker needs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WorkerAddress {
    pub(crate) queue_pairs: Vec<LaneAddress>,
    /// Address of the [`CreditConnection`].
    pub(crate) credits: Option<QueuePairAddress>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct LaneAddress {
    pub(crate) queue_pair: QueuePairAddress,
    /// Memory for writes, reads and atomics of the peer.
    pub(crate) target: RemoteMemory,
}

/// A queue pair with its memory. Fields are dropped in order, the queue pair first.
pub(crate) struct Lane {
    pub(crate) qp: QueuePair,
    pub(crate) memory: LaneMemory,
    address: QueuePairAddress,
    /// The librdmacm connection, which ends when it is dropped.
    id: Option<Id>,
}

impl Lane {
    pub(crate) fn is_connected(&self) -> bool {
        self.id.is_some()
    }

    /// The queue pair, for connecting it to `peer` with librdmacm.
    pub(crate) fn cm_queue_pair(&mut self, peer: &LaneAddress) -> CmQueuePair<'_> {
        CmQueuePair { qp: &mut self.qp, own: self.address, peer: peer.queue_pair }
    }

    pub(crate) fn set_id(&mut self, id: Id) {
        self.id = Some(id);
    }
}

/// Verbs objects of one thread. Fields are dropped in order: queue pairs before the memory that they may still write
/// to.
pub(crate) struct Worker {
    pub(crate) lanes: Vec<Lane>,
    pub(crate) send_cq: CompletionQueue,
    pub(crate) recv_cq: CompletionQueue,
    /// Receives that all queue pairs share, with `--use-srq`.
    pub(crate) srq: Option<SharedReceiveQueue>,
    /// Connection for credits, if the plan needs them.
    pub(crate) credits: Option<CreditConnection>,
    _regions: Regions,
}

impl Worker {
    /// Creates the objects and registers their memory.
    pub(crate) fn new(
        pd: &ProtectionDomain,
        plan: &Plan,
        role: Role,
        init: &InitOptions,
        check: Check<'_>,
    ) -> Result<Self> {
        check()?;
        let layout = Layout::of_role(plan, role);
        let regions = Regions::new(pd, plan, role, &layout)?;
        let rx_depth = if plan.takes_receives() { plan.rx_depth } else { 1 };
        let channel = || plan.events.then(|| pd.context().create_channel()).transpose();
        let send_channel = channel()?;
        // An end that waits for both queues at a time needs one channel for them.
        let recv_channel = if plan.bidirectional { send_channel.clone() } else { channel()? };
        let send_cq = completion_queue(pd.context(), plan, plan.tx_depth, send_channel.as_ref())?;
        let recv_cq = completion_queue(pd.context(), plan, rx_depth, recv_channel.as_ref())?;
        let srq = if plan.shared_receives && plan.is_sent_to(role) {
            Some(pd.shared_receive_queue(rx_depth).max_batch(RECEIVE_BATCH).build()?)
        } else {
            None
        };
        let mut lanes = Vec::with_capacity(plan.qps as usize);
        for index in 0..plan.qps as usize {
            check()?;
            let builder = pd
                .queue_pair(&send_cq, &recv_cq)
                .qp_type(plan.transport.queue_pair())
                .send_depth(plan.tx_depth)
                .recv_depth(rx_depth)
                .inline_data(plan.inline)
                .max_batch(plan.post_list.max(RECEIVE_BATCH))
                .classic(plan.post == Interface::Classic);
            let mut qp = match &srq {
                Some(srq) => builder.shared_receive_queue(srq).build()?,
                None => builder.build()?,
            };
            if plan.post == Interface::Extended && !qp.is_extended() {
                bail!("{} does not post by ibv_wr_*: leave out --post extended", pd.context().device_name());
            }
            let address = match plan.transport {
                Transport::Ud => qp.init_datagrams(QKEY, init)?,
                Transport::Rc | Transport::Uc => qp.init(&init.peer_access(Access::REMOTE))?,
            };
            let (source, target) = regions.buffers(index, &layout);
            let remote = RemoteMemory { address: 0, len: 0, rkey: 0 };
            let memory = LaneMemory { source, target, layout, remote, destination: None };
            lanes.push(Lane { qp, memory, address, id: None });
        }
        let credits = if plan.has_credits() {
            let waits_for = if plan.sends(role) { &send_channel } else { &recv_channel };
            Some(CreditConnection::new(pd, plan, init, waits_for.as_ref())?)
        } else {
            None
        };
        Ok(Worker { lanes, send_cq, recv_cq, srq, credits, _regions: regions })
    }

    /// Addresses for the peer.
    pub(crate) fn address(&self) -> WorkerAddress {
        let lane = |lane: &Lane| LaneAddress { queue_pair: lane.address, target: lane.memory.exposed_target() };
        let credits = self.credits.as_ref().map(|line| line.address);
        WorkerAddress { queue_pairs: self.lanes.iter().map(lane).collect(), credits }
    }

    /// Connects to the peer. With `--rdma-cm` it only stores the peer's memory, and librdmacm connects the queue pairs
    /// later.
    pub(crate) fn connect(&mut self, peer: &WorkerAddress, plan: &Plan, role: Role, check: Check<'_>) -> Result<()> {
        if peer.queue_pairs.len() != self.lanes.len() {
            bail!("the peer has {} queue pairs, this end has {}", peer.queue_pairs.len(), self.lanes.len());
        }
        let connection = &plan.connection;
        let mut options = ConnectOptions::default()
            .service_level(connection.service_level)
            .traffic_class(connection.traffic_class)
            .timeout(connection.timeout)
            .retry_count(connection.retries)
            .rnr_retry(connection.rnr_retries);
        if let Some(mtu) = plan.mtu {
            options = options.mtu(mtu);
        }
        if let Some(outstanding) = plan.outstanding {
            options = options.rd_atomic(outstanding);
        }
        let needed = if plan.sends(role) { Layout::of(plan).target_area } else { 0 };
        for (lane, peer) in self.lanes.iter_mut().zip(&peer.queue_pairs) {
            check()?;
            if peer.target.len < needed {
                bail!("the peer's memory of {} bytes is too short", peer.target.len);
            }
            let peers = &peer.queue_pair;
            match plan.transport {
                Transport::Ud => lane.memory.destination = Some(Destination::new(&lane.qp, peers, &options)?),
                Transport::Rc | Transport::Uc if plan.rdma_cm => {}
                Transport::Rc | Transport::Uc => {
                    lane.qp.connect(peers, &options).context("cannot connect to the peer's queue pair")?
                }
            }
            lane.memory.remote = peer.target;
        }
        match (&mut self.credits, &peer.credits) {
            (None, None) => Ok(()),
            (Some(line), Some(peer)) => line.connect(peer, &options),
            _ => bail!("only one end uses credits"),
        }
    }
}
