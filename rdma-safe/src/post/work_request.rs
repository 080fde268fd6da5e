//! What a send is: identifier, flags, operation, target.

use bitflags::bitflags;
use rdma_sys::*;

use crate::RemoteMemory;

bitflags! {
    /// Flags of a send: `enum ibv_send_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct SendFlags: u32 {
        /// Starts only when earlier reads and atomics are done.
        const FENCE = IBV_SEND_FENCE.0;
        /// Completes with an entry in the completion queue; otherwise only a failure does.
        const SIGNALED = IBV_SEND_SIGNALED.0;
        /// Wakes a peer that waits for solicited events only.
        const SOLICITED = IBV_SEND_SOLICITED.0;
        /// The device puts in the checksums of IPv4, and of TCP or UDP; of devices with
        /// [`UD_IP_CSUM`](crate::DeviceCapabilities::UD_IP_CSUM) or [`RAW_IP_CSUM`](crate::DeviceCapabilities::RAW_IP_CSUM), by the
        /// type of the queue pair. Others ignore it or fail the work.
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
        /// Send that invalidates a key of the peer.
        const SEND_WITH_INV = IBV_QP_EX_WITH_SEND_WITH_INV.0 as u64;
        /// Binding of memory windows of type 2.
        const BIND_MW = IBV_QP_EX_WITH_BIND_MW.0 as u64;
        /// Invalidation of a key of this end.
        const LOCAL_INV = IBV_QP_EX_WITH_LOCAL_INV.0 as u64;
        /// Send of a TCP stream that the device cuts into segments.
        const TSO = IBV_QP_EX_WITH_TSO.0 as u64;
        /// Flush of what was written.
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

    /// Memory windows of type 2.
    pub const WINDOWS: SendOps = SendOps::BIND_MW.union(SendOps::LOCAL_INV);

    /// What every device has of a reliable connection.
    pub const RC: SendOps = SendOps::BASIC
        .union(SendOps::ATOMIC_CMP_AND_SWP)
        .union(SendOps::ATOMIC_FETCH_AND_ADD)
        .union(SendOps::SEND_WITH_INV);

    /// What every device has of an unreliable connection: send and write, with and without immediate data.
    pub const UC: SendOps = SendOps::BASIC.difference(SendOps::RDMA_READ);

    /// What every device has of raw packets: send.
    pub const RAW_PACKET: SendOps = SendOps::SEND;

    /// All of unreliable datagrams: send, with and without immediate data.
    pub const UD: SendOps = SendOps::SEND.union(SendOps::SEND_WITH_IMM);
}

/// What every send has: an identifier, given back with its completion, and flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct WorkRequest {
    pub(super) id: u64,
    pub(super) flags: SendFlags,
}

impl WorkRequest {
    /// A work request without flags: it completes silently unless it fails.
    #[inline]
    pub fn new(id: u64) -> Self {
        WorkRequest { id, flags: SendFlags::empty() }
    }

    /// Completes with an entry in the completion queue.
    #[inline]
    pub fn signaled(self) -> Self {
        self.with(SendFlags::SIGNALED)
    }

    /// Starts only when earlier reads and atomics are done.
    #[inline]
    pub fn fenced(self) -> Self {
        self.with(SendFlags::FENCE)
    }

    /// Wakes a peer that waits for solicited events only.
    #[inline]
    pub fn solicited(self) -> Self {
        self.with(SendFlags::SOLICITED)
    }

    /// Adds flags, of those that have a name here: inline data, for one, is said by the payload.
    #[inline]
    pub fn with(self, flags: SendFlags) -> Self {
        WorkRequest { flags: self.flags | (flags & SendFlags::all()), ..self }
    }
}

/// An address of the peer and the key to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remote {
    /// Address in the peer's space.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
}

impl From<RemoteMemory> for Remote {
    fn from(memory: RemoteMemory) -> Self {
        Remote { address: memory.address, rkey: memory.rkey }
    }
}
