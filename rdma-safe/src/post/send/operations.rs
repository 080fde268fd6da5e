//! The operations of a queue, as a set that one look at it tells all of.

use super::super::{PostError, SendOps};
use crate::QueuePairType;

// The operations of a UD queue pair, which name a destination, and those of an XRC one, which name a shared receive queue, are bits
// of their own in the set that a queue keeps. So they are told apart from those that name nothing, and refused where they do not
// belong, by the one look that every operation takes anyway. No operation of verbs has these bits.
/// How far the bit of an operation that names a shared receive queue is from that of the same without.
const TO_SRQ: u32 = 14;
/// Of every queue pair, so that no set is empty but that of one that is not ready.
const SOME: SendOps = SendOps::from_bits_retain(1 << 27);
pub(super) const SEND_TO: SendOps = SendOps::from_bits_retain(1 << 28);
pub(super) const SEND_TO_WITH_IMM: SendOps = SendOps::from_bits_retain(1 << 29);
/// Of every UD queue pair, whatever it can post.
const DATAGRAMS: SendOps = SendOps::from_bits_retain(1 << 30);
pub(super) const TSO_TO: SendOps = SendOps::from_bits_retain(1 << 32);
/// Of every XRC queue pair, whatever it can post.
const XRC: SendOps = SendOps::from_bits_retain(1 << 33);
const _: () = assert!(SendOps::all().bits() < 1 << TO_SRQ && SendOps::all().bits() << TO_SRQ < SOME.bits());

/// Operations that `ibv_post_send(3)` does not have.
pub(crate) const EXTENDED_ONLY: SendOps = SendOps::FLUSH.union(SendOps::ATOMIC_WRITE);

/// `op` with a shared receive queue that it goes to.
pub(super) const fn to_srq(op: SendOps) -> SendOps {
    SendOps::from_bits_retain(op.bits() << TO_SRQ)
}

/// What a queue pair keeps of the operations that it was created with; never nothing.
pub(super) fn kept(ops: SendOps, qp_type: QueuePairType) -> SendOps {
    match qp_type {
        QueuePairType::UD => {
            let mut kept = SOME | DATAGRAMS;
            kept.set(SEND_TO, ops.contains(SendOps::SEND));
            kept.set(SEND_TO_WITH_IMM, ops.contains(SendOps::SEND_WITH_IMM));
            kept.set(TSO_TO, ops.contains(SendOps::TSO));
            kept
        }
        QueuePairType::XRC_SEND => SOME | XRC | to_srq(ops),
        _ => SOME | ops,
    }
}

/// The operations that a queue pair was created with, of what it keeps.
pub(super) fn operations(kept: SendOps) -> SendOps {
    if kept.contains(XRC) {
        return SendOps::from_bits_retain(kept.bits() >> TO_SRQ) & SendOps::all();
    }
    if !kept.contains(DATAGRAMS) {
        return kept & SendOps::all();
    }
    let mut ops = SendOps::empty();
    ops.set(SendOps::SEND, kept.contains(SEND_TO));
    ops.set(SendOps::SEND_WITH_IMM, kept.contains(SEND_TO_WITH_IMM));
    ops.set(SendOps::TSO, kept.contains(TSO_TO));
    ops
}

/// Why `op` is not among `usable`.
#[inline(always)]
pub(super) fn refusal(usable: SendOps, op: SendOps) -> PostError {
    let (datagrams, xrc) = (usable.contains(DATAGRAMS), usable.contains(XRC));
    let with_srq = !op.intersects(SendOps::all()) && op.bits() < SOME.bits();
    match op {
        SEND_TO | SEND_TO_WITH_IMM | TSO_TO if !datagrams => PostError::NotDatagram,
        SEND_TO => PostError::NotEnabled { op: SendOps::SEND },
        SEND_TO_WITH_IMM => PostError::NotEnabled { op: SendOps::SEND_WITH_IMM },
        TSO_TO => PostError::NotEnabled { op: SendOps::TSO },
        _ if with_srq && !xrc => PostError::NotXrc,
        op if with_srq => PostError::NotEnabled { op: SendOps::from_bits_retain(op.bits() >> TO_SRQ) },
        op if datagrams && (SendOps::UD | SendOps::TSO).contains(op) => PostError::NoDestination,
        op if xrc && usable.contains(to_srq(op)) => PostError::NoRemoteQueue,
        op => PostError::NotEnabled { op },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_gives_back_the_operations_and_fits_one_kind_of_queue_pair() {
        for qp_type in [QueuePairType::RC, QueuePairType::UC, QueuePairType::UD, QueuePairType::XRC_SEND] {
            let ops = if qp_type == QueuePairType::UD { SendOps::UD | SendOps::TSO } else { SendOps::all() };
            for op in ops {
                let kept = kept(op, qp_type);
                assert_eq!(operations(kept), op, "{qp_type}");
                let plain = matches!(qp_type, QueuePairType::RC | QueuePairType::UC);
                assert_eq!(kept.contains(op), plain, "{qp_type}: {op:?} that names nothing");
                assert_eq!(kept.contains(to_srq(op)), qp_type == QueuePairType::XRC_SEND, "{qp_type}: {op:?}");
            }
        }
    }

    #[test]
    fn a_refusal_names_what_is_missing() {
        let usable = |qp_type| kept(SendOps::SEND, qp_type);
        let (rc, ud, xrc) = (usable(QueuePairType::RC), usable(QueuePairType::UD), usable(QueuePairType::XRC_SEND));
        let not_enabled = |op| PostError::NotEnabled { op };
        assert_eq!(refusal(rc, SEND_TO), PostError::NotDatagram);
        assert_eq!(refusal(rc, to_srq(SendOps::SEND)), PostError::NotXrc);
        assert_eq!(refusal(ud, to_srq(SendOps::SEND)), PostError::NotXrc);
        assert_eq!(refusal(xrc, TSO_TO), PostError::NotDatagram);
        assert_eq!(refusal(ud, SendOps::SEND), PostError::NoDestination);
        assert_eq!(refusal(ud, SendOps::TSO), PostError::NoDestination);
        assert_eq!(refusal(ud, TSO_TO), not_enabled(SendOps::TSO));
        assert_eq!(refusal(xrc, SendOps::SEND), PostError::NoRemoteQueue);
        assert_eq!(refusal(xrc, SendOps::FLUSH), not_enabled(SendOps::FLUSH));
        assert_eq!(refusal(xrc, to_srq(SendOps::RDMA_READ)), not_enabled(SendOps::RDMA_READ));
        assert_eq!(refusal(rc, SendOps::ATOMIC_WRITE), not_enabled(SendOps::ATOMIC_WRITE));
    }
}
