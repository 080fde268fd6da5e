//! Shared receive queues.

use core::ffi::c_int;

use rdma_sys::*;

use super::context::number;
use super::events;
use super::limits::{MAX_SGE, MAX_WR};
use super::post::parts;
use super::refuse::null;
use crate::device::{ReceiveQueue, Srq, device};

unsafe fn create(pd: *mut ibv_pd, srq_context: *mut core::ffi::c_void, attr: &mut ibv_srq_attr) -> *mut ibv_srq {
    let Some(device) = device() else { return null(libc::ENODEV) };
    if attr.max_wr == 0 || attr.max_wr > MAX_WR || attr.max_sge > MAX_SGE {
        return null(libc::EINVAL);
    }
    // SAFETY: the caller's domain.
    let ibv_pd { context, handle } = unsafe { *pd };
    let object = Box::into_raw(Box::new(ibv_srq { context, srq_context, pd, ..ibv_srq::zeroed() }));
    let srq = Srq {
        queue: ReceiveQueue::new(attr.max_wr, attr.max_sge),
        pd: handle,
        // SAFETY: the context of the caller's domain.
        context: unsafe { number(context) },
        object: object as usize,
        limit: 0,
        users: 0,
    };
    // SAFETY: it was made just now.
    unsafe { (*object).handle = device.lock().state.shared.srqs.insert(srq) };
    object
}

/// A shared receive queue.
pub unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the caller's structures.
    unsafe { create(pd, (*init).srq_context, &mut (*init).attr) }
}

/// A basic one; of other types there are none here.
pub(crate) unsafe extern "C" fn create_srq_ex(_: *mut ibv_context, init: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq {
    // SAFETY: the caller's structure.
    let mask = unsafe { (*init).comp_mask };
    let known = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
    // SAFETY: as above. It ends with the last field that its mask names: no other is looked at.
    let is_basic = mask & IBV_SRQ_INIT_ATTR_TYPE.0 == 0 || unsafe { (*init).srq_type } == IBV_SRQT_BASIC;
    if mask & !known.0 != 0 || !is_basic {
        return null(libc::EOPNOTSUPP);
    }
    if mask & IBV_SRQ_INIT_ATTR_PD.0 == 0 {
        return null(libc::EINVAL);
    }
    // SAFETY: as the caller says.
    unsafe { create((*init).pd, (*init).srq_context, &mut (*init).attr) }
}

/// Changes how many receives there may be, or when there are too few.
pub unsafe extern "C" fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's queue and structure.
    let (handle, attr) = unsafe { ((*srq).handle, *attr) };
    let has = |flag: ibv_srq_attr_mask| mask as u32 & flag.0 != 0;
    let mut core = device.lock();
    let Some(found) = core.state.shared.srqs.get_mut(handle) else { return libc::EINVAL };
    let capacity = if has(IBV_SRQ_MAX_WR) { attr.max_wr as usize } else { found.queue.capacity };
    let is_fit = capacity > 0 && capacity <= MAX_WR as usize && capacity >= found.queue.waiting.len();
    if !is_fit || (has(IBV_SRQ_LIMIT) && attr.srq_limit as usize > capacity) {
        return libc::EINVAL;
    }
    found.queue.capacity = capacity;
    if has(IBV_SRQ_LIMIT) {
        found.limit = attr.srq_limit;
    }
    0
}

/// What it is like.
pub unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's queue.
    let handle = unsafe { (*srq).handle };
    let core = device.lock();
    let Some(found) = core.state.shared.srqs.get(handle) else { return libc::EINVAL };
    let (max_wr, max_sge) = (found.queue.capacity as u32, found.queue.max_sge);
    // SAFETY: the caller's structure.
    unsafe { attr.write(ibv_srq_attr { max_wr, max_sge, srq_limit: found.limit }) };
    0
}

/// Destroys one that no queue pair takes receives from. What was posted to it is forgotten.
pub unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's queue.
    let handle = unsafe { (*srq).handle };
    let mut core = device.lock();
    let shared = &mut core.state.shared;
    if shared.srqs.get(handle).is_none_or(|srq| srq.users > 0) {
        return libc::EBUSY;
    }
    if let Some(found) = shared.srqs.remove(handle) {
        shared.events.forget(found.context, found.object);
    }
    drop(core);
    events::settle(srq as usize);
    // SAFETY: made by `create`, and nothing refers to it.
    drop(unsafe { Box::from_raw(srq) });
    0
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's queue.
    let handle = unsafe { (*srq).handle };
    let mut core = device.lock();
    let Some(found) = core.state.shared.srqs.get_mut(handle) else { return libc::EINVAL };
    while !wr.is_null() {
        // SAFETY: the caller's list.
        let ibv_recv_wr { wr_id, next, sg_list, num_sge } = unsafe { *wr };
        // SAFETY: the caller's array.
        let posted = unsafe { parts(sg_list, num_sge) }.and_then(|sges| found.queue.push(wr_id, sges));
        if let Err(errno) = posted {
            // SAFETY: the caller's pointer.
            unsafe { bad.write(wr) };
            return errno;
        }
        wr = next;
    }
    0
}
