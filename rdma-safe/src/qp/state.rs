//! States and types of queue pairs, and the state changes that the kernel allows.

use rdma_sys::*;

use super::attributes::AttributeMask;
use crate::named::named;

named! {
    /// State of a queue pair: `enum ibv_qp_state`.
    pub struct QueuePairState(u32) as "queue pair state" {
        /// Created or reset: nothing can be posted.
        RESET = IBV_QPS_RESET.0 => "RESET",
        /// Initialized with a port: receives can be posted.
        INIT = IBV_QPS_INIT.0 => "INIT",
        /// Ready to receive: connected to a peer.
        RTR = IBV_QPS_RTR.0 => "RTR",
        /// Ready to send and receive.
        RTS = IBV_QPS_RTS.0 => "RTS",
        /// Send queue drained or draining.
        SQD = IBV_QPS_SQD.0 => "SQD",
        /// Send queue error (not on reliable connections).
        SQE = IBV_QPS_SQE.0 => "SQE",
        /// Error: all work completes with a flush error.
        ERR = IBV_QPS_ERR.0 => "ERR",
        /// State is not known.
        UNKNOWN = IBV_QPS_UNKNOWN.0 => "UNKNOWN",
    }
}

named! {
    /// Type of a queue pair: `enum ibv_qp_type`.
    pub struct QueuePairType(u32) as "queue pair type" {
        /// Reliable connection.
        RC = IBV_QPT_RC.0 => "RC",
        /// Unreliable connection.
        UC = IBV_QPT_UC.0 => "UC",
        /// Unreliable datagram.
        UD = IBV_QPT_UD.0 => "UD",
        /// Raw Ethernet frames.
        RAW_PACKET = IBV_QPT_RAW_PACKET.0 => "RAW_PACKET",
        /// Extended reliable connection, requester side.
        XRC_SEND = IBV_QPT_XRC_SEND.0 => "XRC_SEND",
        /// Extended reliable connection, responder side.
        XRC_RECV = IBV_QPT_XRC_RECV.0 => "XRC_RECV",
        /// Defined by the vendor.
        DRIVER = IBV_QPT_DRIVER.0 => "DRIVER",
    }
}

impl QueuePairType {
    /// The type with its article: "an RC", "a UD".
    pub(crate) fn with_article(self) -> String {
        let vowel = matches!(self, QueuePairType::RC | QueuePairType::XRC_SEND | QueuePairType::XRC_RECV);
        format!("{} {self}", if vowel { "an" } else { "a" })
    }
}

/// Attributes of a state change, besides the state itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Rule {
    pub(crate) required: AttributeMask,
    pub(crate) optional: AttributeMask,
}

