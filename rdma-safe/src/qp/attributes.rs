//! Attributes of a queue pair, for `ibv_modify_qp` and from `ibv_query_qp`.

use std::fmt;

use bitflags::bitflags;
use rdma_sys::*;

use super::{QueuePairState, QueuePairType};
use crate::address::AddressVector;
use crate::{Access, Mtu};

bitflags! {
    /// Attributes that a modification sets: `enum ibv_qp_attr_mask`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct AttributeMask: u32 {
        /// The state.
        const STATE = IBV_QP_STATE.0;
        /// The state that the caller assumes the queue pair to be in.
        const CUR_STATE = IBV_QP_CUR_STATE.0;
        /// Event when the send queue has drained.
        const EN_SQD_ASYNC_NOTIFY = IBV_QP_EN_SQD_ASYNC_NOTIFY.0;
        /// Access rights of the peer.
        const ACCESS_FLAGS = IBV_QP_ACCESS_FLAGS.0;
        /// Index of the partition key.
        const PKEY_INDEX = IBV_QP_PKEY_INDEX.0;
        /// Port.
        const PORT = IBV_QP_PORT.0;
        /// Queue key.
        const QKEY = IBV_QP_QKEY.0;
        /// Address vector.
        const AV = IBV_QP_AV.0;
        /// Path MTU.
        const PATH_MTU = IBV_QP_PATH_MTU.0;
        /// Acknowledgement timeout.
        const TIMEOUT = IBV_QP_TIMEOUT.0;
        /// Retries after an acknowledgement timeout.
        const RETRY_CNT = IBV_QP_RETRY_CNT.0;
        /// Retries after an RNR NAK: the peer has no receive posted.
        const RNR_RETRY = IBV_QP_RNR_RETRY.0;
        /// First packet sequence number expected from the peer.
        const RQ_PSN = IBV_QP_RQ_PSN.0;
        /// Outstanding reads and atomics as requester.
        const MAX_QP_RD_ATOMIC = IBV_QP_MAX_QP_RD_ATOMIC.0;
        /// Alternate path.
        const ALT_PATH = IBV_QP_ALT_PATH.0;
        /// RNR timer: time that the peer waits after an RNR NAK.
        const MIN_RNR_TIMER = IBV_QP_MIN_RNR_TIMER.0;
        /// First packet sequence number to send.
        const SQ_PSN = IBV_QP_SQ_PSN.0;
        /// Outstanding reads and atomics as responder.
        const MAX_DEST_RD_ATOMIC = IBV_QP_MAX_DEST_RD_ATOMIC.0;
        /// Path migration.
        const PATH_MIG_STATE = IBV_QP_PATH_MIG_STATE.0;
        /// Capacities.
        const CAP = IBV_QP_CAP.0;
        /// Number of the peer's queue pair.
        const DEST_QPN = IBV_QP_DEST_QPN.0;
        /// Rate limit (packet pacing).
        const RATE_LIMIT = IBV_QP_RATE_LIMIT.0;
    }
}

impl fmt::Display for AttributeMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        bitflags::parser::to_writer(self, f)
    }
}

/// Attributes to set with [`QueuePair::modify`](crate::QueuePair::modify), or the result of
/// [`QueuePair::query`](crate::QueuePair::query): `struct ibv_qp_attr` and its mask.
///
/// Each setter also sets the attribute's bit in the mask.
#[derive(Clone, Copy)]
#[must_use = "attributes do nothing until `modify`"]
pub struct QueuePairAttributes {
    pub(crate) raw: ibv_qp_attr,
    pub(crate) mask: AttributeMask,
}

