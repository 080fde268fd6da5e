//! Access rights of memory regions and queue pairs.

use bitflags::bitflags;
use rdma_sys::*;

bitflags! {
    /// Access rights to a memory region, or of the peer of a queue pair: `enum ibv_access_flags`.
    ///
    /// The device may always read for local work. By default it may do nothing else.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Access: u32 {
        /// The device may write for local work: receives, and the results of reads and atomics.
        const LOCAL_WRITE = IBV_ACCESS_LOCAL_WRITE.0;
        /// Peers may write. A region also needs `LOCAL_WRITE`.
        const REMOTE_WRITE = IBV_ACCESS_REMOTE_WRITE.0;
        /// Peers may read.
        const REMOTE_READ = IBV_ACCESS_REMOTE_READ.0;
        /// Peers may use atomic operations. A region also needs `LOCAL_WRITE`.
        const REMOTE_ATOMIC = IBV_ACCESS_REMOTE_ATOMIC.0;
        /// Peers may flush their writes until they are globally visible.
        const FLUSH_GLOBAL = IBV_ACCESS_FLUSH_GLOBAL.0;
        /// Peers may flush their writes until they are persistent.
        const FLUSH_PERSISTENT = IBV_ACCESS_FLUSH_PERSISTENT.0;
        /// The device may reorder accesses. Ignored if it cannot.
        const RELAXED_ORDERING = IBV_ACCESS_RELAXED_ORDERING.0;
        /// On-demand paging: the device faults pages in instead of locking them. Registration fails without
        /// [`DeviceAttributes::on_demand_paging`](crate::device::DeviceAttributes::on_demand_paging).
        const ON_DEMAND = IBV_ACCESS_ON_DEMAND.0;
        /// A [`MemoryWindow`](crate::mw::MemoryWindow) can be bound to the region, which gives peers the rights of the
        /// window.
        const MW_BIND = IBV_ACCESS_MW_BIND.0;
        /// Addresses are offsets in the region. For raw regions only.
        ///
        /// Devices that do not support it ignore it.
        /// [`ProtectionDomain::register_raw_at`](crate::ProtectionDomain::register_raw_at) with address 0 works on all
        /// devices.
        const ZERO_BASED = IBV_ACCESS_ZERO_BASED.0;
        /// All pages are and stay huge, so that the device needs fewer entries. Requires `ON_DEMAND`. For raw regions
        /// only.
        const HUGETLB = IBV_ACCESS_HUGETLB.0;
    }
}

impl Access {
    /// Rights that let a peer access memory.
    pub const REMOTE: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

    /// Rights that let a peer flush its writes.
    pub const FLUSH: Access = Access::FLUSH_GLOBAL.union(Access::FLUSH_PERSISTENT);

    /// Flags whose preconditions only the caller of raw registration can guarantee.
    pub(crate) const RAW: Access = Access::ZERO_BASED.union(Access::HUGETLB);

    /// Rights that let a peer access memory, directly or through a window that is bound later.
    pub(crate) const EXPOSING: Access = Access::REMOTE.union(Access::MW_BIND);
}
