//! Queue pairs: create, modify, query, destroy.

use core::ffi::c_int;
use core::mem::offset_of;
use std::sync::atomic::AtomicBool;

use rdma_sys::*;

use super::ah::destination;
use super::context::context_number;
use super::errors::null;
use super::events;
use super::fill::write_front;
use super::limits::{MAX_INLINE, MAX_RD_ATOMIC, MAX_SGE, MAX_WR, MIN_INLINE};
use super::qp_object::{Batch, Limits, QpObject};
use super::wr;
use crate::device::{Identity, device, is_removed};

/// Operations of `ibv_wr_*` that queue pairs of a type support.
fn operations(kind: ibv_qp_type) -> u64 {
    let sends = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let uc = sends | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let rc = uc
        | IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        | IBV_QP_EX_WITH_LOCAL_INV
        | IBV_QP_EX_WITH_BIND_MW
        | IBV_QP_EX_WITH_SEND_WITH_INV;
    match kind {
        IBV_QPT_RC => rc.0.into(),
        IBV_QPT_UC => (uc | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW).0.into(),
        _ => sends.0.into(),
    }
}

unsafe fn create(pd: *mut ibv_pd, init: &mut ibv_qp_init_attr, ops: Option<u64>) -> *mut ibv_qp {
    let Some(device) = device() else { return null(libc::ENODEV) };
    if is_removed() {
        return null(libc::EIO);
    }
    let kind = init.qp_type;
    if !matches!(kind, IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_UD) {
        return null(libc::EOPNOTSUPP);
    }
    let mut cap = init.cap;
    if init.send_cq.is_null()
        || init.recv_cq.is_null()
        || cap.max_send_wr > MAX_WR
        || cap.max_recv_wr > MAX_WR
        || cap.max_send_sge > MAX_SGE
        || cap.max_recv_sge > MAX_SGE
        || cap.max_inline_data > MAX_INLINE
    {
        return null(libc::EINVAL);
    }
    if ops.is_some_and(|ops| ops & !operations(kind) != 0) {
        return null(libc::EOPNOTSUPP);
    }
    cap.max_inline_data = cap.max_inline_data.max(MIN_INLINE);
    if !init.srq.is_null() {
        (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
    }
    // SAFETY: the caller passes valid objects.
    let ibv_pd { context, handle } = unsafe { *pd };
    let qp_base = ibv_qp {
        context,
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        state: IBV_QPS_RESET,
        qp_type: kind,
        ..ibv_qp::zeroed()
    };
    let mut ex = ibv_qp_ex { qp_base, ..ibv_qp_ex::zeroed() };
    if let Some(ops) = ops {
        wr::set_operations(&mut ex, kind, ops);
    }
    let limits = Limits { kind, cap, is_all_signaled: init.sq_sig_all != 0, is_extended: ops.is_some() };
    let object =
        Box::into_raw(Box::new(QpObject { ex, limits, is_building: AtomicBool::new(false), batch: Batch::new() }));
    // SAFETY: the caller passes valid objects.
    let (send_cq, recv_cq, srq) = unsafe {
        let srq = (!init.srq.is_null()).then(|| (*init.srq).handle);
        ((*init.send_cq).handle, (*init.recv_cq).handle, srq)
    };
    let id = Identity {
        number: 0,
        pd: handle,
        // SAFETY: the context of a valid protection domain is open.
        context: unsafe { context_number(context) },
        object: object as usize,
        kind,
        send_cq,
        recv_cq,
        srq,
        is_all_signaled: limits.is_all_signaled,
        cap,
    };
    let mut core = device.lock();
    if kind == IBV_QPT_UD {
        core.links.iter().for_each(|link| link.socket.report_headers());
    }
    let number = core.state.add_qp(id);
    drop(core);
    init.cap = cap;
    // SAFETY: the object was just created.
    unsafe {
        (*object).ex.qp_base.qp_num = number;
        (*object).ex.qp_base.handle = number;
        &raw mut (*object).ex.qp_base
    }
}

/// Creates a queue pair: `ibv_create_qp(3)`.
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller passes valid structures.
    unsafe { create(pd, &mut *init, None) }
}

pub(crate) unsafe extern "C" fn create_qp_ex(_: *mut ibv_context, init: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: the caller passes a valid structure. It begins like that of `ibv_create_qp`. It may end after the last field that its
    // mask names, so no later field is read.
    let (mask, mut classic) = unsafe { ((*init).comp_mask, init.cast::<ibv_qp_init_attr>().read()) };
    let known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS | IBV_QP_INIT_ATTR_CREATE_FLAGS;
    let has = |flag: ibv_qp_init_attr_mask| mask & flag.0 != 0;
    // SAFETY: the structure has the field if its mask names it.
    let flags = if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) { unsafe { (*init).create_flags } } else { 0 };
    if mask & !known.0 != 0 || flags != 0 {
        return null(libc::EOPNOTSUPP);
    }
    if !has(IBV_QP_INIT_ATTR_PD) {
        return null(libc::EINVAL);
    }
    // SAFETY: the caller passes valid structures.
    unsafe {
        let ops = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then(|| (*init).send_ops_flags);
        let qp = create((*init).pd, &mut classic, ops);
        if !qp.is_null() {
            (*init).cap = classic.cap;
        }
        qp
    }
}

/// Returns the `ibv_wr_*` interface of a queue pair, or null if it was created without one.
pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    let object = qp.cast::<QpObject>();
    // SAFETY: the caller passes a valid queue pair.
    if unsafe { (*object).limits.is_extended } { object.cast() } else { core::ptr::null_mut() }
}

