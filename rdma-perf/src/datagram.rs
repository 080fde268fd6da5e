//! Messages that name where they go, one packet each.

use anyhow::{Context as _, Result};
use rdma_safe::{AddressHandle, ConnectOptions, Grh, QueuePair, QueuePairAddress, UdTarget};

/// Queue key of all queue pairs: perftest's.
pub(crate) const QKEY: u32 = 0x1111_1111;

/// Bytes that a receive takes before those of the message.
pub(crate) const HEADER: u64 = Grh::LEN as u64;

/// The longest packet that verbs know of. Paths may have less.
pub(crate) const MAX_MTU: u64 = 4096;

/// The peer's queue pair, and the way to it.
pub(crate) struct Destination {
    handle: AddressHandle,
    qp_num: u32,
}

impl Destination {
    /// From `qp` to `peer`.
    pub(crate) fn new(qp: &QueuePair, peer: &QueuePairAddress, options: &ConnectOptions) -> Result<Self> {
        let address = qp.address_of(peer, options)?;
        let handle = qp.pd().address_handle(&address).context("cannot find the way to the peer's queue pair")?;
        Ok(Destination { handle, qp_num: peer.qp_num })
    }

    #[inline(always)]
    pub(crate) fn target(&self) -> UdTarget<'_> {
        UdTarget::new(&self.handle, self.qp_num, QKEY)
    }
}
