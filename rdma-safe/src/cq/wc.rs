//! Contents of a completion: status, opcode, flags and available fields.

use bitflags::bitflags;
use rdma_sys::*;

use crate::named::named;

named! {
    /// Status of a completion: `enum ibv_wc_status`. Prints like `ibv_wc_status_str(3)`.
    pub struct WcStatus(u32) as "completion status" {
        /// The work succeeded.
        SUCCESS = IBV_WC_SUCCESS.0 => "success",
        /// The message is longer than the posted receive, or than the device allows.
        LOC_LEN_ERR = IBV_WC_LOC_LEN_ERR.0 => "local length error",
        /// The work request is inconsistent, or (on SoftRoCE) names a bad local key.
        LOC_QP_OP_ERR = IBV_WC_LOC_QP_OP_ERR.0 => "local QP operation error",
        /// Not used any more.
        LOC_EEC_OP_ERR = IBV_WC_LOC_EEC_OP_ERR.0 => "local EE context operation error",
        /// A local address or key is not registered for this access.
        LOC_PROT_ERR = IBV_WC_LOC_PROT_ERR.0 => "local protection error",
        /// The queue pair entered the error state before this work was done.
        WR_FLUSH_ERR = IBV_WC_WR_FLUSH_ERR.0 => "Work Request Flushed Error",
        /// A memory window could not be bound.
        MW_BIND_ERR = IBV_WC_MW_BIND_ERR.0 => "memory management operation error",
        /// The peer sent a response with an unexpected opcode.
        BAD_RESP_ERR = IBV_WC_BAD_RESP_ERR.0 => "bad response error",
        /// An incoming RDMA write with immediate data accessed memory that is not accessible.
        LOC_ACCESS_ERR = IBV_WC_LOC_ACCESS_ERR.0 => "local access error",
        /// The peer rejected the request as invalid.
        REM_INV_REQ_ERR = IBV_WC_REM_INV_REQ_ERR.0 => "remote invalid request error",
        /// The remote key or address does not allow this access.
        REM_ACCESS_ERR = IBV_WC_REM_ACCESS_ERR.0 => "remote access error",
        /// The peer could not complete the operation.
        REM_OP_ERR = IBV_WC_REM_OP_ERR.0 => "remote operation error",
        /// The peer did not acknowledge in time.
        RETRY_EXC_ERR = IBV_WC_RETRY_EXC_ERR.0 => "transport retry counter exceeded",
        /// The peer had no receive posted in time.
        RNR_RETRY_EXC_ERR = IBV_WC_RNR_RETRY_EXC_ERR.0 => "RNR retry counter exceeded",
        /// Not used any more.
        LOC_RDD_VIOL_ERR = IBV_WC_LOC_RDD_VIOL_ERR.0 => "local RDD violation error",
        /// Not used any more.
        REM_INV_RD_REQ_ERR = IBV_WC_REM_INV_RD_REQ_ERR.0 => "remote invalid RD request",
        /// The peer aborted the operation.
        REM_ABORT_ERR = IBV_WC_REM_ABORT_ERR.0 => "aborted error",
        /// Not used any more.
        INV_EECN_ERR = IBV_WC_INV_EECN_ERR.0 => "invalid EE context number",
        /// Not used any more.
        INV_EEC_STATE_ERR = IBV_WC_INV_EEC_STATE_ERR.0 => "invalid EE context state",
        /// The device failed.
        FATAL_ERR = IBV_WC_FATAL_ERR.0 => "fatal error",
        /// The peer's response timed out.
        RESP_TIMEOUT_ERR = IBV_WC_RESP_TIMEOUT_ERR.0 => "response timeout error",
        /// Another transport error.
        GENERAL_ERR = IBV_WC_GENERAL_ERR.0 => "general error",
        /// Tag matching failed.
        TM_ERR = IBV_WC_TM_ERR.0 => "TM error",
        /// Tag matching: a rendezvous has to be completed by software.
        TM_RNDV_INCOMPLETE = IBV_WC_TM_RNDV_INCOMPLETE.0 => "TM software rendezvous",
    }
}

