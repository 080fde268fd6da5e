//! Send work requests: identifier, flags, operations and remote address.

use bitflags::bitflags;
use rdma_sys::*;

use crate::RemoteMemory;

bitflags! {
    /// Flags of a send: `enum ibv_send_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct SendFlags: u32 {
        /// Starts only after earlier reads and atomics have completed.
        const FENCE = IBV_SEND_FENCE.0;
        /// Generates a completion on success, too. Without it, only a failure generates one.
        const SIGNALED = IBV_SEND_SIGNALED.0;
        /// Raises a solicited event at the peer, which wakes a thread that waits for those only.
        const SOLICITED = IBV_SEND_SOLICITED.0;
        /// Lets the device insert the checksums of IPv4, and of TCP or UDP.
        ///
        /// The device must have [`UD_IP_CSUM`](crate::device::DeviceCapabilities::UD_IP_CSUM) or
        /// [`RAW_IP_CSUM`](crate::device::DeviceCapabilities::RAW_IP_CSUM), depending on the type of the queue pair. Other
        /// devices ignore the flag or fail the work.
        const IP_CSUM = IBV_SEND_IP_CSUM.0;
    }
}

bitflags! {
    /// Send operations that a queue pair can be created with: `enum ibv_qp_create_send_ops_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct SendOps: u64 {
        /// RDMA write.
        const RDMA_WRITE = IBV_QP_EX_WITH_RDMA_WRITE.0 as u64;
        /// RDMA write with immediate data.
        const RDMA_WRITE_WITH_IMM = IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM.0 as u64;
        /// Send.
        const SEND = IBV_QP_EX_WITH_SEND.0 as u64;
        /// Send with immediate data.
        const SEND_WITH_IMM = IBV_QP_EX_WITH_SEND_WITH_IMM.0 as u64;
        /// RDMA read.
        const RDMA_READ = IBV_QP_EX_WITH_RDMA_READ.0 as u64;
        /// Atomic compare and swap.
        const ATOMIC_CMP_AND_SWP = IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP.0 as u64;
        /// Atomic fetch and add.
        const ATOMIC_FETCH_AND_ADD = IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD.0 as u64;
        /// Send that invalidates a remote key of the peer.
        const SEND_WITH_INV = IBV_QP_EX_WITH_SEND_WITH_INV.0 as u64;
        /// Binding of memory windows of type 2.
        const BIND_MW = IBV_QP_EX_WITH_BIND_MW.0 as u64;
        /// Invalidation of a local memory window's key.
        const LOCAL_INV = IBV_QP_EX_WITH_LOCAL_INV.0 as u64;
        /// Send of a TCP stream that the device segments (TSO).
        const TSO = IBV_QP_EX_WITH_TSO.0 as u64;
        /// Flush of earlier writes.
        const FLUSH = IBV_QP_EX_WITH_FLUSH.0 as u64;
        /// Atomic write of eight bytes.
        const ATOMIC_WRITE = IBV_QP_EX_WITH_ATOMIC_WRITE.0 as u64;
    }
}

impl SendOps {
    /// Send, write and read, with and without immediate data.
    pub const BASIC: SendOps = SendOps::SEND
        .union(SendOps::SEND_WITH_IMM)
        .union(SendOps::RDMA_WRITE)
        .union(SendOps::RDMA_WRITE_WITH_IMM)
        .union(SendOps::RDMA_READ);

    /// Operations on memory windows of type 2.
    pub const WINDOWS: SendOps = SendOps::BIND_MW.union(SendOps::LOCAL_INV);

    /// Operations that every device supports on reliable connections.
    pub const RC: SendOps = SendOps::BASIC
        .union(SendOps::ATOMIC_CMP_AND_SWP)
        .union(SendOps::ATOMIC_FETCH_AND_ADD)
        .union(SendOps::SEND_WITH_INV);

    /// Operations that every device supports on unreliable connections: send and write, with and without immediate
    /// data.
    pub const UC: SendOps = SendOps::BASIC.difference(SendOps::RDMA_READ);

    /// Operation that every device supports on raw packet queue pairs: send.
    pub const RAW_PACKET: SendOps = SendOps::SEND;

    /// All operations of unreliable datagrams: send, with and without immediate data.
    pub const UD: SendOps = SendOps::SEND.union(SendOps::SEND_WITH_IMM);
}

/// The part that all send work requests share: an identifier, which the completion returns, and flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct WorkRequest {
    pub(super) id: u64,
    pub(super) flags: SendFlags,
}

impl WorkRequest {
    /// A work request without flags: it generates a completion only if it fails.
    #[inline]
    pub fn new(id: u64) -> Self {
        WorkRequest { id, flags: SendFlags::empty() }
    }

    /// Generates a completion on success, too.
    #[inline]
    pub fn signaled(self) -> Self {
        self.with_flags(SendFlags::SIGNALED)
    }

    /// Starts only after earlier reads and atomics have completed.
    #[inline]
    pub fn fenced(self) -> Self {
        self.with_flags(SendFlags::FENCE)
    }

    /// Raises a solicited event at the peer.
    #[inline]
    pub fn solicited(self) -> Self {
        self.with_flags(SendFlags::SOLICITED)
    }

    /// Adds `flags`. Bits without a name here are ignored: inline data, for example, is requested by the payload.
    #[inline]
    pub fn with_flags(self, flags: SendFlags) -> Self {
        WorkRequest { flags: self.flags | (flags & SendFlags::all()), ..self }
    }
}

/// An address in the peer's memory and its remote key.
///
/// A plain value that gets no further fields.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remote {
    /// Address as the peer's region defines it.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
}

impl From<RemoteMemory> for Remote {
    fn from(memory: RemoteMemory) -> Self {
        Remote { address: memory.address, rkey: memory.rkey }
    }
}
