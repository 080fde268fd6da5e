//! In which order the bytes of a message are written.

use std::sync::PoisonError;

use bitflags::bitflags;
use rdma_sys::*;

use super::QueuePair;
use crate::named::named;

named! {
    /// Operation of a work request: `enum ibv_wr_opcode`.
    pub struct WrOpcode(u32) as "operation" {
        /// RDMA write.
        RDMA_WRITE = IBV_WR_RDMA_WRITE.0 => "RDMA_WRITE",
        /// RDMA write that consumes a receive of the peer.
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
        /// Invalidation of a key of this end.
        LOCAL_INV = IBV_WR_LOCAL_INV.0 => "LOCAL_INV",
        /// Binding of a memory window.
        BIND_MW = IBV_WR_BIND_MW.0 => "BIND_MW",
        /// Send that invalidates a key of the peer.
        SEND_WITH_INV = IBV_WR_SEND_WITH_INV.0 => "SEND_WITH_INV",
        /// Send that the device segments.
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
    /// What of a message becomes visible in order: `enum ibv_query_qp_data_in_order_caps`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct DataInOrder: u32 {
        /// The whole message, from its first byte to its last.
        const WHOLE_MESSAGE = IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG.0;
        /// Each 128 bytes whose address is a multiple of 128.
        const ALIGNED_128_BYTES = IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES.0;

        const _ = !0;
    }
}

impl QueuePair {
    /// In which order the bytes of a message are written: `ibv_query_qp_data_in_order(3)`. A program may then look for the last
    /// byte instead of the completion.
    ///
    /// Of an RDMA read it says how the data arrives here; of a write or a send, how that of the peer does. It says nothing of
    /// other operations, of two messages, or of memory with relaxed ordering. Empty where there is no promise: in states other
    /// than RTS on some devices, and on processors other than x86.
    #[must_use]
    #[doc(alias = "ibv_query_qp_data_in_order")]
    pub fn data_in_order(&self, opcode: WrOpcode) -> DataInOrder {
        let query = self.context().verbs().ibv_query_qp_data_in_order;
        // The provider looks at the state in the C object, which a query of attributes by another thread writes.
        let _alone = self.shared.query.lock().unwrap_or_else(PoisonError::into_inner);
        let ask = |flags: u32| {
            // SAFETY: the queue pair is valid, and nobody changes it: that takes `&mut self`, or the lock.
            let answer = unsafe { query(self.as_raw(), ibv_wr_opcode(opcode.0), flags) };
            u32::try_from(answer).unwrap_or(0)
        };
        let caps = DataInOrder::from_bits_retain(ask(IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS.0));
        if !caps.is_empty() {
            return caps;
        }
        // Libraries before rdma-core 46 do not know that flag, and without it answer yes or no.
        match ask(0) {
            0 => DataInOrder::empty(),
            _ => DataInOrder::WHOLE_MESSAGE | DataInOrder::ALIGNED_128_BYTES,
        }
    }
}
