use crate::case::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!(ibv_wr_atomic_cmp_swp(w; w.qp, 0x8000_0001, 1 << 63, 2, 3)),
        case!(ibv_wr_atomic_fetch_add(w; w.qp, 0x8000_0001, 1 << 63, 2)),
        case!(ibv_wr_bind_mw(w; w.qp, w.mw, 5, &raw const (*w.mw_bind).bind_info)),
        case!(ibv_wr_local_inv(w; w.qp, 6)),
        case!(ibv_wr_rdma_read(w; w.qp, 7, 8)),
        case!(ibv_wr_rdma_write(w; w.qp, 9, 10)),
        case!(ibv_wr_flush(w; w.qp, 11, 12, 13, 0xfe, 0xff)),
        case!(ibv_wr_rdma_write_imm(w; w.qp, 14, 15, 0x0102_0304)),
        case!(ibv_wr_send(w; w.qp)),
        case!(ibv_wr_send_imm(w; w.qp, 0x0102_0304)),
        case!(ibv_wr_send_inv(w; w.qp, 16)),
        case!(ibv_wr_send_tso(w; w.qp, w.data.cast(), 0xfffe, 0xffff)),
        case!(ibv_wr_set_ud_addr(w; w.qp, w.ah, 17, 18)),
        case!(ibv_wr_set_xrc_srqn(w; w.qp, 19)),
        case!(ibv_wr_set_inline_data(w; w.qp, w.data.cast(), 20)),
        case!(ibv_wr_set_inline_data_list(w; w.qp, 1 << 40, w.data.cast())),
        case!(ibv_wr_set_sge(w; w.qp, 21, 22, 23)),
        case!(ibv_wr_set_sge_list(w; w.qp, 2, w.sges.cast())),
        case!(ibv_wr_start(w; w.qp)),
        case!(ibv_wr_complete(w; w.qp)),
        case!(ibv_wr_abort(w; w.qp)),
        case!(ibv_wr_atomic_write(w; w.qp, 24, 25, w.data.cast())),
    ]
}
