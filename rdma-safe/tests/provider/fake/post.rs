//! Posting, with `ibv_post_send`, `ibv_post_recv` and `ibv_wr_*`.

use std::ffi::{c_int, c_void};

use rdma_sys::*;

use super::config::{Bad, Mode, PostFault};
use super::engine::{Data, Destination, RecvWr, SendWr};
use super::memory::read;
use super::operations::{Extra, set_newer_builders};
use super::state::{Qp, State, enter};

/// A send as the provider received it.
#[derive(Clone, Debug)]
pub(crate) struct Posted {
    /// `ibv_post_send` or `ibv_wr_complete`.
    pub(crate) verb: &'static str,
    pub(crate) wr_id: u64,
    pub(crate) opcode: ibv_wr_opcode,
    /// Flags at the time of the builder call.
    pub(crate) flags: u32,
    /// `sge`, `sge_list`, `inline_data`, `inline_data_list`.
    pub(crate) setter: &'static str,
    /// Length of the inline data, or number of elements.
    pub(crate) len: usize,
}

/// A work request that is not complete yet.
pub(super) struct Building {
    pub(super) wr: SendWr,
    setter: Option<&'static str>,
}

impl Building {
    pub(super) fn has_data(&self) -> bool {
        self.setter.is_some()
    }

    fn is_unset(&self) -> bool {
        self.setter.is_none()
    }
}

/// Whether a transport supports an operation, by ibv_post_send(3).
fn belongs(qp_type: ibv_qp_type, opcode: ibv_wr_opcode) -> bool {
    let datagram = matches!(opcode, IBV_WR_SEND | IBV_WR_SEND_WITH_IMM);
    match qp_type {
        IBV_QPT_UD => datagram || opcode == IBV_WR_TSO,
        IBV_QPT_RAW_PACKET => matches!(opcode, IBV_WR_SEND | IBV_WR_TSO),
        IBV_QPT_UC => datagram || matches!(opcode, IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM),
        _ => !matches!(opcode, IBV_WR_TSO | IBV_WR_FLUSH | IBV_WR_ATOMIC_WRITE),
    }
}

pub(super) fn blank(qp: &Qp, opcode: ibv_wr_opcode) -> SendWr {
    SendWr {
        sequence: qp.sq_posted,
        wr_id: 0,
        opcode,
        flags: 0,
        imm_data: 0,
        remote_addr: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        destination: None,
        extra: Extra::None,
        srq_number: None,
        data: Data::Sges(Vec::new()),
    }
}

pub(super) fn can_send(state: ibv_qp_state) -> bool {
    matches!(state, IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_SQE | IBV_QPS_ERR)
}

pub(super) unsafe extern "C" fn post_send(
    raw: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    enter(raw, "ibv_post_send", |state, _| {
        let Some(qp) = state.qp(raw.addr(), "ibv_post_send") else { return libc::EINVAL };
        if !can_send(qp.state) {
            let text = format!("ibv_post_send in state {}", qp.state.0);
            state.violation(text);
            return libc::EINVAL;
        }
        if first.is_null() || !first.is_aligned() {
            state.violation("ibv_post_send of no chain");
            return libc::EINVAL;
        }
        let fault = state.post_send_fault.take();
        let (mut next, mut taken) = (first, 0);
        while !next.is_null() {
            let failed = match fault {
                Some(PostFault { errno, taken: limit, .. }) if taken == limit => Err(errno),
                _ => unsafe { state.post_one(raw.addr(), next) },
            };
            if let Err(errno) = failed {
                let at = fault.map_or(Bad::FirstNotTaken, |fault| fault.bad);
                unsafe { set_bad(at, bad, next) };
                if state.mode == Mode::AtPost {
                    state.run();
                }
                return errno;
            }
            taken += 1;
            next = unsafe { (*next).next };
        }
        let errno = match fault {
            // The device accepted the whole chain, but the call fails.
            Some(fault) => {
                unsafe { set_bad(fault.bad, bad, std::ptr::null_mut()) };
                fault.errno
            }
            None => 0,
        };
        state.after_post(raw.addr());
        errno
    })
}

