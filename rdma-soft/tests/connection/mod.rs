//! Connected queue pairs of this process, through the functions of libibverbs.

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use rdma_soft::abi::*;
use rdma_sys::*;

/// An open device. Its objects stay until the process ends.
pub(crate) struct Context {
    raw: *mut ibv_context,
    pd: *mut ibv_pd,
}

impl Context {
    pub(crate) fn open() -> Context {
        // SAFETY: each object is created from the previous ones, which stay.
        unsafe {
            let list = ibv_get_device_list(null_mut());
            let raw = ibv_open_device(*list);
            assert!(!raw.is_null());
            libc::fcntl((*raw).async_fd, libc::F_SETFL, libc::O_NONBLOCK);
            Context { raw, pd: ibv_alloc_pd(raw) }
        }
    }

    /// Creates a completion channel with a nonblocking descriptor.
    pub(crate) fn channel(&self) -> *mut ibv_comp_channel {
        // SAFETY: the context stays, and its user may set flags of the descriptor.
        unsafe {
            let channel = ibv_create_comp_channel(self.raw);
            libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
            channel
        }
    }

    pub(crate) fn cq(&self, entries: i32, channel: *mut ibv_comp_channel) -> *mut ibv_cq {
        // SAFETY: the context and the channel stay.
        let cq = unsafe { ibv_create_cq(self.raw, entries, null_mut(), channel, 0) };
        assert!(!cq.is_null());
        cq
    }

    /// Takes and acknowledges an asynchronous event. Returns its type and object.
    pub(crate) fn event(&self) -> (u32, usize) {
        let mut event = ibv_async_event::zeroed();
        // SAFETY: the context stays. A successful call has written the event.
        unsafe {
            assert_eq!(ibv_get_async_event(self.raw, &mut event), 0);
            ibv_ack_async_event(&mut event);
            (event.event_type.0, event.element.qp as usize)
        }
    }

    /// Takes and acknowledges an event of `cq`. Returns whether there was one.
    pub(crate) fn takes_event(&self, channel: *mut ibv_comp_channel, cq: *mut ibv_cq) -> bool {
        let (mut found, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel and the queue stay.
        unsafe {
            let is_there = ibv_get_cq_event(channel, &mut found, &mut context) == 0;
            if is_there {
                assert_eq!(found, cq);
                ibv_ack_cq_events(found, 1);
            }
            is_there
        }
    }
}

/// Arms a queue for solicited completions only or for all.
pub(crate) fn arm(cq: *mut ibv_cq, is_solicited_only: bool) {
    // SAFETY: the queue stays.
    assert_eq!(unsafe { ibv_req_notify_cq(cq, is_solicited_only.into()) }, 0);
}

/// Two reliable queue pairs that are connected to each other. They exchange empty messages.
pub(crate) struct Pair {
    pub(crate) qps: [*mut ibv_qp; 2],
}

impl Pair {
    /// `queues` has the send and the receive completion queue of each end.
    pub(crate) fn connect(context: &Context, queues: [(*mut ibv_cq, *mut ibv_cq); 2]) -> Pair {
        let cap = ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let qps = queues.map(|(send_cq, recv_cq)| {
            let mut init =
                ibv_qp_init_attr { send_cq, recv_cq, cap, qp_type: IBV_QPT_RC, ..ibv_qp_init_attr::zeroed() };
            // SAFETY: the domain and the queues stay.
            let qp = unsafe { ibv_create_qp(context.pd, &mut init) };
            assert!(!qp.is_null());
            qp
        });
        let pair = Pair { qps };
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the context stays.
        unsafe { assert_eq!(ibv_query_gid(context.raw, 1, 0, &mut gid), 0) };
        for (end, peer) in [(0, 1), (1, 0)] {
            // SAFETY: the queue pair stays.
            let dest_qp_num = unsafe { (*qps[peer]).qp_num };
            let grh = ibv_global_route { dgid: gid, hop_limit: 1, ..ibv_global_route::zeroed() };
            let attr = ibv_qp_attr {
                port_num: 1,
                ah_attr: ibv_ah_attr { grh, is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() },
                path_mtu: IBV_MTU_1024,
                dest_qp_num,
                // 8 ms, so that a failed peer is detected soon.
                timeout: 11,
                retry_cnt: 2,
                rnr_retry: 7,
                ..ibv_qp_attr::zeroed()
            };
            let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
            let rtr = IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER;
            let rts = IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC;
            for (state, mask) in [(IBV_QPS_INIT, init), (IBV_QPS_RTR, rtr), (IBV_QPS_RTS, rts)] {
                pair.modify(end, ibv_qp_attr { qp_state: state, ..attr }, mask);
            }
        }
        pair
    }

    fn modify(&self, end: usize, mut attr: ibv_qp_attr, mask: ibv_qp_attr_mask) {
        // SAFETY: the queue pair stays.
        assert_eq!(unsafe { ibv_modify_qp(self.qps[end], &mut attr, mask.0 as i32) }, 0);
    }

    /// Puts an end into the error state.
    pub(crate) fn fail(&self, end: usize) {
        self.modify(end, ibv_qp_attr { qp_state: IBV_QPS_ERR, ..ibv_qp_attr::zeroed() }, IBV_QP_STATE);
    }

    pub(crate) fn state(&self, end: usize) -> ibv_qp_state {
        let (mut attr, mut init) = (ibv_qp_attr::zeroed(), ibv_qp_init_attr::zeroed());
        // SAFETY: the queue pair stays.
        assert_eq!(unsafe { ibv_query_qp(self.qps[end], &mut attr, IBV_QP_STATE.0 as i32, &mut init) }, 0);
        attr.qp_state
    }

    pub(crate) fn wait_for_state(&self, end: usize, state: ibv_qp_state, hang: Duration) {
        let deadline = Instant::now() + hang;
        while self.state(end) != state {
            assert!(Instant::now() < deadline, "state {}", self.state(end).0);
            std::thread::yield_now();
        }
    }

    /// Posts a receive.
    pub(crate) fn receive(&self, end: usize) {
        let (mut wr, mut bad) = (ibv_recv_wr::zeroed(), null_mut());
        // SAFETY: the queue pair stays, and the message has no data.
        assert_eq!(unsafe { ibv_post_recv(self.qps[end], &mut wr, &mut bad) }, 0);
    }

    /// Posts an empty send. Returns whether there was room.
    pub(crate) fn send(&self, end: usize, flags: ibv_send_flags) -> bool {
        let mut wr = ibv_send_wr { opcode: IBV_WR_SEND, send_flags: flags.0, ..ibv_send_wr::zeroed() };
        let mut bad = null_mut();
        // SAFETY: the queue pair stays, and the message has no data.
        unsafe { ibv_post_send(self.qps[end], &mut wr, &mut bad) == 0 }
    }
}
