//! Work queues, indirection tables, and RSS queue pairs.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;

use rdma_sys::*;

use super::config::Bad;
use super::engine::{Cqe, RecvWr};
use super::post::set_bad;
use super::state::{Alloc, Device, Ptr, State, enter, null, own};

pub(super) struct Wq {
    alloc: Alloc,
    raw: Ptr<ibv_wq>,
    context: usize,
    pd: usize,
    cq: usize,
    number: u32,
    max_wr: u32,
    max_sge: u32,
    state: ibv_wq_state,
    queue: VecDeque<RecvWr>,
}

pub(super) struct Table {
    alloc: Alloc,
    context: usize,
    queues: Vec<usize>,
}

pub(super) struct Rss {
    alloc: Alloc,
    context: usize,
    pd: usize,
    pub(super) table: usize,
    fields: u64,
}

pub(super) fn set_operations(context: &mut verbs_context) {
    context.create_wq = Some(create_wq);
    context.modify_wq = Some(modify_wq);
    context.destroy_wq = Some(destroy_wq);
    context.create_rwq_ind_table = Some(create_rwq_ind_table);
    context.destroy_rwq_ind_table = Some(destroy_rwq_ind_table);
}

unsafe extern "C" fn create_wq(context: *mut ibv_context, attr: *mut ibv_wq_init_attr) -> *mut ibv_wq {
    enter(context, "create_wq", |state, device| {
        if let Some(errno) = state.fault("create_wq") {
            return null(errno);
        }
        let wanted = unsafe { *attr };
        let (pd, cq) = (wanted.pd.addr(), wanted.cq.addr());
        let ours = state.pds.get(&pd).is_some_and(|pd| pd.context == context.addr())
            && state.cqs.get(&cq).is_some_and(|cq| cq.context == context.addr());
        if !ours {
            state.violation("create_wq with objects of another context");
            return null(libc::EINVAL);
        }
        let sizes = 1..=state.config.max_qp_wr;
        if !sizes.contains(&wanted.max_wr) || wanted.max_sge > state.config.max_sge || wanted.wq_type != IBV_WQT_RQ {
            return null(libc::EINVAL);
        }
        let flags = if wanted.comp_mask & IBV_WQ_INIT_ATTR_FLAGS.0 != 0 { wanted.create_flags } else { 0 };
        if flags & !IBV_WQ_FLAGS_CVLAN_STRIPPING.0 != 0 {
            return null(libc::EINVAL);
        }
        let max_wr = wanted.max_wr.next_power_of_two();
        unsafe { (*attr).max_wr = max_wr };
        let number = state.handle();
        // As in a provider, fields that the inline function in the header sets are left alone.
        let post_recv = (state.fault("post_wq_recv") != Some(0)).then_some(post_wq_recv as _);
        let (alloc, raw) = Alloc::new(ibv_wq {
            context,
            pd: wanted.pd,
            cq: wanted.cq,
            wq_num: number,
            handle: number,
            state: IBV_WQS_RESET,
            wq_type: IBV_WQT_RQ,
            post_recv,
            ..ibv_wq::zeroed()
        });
        own(raw, device);
        let wq = Wq {
            alloc,
            raw: Ptr(raw),
            context: context.addr(),
            pd,
            cq,
            number,
            max_wr,
            max_sge: wanted.max_sge,
            state: IBV_WQS_RESET,
            queue: VecDeque::new(),
        };
        state.steering.wqs.insert(raw.addr(), wq);
        raw
    })
}

unsafe extern "C" fn modify_wq(raw: *mut ibv_wq, attr: *mut ibv_wq_attr) -> c_int {
    let attr = unsafe { *attr };
    enter(raw, "modify_wq", |state, _| {
        if let Some(errno) = state.fault("modify_wq") {
            return errno;
        }
        let Some(wq) = state.wq(raw.addr(), "modify_wq") else { return libc::EINVAL };
        if attr.attr_mask & IBV_WQ_ATTR_FLAGS.0 != 0 {
            return if attr.flags_mask == IBV_WQ_FLAGS_CVLAN_STRIPPING.0 { 0 } else { libc::EOPNOTSUPP };
        }
        let (cq, from, to) = (wq.cq, wq.state, attr.wq_state);
        state.needs_lock([cq, cq], "modify_wq");
        match (from, to) {
            (_, IBV_WQS_RESET) => state.steering.wqs.get_mut(&raw.addr()).unwrap().queue.clear(),
            (IBV_WQS_RESET | IBV_WQS_RDY, IBV_WQS_RDY) => {}
            (IBV_WQS_RDY | IBV_WQS_ERR, IBV_WQS_ERR) => state.flush_wq(raw.addr()),
            // One provider returns negative errnos.
            _ => return -libc::EINVAL,
        }
        state.steering.wqs.get_mut(&raw.addr()).unwrap().state = to;
        unsafe { (*raw).state = to };
        0
    })
}