pub(super) unsafe fn set_bad<T>(how: Bad, bad: *mut *mut T, next: *mut T) {
    unsafe {
        match how {
            Bad::FirstNotTaken => *bad = next,
            Bad::Untouched => {}
        }
    }
}

impl State {
    pub(super) fn after_post(&mut self, address: usize) {
        if self.qps[&address].state == IBV_QPS_ERR {
            self.flush(address, !self.config.rxe);
        } else if self.mode == Mode::AtPost {
            self.run();
        }
    }

    /// Reads the address handle when the work is posted.
    fn destination(&mut self, qp: usize, ah: usize, number: u32, qkey: u32, verb: &str) -> Destination {
        let pd = self.qps[&qp].pd;
        if self.ah(ah, verb).is_some_and(|ah| ah.pd != pd) {
            self.violation(format!("{verb} with an ibv_ah of another domain"));
        }
        Destination { ah, number, qkey }
    }

    unsafe fn post_one(&mut self, address: usize, raw: *mut ibv_send_wr) -> Result<(), c_int> {
        let raw = unsafe { *raw };
        let qp = &self.qps[&address];
        let (max_sge, max_inline) = (qp.cap.max_send_sge as usize, qp.cap.max_inline_data as usize);
        if qp.sq_posted - qp.sq_reclaimed >= u64::from(qp.cap.max_send_wr) {
            return Err(libc::ENOMEM);
        }
        let known = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE | IBV_SEND_IP_CSUM;
        if raw.send_flags & !known.0 != 0 {
            self.violation(format!("ibv_post_send with flags {:#x}", raw.send_flags));
        }
        let count = raw.num_sge as usize;
        if raw.num_sge < 0 || count > max_sge.max(1) {
            self.violation(format!("ibv_post_send of {} elements, of which {max_sge} fit", raw.num_sge));
            return Err(libc::EINVAL);
        }
        let sges: Vec<ibv_sge> = (0..count).map(|index| unsafe { *raw.sg_list.add(index) }).collect();
        let mut wr = blank(&self.qps[&address], raw.opcode);
        let qp_type = self.qps[&address].qp_type;
        if !belongs(qp_type, raw.opcode) {
            self.violation(format!("ibv_post_send of operation {} on type {}", raw.opcode.0, qp_type.0));
            return Err(libc::EINVAL);
        }
        if qp_type == IBV_QPT_UD {
            let ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah, remote_qpn, remote_qkey } = unsafe { raw.wr.ud };
            wr.imm_data = unsafe { raw.__bindgen_anon_1.imm_data };
            wr.destination = Some(self.destination(address, ah.addr(), remote_qpn, remote_qkey, "ibv_post_send"));
        }
        if qp_type == IBV_QPT_XRC_SEND {
            wr.srq_number = Some(unsafe { raw.qp_type.xrc.remote_srqn });
        }
        wr.wr_id = raw.wr_id;
        wr.flags = raw.send_flags;
        unsafe {
            match raw.opcode {
                IBV_WR_SEND_WITH_IMM | IBV_WR_SEND_WITH_INV => wr.imm_data = raw.__bindgen_anon_1.imm_data,
                IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_RDMA_READ => {
                    wr.imm_data = raw.__bindgen_anon_1.imm_data;
                    (wr.remote_addr, wr.rkey) = (raw.wr.rdma.remote_addr, raw.wr.rdma.rkey);
                }
                IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                    (wr.remote_addr, wr.rkey) = (raw.wr.atomic.remote_addr, raw.wr.atomic.rkey);
                    (wr.compare_add, wr.swap) = (raw.wr.atomic.compare_add, raw.wr.atomic.swap);
                }
                IBV_WR_TSO => wr.extra = Extra::of_tso(raw.__bindgen_anon_2.tso),
                _ => {}
            }
        }
        let inline = raw.send_flags & IBV_SEND_INLINE.0 != 0;
        let mut posted = Posted {
            verb: "ibv_post_send",
            wr_id: raw.wr_id,
            opcode: raw.opcode,
            flags: raw.send_flags,
            setter: if count > 1 { "sge_list" } else { "sge" },
            len: count,
        };
        if inline {
            let mut bytes = Vec::new();
            for sge in &sges {
                let from = std::ptr::with_exposed_provenance(sge.addr as usize);
                bytes.extend(unsafe { read(from, sge.length as usize) });
            }
            if bytes.len() > max_inline {
                self.violation(format!("ibv_post_send of {} inline bytes, of which {max_inline} fit", bytes.len()));
                return Err(libc::EINVAL);
            }
            (posted.setter, posted.len) = ("inline_data", bytes.len());
            wr.data = Data::Inline(bytes);
        } else {
            wr.data = Data::Sges(sges);
        }
        self.posted.push(posted);
        let qp = self.qps.get_mut(&address).unwrap();
        qp.sq_posted += 1;
        qp.sq.push_back(wr);
        Ok(())
    }
}