impl WcStatus {
    /// Explains the usual causes and what to check.
    ///
    /// [`QueuePair::explain`](crate::QueuePair::explain) and [`Endpoint::explain`](crate::Endpoint::explain) also
    /// consider the operation, the type of queue pair and the network.
    #[must_use]
    pub fn explain(self) -> &'static str {
        match self {
            WcStatus::SUCCESS => "the work is done",
            WcStatus::LOC_LEN_ERR => {
                "the message is longer than the posted receive buffer, or than the port's max_message_size"
            }
            WcStatus::LOC_QP_OP_ERR => {
                "the work request is not valid for this queue pair; on SoftRoCE also: an lkey that does not cover the \
                 buffer, a message longer than the posted receive, or an operation that the device lacks"
            }
            WcStatus::LOC_PROT_ERR => {
                "an lkey of this work request does not cover its buffer with the access needed, or belongs to another \
                 protection domain"
            }
            WcStatus::WR_FLUSH_ERR => {
                "the queue pair was already in the error state: look for the first completion with another error"
            }
            WcStatus::REM_INV_REQ_ERR => {
                "the peer found the request malformed: a message longer than its receive buffer, an operation that its \
                 queue pair does not allow (peer access), or a misaligned atomic"
            }
            WcStatus::REM_ACCESS_ERR => {
                "the rkey does not allow this access at this address: wrong or revoked key, out of the region's bounds, \
                 or the peer registered it, or set up its queue pair, without this remote right"
            }
            WcStatus::REM_OP_ERR => "the peer failed to execute the request: look at the peer's own completions",
            WcStatus::RETRY_EXC_ERR => {
                "the peer did not answer: it is gone, its queue pair is not in RTR or RTS, the addresses (QP number, \
                 GID, GID index, LID) or the path MTU do not fit, or packets are lost (firewall for UDP 4791)"
            }
            WcStatus::RNR_RETRY_EXC_ERR => {
                "the peer had no receive posted: post receives before the peer sends, or raise rnr_retry (7 waits for \
                 ever) or the peer's min_rnr_timer"
            }
            WcStatus::LOC_ACCESS_ERR => "a peer's write with immediate data accessed memory that it may not write",
            WcStatus::MW_BIND_ERR => {
                "the memory window cannot be bound to this region, range or with these rights: see ibv_bind_mw(3)"
            }
            WcStatus::BAD_RESP_ERR => {
                "the peer sent an unexpected response: packet sequence numbers of an earlier connection, or \
                 a faulty device"
            }
            WcStatus::RESP_TIMEOUT_ERR => "the peer accepted the request but did not answer in time",
            WcStatus::REM_ABORT_ERR => "the peer aborted the operation: look at the peer's own completions",
            WcStatus::GENERAL_ERR => "another transport error: see the vendor error code and the kernel log",
            WcStatus::FATAL_ERR => "the device reported a fatal error: see the kernel log",
            _ => "see ibv_poll_cq(3)",
        }
    }
}

named! {
    /// Operation that completed: `enum ibv_wc_opcode`.
    pub struct WcOpcode(u32) as "opcode" {
        /// A send.
        SEND = IBV_WC_SEND.0 => "SEND",
        /// An RDMA write.
        RDMA_WRITE = IBV_WC_RDMA_WRITE.0 => "RDMA_WRITE",
        /// An RDMA read.
        RDMA_READ = IBV_WC_RDMA_READ.0 => "RDMA_READ",
        /// An atomic compare and swap.
        COMP_SWAP = IBV_WC_COMP_SWAP.0 => "COMP_SWAP",
        /// An atomic fetch and add.
        FETCH_ADD = IBV_WC_FETCH_ADD.0 => "FETCH_ADD",
        /// A memory window was bound.
        BIND_MW = IBV_WC_BIND_MW.0 => "BIND_MW",
        /// A key was invalidated locally.
        LOCAL_INV = IBV_WC_LOCAL_INV.0 => "LOCAL_INV",
        /// A segmented send.
        TSO = IBV_WC_TSO.0 => "TSO",
        /// A flush.
        FLUSH = IBV_WC_FLUSH.0 => "FLUSH",
        /// An atomic write.
        ATOMIC_WRITE = IBV_WC_ATOMIC_WRITE.0 => "ATOMIC_WRITE",
        /// A message arrived in a posted receive.
        RECV = IBV_WC_RECV.0 => "RECV",
        /// The peer wrote with immediate data, which consumed a posted receive without using its buffer.
        RECV_RDMA_WITH_IMM = IBV_WC_RECV_RDMA_WITH_IMM.0 => "RECV_RDMA_WITH_IMM",
        /// An entry was added to a tag list.
        TM_ADD = IBV_WC_TM_ADD.0 => "TM_ADD",
        /// An entry was removed from a tag list.
        TM_DEL = IBV_WC_TM_DEL.0 => "TM_DEL",
        /// The program and the device have synchronized their counts of unexpected messages.
        TM_SYNC = IBV_WC_TM_SYNC.0 => "TM_SYNC",
        /// A message with a tag arrived: in the matching entry or, without `WcFlags::TM_MATCH`, in a receive.
        TM_RECV = IBV_WC_TM_RECV.0 => "TM_RECV",
        /// A message without a tag arrived in a receive.
        TM_NO_TAG = IBV_WC_TM_NO_TAG.0 => "TM_NO_TAG",
    }
}

