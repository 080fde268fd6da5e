//! Receives that connections share.

use std::fmt;

use crate::wire::{MAX_PACKET, MIN_PACKET};

/// Receives that connections share, instead of a [`window`](crate::ListenerBuilder::window) for each.
///
/// A connection always has six receives: one for data and five for control packets. When its peer sends more, it reserves further
/// ones, up to its window. A peer that has sent nothing for 100 ms gives them back. So thousands of connections need memory only
/// for the busy ones, and for six packets each. When no receive is free, connections continue with smaller windows. New connections
/// are rejected, and the rejection has the reason.
///
/// ```no_run
/// # async fn example() -> rdma_msg::Result<()> {
/// // 32 MiB for at most 1365 connections.
/// let shared = rdma_msg::SharedReceives::new(8192, 4096);
/// let listener = rdma_msg::Listener::builder().shared_receives(&shared).bind("0.0.0.0:7471").await?;
/// # Ok(())
/// # }
/// ```
///
/// Credit never exceeds the receives that are posted. So no packet finds the queue empty while all peers keep to the protocol. A
/// peer that sends more loses its connection. Until then, its packets take receives of others, whose packets are sent again (RNR).
///
/// The receives of a protection domain are made for its first connection, with memory of their own.
/// [`DriverBuilder::completions`](rdma_async::DriverBuilder::completions) has to exceed their number.
#[derive(Clone)]
pub struct SharedReceives(pub(crate) rdma_async::SharedReceives);

impl SharedReceives {
    /// In each protection domain, receives for `packets` packets of up to `packet_size` bytes, 512 to 1 MiB.
    ///
    /// Connections then have packets of at most this size. Longer messages are divided.
    #[must_use]
    pub fn new(packets: u32, packet_size: usize) -> Self {
        let size = packet_size.clamp(MIN_PACKET as usize, MAX_PACKET as usize);
        SharedReceives(rdma_async::SharedReceives::new(packets, size))
    }

    /// The number of receives in each protection domain.
    #[must_use]
    pub fn packets(&self) -> u32 {
        self.0.messages()
    }

    /// The number of receives that connections have reserved, in all domains. It includes packets whose messages the program keeps.
    #[must_use]
    pub fn reserved(&self) -> u32 {
        self.0.reserved()
    }

    /// The longest packet in bytes.
    pub(crate) fn packet_size(&self) -> u32 {
        u32::try_from(self.0.message_size()).unwrap_or(MAX_PACKET).min(MAX_PACKET)
    }
}

impl fmt::Debug for SharedReceives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceives")
            .field("packets", &self.packets())
            .field("reserved", &self.reserved())
            .finish_non_exhaustive()
    }
}
