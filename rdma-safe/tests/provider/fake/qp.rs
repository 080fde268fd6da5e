//! Creating, modifying, querying and destroying queue pairs.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::OnceLock;

use rdma_sys::*;

use super::config::{Mode, Port};
use super::state::{Alloc, Ptr, Qp, State, enter, null, own};
use super::{post, xrc};

/// The kernel's attribute masks for each state transition.
const KERNEL_TABLE: &str = include_str!("../../../src/qp/state_table.csv");

/// A state transition of a queue pair type.
struct Row {
    qp_type: ibv_qp_type,
    from: ibv_qp_state,
    to: ibv_qp_state,
    required: u32,
    optional: u32,
}

fn table() -> &'static [Row] {
    static TABLE: OnceLock<Vec<Row>> = OnceLock::new();
    let state = |name: &str| match name {
        "RESET" => IBV_QPS_RESET,
        "INIT" => IBV_QPS_INIT,
        "RTR" => IBV_QPS_RTR,
        "RTS" => IBV_QPS_RTS,
        "SQD" => IBV_QPS_SQD,
        "SQE" => IBV_QPS_SQE,
        "ERR" => IBV_QPS_ERR,
        other => panic!("{other} is no state"),
    };
    let number = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
    let row = |line: &str| {
        let fields: Vec<&str> = line.split(',').collect();
        let qp_type = match fields[2] {
            "RC" => IBV_QPT_RC,
            "UC" => IBV_QPT_UC,
            "UD" => IBV_QPT_UD,
            "RAW_PACKET" => IBV_QPT_RAW_PACKET,
            "XRC_SEND" => IBV_QPT_XRC_SEND,
            "XRC_RECV" => IBV_QPT_XRC_RECV,
            _ => return None,
        };
        let (from, to) = (state(fields[0]), state(fields[1]));
        Some(Row { qp_type, from, to, required: number(fields[3]), optional: number(fields[4]) })
    };
    TABLE.get_or_init(|| KERNEL_TABLE.lines().filter(|line| !line.starts_with('#')).filter_map(row).collect())
}

pub(super) unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let wanted = unsafe { *attr };
    enter(pd, "ibv_create_qp", |state, device| {
        let raw = create(state, "ibv_create_qp", pd, &wanted, None);
        if let (Some(sends), false) = (state.config.granted_sends, raw.is_null()) {
            unsafe { (*attr).cap.max_send_wr = sends };
        }
        own(raw, device);
        raw
    })
}

pub(super) unsafe extern "C" fn create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    let wanted = unsafe { *attr };
    enter(context, "create_qp_ex", |state, device| {
        if wanted.qp_type == IBV_QPT_XRC_RECV {
            let raw = xrc::create_target(state, context, &wanted);
            own(raw, device);
            return raw;
        }
        if wanted.comp_mask & IBV_QP_INIT_ATTR_IND_TABLE.0 != 0 {
            return state.create_rss_qp(&wanted, device);
        }
        let has = |flag: ibv_qp_init_attr_mask| wanted.comp_mask & flag.0 != 0;
        let known = IBV_QP_INIT_ATTR_PD
            | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
            | IBV_QP_INIT_ATTR_MAX_TSO_HEADER
            | IBV_QP_INIT_ATTR_CREATE_FLAGS;
        if wanted.comp_mask & !known.0 != 0 {
            return null(libc::EOPNOTSUPP);
        }
        let max_tso_header = if has(IBV_QP_INIT_ATTR_MAX_TSO_HEADER) { wanted.max_tso_header } else { 0 };
        let ops = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then_some(wanted.send_ops_flags);
        let classic = ibv_qp_init_attr {
            qp_context: wanted.qp_context,
            send_cq: wanted.send_cq,
            recv_cq: wanted.recv_cq,
            srq: wanted.srq,
            cap: wanted.cap,
            qp_type: wanted.qp_type,
            sq_sig_all: wanted.sq_sig_all,
        };
        let raw = create(state, "create_qp_ex", wanted.pd, &classic, ops);
        if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) && !raw.is_null() {
            state.create_flags.push((wanted.create_flags, wanted.source_qpn));
        }
        if let Some(qp) = state.qps.get_mut(&raw.addr()) {
            qp.max_tso_header = max_tso_header;
        }
        if let (Some(sges), false) = (state.config.granted_sges, raw.is_null()) {
            unsafe { (*attr).cap.max_send_sge = sges };
        }
        own(raw, device);
        raw
    })
}

