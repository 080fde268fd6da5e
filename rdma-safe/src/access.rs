//! Access rights of memory regions and queue pairs.

use bitflags::bitflags;
use rdma_sys::*;

bitflags! {
    /// What may be done with a memory region, or by the peer of a queue pair: `enum ibv_access_flags`.
    ///
    /// Local reading is always allowed. The default is no more than that.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Access: u32 {
        /// The device may write for local work: receives, and results of reads and atomics.
        const LOCAL_WRITE = IBV_ACCESS_LOCAL_WRITE.0;
        /// Peers may write. Needs `LOCAL_WRITE` on a region.
        const REMOTE_WRITE = IBV_ACCESS_REMOTE_WRITE.0;
        /// Peers may read.
        const REMOTE_READ = IBV_ACCESS_REMOTE_READ.0;
        /// Peers may do atomic operations. Needs `LOCAL_WRITE` on a region.
        const REMOTE_ATOMIC = IBV_ACCESS_REMOTE_ATOMIC.0;
        /// Peers may flush what they have written until it is visible to all.
        const FLUSH_GLOBAL = IBV_ACCESS_FLUSH_GLOBAL.0;
        /// Peers may flush what they have written until it is persistent.
        const FLUSH_PERSISTENT = IBV_ACCESS_FLUSH_PERSISTENT.0;
        /// The device may reorder accesses; ignored where it cannot.
        const RELAXED_ORDERING = IBV_ACCESS_RELAXED_ORDERING.0;
        /// Pages are not locked but faulted in by the device: on-demand paging. Without
        /// [`DeviceAttributes::on_demand_paging`](crate::DeviceAttributes::on_demand_paging) registrations with it are refused.
        const ON_DEMAND = IBV_ACCESS_ON_DEMAND.0;
        /// A [`MemoryWindow`](crate::MemoryWindow) can be bound to the region, which lets peers in as the window says.
        const MW_BIND = IBV_ACCESS_MW_BIND.0;
        /// The bytes are named by their offset in the region, where the device knows that; those that do not, ignore it. What every
        /// device knows is [`ProtectionDomain::register_raw_at`](crate::ProtectionDomain::register_raw_at) with 0. For raw regions
        /// only.
        const ZERO_BASED = IBV_ACCESS_ZERO_BASED.0;
        /// All pages are huge and stay so, which spares the device entries. Goes with `ON_DEMAND`, and for raw regions only.
        const HUGETLB = IBV_ACCESS_HUGETLB.0;
    }
}

impl Access {
    /// The rights that let a peer reach memory.
    pub const REMOTE: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

    /// The rights that let a peer flush what it has written.
    pub const FLUSH: Access = Access::FLUSH_GLOBAL.union(Access::FLUSH_PERSISTENT);

    /// What the owner of memory by address has to answer for.
    pub(crate) const RAW: Access = Access::ZERO_BASED.union(Access::HUGETLB);

    /// What lets a peer reach memory, now or by a window that is bound later.
    pub(crate) const EXPOSING: Access = Access::REMOTE.union(Access::MW_BIND);
}
