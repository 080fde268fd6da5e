//! Arguments of C programs: structures of other releases, and invalid pointers that must not be used.

use std::mem::size_of;
use std::ptr::{null, null_mut};

use rdma_soft::abi::*;
use rdma_sys::*;

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn query_writes_no_more_than_the_callers_structure_and_zeroes_the_rest() {
    // SAFETY: each object is created from the previous ones, which stay.
    unsafe {
        let list = ibv_get_device_list(null_mut());
        let context = ibv_open_device(*list);
        let pd = ibv_alloc_pd(context);
        let cq = ibv_create_cq(context, 1, null_mut(), null_mut(), 0);
        let mut init = ibv_qp_init_attr { send_cq: cq, recv_cq: cq, qp_type: IBV_QPT_RC, ..ibv_qp_init_attr::zeroed() };
        let qp = ibv_create_qp(pd, &mut init);

        // Older programs have a structure without this last field.
        let mut attr = ibv_qp_attr { rate_limit: 0x5555_5555, ..ibv_qp_attr::zeroed() };
        assert_eq!(ibv_query_qp(qp, &mut attr, IBV_QP_STATE.0 as i32, &mut init), 0);
        assert_eq!((attr.qp_state, attr.rate_limit), (IBV_QPS_RESET, 0x5555_5555));

        const SIZE: usize = size_of::<ibv_device_attr_ex>();
        let extended = &*context.cast::<u8>().sub(std::mem::offset_of!(verbs_context, context)).cast::<verbs_context>();
        let query = extended.query_device_ex.unwrap();
        for size in [size_of::<ibv_device_attr>(), SIZE, SIZE + 64] {
            let mut bytes = [0x5555_5555_5555_5555_u64; SIZE / 8 + 16];
            assert_eq!(query(context, null(), bytes.as_mut_ptr().cast(), size), 0);
            let bytes: Vec<u8> = bytes.iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert!(bytes[size..].iter().all(|byte| *byte == 0x55), "{size}");
            assert!(bytes[SIZE.min(size)..size].iter().all(|byte| *byte == 0), "{size}");
        }
        assert_eq!(ibv_destroy_qp(qp), 0);
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_queue_pair_takes_inline_data_of_the_size_of_an_element_without_a_request() {
    // SAFETY: each object is created from the previous ones, which stay.
    unsafe {
        let list = ibv_get_device_list(null_mut());
        let context = ibv_open_device(*list);
        let pd = ibv_alloc_pd(context);
        let cq = ibv_create_cq(context, 1, null_mut(), null_mut(), 0);
        for (requested, granted) in [(0, 16), (16, 16), (17, 17)] {
            let cap =
                ibv_qp_cap { max_send_wr: 1, max_send_sge: 1, max_inline_data: requested, ..ibv_qp_cap::zeroed() };
            let qp_type = IBV_QPT_RC;
            let mut init = ibv_qp_init_attr { send_cq: cq, recv_cq: cq, qp_type, cap, ..ibv_qp_init_attr::zeroed() };
            let qp = ibv_create_qp(pd, &mut init);
            assert_eq!(init.cap.max_inline_data, granted);
            assert_eq!(ibv_destroy_qp(qp), 0);
        }
    }
}

/// Creates a datagram queue pair in state RTS. Its context stays.
unsafe fn datagrams() -> *mut ibv_qp {
    // SAFETY: each object is created from the previous ones, which stay.
    unsafe {
        let list = ibv_get_device_list(null_mut());
        let context = ibv_open_device(*list);
        let pd = ibv_alloc_pd(context);
        let cq = ibv_create_cq(context, 8, null_mut(), null_mut(), 0);
        let cap = ibv_qp_cap { max_send_wr: 4, max_send_sge: 2, max_inline_data: 64, ..ibv_qp_cap::zeroed() };
        let qp_type = IBV_QPT_UD;
        let mut init = ibv_qp_init_attr { send_cq: cq, recv_cq: cq, qp_type, cap, ..ibv_qp_init_attr::zeroed() };
        let qp = ibv_create_qp(pd, &mut init);
        let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
        for (state, mask) in
            [(IBV_QPS_INIT, init), (IBV_QPS_RTR, IBV_QP_STATE), (IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN)]
        {
            let mut attr = ibv_qp_attr { qp_state: state, port_num: 1, ..ibv_qp_attr::zeroed() };
            assert_eq!(ibv_modify_qp(qp, &mut attr, mask.0 as i32), 0);
        }
        qp
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn an_empty_inline_element_may_have_any_address() {
    // SAFETY: all arguments are valid as the verbs require.
    unsafe {
        let qp = datagrams();
        let mut gid = ibv_gid { raw: [0; 16] };
        assert_eq!(ibv_query_gid((*qp).context, 1, 0, &mut gid), 0);
        let grh = ibv_global_route { dgid: gid, ..ibv_global_route::zeroed() };
        let ah = ibv_create_ah((*qp).pd, &mut ibv_ah_attr { grh, is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() });
        let mut parts = [ibv_sge { addr: 0, length: 0, lkey: 0 }; 2];
        let flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
        let mut wr = ibv_send_wr {
            wr_id: 7,
            sg_list: parts.as_mut_ptr(),
            num_sge: 2,
            opcode: IBV_WR_SEND,
            send_flags: flags.0,
            ..ibv_send_wr::zeroed()
        };
        wr.wr.ud.ah = ah;
        (wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey) = ((*qp).qp_num, 1);
        let mut bad = null_mut();
        let ops = &(*(*qp).context).ops;
        assert_eq!(ops.post_send.unwrap()(qp, &mut wr, &mut bad), 0);
        let mut wc = ibv_wc::zeroed();
        assert_eq!(ops.poll_cq.unwrap()((*qp).send_cq, 1, &mut wc), 1);
        assert_eq!((wc.wr_id, wc.status), (7, IBV_WC_SUCCESS));
        assert_eq!((ibv_destroy_ah(ah), ibv_destroy_qp(qp)), (0, 0));
    }
}