fn create(
    state: &mut State,
    verb: &'static str,
    pd: *mut ibv_pd,
    wanted: &ibv_qp_init_attr,
    ops: Option<u64>,
) -> *mut ibv_qp {
    if let Some(errno) = state.fault(verb) {
        return null(errno);
    }
    let Some(domain) = state.pd(pd.addr(), verb) else { return null(libc::EINVAL) };
    let context = domain.context;
    let sends_only = wanted.qp_type == IBV_QPT_XRC_SEND;
    for cq in [wanted.send_cq, if sends_only { wanted.send_cq } else { wanted.recv_cq }] {
        if state.cqs.get(&cq.addr()).is_none_or(|cq| cq.context != context) {
            state.violation(format!("{verb} with a completion queue of another context"));
            return null(libc::EINVAL);
        }
    }
    let srq = (!wanted.srq.is_null()).then(|| wanted.srq.addr());
    if srq.is_some_and(|srq| state.srqs.get(&srq).is_none_or(|srq| srq.context != context)) {
        state.violation(format!("{verb} with a shared receive queue of another context"));
        return null(libc::EINVAL);
    }
    if sends_only && (!wanted.recv_cq.is_null() || srq.is_some() || wanted.cap.max_recv_wr > 0) {
        state.violation(format!("{verb} of a queue pair that only sends with a receive queue"));
    }
    let cap = wanted.cap;
    let config = &state.config;
    if cap.max_send_wr > config.max_qp_wr
        || cap.max_recv_wr > config.max_qp_wr
        || cap.max_send_sge > config.max_sge
        || cap.max_recv_sge > config.max_sge
        || cap.max_inline_data > config.max_inline
    {
        return null(libc::EINVAL);
    }
    if ops.is_some_and(|ops| ops & !(config.send_ops & possible(wanted.qp_type)) != 0) {
        return null(libc::EOPNOTSUPP);
    }
    let number = state.next_number.take().unwrap_or_else(|| state.handle());
    let base = ibv_qp {
        context: unsafe { (*pd).context },
        qp_context: wanted.qp_context,
        pd,
        send_cq: wanted.send_cq,
        recv_cq: wanted.recv_cq,
        srq: wanted.srq,
        handle: number,
        qp_num: number,
        qp_type: wanted.qp_type,
        ..ibv_qp::zeroed()
    };
    // A classic queue pair gets only the size of `ibv_qp`, so Miri detects code that uses it as an extended queue pair.
    let (alloc, raw, raw_ex) = match ops {
        None => {
            let (alloc, raw) = Alloc::new(base);
            (alloc, raw, std::ptr::null_mut())
        }
        Some(ops) => {
            let mut qp_ex = ibv_qp_ex { qp_base: base, ..ibv_qp_ex::zeroed() };
            post::set_builders(&mut qp_ex, ops & !state.config.hollow_ops);
            if wanted.qp_type == IBV_QPT_UD && !state.config.no_ud_addr {
                qp_ex.wr_set_ud_addr = Some(post::wr_set_ud_addr);
            }
            if sends_only {
                qp_ex.wr_set_xrc_srqn = Some(xrc::wr_set_xrc_srqn);
            }
            let (alloc, raw) = Alloc::new(qp_ex);
            (alloc, raw.cast(), raw)
        }
    };
    let qp = Qp {
        raw_ex: Ptr(raw_ex),
        pd: pd.addr(),
        send_cq: wanted.send_cq.addr(),
        recv_cq: wanted.recv_cq.addr(),
        srq,
        cap,
        ..blank(alloc, raw, context, number, wanted.qp_type)
    };
    state.qps.insert(raw.addr(), qp);
    raw
}

