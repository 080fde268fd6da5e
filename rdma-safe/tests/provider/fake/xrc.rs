//! Extended reliable connections: domains, their shared receive queues, and targets with several handles.

use std::ffi::c_int;

use rdma_sys::*;

use super::engine::{End, SendWr};
use super::qp::blank;
use super::srq::SrqParts;
use super::state::{Alloc, State, enter, null, own};
use super::tags::Tags;

pub(super) struct Xrcd {
    alloc: Alloc,
    pub(super) context: usize,
    /// Identifier of the domain, the same for all handles.
    pub(super) domain: u64,
}

/// A handle to a queue pair in addition to that of its creator.
pub(super) struct OpenedQp {
    alloc: Alloc,
    pub(super) context: usize,
    pub(super) qp: usize,
}

pub(super) unsafe extern "C" fn open_xrcd(context: *mut ibv_context, attr: *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd {
    let attr = unsafe { *attr };
    enter(context, "open_xrcd", |state, device| {
        if let Some(errno) = state.fault("open_xrcd") {
            return null(errno);
        }
        if state.context(context.addr(), "open_xrcd").is_none() {
            return null(libc::EINVAL);
        }
        if attr.comp_mask != (IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS).0 {
            state.violation("open_xrcd without a descriptor or flags");
            return null(libc::EINVAL);
        }
        let create = attr.oflags & libc::O_CREAT != 0;
        let domain = match attr.fd {
            -1 if !create => return null(libc::EINVAL),
            -1 => u64::from(state.handle()) << 40,
            fd => {
                let mut stat = unsafe { std::mem::zeroed::<libc::stat>() };
                if unsafe { libc::fstat(fd, &mut stat) } != 0 {
                    return null(libc::EBADF);
                }
                let exists = state.xrcds.values().any(|xrcd| xrcd.domain == stat.st_ino);
                if exists && attr.oflags & libc::O_EXCL != 0 {
                    return null(libc::EINVAL);
                }
                if !exists && !create {
                    return null(libc::EAGAIN);
                }
                stat.st_ino
            }
        };
        let (alloc, raw) = Alloc::new(ibv_xrcd { context });
        own(raw, device);
        state.xrcds.insert(raw.addr(), Xrcd { alloc, context: context.addr(), domain });
        raw
    })
}

pub(super) unsafe extern "C" fn close_xrcd(raw: *mut ibv_xrcd) -> c_int {
    enter(raw, "close_xrcd", |state, _| {
        let address = raw.addr();
        let Some(xrcd) = state.xrcd(address, "close_xrcd") else { return libc::EINVAL };
        let (domain, context) = (xrcd.domain, xrcd.context);
        if let Some(errno) = state.fault("close_xrcd") {
            return errno;
        }
        let others = state.xrcds.values().filter(|xrcd| (xrcd.domain, xrcd.context) == (domain, context)).count() > 1;
        let used = state.qps.values().any(|qp| qp.context == context && qp.xrcd == Some(domain) && !qp.orphan)
            || state.opened.values().any(|opened| opened.context == context)
            || state.srqs.values().any(|srq| srq.context == context && srq.xrcd == Some(domain));
        if used && !others {
            state.violation("close_xrcd of a domain that is in use");
            return libc::EBUSY;
        }
        let xrcd = state.xrcds.remove(&address).unwrap();
        state.retire(xrcd.alloc);
        0
    })
}

/// Creates the target of a connection, which has no queues and no protection domain.
pub(super) fn create_target(state: &mut State, context: *mut ibv_context, wanted: &ibv_qp_init_attr_ex) -> *mut ibv_qp {
    if let Some(errno) = state.fault("create_qp_ex") {
        return null(errno);
    }
    let has = |flag: ibv_qp_init_attr_mask| wanted.comp_mask & flag.0 != 0;
    let queues = !wanted.send_cq.is_null() || !wanted.recv_cq.is_null() || !wanted.srq.is_null();
    if has(IBV_QP_INIT_ATTR_PD) || queues || wanted.cap.max_send_wr + wanted.cap.max_recv_wr > 0 {
        state.violation("create_qp_ex of a target with queues");
        return null(libc::EINVAL);
    }
    let Some(xrcd) = state.xrcd(wanted.xrcd.addr(), "create_qp_ex") else { return null(libc::EINVAL) };
    if xrcd.context != context.addr() {
        state.violation("create_qp_ex in an XRC domain of another context");
        return null(libc::EINVAL);
    }
    let (domain, number) = (xrcd.domain, state.handle());
    let base = ibv_qp {
        context,
        qp_context: wanted.qp_context,
        handle: number,
        qp_num: number,
        qp_type: wanted.qp_type,
        ..ibv_qp::zeroed()
    };
    let (alloc, raw) = Alloc::new(base);
    let qp = super::state::Qp { xrcd: Some(domain), ..blank(alloc, raw, context.addr(), number, wanted.qp_type) };
    state.qps.insert(raw.addr(), qp);
    raw
}

pub(super) unsafe extern "C" fn open_qp(context: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> *mut ibv_qp {
    let attr = unsafe { *attr };
    enter(context, "open_qp", |state, device| {
        if let Some(errno) = state.fault("open_qp") {
            return null(errno);
        }
        if attr.comp_mask != 0b1111 {
            state.violation("open_qp without a name for the queue pair");
            return null(libc::EINVAL);
        }
        let Some(xrcd) = state.xrcd(attr.xrcd.addr(), "open_qp") else { return null(libc::EINVAL) };
        let domain = xrcd.domain;
        let is_it = |qp: &super::state::Qp| qp.number == attr.qp_num && qp.qp_type == attr.qp_type;
        let Some((qp, found)) = state.qps.iter().find(|(_, qp)| is_it(qp) && qp.xrcd == Some(domain)) else {
            return null(libc::EINVAL);
        };
        let (alloc, raw) = Alloc::new(ibv_qp {
            context,
            qp_context: attr.qp_context,
            handle: found.number,
            qp_num: found.number,
            qp_type: found.qp_type,
            ..ibv_qp::zeroed()
        });
        let opened = OpenedQp { alloc, context: context.addr(), qp: *qp };
        own(raw, device);
        state.opened.insert(raw.addr(), opened);
        raw
    })
}

pub(super) unsafe extern "C" fn get_srq_num(raw: *mut ibv_srq, number: *mut u32) -> c_int {
    enter(raw, "get_srq_num", |state, _| {
        if let Some(errno) = state.fault("get_srq_num") {
            return errno;
        }
        match state.srq(raw.addr(), "get_srq_num").map(|srq| (srq.xrcd, srq.number)) {
            Some((Some(_), found)) => {
                unsafe { *number = found };
                0
            }
            _ => libc::EINVAL,
        }
    })
}

pub(super) unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    let wanted = unsafe { *attr };
    enter(context, "create_srq_ex", |state, device| {
        if let Some(errno) = state.fault("create_srq_ex") {
            return null(errno);
        }
        let has = |flag: ibv_srq_init_attr_mask| wanted.comp_mask & flag.0 != 0;
        if !has(IBV_SRQ_INIT_ATTR_PD) || !has(IBV_SRQ_INIT_ATTR_CQ) || wanted.srq_type == IBV_SRQT_BASIC {
            return null(libc::EINVAL);
        }
        let mut parts = SrqParts { cq: Some(wanted.cq.addr()), ..SrqParts::default() };
        if state.cqs.get(&wanted.cq.addr()).is_none_or(|cq| cq.context != context.addr()) {
            state.violation("create_srq_ex with a completion queue of another context");
            return null(libc::EINVAL);
        }
        if wanted.srq_type == IBV_SRQT_TM {
            if !has(IBV_SRQ_INIT_ATTR_TM) || has(IBV_SRQ_INIT_ATTR_XRCD) {
                return null(libc::EINVAL);
            }
            parts.tags = Some(Tags::new(wanted.tm_cap));
        }
        if wanted.srq_type == IBV_SRQT_XRC {
            let Some(xrcd) = state.xrcd(wanted.xrcd.addr(), "create_srq_ex") else { return null(libc::EINVAL) };
            if xrcd.context != context.addr() || !has(IBV_SRQ_INIT_ATTR_XRCD) {
                state.violation("create_srq_ex in an XRC domain of another context, or of none");
                return null(libc::EINVAL);
            }
            parts.xrcd = Some(xrcd.domain);
        }
        let mut classic = ibv_srq_init_attr { srq_context: wanted.srq_context, attr: wanted.attr };
        let raw = super::srq::create(state, device, wanted.pd, &mut classic, parts);
        unsafe { (*attr).attr = classic.attr };
        raw
    })
}

pub(super) unsafe extern "C" fn wr_set_xrc_srqn(raw: *mut ibv_qp_ex, number: u32) {
    enter(raw, "wr_set_xrc_srqn", |state, _| {
        let late = state.qp(raw.addr(), "wr_set_xrc_srqn").and_then(|qp| qp.last_built()).map(|building| {
            let late = building.has_data() || building.wr.srq_number.is_some();
            building.wr.srq_number = Some(number);
            late
        });
        if late != Some(false) {
            state.violation("wr_set_xrc_srqn without a work request, or of one that has its data or its queue");
        }
    });
}

impl State {
    /// The queue pair that a handle refers to.
    pub(super) fn behind(&self, raw: usize) -> usize {
        self.opened.get(&raw).map_or(raw, |opened| opened.qp)
    }

    /// Closes one of several handles; `false` if it is the only one.
    pub(super) fn close_handle(&mut self, raw: usize) -> bool {
        if let Some(opened) = self.opened.remove(&raw) {
            self.retire(opened.alloc);
            let last = !self.opened.values().any(|other| other.qp == opened.qp);
            if last && self.qps[&opened.qp].orphan {
                let qp = self.qps.remove(&opened.qp).unwrap();
                self.retire(qp.alloc);
            }
            return true;
        }
        let shared = self.opened.values().any(|opened| opened.qp == raw);
        if shared {
            self.qps.get_mut(&raw).unwrap().orphan = true;
        }
        shared
    }

    /// Executes work of an XRC queue pair. Meanwhile the target uses the shared receive queue that the work request names, and
    /// the protection domain of that queue.
    pub(super) fn execute_xrc(&mut self, address: usize, wr: &SendWr, bytes: &[u8]) -> End {
        let number = self.qps[&address].attr.dest_qp_num;
        let found = self.qps.iter().find(|(_, qp)| qp.number == number && qp.qp_type == IBV_QPT_XRC_RECV);
        let Some((&target, qp)) = found else { return End::Failed { status: IBV_WC_RETRY_EXC_ERR } };
        match qp.state {
            IBV_QPS_RTR | IBV_QPS_RTS => {}
            IBV_QPS_RESET | IBV_QPS_INIT => return End::Wait,
            _ => return End::Failed { status: IBV_WC_RETRY_EXC_ERR },
        }
        let domain = qp.xrcd;
        let names = |srq: &super::srq::Srq| Some(srq.number) == wr.srq_number && srq.xrcd == domain;
        let Some((&srq, found)) = self.srqs.iter().find(|(_, srq)| names(srq)) else {
            self.enter_error(target);
            return End::Failed { status: IBV_WC_REM_INV_REQ_ERR };
        };
        let (pd, cq) = (found.pd, found.cq.unwrap());
        let qp = self.qps.get_mut(&target).unwrap();
        (qp.srq, qp.pd, qp.recv_cq) = (Some(srq), pd, cq);
        let end = self.perform(address, target, wr, bytes);
        let qp = self.qps.get_mut(&target).unwrap();
        (qp.srq, qp.pd, qp.recv_cq) = (None, 0, 0);
        end
    }
}
