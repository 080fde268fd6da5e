//! Completion counters.

use std::ffi::c_int;

use rdma_sys::*;

use super::state::{Alloc, State, enter, null, own};

pub(super) struct CompCntr {
    alloc: Alloc,
    context: usize,
    bytes: bool,
    /// Completed and failed operations.
    values: [u64; 2],
    /// Queue pairs, each with the mask of operations that are counted.
    attached: Vec<(usize, u32)>,
}

const MAX: u64 = (1 << 40) - 1;

pub(super) unsafe extern "C" fn query_comp_cntr_caps(
    context: *mut ibv_context,
    caps: *mut ibv_comp_cntr_caps,
    size: usize,
) -> c_int {
    enter(context, "ibv_query_comp_cntr_caps", |state, _| {
        let Some(supported_qp_attach_ops) = state.config.comp_cntrs else { return libc::ENOTSUP };
        if size != size_of::<ibv_comp_cntr_caps>() {
            state.violation("ibv_query_comp_cntr_caps with another size than the structure's");
        }
        unsafe { caps.write(ibv_comp_cntr_caps { max_value: MAX, max_counters: 2, supported_qp_attach_ops }) };
        0
    })
}

pub(super) unsafe extern "C" fn create_comp_cntr(
    context: *mut ibv_context,
    attr: *mut ibv_comp_cntr_init_attr,
) -> *mut ibv_comp_cntr {
    let attr = unsafe { *attr };
    enter(context, "ibv_create_comp_cntr", |state, device| {
        if state.config.comp_cntrs.is_none() {
            return null(libc::ENOTSUP);
        }
        if attr.comp_mask != 0 || attr.flags != 0 || attr.type_.0 > 1 {
            return null(libc::EINVAL);
        }
        if state.comp_cntrs.len() == 2 {
            return null(libc::ENOMEM);
        }
        let (alloc, raw) = Alloc::new(ibv_comp_cntr { context, handle: state.handle() });
        own(raw, device);
        let bytes = attr.type_ == IBV_COMP_CNTR_TYPE_BYTES;
        let counter = CompCntr { alloc, context: context.addr(), bytes, values: [0; 2], attached: Vec::new() };
        state.comp_cntrs.insert(raw.addr(), counter);
        raw
    })
}

pub(super) unsafe extern "C" fn destroy_comp_cntr(raw: *mut ibv_comp_cntr) -> c_int {
    enter(raw, "ibv_destroy_comp_cntr", |state, _| {
        if let Some(errno) = state.fault("ibv_destroy_comp_cntr") {
            return errno;
        }
        if state.comp_cntrs.get(&raw.addr()).is_some_and(|counter| !counter.attached.is_empty()) {
            state.violation("ibv_destroy_comp_cntr of a counter that queue pairs have");
            return libc::EBUSY;
        }
        match state.comp_cntrs.remove(&raw.addr()) {
            Some(counter) => state.retire(counter.alloc),
            None => state.violation("ibv_destroy_comp_cntr of a counter that does not exist"),
        }
        0
    })
}

fn with(raw: *mut ibv_comp_cntr, verb: &'static str, f: impl FnOnce(&mut [u64; 2])) -> c_int {
    enter(raw, verb, |state, _| {
        if let Some(errno) = state.fault(verb) {
            return errno;
        }
        match state.comp_cntrs.get_mut(&raw.addr()) {
            Some(counter) => f(&mut counter.values),
            None => state.violation(format!("{verb} on a counter that does not exist")),
        }
        0
    })
}

pub(super) unsafe extern "C" fn read_comp_cntr(raw: *mut ibv_comp_cntr, value: *mut u64) -> c_int {
    with(raw, "ibv_read_comp_cntr", |values| unsafe { *value = values[0] })
}

pub(super) unsafe extern "C" fn read_err_comp_cntr(raw: *mut ibv_comp_cntr, value: *mut u64) -> c_int {
    with(raw, "ibv_read_err_comp_cntr", |values| unsafe { *value = values[1] })
}