pub(super) unsafe extern "C" fn post_recv(
    raw: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    enter(raw, "ibv_post_recv", |state, _| {
        let Some(qp) = state.qp(raw.addr(), "ibv_post_recv") else { return libc::EINVAL };
        if qp.state == IBV_QPS_RESET {
            state.violation("ibv_post_recv in RESET");
            return libc::EINVAL;
        }
        if qp.srq.is_some() || matches!(qp.qp_type, IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV) {
            state.violation("ibv_post_recv to a queue pair without a receive queue");
            return libc::EINVAL;
        }
        let recv_cq = qp.recv_cq;
        state.needs_no_batch([recv_cq, recv_cq], "ibv_post_recv");
        if first.is_null() || !first.is_aligned() {
            state.violation("ibv_post_recv of no chain");
            return libc::EINVAL;
        }
        let fault = state.post_recv_fault.take();
        let (mut next, mut taken) = (first, 0);
        while !next.is_null() {
            let wr = unsafe { *next };
            let qp = state.qps.get_mut(&raw.addr()).unwrap();
            let is_full = qp.rq_posted - qp.rq_reclaimed >= u64::from(qp.cap.max_recv_wr);
            let too_many = wr.num_sge < 0 || wr.num_sge as u32 > qp.cap.max_recv_sge;
            let errno = match fault {
                Some(fault) if taken == fault.taken => fault.errno,
                _ if is_full => libc::ENOMEM,
                _ if too_many => libc::EINVAL,
                _ => 0,
            };
            if errno != 0 {
                if too_many {
                    state.violation(format!("ibv_post_recv of {} elements", wr.num_sge));
                }
                unsafe { set_bad(fault.map_or(Bad::FirstNotTaken, |fault| fault.bad), bad, next) };
                return errno;
            }
            let sges = (0..wr.num_sge as usize).map(|index| unsafe { *wr.sg_list.add(index) }).collect();
            qp.rq.push_back(RecvWr { sequence: qp.rq_posted, wr_id: wr.wr_id, sges });
            qp.rq_posted += 1;
            taken += 1;
            next = wr.next;
        }
        let errno = fault.map_or(0, |fault| {
            unsafe { set_bad(fault.bad, bad, std::ptr::null_mut()) };
            fault.errno
        });
        state.after_post(raw.addr());
        errno
    })
}