/// Returns a queue pair without queues.
pub(super) fn blank(alloc: Alloc, raw: *mut ibv_qp, context: usize, number: u32, qp_type: ibv_qp_type) -> Qp {
    Qp {
        alloc,
        raw: Ptr(raw),
        raw_ex: Ptr(std::ptr::null_mut()),
        context,
        pd: 0,
        send_cq: 0,
        recv_cq: 0,
        srq: None,
        number,
        qp_type,
        cap: ibv_qp_cap::zeroed(),
        state: IBV_QPS_RESET,
        attr: ibv_qp_attr::zeroed(),
        sq: VecDeque::new(),
        sq_posted: 0,
        sq_reclaimed: 0,
        rq: VecDeque::new(),
        rq_posted: 0,
        rq_reclaimed: 0,
        batch: None,
        ece: None,
        max_tso_header: 0,
        xrcd: None,
        orphan: false,
        builder: None,
    }
}

impl Qp {
    /// The work request that was started last.
    pub(super) fn last_built(&mut self) -> Option<&mut post::Building> {
        self.batch.as_mut().and_then(|batch| batch.last_mut())
    }
}

/// Operations that a queue pair type supports.
fn possible(qp_type: ibv_qp_type) -> u64 {
    let sends = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let ud = sends | IBV_QP_EX_WITH_TSO;
    let windows = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;
    let uc = sends | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | windows;
    match qp_type {
        IBV_QPT_UD => ud.0.into(),
        IBV_QPT_RAW_PACKET => (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_TSO).0.into(),
        IBV_QPT_UC => uc.0.into(),
        _ => !u64::from(IBV_QP_EX_WITH_TSO.0),
    }
}

pub(super) unsafe extern "C" fn qp_to_qp_ex(raw: *mut ibv_qp) -> *mut ibv_qp_ex {
    enter(raw, "ibv_qp_to_qp_ex", |state, _| {
        state.qp(raw.addr(), "ibv_qp_to_qp_ex").map_or(std::ptr::null_mut(), |qp| qp.raw_ex.0)
    })
}

pub(super) unsafe extern "C" fn destroy_qp(raw: *mut ibv_qp) -> c_int {
    enter(raw, "ibv_destroy_qp", |state, _| {
        if state.close_handle(raw.addr()) {
            return 0;
        }
        if state.has_flows(raw.addr()) {
            state.violation("ibv_destroy_qp of a queue pair that flows lead to");
            return libc::EBUSY;
        }
        if state.steering.rss.contains_key(&raw.addr()) {
            return state.destroy_rss_qp(raw.addr());
        }
        let Some(qp) = state.qp(raw.addr(), "ibv_destroy_qp") else { return libc::EINVAL };
        let (cqs, is_open) = ([qp.send_cq, qp.recv_cq], qp.batch.is_some());
        state.needs_lock(cqs, "ibv_destroy_qp");
        state.needs_no_batch(cqs, "ibv_destroy_qp");
        if is_open {
            state.violation("ibv_destroy_qp between wr_start and wr_complete");
        }
        if let Some(errno) = state.fault("ibv_destroy_qp") {
            return errno;
        }
        if state.groups.iter().any(|(_, member)| *member == raw.addr()) {
            state.violation("ibv_destroy_qp of a queue pair that is in multicast groups");
            return libc::EBUSY;
        }
        state.end_events(raw.addr(), "ibv_destroy_qp");
        state.detach_comp_cntrs(raw.addr());
        let qp = state.qps.remove(&raw.addr()).unwrap();
        cqs.iter().for_each(|cq| state.discard_completions(*cq, qp.number));
        state.retire(qp.alloc);
        0
    })
}

pub(super) unsafe extern "C" fn query_qp(
    raw: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    enter(raw, "ibv_query_qp", |state, _| {
        if let Some(errno) = state.fault("ibv_query_qp") {
            return errno;
        }
        let Some(qp) = state.qp(state.behind(raw.addr()), "ibv_query_qp") else { return libc::EINVAL };
        unsafe {
            attr.write(ibv_qp_attr { qp_state: qp.state, cur_qp_state: qp.state, cap: qp.cap, ..qp.attr });
            (*init_attr).cap = qp.cap;
        }
        0
    })
}