pub(super) unsafe extern "C" fn set_comp_cntr(raw: *mut ibv_comp_cntr, value: u64) -> c_int {
    with(raw, "ibv_set_comp_cntr", |values| values[0] = value)
}

pub(super) unsafe extern "C" fn set_err_comp_cntr(raw: *mut ibv_comp_cntr, value: u64) -> c_int {
    with(raw, "ibv_set_err_comp_cntr", |values| values[1] = value)
}

pub(super) unsafe extern "C" fn inc_comp_cntr(raw: *mut ibv_comp_cntr, amount: u64) -> c_int {
    with(raw, "ibv_inc_comp_cntr", |values| values[0] = (values[0] + amount) & MAX)
}

pub(super) unsafe extern "C" fn inc_err_comp_cntr(raw: *mut ibv_comp_cntr, amount: u64) -> c_int {
    with(raw, "ibv_inc_err_comp_cntr", |values| values[1] = (values[1] + amount) & MAX)
}

pub(super) unsafe extern "C" fn qp_attach_comp_cntr(
    qp: *mut ibv_qp,
    raw: *mut ibv_comp_cntr,
    attr: *mut ibv_qp_attach_comp_cntr_attr,
) -> c_int {
    let attr = unsafe { *attr };
    enter(qp, "ibv_qp_attach_comp_cntr", |state, _| {
        let supported = state.config.comp_cntrs.unwrap_or(0);
        let Some(found) = state.qp(qp.addr(), "ibv_qp_attach_comp_cntr") else { return libc::EINVAL };
        if !matches!(found.state, IBV_QPS_RESET | IBV_QPS_INIT) || attr.comp_mask != 0 {
            return libc::EINVAL;
        }
        if attr.op_mask & !supported != 0 {
            return libc::ENOTSUP;
        }
        let mut all = state.comp_cntrs.values().flat_map(|counter| &counter.attached);
        if all.any(|(other, ops)| *other == qp.addr() && ops & attr.op_mask != 0) {
            return libc::EBUSY;
        }
        match state.comp_cntrs.get_mut(&raw.addr()) {
            Some(counter) => counter.attached.push((qp.addr(), attr.op_mask)),
            None => state.violation("ibv_qp_attach_comp_cntr of a counter that does not exist"),
        }
        0
    })
}

impl State {
    pub(super) fn comp_cntrs_of(&self, context: usize) -> usize {
        self.comp_cntrs.values().filter(|counter| counter.context == context).count()
    }

    pub(super) fn detach_comp_cntrs(&mut self, qp: usize) {
        for counter in self.comp_cntrs.values_mut() {
            counter.attached.retain(|(other, _)| *other != qp);
        }
    }

    /// Counts a completed send operation of `bytes` bytes; `None` for a failed one.
    pub(super) fn count(&mut self, qp: usize, opcode: ibv_wr_opcode, bytes: Option<u32>) {
        let op = match opcode {
            IBV_WR_RDMA_READ => IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_READ,
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_WRITE,
            _ => IBV_QP_ATTACH_COMP_CNTR_OP_SEND,
        };
        self.add_to_counters(qp, op, bytes);
    }

    pub(super) fn count_receive(&mut self, qp: usize, bytes: Option<u32>) {
        self.add_to_counters(qp, IBV_QP_ATTACH_COMP_CNTR_OP_RECV, bytes);
    }

    fn add_to_counters(&mut self, qp: usize, op: ibv_qp_attach_comp_cntr_op, bytes: Option<u32>) {
        for counter in self.comp_cntrs.values_mut() {
            if counter.attached.iter().any(|(of, ops)| *of == qp && ops & op.0 != 0) {
                match bytes {
                    Some(bytes) => counter.values[0] += if counter.bytes { bytes.into() } else { 1 },
                    None => counter.values[1] += 1,
                }
            }
        }
    }
}