/// Sets the mandatory functions and the requested builders. The others stay NULL.
pub(super) fn set_builders(qp: &mut ibv_qp_ex, ops: u64) {
    let wants = |flag: ibv_qp_create_send_ops_flags| ops & u64::from(flag.0) != 0;
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_send = wants(IBV_QP_EX_WITH_SEND).then_some(wr_send as _);
    qp.wr_send_imm = wants(IBV_QP_EX_WITH_SEND_WITH_IMM).then_some(wr_send_imm as _);
    qp.wr_send_inv = wants(IBV_QP_EX_WITH_SEND_WITH_INV).then_some(wr_send_inv as _);
    qp.wr_rdma_write = wants(IBV_QP_EX_WITH_RDMA_WRITE).then_some(wr_rdma_write as _);
    qp.wr_rdma_write_imm = wants(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM).then_some(wr_rdma_write_imm as _);
    qp.wr_rdma_read = wants(IBV_QP_EX_WITH_RDMA_READ).then_some(wr_rdma_read as _);
    qp.wr_atomic_cmp_swp = wants(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP).then_some(wr_atomic_cmp_swp as _);
    qp.wr_atomic_fetch_add = wants(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD).then_some(wr_atomic_fetch_add as _);
    qp.wr_bind_mw = wants(IBV_QP_EX_WITH_BIND_MW).then_some(wr_bind_mw as _);
    qp.wr_local_inv = wants(IBV_QP_EX_WITH_LOCAL_INV).then_some(wr_local_inv as _);
    set_newer_builders(qp, ops);
}

unsafe extern "C" fn wr_start(raw: *mut ibv_qp_ex) {
    enter(raw, "wr_start", |state, _| {
        let Some(qp) = state.qp(raw.addr(), "wr_start") else { return };
        let (nested, from, send_cq) = (qp.batch.is_some(), qp.state, qp.send_cq);
        state.needs_no_batch([send_cq, send_cq], "wr_start");
        let qp = state.qps.get_mut(&raw.addr()).unwrap();
        qp.batch = Some(Vec::new());
        qp.builder = Some(std::thread::current().id());
        if nested {
            state.violation("deadlock: wr_start between wr_start and wr_complete");
        }
        if !can_send(from) {
            state.violation(format!("wr_start in state {}", from.0));
        }
    });
}

pub(super) fn build(raw: *mut ibv_qp_ex, verb: &'static str, opcode: ibv_wr_opcode, fill: impl FnOnce(&mut SendWr)) {
    build_with(raw, verb, opcode, None, fill);
}

/// If `setter` is given, the operation already has its data.
pub(super) fn build_with(
    raw: *mut ibv_qp_ex,
    verb: &'static str,
    opcode: ibv_wr_opcode,
    setter: Option<&'static str>,
    fill: impl FnOnce(&mut SendWr),
) {
    enter(raw, verb, |state, _| {
        let Some(qp) = state.qp(raw.addr(), verb) else { return };
        let mut wr = blank(qp, opcode);
        unsafe { (wr.wr_id, wr.flags) = ((*raw).wr_id, (*raw).wr_flags) };
        fill(&mut wr);
        let Some(batch) = &mut qp.batch else {
            return state.violation(format!("{verb} outside of wr_start and wr_complete"));
        };
        let is_unset = batch.last().is_some_and(Building::is_unset);
        batch.push(Building { wr, setter });
        if is_unset {
            state.violation(format!("{verb} after a work request without data"));
        }
    });
}

fn set(raw: *mut ibv_qp_ex, verb: &'static str, data: impl FnOnce(&Qp) -> Result<Data, String>) {
    enter(raw, verb, |state, _| {
        let Some(qp) = state.qp(raw.addr(), verb) else { return };
        let Some(mut building) = qp.batch.as_mut().and_then(Vec::pop) else {
            return state.violation(format!("{verb} without a work request"));
        };
        let result = data(qp);
        let is_set = building.setter.replace(verb).is_some();
        let homeless = qp.qp_type == IBV_QPT_UD && building.wr.destination.is_none()
            || qp.qp_type == IBV_QPT_XRC_SEND && building.wr.srq_number.is_none();
        let problem = match result {
            Ok(data) => {
                building.wr.data = data;
                None
            }
            Err(problem) => Some(problem),
        };
        qp.batch.as_mut().unwrap().push(building);
        if homeless {
            state.violation(format!("{verb} of a datagram without a destination, or an XRC message without a queue"));
        }
        if is_set {
            state.violation(format!("{verb} of a work request that has its data"));
        }
        if let Some(problem) = problem {
            state.violation(format!("{verb}: {problem}"));
        }
    });
}