macro_rules! attributes {
    ($(
        $(#[$meta:meta])*
        $set:ident / $value:ident: $type:ty = $mask:ident, |$raw:ident, $new:ident| $assign:expr, |$old:ident| $read:expr;
    )+) => {
        $(
            $(#[$meta])*
            pub fn $set(mut self, value: $type) -> Self {
                let ($raw, $new) = (&mut self.raw, value);
                $assign;
                self.mask |= AttributeMask::$mask;
                self
            }

            #[doc = concat!("The value of [`Self::", stringify!($set), "`], if the mask has it.")]
            #[must_use]
            pub fn $value(&self) -> Option<$type> {
                let $old = &self.raw;
                self.mask.contains(AttributeMask::$mask).then(|| $read)
            }
        )+
    };
}

impl Default for QueuePairAttributes {
    fn default() -> Self {
        QueuePairAttributes::new()
    }
}

impl QueuePairAttributes {
    /// No attributes.
    pub fn new() -> Self {
        QueuePairAttributes { raw: ibv_qp_attr::zeroed(), mask: AttributeMask::empty() }
    }

    attributes! {
        /// New state.
        set_state / state: QueuePairState = STATE,
            |raw, new| raw.qp_state = ibv_qp_state(new.0), |old| QueuePairState(old.qp_state.0);
        /// The state that the queue pair is assumed to be in.
        set_cur_state / cur_state: QueuePairState = CUR_STATE,
            |raw, new| raw.cur_qp_state = ibv_qp_state(new.0), |old| QueuePairState(old.cur_qp_state.0);
        /// Whether an event is raised when the send queue has drained.
        set_sqd_event / sqd_event: bool = EN_SQD_ASYNC_NOTIFY,
            |raw, new| raw.en_sqd_async_notify = u8::from(new), |old| old.en_sqd_async_notify != 0;
        /// Access rights of the peer; only remote rights have an effect.
        set_access / access: Access = ACCESS_FLAGS,
            |raw, new| raw.qp_access_flags = new.bits(), |old| Access::from_bits_truncate(old.qp_access_flags);
        /// Index into the port's partition key table.
        set_pkey_index / pkey_index: u16 = PKEY_INDEX, |raw, new| raw.pkey_index = new, |old| old.pkey_index;
        /// Port, counted from 1.
        set_port / port: u8 = PORT, |raw, new| raw.port_num = new, |old| old.port_num;
        /// Queue key (UD).
        set_qkey / qkey: u32 = QKEY, |raw, new| raw.qkey = new, |old| old.qkey;
        /// Address vector: the path to the peer.
        set_address / address: AddressVector = AV,
            |raw, new| raw.ah_attr = new.to_raw(), |old| AddressVector::from_raw(&old.ah_attr);
        /// Path MTU.
        set_path_mtu / path_mtu: Mtu = PATH_MTU,
            |raw, new| raw.path_mtu = ibv_mtu(new.code()), |old| Mtu::from_code(old.path_mtu.0);
        /// Acknowledgement timeout: 4.096 µs · 2^`value`, 1 to 31; 0 waits forever.
        set_timeout / timeout: u8 = TIMEOUT, |raw, new| raw.timeout = new, |old| old.timeout;
        /// Retries after an acknowledgement timeout, 0 to 7.
        set_retry_count / retry_count: u8 = RETRY_CNT, |raw, new| raw.retry_cnt = new, |old| old.retry_cnt;
        /// Retries after an RNR NAK, 0 to 6; 7 retries forever.
        set_rnr_retry / rnr_retry: u8 = RNR_RETRY, |raw, new| raw.rnr_retry = new, |old| old.rnr_retry;
        /// First packet sequence number expected from the peer, 24 bits.
        set_rq_psn / rq_psn: u32 = RQ_PSN, |raw, new| raw.rq_psn = new, |old| old.rq_psn;
        /// Outstanding reads and atomics that this end may have as requester.
        set_max_rd_atomic / max_rd_atomic: u8 = MAX_QP_RD_ATOMIC,
            |raw, new| raw.max_rd_atomic = new, |old| old.max_rd_atomic;
        /// RNR timer, which the peer waits after an RNR NAK before it retries. A code of `enum ib_rnr_timeout`, 0 to
        /// 31; 12 is 0.64 ms.
        set_min_rnr_timer / min_rnr_timer: u8 = MIN_RNR_TIMER,
            |raw, new| raw.min_rnr_timer = new, |old| old.min_rnr_timer;
        /// First packet sequence number to send, 24 bits.
        set_sq_psn / sq_psn: u32 = SQ_PSN, |raw, new| raw.sq_psn = new, |old| old.sq_psn;
        /// Outstanding reads and atomics of the peer that this end accepts as responder.
        set_max_dest_rd_atomic / max_dest_rd_atomic: u8 = MAX_DEST_RD_ATOMIC,
            |raw, new| raw.max_dest_rd_atomic = new, |old| old.max_dest_rd_atomic;
        /// Number of the peer's queue pair, 24 bits.
        set_dest_qp_num / dest_qp_num: u32 = DEST_QPN, |raw, new| raw.dest_qp_num = new, |old| old.dest_qp_num;
        /// Rate limit (packet pacing) in kbit/s.
        set_rate_limit / rate_limit: u32 = RATE_LIMIT, |raw, new| raw.rate_limit = new, |old| old.rate_limit;
    }

    /// Attributes that are set.
    #[must_use]
    pub fn mask(&self) -> AttributeMask {
        self.mask
    }

    /// All fields in C's representation.
    #[must_use]
    pub fn as_raw(&self) -> &ibv_qp_attr {
        &self.raw
    }
}

impl fmt::Debug for QueuePairAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("QueuePairAttributes");
        macro_rules! show {
            ($($name:ident)+) => {
                $(if let Some(value) = self.$name() { debug.field(stringify!($name), &value); })+
            };
        }
        show!(state cur_state sqd_event access pkey_index port qkey address path_mtu timeout retry_count rnr_retry rq_psn
            max_rd_atomic min_rnr_timer sq_psn max_dest_rd_atomic dest_qp_num rate_limit);
        debug.finish()
    }
}