pub(super) unsafe extern "C" fn modify_qp(raw: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let (attr, mask) = (unsafe { *attr }, mask as u32);
    enter(raw, "ibv_modify_qp", |state, _| {
        let raw = state.behind(raw.addr());
        if let Some(errno) = state.fault("ibv_modify_qp") {
            return errno;
        }
        if state.steering.rss.contains_key(&raw) {
            return libc::EOPNOTSUPP;
        }
        let Some(qp) = state.qp(raw, "ibv_modify_qp") else { return libc::EINVAL };
        let (from, port, cqs, is_open) = (qp.state, qp.attr.port_num, [qp.send_cq, qp.recv_cq], qp.batch.is_some());
        let qp_type = qp.qp_type;
        let mask = mask & !ignored(qp_type);
        let to = if mask & IBV_QP_STATE.0 != 0 { attr.qp_state } else { from };
        if to == IBV_QPS_RESET {
            state.needs_lock(cqs, "ibv_modify_qp to RESET");
            state.needs_no_batch(cqs, "ibv_modify_qp to RESET");
        }
        if is_open {
            state.violation("ibv_modify_qp between wr_start and wr_complete");
        }
        if !allows(qp_type, from, to, mask) {
            return libc::EINVAL;
        }
        if let Err(errno) = state.check_values(&attr, ibv_qp_attr_mask(mask), port) {
            return errno;
        }
        let qp = state.qps.get_mut(&raw).unwrap();
        merge(&mut qp.attr, &attr, ibv_qp_attr_mask(mask));
        qp.state = to;
        unsafe { (*qp.raw.0).state = to };
        state.modified.push((attr, mask));
        match to {
            IBV_QPS_ERR => state.enter_error(raw),
            IBV_QPS_RESET => {
                let qp = state.qps.get_mut(&raw).unwrap();
                qp.sq.clear();
                qp.rq.clear();
                (qp.sq_reclaimed, qp.rq_reclaimed) = (qp.sq_posted, qp.rq_posted);
            }
            _ if state.mode == Mode::AtPost => state.run(),
            _ => {}
        }
        0
    })
}

/// Attributes that uverbs ignores.
fn ignored(qp_type: ibv_qp_type) -> u32 {
    match qp_type {
        IBV_QPT_XRC_SEND => (IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER).0,
        IBV_QPT_XRC_RECV => (IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY).0,
        _ => 0,
    }
}

/// Whether the kernel's table permits a transition with these attributes.
fn allows(qp_type: ibv_qp_type, from: ibv_qp_state, to: ibv_qp_state, mask: u32) -> bool {
    table().iter().any(|row| {
        let allowed = row.required | row.optional | IBV_QP_STATE.0;
        let is_row = row.qp_type == qp_type && row.from == from && row.to == to;
        is_row && mask & row.required == row.required && mask & !allowed == 0
    })
}

impl State {
    /// Applies the value checks of the kernel and the driver; returns the errno of a failed check.
    fn check_values(&self, attr: &ibv_qp_attr, mask: ibv_qp_attr_mask, port: u8) -> Result<(), i32> {
        let has = |flag: ibv_qp_attr_mask| (mask & flag).0 != 0;
        let find = |number: u8| -> Result<&Port, i32> {
            usize::from(number).checked_sub(1).and_then(|index| self.config.ports.get(index)).ok_or(libc::EINVAL)
        };
        let port = if has(IBV_QP_PORT) { attr.port_num } else { port };
        if has(IBV_QP_PORT) {
            find(port)?;
        }
        if has(IBV_QP_PKEY_INDEX) && usize::from(attr.pkey_index) >= find(port)?.pkeys.len() {
            return Err(libc::EINVAL);
        }
        if has(IBV_QP_PATH_MTU) && attr.path_mtu.0 > find(port)?.max_mtu.0 {
            return Err(libc::EINVAL);
        }
        if has(IBV_QP_AV) {
            let address = &attr.ah_attr;
            if address.port_num != port {
                return Err(libc::EINVAL);
            }
            self.check_address(address)?;
        }
        Ok(())
    }
}

