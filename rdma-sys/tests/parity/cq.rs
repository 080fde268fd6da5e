use crate::case::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!(ibv_cq_ex_to_cq(w; w.cq)),
        case!(ibv_start_poll(w; w.cq, w.attr.cast())),
        case!(ibv_next_poll(w; w.cq)),
        case!(ibv_end_poll(w; w.cq)),
        case!(ibv_wc_read_opcode(w; w.cq)),
        case!(ibv_wc_read_vendor_err(w; w.cq)),
        case!(ibv_wc_read_byte_len(w; w.cq)),
        case!(ibv_wc_read_imm_data(w; w.cq)),
        case!(ibv_wc_read_invalidated_rkey(w; w.cq)),
        case!(ibv_wc_read_qp_num(w; w.cq)),
        case!(ibv_wc_read_src_qp(w; w.cq)),
        case!(ibv_wc_read_wc_flags(w; w.cq)),
        case!(ibv_wc_read_slid(w; w.cq)),
        case!(ibv_wc_read_sl(w; w.cq)),
        case!(ibv_wc_read_dlid_path_bits(w; w.cq)),
        case!(ibv_wc_read_completion_ts(w; w.cq)),
        case!(ibv_wc_read_completion_wallclock_ns(w; w.cq)),
        case!(ibv_wc_read_cvlan(w; w.cq)),
        case!(ibv_wc_read_flow_tag(w; w.cq)),
        case!(ibv_wc_read_tm_info(w; w.cq, w.tm_info)),
        case!(ibv_create_cq_ex(w; w.context(), w.attr.cast()) of create_cq_ex),
        case!(ibv_poll_cq(w; w.cq(), -3, w.wc)),
        case!(ibv_req_notify_cq(w; w.cq(), 1)),
        case!(ibv_modify_cq(w; w.cq(), w.attr.cast()) of modify_cq),
    ]
}