/// Capacities of a queue pair: `struct ibv_qp_cap`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePairCapacity {
    /// Work requests in the send queue.
    pub max_send_wr: u32,
    /// Work requests in the receive queue.
    pub max_recv_wr: u32,
    /// Scatter/gather elements in a send.
    pub max_send_sge: u32,
    /// Scatter/gather elements in a receive.
    pub max_recv_sge: u32,
    /// Inline data of a send, in bytes.
    pub max_inline_data: u32,
}

impl QueuePairCapacity {
    pub(super) fn to_raw(self) -> ibv_qp_cap {
        ibv_qp_cap {
            max_send_wr: self.max_send_wr,
            max_recv_wr: self.max_recv_wr,
            max_send_sge: self.max_send_sge,
            max_recv_sge: self.max_recv_sge,
            max_inline_data: self.max_inline_data,
        }
    }

    pub(super) fn from_raw(raw: &ibv_qp_cap) -> Self {
        QueuePairCapacity {
            max_send_wr: raw.max_send_wr,
            max_recv_wr: raw.max_recv_wr,
            max_send_sge: raw.max_send_sge,
            max_recv_sge: raw.max_recv_sge,
            max_inline_data: raw.max_inline_data,
        }
    }
}

impl fmt::Display for QueuePairCapacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} sends of {} elements and {} inline bytes, {} receives of {} elements",
            self.max_send_wr, self.max_send_sge, self.max_inline_data, self.max_recv_wr, self.max_recv_sge
        )
    }
}

/// A modification of a queue pair: the states and the type that the rules of ibv_modify_qp(3) depend on. Both states
/// may be the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Transition {
    /// State before.
    pub from: QueuePairState,
    /// Requested state.
    pub to: QueuePairState,
    /// Type of the queue pair.
    pub qp_type: QueuePairType,
}

impl fmt::Display for Transition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {} of {} queue pair", self.from, self.to, self.qp_type.with_article())
    }
}