fn merge(to: &mut ibv_qp_attr, from: &ibv_qp_attr, mask: ibv_qp_attr_mask) {
    macro_rules! take {
        ($($flag:ident: $field:ident,)+) => {
            $(if (mask & $flag).0 != 0 { to.$field = from.$field; })+
        };
    }
    take! {
        IBV_QP_ACCESS_FLAGS: qp_access_flags,
        IBV_QP_PKEY_INDEX: pkey_index,
        IBV_QP_PORT: port_num,
        IBV_QP_QKEY: qkey,
        IBV_QP_AV: ah_attr,
        IBV_QP_PATH_MTU: path_mtu,
        IBV_QP_TIMEOUT: timeout,
        IBV_QP_RETRY_CNT: retry_cnt,
        IBV_QP_RNR_RETRY: rnr_retry,
        IBV_QP_RQ_PSN: rq_psn,
        IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic,
        IBV_QP_MIN_RNR_TIMER: min_rnr_timer,
        IBV_QP_SQ_PSN: sq_psn,
        IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic,
        IBV_QP_DEST_QPN: dest_qp_num,
    }
}

pub(super) unsafe extern "C" fn query_ece(raw: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    enter(raw, "ibv_query_ece", |state, _| {
        if let Some(errno) = state.fault("ibv_query_ece") {
            return errno;
        }
        let (vendor_id, options) = (state.config.vendor_id, state.config.ece_options);
        let (Some(qp), Some(options)) = (state.qp(raw.addr(), "ibv_query_ece"), options) else {
            return libc::EOPNOTSUPP;
        };
        unsafe { ece.write(qp.ece.unwrap_or(ibv_ece { vendor_id, options, comp_mask: 0 })) };
        0
    })
}

/// Accepts the options that the device supports.
pub(super) unsafe extern "C" fn set_ece(raw: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    enter(raw, "ibv_set_ece", |state, _| {
        if let Some(errno) = state.fault("ibv_set_ece") {
            return errno;
        }
        let wanted = unsafe { *ece };
        let (vendor_id, options) = (state.config.vendor_id, state.config.ece_options);
        let (Some(qp), Some(options)) = (state.qp(raw.addr(), "ibv_set_ece"), options) else { return libc::EOPNOTSUPP };
        if wanted.vendor_id != vendor_id || wanted.comp_mask != 0 {
            return libc::EINVAL;
        }
        let accepted = ibv_ece { options: wanted.options & options, ..wanted };
        qp.ece = Some(accepted);
        unsafe { ece.write(accepted) };
        0
    })
}

pub(super) unsafe extern "C" fn modify_qp_rate_limit(raw: *mut ibv_qp, attr: *mut ibv_qp_rate_limit_attr) -> c_int {
    enter(raw, "modify_qp_rate_limit", |state, _| {
        if let Some(errno) = state.fault("modify_qp_rate_limit") {
            return errno;
        }
        if state.qp(raw.addr(), "modify_qp_rate_limit").is_none() {
            return libc::EINVAL;
        }
        let attr = unsafe { *attr };
        if attr.comp_mask != 0 {
            state.violation("modify_qp_rate_limit with a comp_mask that is not defined");
        }
        state.rate_limits.push(attr);
        0
    })
}

/// Returns a bit mask if the caller sets the flag that asks for it, otherwise 0 or 1.
pub(super) unsafe extern "C" fn query_qp_data_in_order(raw: *mut ibv_qp, opcode: ibv_wr_opcode, flags: u32) -> c_int {
    enter(raw, "ibv_query_qp_data_in_order", |state, _| {
        if state.qp(raw.addr(), "ibv_query_qp_data_in_order").is_none() {
            return 0;
        }
        let caps = state.config.data_in_order.get(&opcode.0).copied().unwrap_or(0);
        match flags {
            0 => c_int::from(caps & 1 != 0),
            _ if state.config.data_in_order_flags => caps as c_int,
            _ => 0,
        }
    })
}
