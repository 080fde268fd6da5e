//! Flushing: earlier writes to a peer made visible, or persistent.

use bitflags::bitflags;
use rdma_sys::*;

use crate::named::named;

bitflags! {
    /// How far the bytes have to come that a flush waits for: `enum ibv_placement_type`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct FlushPlacement: u8 {
        /// Visible to everyone who looks at the memory. The region and the queue pair of the peer need
        /// [`Access::FLUSH_GLOBAL`](crate::Access::FLUSH_GLOBAL).
        const GLOBAL = IBV_FLUSH_GLOBAL.0 as u8;
        /// Persistent: there after a power failure. The region and the queue pair of the peer need
        /// [`Access::FLUSH_PERSISTENT`](crate::Access::FLUSH_PERSISTENT).
        const PERSISTENT = IBV_FLUSH_PERSISTENT.0 as u8;
    }
}

named! {
    /// What a flush is about: `enum ibv_selectivity_level`.
    pub struct FlushRange(u8) as "flush level" {
        /// The bytes that it names.
        RANGE = IBV_FLUSH_RANGE.0 as u8 => "RANGE",
        /// The whole region of the key; the address and the length do not matter.
        REGION = IBV_FLUSH_MR.0 as u8 => "REGION",
    }
}
