//! Connected queue pairs of this process with memory, through the functions of libibverbs.

use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdma_soft::abi::{ibv_reg_mr, *};
use rdma_soft::check::{Kind, Options, Report, Session};
use rdma_sys::*;

/// Deadline of a test that hangs.
const HANG: Duration = Duration::from_secs(60);

/// Only one test at a time may have a session.
static SESSION: Mutex<()> = Mutex::new(());

/// A checked device with two connected queue pairs.
pub(crate) struct World {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) channel: *mut ibv_comp_channel,
    /// Send and receive completion queues of both ends.
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) qps: [*mut ibv_qp; 2],
    memory: Vec<Box<[u8]>>,
    session: Session,
    _one: MutexGuard<'static, ()>,
}

/// A registered region.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) mr: *mut ibv_mr,
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) key: u32,
}

impl Memory {
    /// Writes a byte as the program.
    pub(crate) fn write(&self, at: usize, byte: u8) {
        // SAFETY: the memory stays until the world is dropped, and nothing else in the program uses it.
        unsafe { (self.address as *mut u8).add(at).write_volatile(byte) };
    }

    pub(crate) fn sge(&self) -> ibv_sge {
        ibv_sge { addr: self.address, length: self.len, lkey: self.key }
    }
}

pub(crate) const ALL: i32 =
    (IBV_ACCESS_LOCAL_WRITE.0 | IBV_ACCESS_REMOTE_WRITE.0 | IBV_ACCESS_REMOTE_READ.0 | IBV_ACCESS_REMOTE_ATOMIC.0)
        as i32;

impl World {
    pub(crate) fn new() -> World {
        World::with(Options::default(), 16)
    }

