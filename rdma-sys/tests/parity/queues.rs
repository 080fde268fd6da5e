use std::mem::offset_of;

use rdma_sys::*;

use crate::case::{Case, case};
use crate::world::World;

pub fn cases() -> Vec<Case> {
    vec![
        case!(ibv_create_srq_ex(w; w.context(), w.srq_init_attr))
            .with("create_srq_ex", offset_of!(verbs_context, create_srq_ex))
            .variants(&[
                ("nothing", |w| srq(w, 0, IBV_SRQT_BASIC)),
                ("pd", |w| srq(w, 2, IBV_SRQT_XRC)),
                ("type", |w| srq(w, 1, IBV_SRQT_BASIC)),
                ("pd, basic", |w| srq(w, 3, IBV_SRQT_BASIC)),
                ("pd, XRC", |w| srq(w, 3, IBV_SRQT_XRC)),
                ("pd, tag matching", |w| srq(w, 3, IBV_SRQT_TM)),
                ("pd, basic, xrcd", |w| srq(w, 7, IBV_SRQT_BASIC)),
                ("pd, xrcd", |w| srq(w, 6, IBV_SRQT_BASIC)),
                ("pd, cq", |w| srq(w, 10, IBV_SRQT_BASIC)),
                ("pd, last bit", |w| srq(w, 2 | 1 << 31, IBV_SRQT_BASIC)),
            ]),
        case!(ibv_get_srq_num(w; w.srq, w.numbers.cast()) of get_srq_num),
        case!(ibv_post_srq_recv(w; w.srq, w.recv_wr, w.bad_recv_wr)),
        case!(ibv_post_srq_ops(w; w.srq, w.ops_wr, w.bad_ops_wr) of post_srq_ops),
        case!(ibv_create_qp_ex(w; w.context(), w.qp_init_attr))
            .with("create_qp_ex", offset_of!(verbs_context, create_qp_ex))
            .variants(&[
                ("nothing", |w| qp(w, 0)),
                ("pd", |w| qp(w, 1)),
                ("xrcd", |w| qp(w, 2)),
                ("pd, xrcd", |w| qp(w, 3)),
                ("pd, operations", |w| qp(w, 1 | 1 << 6)),
                ("pd, last bit", |w| qp(w, 1 | 1 << 31)),
            ]),
        case!(ibv_open_qp(w; w.context(), w.attr.cast()) of open_qp),
        case!(ibv_modify_qp_rate_limit(w; w.qp(), w.attr.cast()) of modify_qp_rate_limit),
        case!(ibv_post_send(w; w.qp(), w.send_wr, w.bad_send_wr)),
        case!(ibv_post_recv(w; w.qp(), w.recv_wr, w.bad_recv_wr)),
        // From type 32 on, the result is undefined in C.
        case!(ibv_is_qpt_supported(w; 1 << 2 | 1 << 9 | 1 << 31, ibv_qp_type((*w.numbers)[0] as u32))).variants(&[
            ("RC", |w| number(w, 2)),
            ("UC", |w| number(w, 3)),
            ("XRC", |w| number(w, 9)),
            ("0", |w| number(w, 0)),
            ("30", |w| number(w, 30)),
            ("31", |w| number(w, 31)),
        ]),
        case!(ibv_flow_label_to_udp_sport(w; (*w.numbers)[0] as u32)).variants(&[
            ("0", |w| number(w, 0)),
            ("low", |w| number(w, 0x3fff)),
            ("high", |w| number(w, 0xf_c000)),
            ("all", |w| number(w, 0xf_ffff)),
            ("more than a label has", |w| number(w, 0xffff_ffff)),
            ("mixed", |w| number(w, 0x9_5a5a)),
        ]),
        case!(ibv_post_wq_recv(w; w.wq, w.recv_wr, w.bad_recv_wr)),
        case!(ibv_create_wq(w; w.context(), w.wq_init_attr) of create_wq),
        case!(ibv_modify_wq(w; w.wq, w.attr.cast()) of modify_wq),
        case!(ibv_destroy_wq(w; w.wq) of destroy_wq),
        case!(ibv_create_rwq_ind_table(w; w.context(), w.attr.cast()) of create_rwq_ind_table),
        case!(ibv_destroy_rwq_ind_table(w; w.rwq_ind_table) of destroy_rwq_ind_table),
    ]
}

fn srq(w: &World, mask: u32, srq_type: ibv_srq_type) {
    unsafe {
        (*w.srq_init_attr).comp_mask = mask;
        (*w.srq_init_attr).srq_type = srq_type;
    }
}

fn qp(w: &World, mask: u32) {
    unsafe { (*w.qp_init_attr).comp_mask = mask }
}

fn number(w: &World, number: u64) {
    unsafe { (*w.numbers)[0] = number }
}
