//! Shared receive queues.

use core::ffi::c_int;

use rdma_sys::*;

use super::context::context_number;
use super::errors::null;
use super::events;
use super::limits::{MAX_SGE, MAX_WR};
use super::post::sge_list;
use crate::check::{self, Object, Owner};
use crate::device::{ReceiveQueue, Shared, Srq, device, observe};

unsafe fn create(pd: *mut ibv_pd, srq_context: *mut core::ffi::c_void, attr: &mut ibv_srq_attr) -> *mut ibv_srq {
    let Some(device) = device() else { return null(libc::ENODEV) };
    if attr.max_wr == 0 || attr.max_wr > MAX_WR || attr.max_sge > MAX_SGE {
        return null(libc::EINVAL);
    }
    // SAFETY: the caller passes a valid protection domain.
    let ibv_pd { context, handle } = unsafe { *pd };
    let object = Box::into_raw(Box::new(ibv_srq { context, srq_context, pd, ..ibv_srq::zeroed() }));
    let srq = Srq {
        queue: ReceiveQueue::new(attr.max_wr, attr.max_sge),
        pd: handle,
        // SAFETY: the context of a valid protection domain is open.
        context: unsafe { context_number(context) },
        object: object as usize,
        limit: 0,
        users: 0,
    };
    let number = device.lock().state.shared.srqs.insert(srq);
    check::created(Object::SharedReceiveQueue(number));
    // SAFETY: the object was just created.
    unsafe { (*object).handle = number };
    object
}

/// Creates a shared receive queue: `ibv_create_srq(3)`.
pub unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the caller passes valid structures.
    unsafe { create(pd, (*init).srq_context, &mut (*init).attr) }
}

/// Creates a basic shared receive queue. Other types are not supported.
pub(crate) unsafe extern "C" fn create_srq_ex(_: *mut ibv_context, init: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq {
    // SAFETY: the caller passes a valid structure.
    let mask = unsafe { (*init).comp_mask };
    let known = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
    // SAFETY: as above. The structure may end after the last field that its mask names, so no later field is read.
    let is_basic = mask & IBV_SRQ_INIT_ATTR_TYPE.0 == 0 || unsafe { (*init).srq_type } == IBV_SRQT_BASIC;
    if mask & !known.0 != 0 || !is_basic {
        return null(libc::EOPNOTSUPP);
    }
    if mask & IBV_SRQ_INIT_ATTR_PD.0 == 0 {
        return null(libc::EINVAL);
    }
    // SAFETY: the caller keeps the contract of the verb.
    unsafe { create((*init).pd, (*init).srq_context, &mut (*init).attr) }
}

/// Changes the capacity or the limit of a shared receive queue: `ibv_modify_srq(3)`.
pub unsafe extern "C" fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid queue and structure.
    let (handle, attr) = unsafe { ((*srq).handle, *attr) };
    let has = |flag: ibv_srq_attr_mask| mask as u32 & flag.0 != 0;
    let mut core = device.lock();
    let Some(found) = core.state.shared.srqs.get_mut(handle) else { return libc::EINVAL };
    let capacity = if has(IBV_SRQ_MAX_WR) { attr.max_wr as usize } else { found.queue.capacity };
    let is_fit = capacity > 0 && capacity <= MAX_WR as usize && capacity >= found.queue.posted.len();
    if !is_fit || (has(IBV_SRQ_LIMIT) && attr.srq_limit as usize > capacity) {
        return libc::EINVAL;
    }
    found.queue.capacity = capacity;
    if has(IBV_SRQ_LIMIT) {
        found.limit = attr.srq_limit;
    }
    0
}

/// Returns the attributes of a shared receive queue: `ibv_query_srq(3)`.
pub unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid queue.
    let handle = unsafe { (*srq).handle };
    let core = device.lock();
    let Some(found) = core.state.shared.srqs.get(handle) else { return libc::EINVAL };
    let (max_wr, max_sge) = (found.queue.capacity as u32, found.queue.max_sge);
    // SAFETY: the caller passes a valid structure.
    unsafe { attr.write(ibv_srq_attr { max_wr, max_sge, srq_limit: found.limit }) };
    0
}

/// Destroys a shared receive queue that no queue pair uses. Drops its receives.
pub unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid queue.
    let handle = unsafe { (*srq).handle };
    let mut core = device.lock();
    let shared = &mut core.state.shared;
    if shared.srqs.get(handle).is_none_or(|srq| srq.users > 0) {
        return libc::EBUSY;
    }
    check::with(|check| check.cleared(Owner::Srq(handle)));
    check::destroyed(Object::SharedReceiveQueue(handle));
    if let Some(found) = shared.srqs.remove(handle) {
        shared.events.remove_object(found.context, found.object);
    }
    drop(core);
    events::wait_until_acknowledged(srq as usize);
    // SAFETY: `create` created it, and nothing refers to it any more.
    drop(unsafe { Box::from_raw(srq) });
    0
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid queue.
    let handle = unsafe { (*srq).handle };
    let mut core = device.lock();
    let Shared { srqs, keys, cqs, .. } = &mut core.state.shared;
    let Some(found) = srqs.get_mut(handle) else { return libc::EINVAL };
    let mut result = 0;
    while !wr.is_null() {
        // SAFETY: the caller passes a valid list.
        let ibv_recv_wr { wr_id, next, sg_list, num_sge } = unsafe { *wr };
        // SAFETY: the caller passes a valid array.
        let posted = unsafe { sge_list(sg_list, num_sge) }.and_then(|sges| found.queue.push(wr_id, sges));
        if let Err(errno) = posted {
            // SAFETY: the caller passes a valid pointer.
            unsafe { bad.write(wr) };
            result = errno;
            break;
        }
        wr = next;
    }
    observe::posted_receives(Owner::Srq(handle), &mut found.queue, found.pd, None, keys, cqs);
    result
}