bitflags! {
    /// Flags of a completion: `enum ibv_wc_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct WcFlags: u32 {
        /// The first 40 bytes of a UD receive hold a global route header, [`Grh`](crate::address::Grh). SoftRoCE also sets this
        /// flag on connections, where there is none.
        const GRH = IBV_WC_GRH.0;
        /// The message has immediate data.
        const WITH_IMM = IBV_WC_WITH_IMM.0;
        /// The device verified the checksums.
        const IP_CSUM_OK = IBV_WC_IP_CSUM_OK.0;
        /// The peer invalidated a key.
        const WITH_INV = IBV_WC_WITH_INV.0;
        /// Tag matching: the device requests the number of unexpected messages that the program has handled.
        const TM_SYNC_REQ = IBV_WC_TM_SYNC_REQ.0;
        /// Tag matching: the message consumed an entry of the list.
        const TM_MATCH = IBV_WC_TM_MATCH.0;
        /// Tag matching: the whole message is in the memory of its entry.
        const TM_DATA_VALID = IBV_WC_TM_DATA_VALID.0;
        /// Flags that this crate does not know.
        const _ = !0;
    }
}

bitflags! {
    /// Fields that the completions of a queue can have: `enum ibv_create_cq_wc_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct WcFields: u64 {
        /// Bytes transferred.
        const BYTE_LEN = IBV_WC_EX_WITH_BYTE_LEN.0 as u64;
        /// Immediate data, or the key that a peer invalidated.
        const IMM = IBV_WC_EX_WITH_IMM.0 as u64;
        /// Number of the local queue pair.
        const QP_NUM = IBV_WC_EX_WITH_QP_NUM.0 as u64;
        /// Number of the sending queue pair (UD).
        const SRC_QP = IBV_WC_EX_WITH_SRC_QP.0 as u64;
        /// LID of the sender (UD on InfiniBand).
        const SLID = IBV_WC_EX_WITH_SLID.0 as u64;
        /// Service level (UD on InfiniBand); packet type on Ethernet.
        const SL = IBV_WC_EX_WITH_SL.0 as u64;
        /// Low bits of the destination LID (UD on InfiniBand).
        const DLID_PATH_BITS = IBV_WC_EX_WITH_DLID_PATH_BITS.0 as u64;
        /// Completion time in ticks of the device's clock.
        const COMPLETION_TIMESTAMP = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP.0 as u64;
        /// VLAN tag that the device stripped.
        const CVLAN = IBV_WC_EX_WITH_CVLAN.0 as u64;
        /// Tag of the matching flow.
        const FLOW_TAG = IBV_WC_EX_WITH_FLOW_TAG.0 as u64;
        /// Tag of the message, and the application data of its header.
        const TM_INFO = IBV_WC_EX_WITH_TM_INFO.0 as u64;
        /// Completion time in nanoseconds of the wall clock.
        const COMPLETION_TIMESTAMP_WALLCLOCK = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK.0 as u64;
    }
}

impl WcFields {
    /// The fields that `ibv_poll_cq(3)` always reports, which every device supports.
    pub const STANDARD: WcFields = WcFields::from_bits_truncate(IBV_WC_STANDARD_FLAGS as u64);
}
