//! The flush operation, which makes earlier writes visible or persistent at the peer.

use bitflags::bitflags;
use rdma_sys::*;

use crate::named::named;

bitflags! {
    /// Placement that a flush waits for: `enum ibv_placement_type`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct FlushPlacement: u8 {
        /// Globally visible: to every reader of the memory. The peer's region and queue pair need
        /// [`Access::FLUSH_GLOBAL`](crate::Access::FLUSH_GLOBAL).
        const GLOBAL = IBV_FLUSH_GLOBAL.0 as u8;
        /// Persistent: survives a power failure. The peer's region and queue pair need
        /// [`Access::FLUSH_PERSISTENT`](crate::Access::FLUSH_PERSISTENT).
        const PERSISTENT = IBV_FLUSH_PERSISTENT.0 as u8;
    }
}

named! {
    /// Range of a flush: `enum ibv_selectivity_level`.
    pub struct FlushRange(u8) as "flush level" {
        /// The bytes given by address and length.
        RANGE = IBV_FLUSH_RANGE.0 as u8 => "RANGE",
        /// The whole region of the key; address and length are ignored.
        REGION = IBV_FLUSH_MR.0 as u8 => "REGION",
    }
}