/// Refuses values that Linux and its rxe refuse.
fn check(attr: &ibv_qp_attr, mask: u32, active: ibv_mtu) -> Result<(), c_int> {
    let has = |flag: ibv_qp_attr_mask| mask & flag.0 != 0;
    let most = MAX_RD_ATOMIC;
    let is_wrong = (has(IBV_QP_PORT) && attr.port_num != 1)
        || (has(IBV_QP_PKEY_INDEX) && attr.pkey_index != 0)
        || (has(IBV_QP_PATH_MTU) && !(1..=active.0).contains(&attr.path_mtu.0))
        || (has(IBV_QP_MAX_QP_RD_ATOMIC) && attr.max_rd_atomic > most)
        || (has(IBV_QP_MAX_DEST_RD_ATOMIC) && attr.max_dest_rd_atomic > most)
        || (has(IBV_QP_TIMEOUT) && attr.timeout > 31)
        || (has(IBV_QP_RETRY_CNT) && attr.retry_cnt > 7)
        || (has(IBV_QP_RNR_RETRY) && attr.rnr_retry > 7)
        || (has(IBV_QP_MIN_RNR_TIMER) && attr.min_rnr_timer > 31)
        || has(IBV_QP_CAP)
        || has(IBV_QP_ALT_PATH);
    if is_wrong { Err(libc::EINVAL) } else { Ok(()) }
}

/// Bytes of the attributes in the first release. Later fields mean nothing here and are not written.
const ATTR: usize = offset_of!(ibv_qp_attr, rate_limit);

/// # Safety
/// The caller passes a valid structure, of any release.
unsafe fn read_attr(from: *const ibv_qp_attr) -> ibv_qp_attr {
    let mut attr = ibv_qp_attr::zeroed();
    // SAFETY: both structures have `ATTR` bytes.
    unsafe { (&raw mut attr).cast::<u8>().copy_from(from.cast(), ATTR) };
    attr
}

/// Changes the state and attributes of a queue pair: `ibv_modify_qp(3)`.
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes valid structures.
    let (number, attr, mask) = unsafe { ((*qp).qp_num, read_attr(attr), mask as u32) };
    if let Err(errno) = check(&attr, mask, device.active_mtu()) {
        return errno;
    }
    let peer = match mask & IBV_QP_AV.0 {
        0 => None,
        _ => match destination(&attr.ah_attr) {
            Ok(peer) => Some(peer),
            Err(errno) => return errno,
        },
    };
    let mut core = device.lock();
    let window = core.window();
    if mask & IBV_QP_STATE.0 != 0 {
        // Sends the peer the ACKs that are due, and completes finished work, before the state changes.
        core.update_qp_state(number, device.now());
    }
    // A queue pair in RESET does not fail, but a removed device cannot connect it.
    if is_removed() && mask & IBV_QP_STATE.0 != 0 && !matches!(attr.qp_state, IBV_QPS_RESET | IBV_QPS_ERR) {
        return libc::EIO;
    }
    let state = &mut core.state;
    let Some(found) = state.qps.get_mut(&number) else { return libc::EINVAL };
    if let Err(errno) = found.modify(&attr, mask, peer, window, &mut state.shared) {
        return errno;
    }
    // SAFETY: the caller passes a valid queue pair. Its state is written only with the device locked.
    unsafe { (*qp).state = found.state };
    state.mark_ready(number);
    core.send(device.now());
    device.unlock(core);
    0
}

/// Returns the attributes of a queue pair: `ibv_query_qp(3)`.
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    let mut core = device.lock();
    // SAFETY: the caller passes a valid queue pair. Only these fields are read: another thread may lock the mutex in it.
    let (number, qp_type, qp_context, send_cq, recv_cq, srq) =
        unsafe { ((*qp).qp_num, (*qp).qp_type, (*qp).qp_context, (*qp).send_cq, (*qp).recv_cq, (*qp).srq) };
    // A program that has seen work fail must see the state that follows from it.
    core.update_qp_state(number, device.now());
    let Some(found) = core.state.qps.get(&number) else { return libc::EINVAL };
    let full = ibv_qp_attr {
        qp_state: found.state,
        cur_qp_state: found.state,
        sq_draining: u8::from(found.is_draining()),
        cap: found.id.cap,
        ..found.attr
    };
    let made = ibv_qp_init_attr {
        qp_context,
        send_cq,
        recv_cq,
        srq,
        cap: found.id.cap,
        qp_type,
        sq_sig_all: c_int::from(found.id.is_all_signaled),
    };
    // SAFETY: the caller passes valid structures. As in libibverbs, a query also updates the state in the object.
    unsafe {
        write_front(attr.cast(), &full, ATTR);
        init.write(made);
        (*qp).state = found.state;
    }
    0
}

/// Destroys a queue pair. Drops outstanding work, and the completions that were not polled.
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid queue pair.
    let number = unsafe { (*qp).qp_num };
    let mut core = device.lock();
    // Sends the peer the ACKs that are due.
    core.send(device.now());
    let removed = core.state.remove_qp(number);
    device.unlock(core);
    if let Err(errno) = removed {
        return errno;
    }
    events::wait_until_acknowledged(qp as usize);
    // SAFETY: `create` created it, and nothing refers to it any more.
    drop(unsafe { Box::from_raw(qp.cast::<QpObject>()) });
    0
}
