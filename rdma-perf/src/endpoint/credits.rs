//! Credits: the receiver reports arrived messages to the sender, where the transport has no acknowledgements.

use anyhow::{Context as _, Result, bail};
use rdma_safe::{
    Access, CompletionChannel, CompletionQueue, ConnectOptions, InitOptions, ProtectionDomain, QueuePair,
    QueuePairAddress,
};

use super::queue::completion_queue;
use crate::plan::Plan;
use crate::plan::receives::credit_window;

/// A reliable connection for credits, in addition to the measured queue pairs of a worker.
///
/// A credit is a message without data. Its immediate data says how many messages of which queue pair have arrived.
pub(crate) struct CreditConnection {
    // Dropped before its completion queue.
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) counts: CreditCounts,
    pub(crate) address: QueuePairAddress,
    /// Number of receives for credits.
    receives: u32,
}

impl CreditConnection {
    pub(crate) fn new(
        pd: &ProtectionDomain,
        plan: &Plan,
        init: &InitOptions,
        channel: Option<&CompletionChannel>,
    ) -> Result<Self> {
        // At most one credit per queue pair is in flight. The second receive keeps a new credit from waiting for a
        // repost.
        let (sends, receives) = (plan.qps, 2 * plan.qps);
        let cq = completion_queue(pd.context(), plan, 3, channel)?;
        let mut qp = pd.queue_pair(&cq, &cq).send_depth(sends).recv_depth(receives).max_batch(sends).build()?;
        let address = qp.init(&init.peer_access(Access::empty()))?;
        let counts = CreditCounts::new(plan.qps as usize, credit_window(plan));
        Ok(CreditConnection { qp, cq, counts, address, receives })
    }

    pub(crate) fn connect(&mut self, peer: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        for _ in 0..self.receives {
            post_receive(&mut self.qp)?;
        }
        self.qp.connect(peer, options).context("cannot connect to the peer's queue pair for credits")
    }
}

/// Posts one receive for a credit.
pub(crate) fn post_receive(qp: &mut QueuePair) -> Result<()> {
    let mut batch = qp.recv_batch()?;
    // SAFETY: the receive has no memory.
    unsafe { batch.receive(0, &[])? };
    Ok(batch.post()?)
}

/// Credits of the current size, in both directions.
pub(crate) struct CreditCounts {
    pub(crate) window: u64,
    /// Messages per queue pair that the peer has received.
    pub(crate) arrived: Vec<u64>,
    /// Messages per queue pair from the peer that credits have reported.
    pub(crate) announced: Vec<u64>,
    /// Own credits in flight.
    pub(crate) in_flight: u64,
}

impl CreditCounts {
    pub(crate) fn new(lanes: usize, window: u64) -> Self {
        CreditCounts { window, arrived: vec![0; lanes], announced: vec![0; lanes], in_flight: 0 }
    }

    /// Starts a new size. No credit of the previous size is in flight, since its sender has waited for all of them.
    pub(crate) fn reset(&mut self) {
        self.arrived.fill(0);
        self.announced.fill(0);
    }

    /// The immediate data of the next credit for `lane`, of which `received` messages have arrived. `None` if none is
    /// due.
    pub(crate) fn next_credit(&mut self, lane: usize, received: u64, idle: bool) -> Option<u32> {
        let more = received - self.announced[lane];
        // A credit takes a part of the link, so a busy receiver sends one per quarter of the window.
        if more == 0 || (!idle && more < self.window / 4) {
            return None;
        }
        self.announced[lane] = received;
        // A window has 15 bits, and a worker's queue pair numbers have 14.
        Some((lane as u32) << 16 | more as u32)
    }

    /// Adds a credit of the peer.
    pub(crate) fn apply(&mut self, credit: u32) -> Result<()> {
        match self.arrived.get_mut((credit >> 16) as usize) {
            Some(arrived) => *arrived += u64::from(credit & 0xffff),
            None => bail!("the peer sent a credit for a queue pair that does not exist: {credit:#x}"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sender_adds_up_the_receivers_credits() {
        let (mut receiver, mut sender) = (CreditCounts::new(3, 100), CreditCounts::new(3, 100));
        assert_eq!(receiver.next_credit(2, 24, false), None);
        for (lane, received, idle) in [(2, 25, false), (2, 26, true), (0, 100, false), (2, 126, false)] {
            let credit = receiver.next_credit(lane, received, idle).unwrap();
            sender.apply(credit).unwrap();
            assert_eq!(sender.arrived[lane], received);
        }
        assert_eq!(receiver.next_credit(2, 126, true), None);
        assert_eq!(sender.arrived, [100, 0, 126]);
        assert!(sender.apply(3 << 16 | 1).is_err());
    }
}
