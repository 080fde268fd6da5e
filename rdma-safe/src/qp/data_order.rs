//! The order in which the bytes of a message are written.

use bitflags::bitflags;
use rdma_sys::*;

use super::QueuePair;
use crate::named::named;

named! {
    /// Operation of a work request: `enum ibv_wr_opcode`.
    pub struct WrOpcode(u32) as "operation" {
        /// RDMA write.
        RDMA_WRITE = IBV_WR_RDMA_WRITE.0 => "RDMA_WRITE",
        /// RDMA write with immediate data, which consumes a receive of the peer.
        RDMA_WRITE_WITH_IMM = IBV_WR_RDMA_WRITE_WITH_IMM.0 => "RDMA_WRITE_WITH_IMM",
        /// Send.
        SEND = IBV_WR_SEND.0 => "SEND",
        /// Send with immediate data.
        SEND_WITH_IMM = IBV_WR_SEND_WITH_IMM.0 => "SEND_WITH_IMM",
        /// RDMA read.
        RDMA_READ = IBV_WR_RDMA_READ.0 => "RDMA_READ",
        /// Atomic compare and swap.
        ATOMIC_CMP_AND_SWP = IBV_WR_ATOMIC_CMP_AND_SWP.0 => "ATOMIC_CMP_AND_SWP",
        /// Atomic fetch and add.
        ATOMIC_FETCH_AND_ADD = IBV_WR_ATOMIC_FETCH_AND_ADD.0 => "ATOMIC_FETCH_AND_ADD",
        /// Invalidation of a local memory window's key.
        LOCAL_INV = IBV_WR_LOCAL_INV.0 => "LOCAL_INV",
        /// Binding of a memory window.
        BIND_MW = IBV_WR_BIND_MW.0 => "BIND_MW",
        /// Send that invalidates a remote key of the peer.
        SEND_WITH_INV = IBV_WR_SEND_WITH_INV.0 => "SEND_WITH_INV",
        /// Send that the device segments (TSO).
        TSO = IBV_WR_TSO.0 => "TSO",
        /// Defined by the vendor.
        DRIVER1 = IBV_WR_DRIVER1.0 => "DRIVER1",
        /// Flush.
        FLUSH = IBV_WR_FLUSH.0 => "FLUSH",
        /// Atomic write.
        ATOMIC_WRITE = IBV_WR_ATOMIC_WRITE.0 => "ATOMIC_WRITE",
    }
}

bitflags! {
    /// Parts of a message that become visible in order: `enum ibv_query_qp_data_in_order_caps`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct DataInOrder: u32 {
        /// The whole message, from its first byte to its last.
        const WHOLE_MESSAGE = IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG.0;
        /// Each aligned block of 128 bytes.
        const ALIGNED_128_BYTES = IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES.0;

        const _ = !0;
    }
}

impl QueuePair {
    /// The order in which the bytes of a message become visible: `ibv_query_qp_data_in_order(3)`.
    ///
    /// If they do so in order, a program may poll the last byte instead of the completion queue.
    ///
    /// For an RDMA read, the answer is about the data that arrives here; for a write or a send, about the data of the
    /// peer's operation. It does not cover other operations, the order of two messages, or memory with relaxed
    /// ordering. It is empty if there is no guarantee: on some devices in states other than RTS, and on processors
    /// other than x86.
    #[must_use]
    #[doc(alias = "ibv_query_qp_data_in_order")]
    pub fn data_in_order(&self, opcode: WrOpcode) -> DataInOrder {
        let query = self.context().verbs().ibv_query_qp_data_in_order;
        // The provider reads the state in the C object, which `query` in another thread may write.
        let _guard = self.core().extras();
        let query_caps = |flags: u32| {
            // SAFETY: the queue pair is valid, and nobody changes it: that requires `&mut self`, or the lock.
            let answer = unsafe { query(self.as_raw(), ibv_wr_opcode(opcode.0), flags) };
            u32::try_from(answer).unwrap_or(0)
        };
        let caps = DataInOrder::from_bits_retain(query_caps(IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS.0));
        if !caps.is_empty() {
            return caps;
        }
        // Libraries before rdma-core 46 do not know that flag, and answer yes or no without it.
        match query_caps(0) {
            0 => DataInOrder::empty(),
            _ => DataInOrder::WHOLE_MESSAGE | DataInOrder::ALIGNED_128_BYTES,
        }
    }
}