unsafe extern "C" fn destroy_wq(raw: *mut ibv_wq) -> c_int {
    enter(raw, "destroy_wq", |state, _| {
        let address = raw.addr();
        let Some(wq) = state.wq(address, "destroy_wq") else { return libc::EINVAL };
        let cq = wq.cq;
        state.needs_lock([cq, cq], "destroy_wq");
        if let Some(errno) = state.fault("destroy_wq") {
            return errno;
        }
        if state.steering.tables.values().any(|table| table.queues.contains(&address)) {
            state.violation("destroy_wq of a work queue that is in a table");
            return libc::EBUSY;
        }
        state.end_events(address, "destroy_wq");
        let wq = state.steering.wqs.remove(&address).unwrap();
        state.retire(wq.alloc);
        0
    })
}

unsafe extern "C" fn post_wq_recv(raw: *mut ibv_wq, first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    enter(raw, "post_wq_recv", |state, _| {
        if state.wq(raw.addr(), "post_wq_recv").is_none() {
            return libc::EINVAL;
        }
        let mut next = first;
        while !next.is_null() {
            let wr = unsafe { *next };
            let wq = state.steering.wqs.get_mut(&raw.addr()).unwrap();
            let errno = match () {
                () if wq.state == IBV_WQS_RESET => libc::EINVAL,
                () if wq.queue.len() >= wq.max_wr as usize => libc::ENOMEM,
                () if wr.num_sge as u32 > wq.max_sge => libc::EINVAL,
                () => 0,
            };
            if errno != 0 {
                if errno == libc::EINVAL {
                    state.violation("post_wq_recv in RESET, or of too many elements");
                }
                unsafe { set_bad(Bad::FirstNotTaken, bad, next) };
                return errno;
            }
            let sges = (0..wr.num_sge as usize).map(|index| unsafe { *wr.sg_list.add(index) }).collect();
            wq.queue.push_back(RecvWr { sequence: 0, wr_id: wr.wr_id, sges });
            next = wr.next;
        }
        if state.steering.wqs[&raw.addr()].state == IBV_WQS_ERR {
            state.flush_wq(raw.addr());
        }
        0
    })
}

unsafe extern "C" fn create_rwq_ind_table(
    context: *mut ibv_context,
    attr: *mut ibv_rwq_ind_table_init_attr,
) -> *mut ibv_rwq_ind_table {
    let attr = unsafe { *attr };
    enter(context, "create_rwq_ind_table", |state, device| {
        if let Some(errno) = state.fault("create_rwq_ind_table") {
            return null(errno);
        }
        let queues: Vec<usize> =
            (0..1_usize << attr.log_ind_tbl_size).map(|index| unsafe { (*attr.ind_tbl.add(index)).addr() }).collect();
        if queues.iter().any(|wq| state.steering.wqs.get(wq).is_none_or(|wq| wq.context != context.addr())) {
            state.violation("create_rwq_ind_table with a work queue of another context");
            return null(libc::EINVAL);
        }
        let (alloc, raw) = Alloc::new(ibv_rwq_ind_table { context, ..ibv_rwq_ind_table::zeroed() });
        own(raw, device);
        state.steering.tables.insert(raw.addr(), Table { alloc, context: context.addr(), queues });
        raw
    })
}

unsafe extern "C" fn destroy_rwq_ind_table(raw: *mut ibv_rwq_ind_table) -> c_int {
    enter(raw, "destroy_rwq_ind_table", |state, _| {
        let address = raw.addr();
        if let Some(errno) = state.fault("destroy_rwq_ind_table") {
            return errno;
        }
        if state.steering.rss.values().any(|rss| rss.table == address) {
            state.violation("destroy_rwq_ind_table of a table that a queue pair has");
            return libc::EBUSY;
        }
        match state.steering.tables.remove(&address) {
            Some(table) => state.retire(table.alloc),
            None => state.violation("destroy_rwq_ind_table of a table that does not exist"),
        }
        0
    })
}

impl State {
    fn wq(&mut self, address: usize, verb: &str) -> Option<&mut Wq> {
        if !self.steering.wqs.contains_key(&address) {
            self.violation(format!("{verb} on an ibv_wq that does not exist"));
        }
        self.steering.wqs.get_mut(&address)
    }

    pub(super) fn work_queues_in(&self, pd: usize) -> usize {
        self.steering.wqs.values().filter(|wq| wq.pd == pd).count()
            + self.steering.rss.values().filter(|rss| rss.pd == pd).count()
    }

