//! State transitions and attributes of a queue pair.
//!
//! `ibv_modify_qp(3)` has the rules of Linux (drivers/infiniband/core/verbs.c) and its rxe (drivers/infiniband/sw/rxe/rxe_qp.c).

use std::sync::OnceLock;

use rdma_sys::*;

/// Required and optional attributes of each transition.
const TABLE: &str = include_str!("qp_states.csv");

struct Row {
    kind: ibv_qp_type,
    from: ibv_qp_state,
    to: ibv_qp_state,
    required: u32,
    optional: u32,
}

fn table() -> &'static [Row] {
    static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
    ROWS.get_or_init(|| TABLE.lines().filter(|line| !line.starts_with('#')).filter_map(row).collect())
}

fn row(line: &str) -> Option<Row> {
    let mut fields = line.split(',');
    let mut field = || fields.next();
    let (from, to) = (state(field()?)?, state(field()?)?);
    let kind = match field()? {
        "RC" => IBV_QPT_RC,
        "UC" => IBV_QPT_UC,
        "UD" => IBV_QPT_UD,
        _ => return None,
    };
    let mut mask = || u32::from_str_radix(field()?.strip_prefix("0x")?, 16).ok();
    Some(Row { kind, from, to, required: mask()?, optional: mask()? })
}

fn state(name: &str) -> Option<ibv_qp_state> {
    Some(match name {
        "RESET" => IBV_QPS_RESET,
        "INIT" => IBV_QPS_INIT,
        "RTR" => IBV_QPS_RTR,
        "RTS" => IBV_QPS_RTS,
        "SQD" => IBV_QPS_SQD,
        "SQE" => IBV_QPS_SQE,
        "ERR" => IBV_QPS_ERR,
        _ => return None,
    })
}

/// Whether queue pairs of a type may go from one state to another with these attributes.
pub(super) fn is_allowed(kind: ibv_qp_type, from: ibv_qp_state, to: ibv_qp_state, mask: u32) -> bool {
    let row = table().iter().find(|row| row.kind == kind && row.from == from && row.to == to);
    row.is_some_and(|row| {
        mask & row.required == row.required && mask & !(row.required | row.optional | IBV_QP_STATE.0) == 0
    })
}

/// Copies the attributes that the mask names.
pub(super) fn merge(to: &mut ibv_qp_attr, from: &ibv_qp_attr, mask: u32) {
    macro_rules! take {
        ($($flag:ident: $($field:ident),+;)+) => {
            $(if mask & $flag.0 != 0 {
                $(to.$field = from.$field;)+
            })+
        };
    }
    take! {
        IBV_QP_EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify;
        IBV_QP_ACCESS_FLAGS: qp_access_flags;
        IBV_QP_PKEY_INDEX: pkey_index;
        IBV_QP_PORT: port_num;
        IBV_QP_QKEY: qkey;
        IBV_QP_AV: ah_attr;
        IBV_QP_PATH_MTU: path_mtu;
        IBV_QP_TIMEOUT: timeout;
        IBV_QP_RETRY_CNT: retry_cnt;
        IBV_QP_RNR_RETRY: rnr_retry;
        IBV_QP_RQ_PSN: rq_psn;
        IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
        IBV_QP_ALT_PATH: alt_ah_attr, alt_pkey_index, alt_port_num, alt_timeout;
        IBV_QP_MIN_RNR_TIMER: min_rnr_timer;
        IBV_QP_SQ_PSN: sq_psn;
        IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        IBV_QP_PATH_MIG_STATE: path_mig_state;
        IBV_QP_DEST_QPN: dest_qp_num;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_transitions_of_the_table_are_allowed() {
        assert_eq!(table().len(), TABLE.lines().filter(|line| !line.starts_with('#')).count());
        let init = (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS).0;
        assert!(is_allowed(IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, init));
        assert!(!is_allowed(IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, init & !IBV_QP_PORT.0));
        assert!(!is_allowed(IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, init | IBV_QP_QKEY.0));
        assert!(!is_allowed(IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_RTS, init));
        assert!(is_allowed(IBV_QPT_UD, IBV_QPS_RTS, IBV_QPS_ERR, IBV_QP_STATE.0));
    }
}