unsafe extern "C" fn wr_complete(raw: *mut ibv_qp_ex) -> c_int {
    enter(raw, "wr_complete", |state, _| {
        let Some(qp) = state.qp(raw.addr(), "wr_complete") else { return libc::EINVAL };
        let Some(batch) = qp.batch.take() else {
            state.violation("wr_complete without wr_start");
            return libc::EINVAL;
        };
        let room = u64::from(qp.cap.max_send_wr) - (qp.sq_posted - qp.sq_reclaimed);
        if batch.is_empty() {
            state.violation("wr_complete of nothing");
        }
        if batch.last().is_some_and(Building::is_unset) {
            state.violation("wr_complete after a work request without data");
        }
        let fault = state.wr_complete_fault.take();
        if let Some((errno, false)) = fault {
            return errno;
        }
        if batch.len() as u64 > room {
            return libc::ENOMEM;
        }
        for building in batch {
            let Building { mut wr, setter } = building;
            let len = match &wr.data {
                Data::Sges(sges) => sges.len(),
                Data::Inline(bytes) => bytes.len(),
            };
            let setter = setter.map_or("none", |verb| verb.trim_start_matches("wr_set_"));
            let (wr_id, opcode, flags) = (wr.wr_id, wr.opcode, wr.flags);
            state.posted.push(Posted { verb: "ibv_wr_complete", wr_id, opcode, flags, setter, len });
            let qp = state.qps.get_mut(&raw.addr()).unwrap();
            wr.sequence = qp.sq_posted;
            qp.sq_posted += 1;
            qp.sq.push_back(wr);
        }
        state.after_post(raw.addr());
        fault.map_or(0, |(errno, _)| errno)
    })
}

unsafe extern "C" fn wr_abort(raw: *mut ibv_qp_ex) {
    enter(raw, "wr_abort", |state, _| {
        let Some(qp) = state.qp(raw.addr(), "wr_abort") else { return };
        if qp.batch.take().is_none() {
            state.violation("wr_abort without wr_start");
        }
    });
}

pub(super) unsafe extern "C" fn wr_set_ud_addr(raw: *mut ibv_qp_ex, ah: *mut ibv_ah, number: u32, qkey: u32) {
    enter(raw, "wr_set_ud_addr", |state, _| {
        let destination = state.destination(raw.addr(), ah.addr(), number, qkey, "wr_set_ud_addr");
        let Some(qp) = state.qp(raw.addr(), "wr_set_ud_addr") else { return };
        let Some(building) = qp.batch.as_mut().and_then(|batch| batch.last_mut()) else {
            return state.violation("wr_set_ud_addr without a work request");
        };
        let late = building.setter.is_some() || building.wr.destination.replace(destination).is_some();
        if late {
            state.violation("wr_set_ud_addr of a work request that has its data or its destination");
        }
    });
}

unsafe extern "C" fn wr_send(raw: *mut ibv_qp_ex) {
    build(raw, "wr_send", IBV_WR_SEND, |_| {});
}

unsafe extern "C" fn wr_send_imm(raw: *mut ibv_qp_ex, imm: __be32) {
    build(raw, "wr_send_imm", IBV_WR_SEND_WITH_IMM, |wr| wr.imm_data = imm);
}

unsafe extern "C" fn wr_send_inv(raw: *mut ibv_qp_ex, rkey: u32) {
    build(raw, "wr_send_inv", IBV_WR_SEND_WITH_INV, |wr| wr.imm_data = rkey);
}

