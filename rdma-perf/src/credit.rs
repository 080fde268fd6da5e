//! How a peer says what it has received of messages that nobody acknowledges.

use anyhow::{Context as _, Result};
use rdma_safe::{
    Access, CompletionChannel, CompletionQueue, ConnectOptions, InitOptions, ProtectionDomain, QueuePair,
    QueuePairAddress,
};

use crate::plan::Plan;
use crate::run::{Book, credit_window};
use crate::worker::completion_queue;

/// A reliable connection beside the queue pairs of a worker, for credits: messages without data, whose immediate data says
/// how many messages of which queue pair have arrived.
pub(crate) struct CreditLine {
    // Dropped before its completion queue.
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) book: Book,
    pub(crate) address: QueuePairAddress,
    /// Receives for credits.
    receives: u32,
}

impl CreditLine {
    pub(crate) fn new(
        pd: &ProtectionDomain,
        plan: &Plan,
        init: &InitOptions,
        channel: Option<&CompletionChannel>,
    ) -> Result<Self> {
        // One of each queue pair is on its way, and there is room for another, so that none has to wait for a receive.
        let (sends, receives) = (plan.qps, 2 * plan.qps);
        let cq = completion_queue(pd.context(), plan, 3, channel)?;
        let mut qp = pd.queue_pair(&cq, &cq).send_depth(sends).recv_depth(receives).max_batch(sends).build()?;
        let address = qp.init(&init.peer_access(Access::empty()))?;
        let book = Book::new(plan.qps as usize, credit_window(plan));
        Ok(CreditLine { qp, cq, book, address, receives })
    }

    pub(crate) fn connect(&mut self, peer: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        for _ in 0..self.receives {
            post_receive(&mut self.qp)?;
        }
        self.qp.connect(peer, options).context("cannot connect to the peer's queue pair for credits")
    }
}

/// Room for one more credit.
pub(crate) fn post_receive(qp: &mut QueuePair) -> Result<()> {
    let mut batch = qp.recv_batch()?;
    // SAFETY: a receive without memory.
    unsafe { batch.receive(0, &[])? };
    Ok(batch.post()?)
}
