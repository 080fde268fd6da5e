//! Datagrams between queue pairs of this process, through the functions of libibverbs.

use std::ptr::null_mut;

use rdma_soft::abi::*;
use rdma_sys::*;

const QKEY: u32 = 1;

/// Creates a datagram queue pair in state RTS, with a completion queue.
pub(crate) unsafe fn datagrams(pd: *mut ibv_pd) -> *mut ibv_qp {
    // SAFETY: each object is created from the previous ones, which stay.
    unsafe {
        let cq = ibv_create_cq((*pd).context, 8, null_mut(), null_mut(), 0);
        let cap = ibv_qp_cap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 64 };
        let qp_type = IBV_QPT_UD;
        let mut init = ibv_qp_init_attr { send_cq: cq, recv_cq: cq, qp_type, cap, ..ibv_qp_init_attr::zeroed() };
        let qp = ibv_create_qp(pd, &mut init);
        let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
        for (qp_state, mask) in
            [(IBV_QPS_INIT, init), (IBV_QPS_RTR, IBV_QP_STATE), (IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN)]
        {
            let mut attr = ibv_qp_attr { qp_state, port_num: 1, qkey: QKEY, ..ibv_qp_attr::zeroed() };
            assert_eq!(ibv_modify_qp(qp, &mut attr, mask.0 as i32), 0);
        }
        qp
    }
}

/// Sends four inline bytes.
pub(crate) unsafe fn send(from: *mut ibv_qp, to: *mut ibv_qp, mut peer: ibv_ah_attr) {
    // SAFETY: the objects exist, and inline data is read during the call.
    unsafe {
        let ah = ibv_create_ah((*from).pd, &mut peer);
        assert!(!ah.is_null());
        let mut sge = ibv_sge { addr: b"ping".as_ptr() as u64, length: 4, lkey: 0 };
        let mut wr = ibv_send_wr {
            sg_list: &mut sge,
            num_sge: 1,
            opcode: IBV_WR_SEND,
            send_flags: (IBV_SEND_INLINE | IBV_SEND_SIGNALED).0,
            ..ibv_send_wr::zeroed()
        };
        wr.wr.ud.ah = ah;
        (wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey) = ((*to).qp_num, QKEY);
        assert_eq!((*(*from).context).ops.post_send.unwrap()(from, &mut wr, &mut null_mut()), 0);
        assert_eq!(next_completion(from).status, IBV_WC_SUCCESS);
        assert_eq!(ibv_destroy_ah(ah), 0);
    }
}

/// Waits for the next completion of the queue pair.
pub(crate) unsafe fn next_completion(qp: *mut ibv_qp) -> ibv_wc {
    let mut wc = ibv_wc::zeroed();
    // SAFETY: the queue exists, and `wc` is valid for writes.
    unsafe {
        let cq = (*qp).send_cq;
        let poll = (*(*cq).context).ops.poll_cq.unwrap();
        while poll(cq, 1, &mut wc) == 0 {
            std::thread::yield_now();
        }
    }
    wc
}