unsafe extern "C" fn wr_rdma_write(raw: *mut ibv_qp_ex, rkey: u32, remote: u64) {
    build(raw, "wr_rdma_write", IBV_WR_RDMA_WRITE, |wr| (wr.rkey, wr.remote_addr) = (rkey, remote));
}

unsafe extern "C" fn wr_rdma_write_imm(raw: *mut ibv_qp_ex, rkey: u32, remote: u64, imm: __be32) {
    build(raw, "wr_rdma_write_imm", IBV_WR_RDMA_WRITE_WITH_IMM, |wr| {
        (wr.rkey, wr.remote_addr, wr.imm_data) = (rkey, remote, imm);
    });
}

unsafe extern "C" fn wr_rdma_read(raw: *mut ibv_qp_ex, rkey: u32, remote: u64) {
    build(raw, "wr_rdma_read", IBV_WR_RDMA_READ, |wr| (wr.rkey, wr.remote_addr) = (rkey, remote));
}

unsafe extern "C" fn wr_atomic_cmp_swp(raw: *mut ibv_qp_ex, rkey: u32, remote: u64, compare: u64, swap: u64) {
    build(raw, "wr_atomic_cmp_swp", IBV_WR_ATOMIC_CMP_AND_SWP, |wr| {
        (wr.rkey, wr.remote_addr, wr.compare_add, wr.swap) = (rkey, remote, compare, swap);
    });
}

/// The device reports support for memory windows, but none can be allocated. Windows are tested on soft0.
unsafe extern "C" fn wr_bind_mw(_: *mut ibv_qp_ex, _: *mut ibv_mw, _: u32, _: *const ibv_mw_bind_info) {
    unreachable!("a provider without windows binds none");
}

unsafe extern "C" fn wr_local_inv(_: *mut ibv_qp_ex, _: u32) {
    unreachable!("a provider without windows invalidates none");
}

unsafe extern "C" fn wr_atomic_fetch_add(raw: *mut ibv_qp_ex, rkey: u32, remote: u64, add: u64) {
    build(raw, "wr_atomic_fetch_add", IBV_WR_ATOMIC_FETCH_AND_ADD, |wr| {
        (wr.rkey, wr.remote_addr, wr.compare_add) = (rkey, remote, add);
    });
}

unsafe extern "C" fn wr_set_sge(raw: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    set(raw, "wr_set_sge", |_| Ok(Data::Sges(vec![ibv_sge { addr, length, lkey }])));
}

unsafe extern "C" fn wr_set_sge_list(raw: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    set(raw, "wr_set_sge_list", |qp| {
        if count > qp.cap.max_send_sge as usize {
            return Err(format!("{count} elements, of which {} fit", qp.cap.max_send_sge));
        }
        Ok(Data::Sges((0..count).map(|index| unsafe { *list.add(index) }).collect()))
    });
}

unsafe extern "C" fn wr_set_inline_data(raw: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    set(raw, "wr_set_inline_data", |qp| {
        if length > qp.cap.max_inline_data as usize {
            return Err(format!("{length} bytes, of which {} fit", qp.cap.max_inline_data));
        }
        Ok(Data::Inline(unsafe { read(addr.cast(), length) }))
    });
}

unsafe extern "C" fn wr_set_inline_data_list(raw: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    set(raw, "wr_set_inline_data_list", |qp| {
        let mut bytes = Vec::new();
        for index in 0..count {
            let piece = unsafe { *list.add(index) };
            bytes.extend(unsafe { read(piece.addr.cast(), piece.length) });
        }
        if bytes.len() > qp.cap.max_inline_data as usize {
            return Err(format!("{} bytes, of which {} fit", bytes.len(), qp.cap.max_inline_data));
        }
        Ok(Data::Inline(bytes))
    });
}
