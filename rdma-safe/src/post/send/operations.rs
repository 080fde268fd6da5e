//! The enabled operations of a send queue, encoded so that one test also covers the type of the queue pair.

use super::super::{PostError, SendOps};
use crate::QueuePairType;

// UD queue pairs name a destination and XRC queue pairs name a shared receive queue. Their operations have separate bits in the
// encoded set, which no operation of verbs uses. Posting tests one bit for each operation. This test thus also refuses
// operations with a wrong or missing destination.
/// Distance from the bit of an operation to the bit of the same operation with a shared receive queue.
const TO_SRQ: u32 = 14;
/// Distance from the bit of an operation to the bit of the same operation with a datagram's destination.
const TO_DATAGRAM: u32 = 28;
/// Set for every queue pair, so that a set of operations is empty only if the queue pair is not ready.
const ALWAYS: SendOps = SendOps::from_bits_retain(1 << 27);
/// Set for every UD queue pair.
const DATAGRAMS: SendOps = SendOps::from_bits_retain(1 << 42);
/// Set for every XRC queue pair.
const XRC: SendOps = SendOps::from_bits_retain(1 << 43);
const _: () = {
    assert!(SendOps::all().bits() < 1 << TO_SRQ && to_srq(SendOps::all()).bits() < ALWAYS.bits());
    assert!(ALWAYS.bits() < 1 << TO_DATAGRAM && to_datagram(SendOps::all()).bits() < DATAGRAMS.bits());
};

/// Operations of UD queue pairs.
const UD: SendOps = SendOps::UD.union(SendOps::TSO);

/// Operations that `ibv_post_send(3)` does not have.
pub(crate) const EXTENDED_ONLY: SendOps = SendOps::FLUSH.union(SendOps::ATOMIC_WRITE);

/// The bits of `ops` with a shared receive queue as their destination.
pub(super) const fn to_srq(ops: SendOps) -> SendOps {
    SendOps::from_bits_retain(ops.bits() << TO_SRQ)
}

/// The bits of `ops` with a datagram's destination.
pub(super) const fn to_datagram(ops: SendOps) -> SendOps {
    SendOps::from_bits_retain(ops.bits() << TO_DATAGRAM)
}

/// Encodes the operations that a queue pair was created with. The result is never empty.
pub(super) fn encode(ops: SendOps, qp_type: QueuePairType) -> SendOps {
    match qp_type {
        QueuePairType::UD => ALWAYS | DATAGRAMS | to_datagram(ops & UD),
        QueuePairType::XRC_SEND => ALWAYS | XRC | to_srq(ops),
        _ => ALWAYS | ops,
    }
}

/// Decodes the operations that a queue pair was created with.
pub(super) fn decode(encoded: SendOps) -> SendOps {
    let distance = if encoded.contains(XRC) {
        TO_SRQ
    } else if encoded.contains(DATAGRAMS) {
        TO_DATAGRAM
    } else {
        0
    };
    SendOps::from_bits_retain(encoded.bits() >> distance) & SendOps::all()
}

/// The error for the encoded operation `op`, which is not in `usable`.
#[inline(always)]
pub(super) fn refusal(usable: SendOps, op: SendOps) -> PostError {
    let (datagrams, xrc) = (usable.contains(DATAGRAMS), usable.contains(XRC));
    let decoded = |distance| SendOps::from_bits_retain(op.bits() >> distance);
    if op.bits() >= 1 << TO_DATAGRAM {
        return if datagrams { PostError::NotEnabled { op: decoded(TO_DATAGRAM) } } else { PostError::NotDatagram };
    }
    if op.bits() >= 1 << TO_SRQ {
        return if xrc { PostError::NotEnabled { op: decoded(TO_SRQ) } } else { PostError::NotXrc };
    }
    match op {
        op if datagrams && UD.contains(op) => PostError::NoDestination,
        op if xrc && usable.contains(to_srq(op)) => PostError::NoRemoteQueue,
        op => PostError::NotEnabled { op },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_operations_decode_and_belong_to_one_type_of_queue_pair() {
        for qp_type in [QueuePairType::RC, QueuePairType::UC, QueuePairType::UD, QueuePairType::XRC_SEND] {
            let ops = if qp_type == QueuePairType::UD { UD } else { SendOps::all() };
            for op in ops {
                let encoded = encode(op, qp_type);
                assert_eq!(decode(encoded), op, "{qp_type}");
                let plain = matches!(qp_type, QueuePairType::RC | QueuePairType::UC);
                assert_eq!(encoded.contains(op), plain, "{qp_type}: {op:?} without a destination");
                assert_eq!(encoded.contains(to_srq(op)), qp_type == QueuePairType::XRC_SEND, "{qp_type}: {op:?}");
            }
        }
    }

    #[test]
    fn the_error_names_the_missing_part() {
        let usable = |qp_type| encode(SendOps::SEND, qp_type);
        let (rc, ud, xrc) = (usable(QueuePairType::RC), usable(QueuePairType::UD), usable(QueuePairType::XRC_SEND));
        let not_enabled = |op| PostError::NotEnabled { op };
        assert_eq!(refusal(rc, to_datagram(SendOps::SEND)), PostError::NotDatagram);
        assert_eq!(refusal(rc, to_srq(SendOps::SEND)), PostError::NotXrc);
        assert_eq!(refusal(ud, to_srq(SendOps::SEND)), PostError::NotXrc);
        assert_eq!(refusal(xrc, to_datagram(SendOps::TSO)), PostError::NotDatagram);
        assert_eq!(refusal(ud, SendOps::SEND), PostError::NoDestination);
        assert_eq!(refusal(ud, SendOps::TSO), PostError::NoDestination);
        assert_eq!(refusal(ud, to_datagram(SendOps::TSO)), not_enabled(SendOps::TSO));
        assert_eq!(refusal(xrc, SendOps::SEND), PostError::NoRemoteQueue);
        assert_eq!(refusal(xrc, SendOps::FLUSH), not_enabled(SendOps::FLUSH));
        assert_eq!(refusal(xrc, to_srq(SendOps::RDMA_READ)), not_enabled(SendOps::RDMA_READ));
        assert_eq!(refusal(rc, SendOps::ATOMIC_WRITE), not_enabled(SendOps::ATOMIC_WRITE));
    }
}