    pub(super) fn work_queues_complete_to(&self, cq: usize) -> bool {
        self.steering.wqs.values().any(|wq| wq.cq == cq)
    }

    pub(super) fn work_queue_objects(&self, context: usize) -> usize {
        self.steering.wqs.values().filter(|wq| wq.context == context).count()
            + self.steering.tables.values().filter(|table| table.context == context).count()
            + self.steering.rss.values().filter(|rss| rss.context == context).count()
    }

    pub(super) fn create_rss_qp(&mut self, wanted: &ibv_qp_init_attr_ex, device: &Arc<Device>) -> *mut ibv_qp {
        if let Some(errno) = self.fault("create_rss_qp") {
            return null(errno);
        }
        let (table, conf) = (wanted.rwq_ind_tbl.addr(), wanted.rx_hash_conf);
        let all = (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH).0;
        if wanted.comp_mask != all || !self.steering.tables.contains_key(&table) {
            self.violation("create_qp_ex with a table that does not exist, or without all that goes with one");
            return null(libc::EINVAL);
        }
        let key: Vec<u8> =
            (0..usize::from(conf.rx_hash_key_len)).map(|index| unsafe { *conf.rx_hash_key.add(index) }).collect();
        if key.len() != 40 || !wanted.send_cq.is_null() || !wanted.recv_cq.is_null() {
            return null(libc::EINVAL);
        }
        let Some(pd) = self.pd(wanted.pd.addr(), "create_qp_ex") else { return null(libc::EINVAL) };
        let context = pd.context;
        let raw = ibv_qp {
            context: unsafe { (*wanted.pd).context },
            qp_context: wanted.qp_context,
            pd: wanted.pd,
            qp_type: wanted.qp_type,
            ..ibv_qp::zeroed()
        };
        let (alloc, raw) = Alloc::new(raw);
        own(raw, device);
        let rss = Rss { alloc, context, pd: wanted.pd.addr(), table, fields: conf.rx_hash_fields_mask };
        self.steering.rss.insert(raw.addr(), rss);
        raw
    }

    pub(super) fn destroy_rss_qp(&mut self, address: usize) -> c_int {
        if let Some(errno) = self.fault("ibv_destroy_qp") {
            return errno;
        }
        let rss = self.steering.rss.remove(&address).unwrap();
        self.retire(rss.alloc);
        0
    }

    /// Delivers a frame to a work queue. The sum of the hashed ports selects the queue.
    pub(super) fn spread(&mut self, rss: usize, frame: &[u8]) {
        let rss = &self.steering.rss[&rss];
        let has = |field: ibv_rx_hash_fields| rss.fields & u64::from(field.0) != 0;
        let port = |at: usize| usize::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
        let mut hash = 0;
        if has(IBV_RX_HASH_SRC_PORT_UDP) {
            hash += port(34);
        }
        if has(IBV_RX_HASH_DST_PORT_UDP) {
            hash += port(36);
        }
        let queues = &self.steering.tables[&rss.table].queues;
        let address = queues[hash % queues.len()];
        let wq = self.steering.wqs.get_mut(&address).unwrap();
        if wq.state != IBV_WQS_RDY {
            return;
        }
        // Without a receive, the frame is dropped.
        let Some(receive) = wq.queue.pop_front() else { return };
        let (pd, cq, qp_num) = (wq.pd, wq.cq, wq.number);
        let ok = self.scatter(pd, &receive.sges, frame).is_some();
        let cqe = match ok {
            true => Cqe { opcode: IBV_WC_RECV.0, byte_len: frame.len() as u32, ..Cqe::default() },
            false => Cqe { status: IBV_WC_LOC_PROT_ERR.0, ..Cqe::default() },
        };
        self.push_cqe(cq, Cqe { wr_id: receive.wr_id, qp_num, ..cqe }, false);
    }

    fn flush_wq(&mut self, address: usize) {
        let wq = self.steering.wqs.get_mut(&address).unwrap();
        let (cq, qp_num) = (wq.cq, wq.number);
        for receive in std::mem::take(&mut wq.queue) {
            let status = IBV_WC_WR_FLUSH_ERR.0;
            self.push_cqe(cq, Cqe { wr_id: receive.wr_id, status, qp_num, opcode: 0xff, ..Cqe::default() }, false);
        }
    }

    /// Moves a work queue to the error state, like a device that detects an error.
    pub(super) fn break_wq(&mut self, raw: *mut ibv_wq) {
        let wq = self.steering.wqs.get_mut(&raw.addr()).unwrap();
        wq.state = IBV_WQS_ERR;
        let (context, raw) = (wq.context, wq.raw);
        self.flush_wq(raw.0.addr());
        self.raise_object(context, IBV_EVENT_WQ_FATAL, raw.0.cast());
    }
}
