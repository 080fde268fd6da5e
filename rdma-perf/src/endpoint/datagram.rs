//! Addresses of datagrams.

use anyhow::{Context as _, Result};
use rdma_safe::{AddressHandle, ConnectOptions, QueuePair, QueuePairAddress, UdTarget};

/// Queue key of all queue pairs, the same as perftest's.
pub(crate) const QKEY: u32 = 0x1111_1111;

/// Address handle and number of the peer's queue pair.
pub(crate) struct Destination {
    handle: AddressHandle,
    qp_num: u32,
}

impl Destination {
    /// The destination `peer`, as seen from `qp`.
    pub(crate) fn new(qp: &QueuePair, peer: &QueuePairAddress, options: &ConnectOptions) -> Result<Self> {
        let address = qp.address_of(peer, options)?;
        let handle =
            qp.pd().address_handle(&address).context("cannot create an address handle for the peer's queue pair")?;
        Ok(Destination { handle, qp_num: peer.qp_num })
    }

    #[inline(always)]
    pub(crate) fn target(&self) -> UdTarget<'_> {
        UdTarget::new(&self.handle, self.qp_num, QKEY)
    }
}