    /// `entries` is the size of the receive completion queue.
    pub(crate) fn with(options: Options, entries: i32) -> World {
        let one = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
        let session = Session::start(options).unwrap();
        // SAFETY: each object is created from the previous ones, which stay until the world is dropped.
        unsafe {
            let list = ibv_get_device_list(null_mut());
            let context = ibv_open_device(*list);
            ibv_free_device_list(list);
            assert!(!context.is_null());
            let pd = ibv_alloc_pd(context);
            let channel = ibv_create_comp_channel(context);
            let send_cq = ibv_create_cq(context, 32, null_mut(), null_mut(), 0);
            let recv_cq = ibv_create_cq(context, entries, null_mut(), channel, 0);
            assert!(!pd.is_null() && !channel.is_null() && !send_cq.is_null() && !recv_cq.is_null());
            let cap =
                ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 2, max_recv_sge: 2, max_inline_data: 64 };
            let init = ibv_qp_init_attr { send_cq, recv_cq, cap, qp_type: IBV_QPT_RC, ..ibv_qp_init_attr::zeroed() };
            let qps = [init, init].map(|mut init| ibv_create_qp(pd, &mut init));
            let world = World { context, pd, channel, send_cq, recv_cq, qps, memory: Vec::new(), session, _one: one };
            world.connect();
            world
        }
    }

    /// Resets both queue pairs, and connects them again.
    pub(crate) fn reconnect(&self) {
        for qp in self.qps {
            let mut attr = ibv_qp_attr { qp_state: IBV_QPS_RESET, ..ibv_qp_attr::zeroed() };
            // SAFETY: the queue pair exists.
            assert_eq!(unsafe { ibv_modify_qp(qp, &mut attr, IBV_QP_STATE.0 as i32) }, 0);
        }
        self.connect();
    }

    fn connect(&self) {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the context and the queue pairs exist.
        unsafe {
            assert_eq!(ibv_query_gid(self.context, 1, 0, &mut gid), 0);
            for (end, peer) in [(0, 1), (1, 0)] {
                let grh = ibv_global_route { dgid: gid, hop_limit: 1, ..ibv_global_route::zeroed() };
                let mut attr = ibv_qp_attr {
                    port_num: 1,
                    ah_attr: ibv_ah_attr { grh, is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() },
                    path_mtu: IBV_MTU_1024,
                    dest_qp_num: (*self.qps[peer]).qp_num,
                    qp_access_flags: ALL as u32,
                    max_rd_atomic: 1,
                    max_dest_rd_atomic: 1,
                    min_rnr_timer: 1,
                    timeout: 14,
                    retry_cnt: 7,
                    rnr_retry: 7,
                    ..ibv_qp_attr::zeroed()
                };
                let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
                let path = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
                let rtr = path | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
                let retries = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY;
                let rts = retries | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
                for (state, mask) in [(IBV_QPS_INIT, init), (IBV_QPS_RTR, rtr), (IBV_QPS_RTS, rts)] {
                    attr.qp_state = state;
                    assert_eq!(ibv_modify_qp(self.qps[end], &mut attr, mask.0 as i32), 0);
                }
            }
        }
    }

    /// Registers new memory of `len` bytes.
    pub(crate) fn memory(&mut self, len: u32) -> Memory {
        self.memory_in(self.pd, len, ALL)
    }

    pub(crate) fn memory_in(&mut self, pd: *mut ibv_pd, len: u32, access: i32) -> Memory {
        let mut bytes = vec![0_u8; len as usize].into_boxed_slice();
        let address = bytes.as_mut_ptr();
        self.memory.push(bytes);
        // SAFETY: the memory stays until the world is dropped.
        unsafe { self.register(pd, address as u64, len, access) }
    }

    /// Registers memory.
    ///
    /// # Safety
    /// The memory is mapped.
    pub(crate) unsafe fn register(&self, pd: *mut ibv_pd, address: u64, len: u32, access: i32) -> Memory {
        // SAFETY: the caller keeps the contract above.
        let mr = unsafe { ibv_reg_mr(pd, address as *mut _, len as usize, access) };
        assert!(!mr.is_null());
        // SAFETY: the region was just registered.
        Memory { mr, address, len, key: unsafe { (*mr).lkey } }
    }

    pub(crate) fn qp(&self, end: usize) -> Option<u32> {
        // SAFETY: the queue pair exists.
        Some(unsafe { (*self.qps[end]).qp_num })
    }

    pub(crate) fn receive(&self, wr_id: u64, mut sge: ibv_sge) {
        let mut wr = ibv_recv_wr { wr_id, sg_list: &mut sge, num_sge: 1, ..ibv_recv_wr::zeroed() };
        // SAFETY: the queue pair exists. The memory is as the test wants it.
        assert_eq!(unsafe { ibv_post_recv(self.qps[1], &mut wr, &mut null_mut()) }, 0);
    }

    pub(crate) fn send(&self, wr_id: u64, sge: ibv_sge) {
        self.post(wr_id, sge, IBV_WR_SEND, IBV_SEND_SIGNALED, (0, 0));
    }

    /// Posts a request with the remote address and key `remote`.
    pub(crate) fn post(
        &self,
        wr_id: u64,
        mut sge: ibv_sge,
        opcode: ibv_wr_opcode,
        flags: ibv_send_flags,
        remote: (u64, u32),
    ) {
        let mut wr =
            ibv_send_wr { wr_id, sg_list: &mut sge, num_sge: 1, opcode, send_flags: flags.0, ..ibv_send_wr::zeroed() };
        wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: remote.0, rkey: remote.1 };
        // SAFETY: the queue pair exists. The memory is as the test wants it.
        assert_eq!(unsafe { ibv_post_send(self.qps[0], &mut wr, &mut null_mut()) }, 0);
    }

    /// Waits for a completion.
    pub(crate) fn poll(&self, cq: *mut ibv_cq) -> ibv_wc {
        let (mut wc, deadline) = (ibv_wc::zeroed(), Instant::now() + HANG);
        loop {
            assert!(Instant::now() < deadline, "no completion");
            // SAFETY: the queue exists, and there is room for one completion.
            match unsafe { ibv_poll_cq(cq, 1, &mut wc) } {
                1 => return wc,
                count => assert_eq!(count, 0),
            }
        }
    }

    pub(crate) fn sent(&self) -> ibv_wc_status {
        self.poll(self.send_cq).status
    }

    pub(crate) fn received(&self) -> ibv_wc_status {
        self.poll(self.recv_cq).status
    }

    pub(crate) fn reports(&self) -> Vec<Report> {
        self.session.take_reports()
    }

    /// Returns the only report, of this kind.
    #[track_caller]
    pub(crate) fn report(&self, kind: Kind) -> Report {
        let reports = self.reports();
        assert_eq!(reports.iter().map(|report| report.kind).collect::<Vec<_>>(), [kind], "{reports:#?}");
        reports.into_iter().next().unwrap()
    }

    /// Waits for a report of this kind.
    pub(crate) fn wait_for_report(&self, kind: Kind) -> Report {
        let deadline = Instant::now() + HANG;
        loop {
            assert!(Instant::now() < deadline, "no report");
            match self.reports().pop() {
                Some(report) => {
                    assert_eq!(report.kind, kind, "{report}");
                    return report;
                }
                // Some reports are made only while all threads sleep.
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

impl World {
    /// Closes the context without destroying its objects.
    pub(crate) fn abandon(mut self) -> Vec<Report> {
        // SAFETY: the context is open. It and its objects are not used again.
        assert_eq!(unsafe { ibv_close_device(std::mem::replace(&mut self.context, null_mut())) }, 0);
        self.reports()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if self.context.is_null() {
            return;
        }
        // SAFETY: the objects exist, and closing the context removes the others.
        unsafe {
            for qp in self.qps {
                assert_eq!(ibv_destroy_qp(qp), 0);
            }
            ibv_close_device(self.context);
        }
    }
}