/// The attributes that the kernel requires or allows for a state change; `None` if it refuses the change or does not
/// know the type.
///
/// Copied from `qp_state_table` of drivers/infiniband/core/verbs.c, kernel 6.1. Drivers of InfiniBand and RoCE devices
/// consult the table; those of iWARP devices do not. `RATE_LIMIT` is left to the driver, because later kernels moved it
/// there.
pub(crate) fn rule(from: QueuePairState, to: QueuePairState, qp_type: QueuePairType) -> Option<Rule> {
    use AttributeMask as A;
    use QueuePairState as S;

    let column = match qp_type {
        QueuePairType::RC => 0,
        QueuePairType::UC => 1,
        QueuePairType::UD => 2,
        QueuePairType::RAW_PACKET => 3,
        QueuePairType::XRC_SEND => 4,
        QueuePairType::XRC_RECV => 5,
        _ => return None,
    };
    let none = A::empty();
    let init = A::ACCESS_FLAGS | A::PKEY_INDEX | A::PORT;
    let init_ud = A::PKEY_INDEX | A::PORT | A::QKEY;
    let keys = A::PKEY_INDEX | A::QKEY;
    let path = A::AV | A::PATH_MTU | A::RQ_PSN | A::DEST_QPN;
    let responder = A::MIN_RNR_TIMER | A::MAX_DEST_RD_ATOMIC;
    let requester = A::TIMEOUT | A::RETRY_CNT | A::RNR_RETRY | A::MAX_QP_RD_ATOMIC;
    let to_rtr = A::ACCESS_FLAGS | A::PKEY_INDEX | A::ALT_PATH;
    let migrate = A::CUR_STATE | A::ACCESS_FLAGS | A::ALT_PATH | A::PATH_MIG_STATE;
    let migrate_rnr = migrate | A::MIN_RNR_TIMER;
    let current_key = A::CUR_STATE | A::QKEY;
    let drained = A::ACCESS_FLAGS | A::PKEY_INDEX | A::AV | A::ALT_PATH | A::PATH_MIG_STATE;

    // Required and optional attributes, by column.
    let (required, optional) = match (from, to) {
        (S::RESET | S::INIT | S::RTR | S::RTS | S::SQD | S::SQE | S::ERR, S::RESET)
        | (S::INIT | S::RTR | S::RTS | S::SQD | S::SQE | S::ERR, S::ERR) => ([none; 6], [none; 6]),
        (S::RESET, S::INIT) => ([init, init, init_ud, A::PORT, init, init], [none; 6]),
        (S::INIT, S::INIT) => ([none; 6], [init, init, init_ud, none, init, init]),
        (S::INIT, S::RTR) => {
            ([path | responder, path, none, none, path, path | responder], [to_rtr, to_rtr, keys, none, to_rtr, to_rtr])
        }
        (S::RTR, S::RTS) => (
            [requester | A::SQ_PSN, A::SQ_PSN, A::SQ_PSN, none, requester | A::SQ_PSN, A::TIMEOUT | A::SQ_PSN],
            [migrate_rnr, migrate, current_key, none, migrate, migrate_rnr],
        ),
        (S::RTS, S::RTS) | (S::SQD, S::RTS) => {
            ([none; 6], [migrate_rnr, migrate, current_key, none, migrate, migrate_rnr])
        }
        (S::RTS, S::SQD) => {
            let notify = A::EN_SQD_ASYNC_NOTIFY;
            ([none; 6], [notify, notify, notify, none, notify, notify])
        }
        (S::SQD, S::SQD) => (
            [none; 6],
            [
                drained | A::PORT | requester | responder,
                drained,
                keys,
                none,
                drained | A::PORT | requester,
                drained | A::PORT | A::TIMEOUT | responder,
            ],
        ),
        (S::SQE, S::RTS) => ([none; 6], [none, A::CUR_STATE | A::ACCESS_FLAGS, current_key, none, none, none]),
        _ => return None,
    };
    Some(Rule { required: required[column], optional: optional[column] })
}

/// Attributes that uverbs drops before it consults the table (kernel drivers/infiniband/core/uverbs_cmd.c).
pub(crate) fn ignored(qp_type: QueuePairType) -> AttributeMask {
    use AttributeMask as A;
    A::STATE
        | A::RATE_LIMIT
        | match qp_type {
            QueuePairType::XRC_SEND => A::MAX_DEST_RD_ATOMIC | A::MIN_RNR_TIMER,
            QueuePairType::XRC_RECV => A::MAX_QP_RD_ATOMIC | A::RETRY_CNT | A::RNR_RETRY,
            _ => A::empty(),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The masks of kernel 6.1 as numbers, one line per allowed state change and type.
    const KERNEL_TABLE: &str = include_str!("state_table.csv");

    #[test]
    fn the_rules_match_the_kernel_table() {
        let state = |name: &str| *QueuePairState::KNOWN.iter().find(|state| state.to_string() == name).unwrap();
        let qp_type = |name: &str| *QueuePairType::KNOWN.iter().find(|qp_type| qp_type.to_string() == name).unwrap();
        let mask = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
        let mut valid = std::collections::HashSet::new();
        for line in KERNEL_TABLE.lines().filter(|line| !line.starts_with('#')) {
            let fields: Vec<&str> = line.split(',').collect();
            let (from, to, kind) = (state(fields[0]), state(fields[1]), qp_type(fields[2]));
            let rule = rule(from, to, kind).unwrap_or_else(|| panic!("{line}: not allowed"));
            assert_eq!(rule.required.bits(), mask(fields[3]), "required by {line}");
            let without_rate_limit = mask(fields[4]) & !AttributeMask::RATE_LIMIT.bits();
            assert_eq!(rule.optional.bits(), without_rate_limit, "optional in {line}");
            valid.insert((from, to, kind));
        }
        for from in QueuePairState::KNOWN {
            for to in QueuePairState::KNOWN {
                for kind in QueuePairType::KNOWN {
                    let allowed = rule(*from, *to, *kind).is_some();
                    assert_eq!(allowed, valid.contains(&(*from, *to, *kind)), "{from} to {to} for {kind}");
                }
            }
        }
    }
}
