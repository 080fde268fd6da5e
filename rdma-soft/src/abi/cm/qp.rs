//! Queue pairs, completion queues and shared receive queues that belong to an id.

use core::ffi::c_int;
use core::ptr::null_mut;

use rdma_sys::*;

use super::connect::rdma_init_qp_attr;
use super::object::{IdObject, number};
use super::result;
use crate::abi::errors::errno;
use crate::abi::{
    ibv_create_comp_channel, ibv_create_cq, ibv_create_qp, ibv_create_srq, ibv_destroy_comp_channel, ibv_destroy_cq,
    ibv_destroy_qp, ibv_destroy_srq, ibv_modify_qp, qp as abi_qp, srq as abi_srq,
};
use crate::device::device;

/// RNR NAK timer of queue pairs of ids: 0.64 ms. The kernel's is 655 ms, as it leaves the attribute 0.
const MIN_RNR_TIMER: u8 = 12;

/// Moves the queue pair of an id to a state, with the attributes of its connection.
///
/// # Safety
/// The id and its queue pair are valid.
unsafe fn modify(id: *mut rdma_cm_id, state: ibv_qp_state, change: impl FnOnce(&mut ibv_qp_attr)) -> Result<(), c_int> {
    let (mut attr, mut mask) = (ibv_qp_attr { qp_state: state, ..ibv_qp_attr::zeroed() }, 0);
    // SAFETY: the caller passes a valid id, and the attributes are valid.
    unsafe {
        if rdma_init_qp_attr(id, &raw mut attr, &raw mut mask) != 0 {
            return Err(errno());
        }
        change(&mut attr);
        match ibv_modify_qp((*id).qp, &raw mut attr, mask) {
            0 => Ok(()),
            errno => Err(errno),
        }
    }
}

/// Moves the queue pair of an id to RTS, for a connection whose peer is known.
///
/// # Safety
/// The id and its queue pair are valid.
pub(super) unsafe fn to_rts(id: *mut rdma_cm_id) -> Result<(), c_int> {
    // SAFETY: the caller passes a valid id with a queue pair.
    unsafe {
        let object = id.cast::<IdObject>();
        let (served, asked) = ((*object).responder_resources, (*object).initiator_depth);
        // The access rights follow from the request.
        modify(id, IBV_QPS_INIT, |_| {})?;
        modify(id, IBV_QPS_RTR, |attr| {
            attr.min_rnr_timer = MIN_RNR_TIMER;
            attr.max_dest_rd_atomic = served;
        })?;
        modify(id, IBV_QPS_RTS, |attr| attr.max_rd_atomic = attr.max_rd_atomic.min(asked))
    }
}

/// Moves the queue pair of the active side to RTS, and confirms the reply of the peer.
///
/// # Safety
/// The id and its queue pair are valid.
pub(super) unsafe fn finish_connect(id: *mut rdma_cm_id) -> Result<(), c_int> {
    let device = device().ok_or(libc::ENODEV)?;
    // SAFETY: the caller passes a valid id with a queue pair.
    let (ready, number) = unsafe { (to_rts(id), number(id)) };
    if let Err(errno) = ready {
        // SAFETY: as above.
        unsafe { fail(id) };
        return Err(errno);
    }
    let mut core = device.lock();
    let established = core.cm_establish(number, device.now());
    core.receive_own(device.now());
    device.unlock(core);
    established
}

/// Moves the queue pair of an id to the error state, if it has one.
///
/// # Safety
/// The id and its queue pair are valid.
pub(super) unsafe fn fail(id: *mut rdma_cm_id) {
    let mut attr = ibv_qp_attr { qp_state: IBV_QPS_ERR, ..ibv_qp_attr::zeroed() };
    // SAFETY: the caller passes a valid id with a valid queue pair or none.
    unsafe {
        if !(*id).qp.is_null() {
            ibv_modify_qp((*id).qp, &raw mut attr, IBV_QP_STATE.0 as c_int);
        }
    }
}

/// Creates the completion queues that a new queue pair of the id lacks.
///
/// # Safety
/// The id is valid.
unsafe fn create_cqs(id: *mut rdma_cm_id, send: u32, receive: u32) -> Result<(), c_int> {
    // SAFETY: the caller passes a valid id, whose context is open. The queues belong to their channels.
    unsafe {
        let (verbs, context) = ((*id).verbs, id.cast());
        let create = move |size: u32| {
            let channel = ibv_create_comp_channel(verbs);
            if channel.is_null() {
                return Err(errno());
            }
            let cq = ibv_create_cq(verbs, size as c_int, context, channel, 0);
            if cq.is_null() {
                let errno = errno();
                ibv_destroy_comp_channel(channel);
                return Err(errno);
            }
            Ok((channel, cq))
        };
        if receive > 0 {
            ((*id).recv_cq_channel, (*id).recv_cq) = create(receive)?;
        }
        if send > 0 {
            ((*id).send_cq_channel, (*id).send_cq) = create(send)?;
        }
    }
    Ok(())
}

/// Destroys the completion queues that were created for the id.
///
/// # Safety
/// The id is valid, and no queue pair uses the queues.
unsafe fn destroy_cqs(id: *mut rdma_cm_id) {
    // SAFETY: the caller passes a valid id. A queue with a channel was created by `create_cqs`.
    unsafe {
        for (cq, channel) in [
            (&raw mut (*id).recv_cq, &raw mut (*id).recv_cq_channel),
            (&raw mut (*id).send_cq, &raw mut (*id).send_cq_channel),
        ] {
            let (cq, channel) = (cq.replace(null_mut()), channel.replace(null_mut()));
            if !channel.is_null() {
                ibv_destroy_cq(cq);
                ibv_destroy_comp_channel(channel);
            }
        }
    }
}

/// Creates a queue pair for an id, in INIT, or in RTS for datagrams: `rdma_create_qp(3)`.
pub unsafe extern "C" fn rdma_create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    qp_init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller passes valid arguments. The extended structure begins like the other one.
    unsafe {
        let mut extended = ibv_qp_init_attr_ex { pd, ..ibv_qp_init_attr_ex::zeroed() };
        (&raw mut extended).cast::<ibv_qp_init_attr>().write(qp_init_attr.read());
        extended.comp_mask = if pd.is_null() { 0 } else { IBV_QP_INIT_ATTR_PD.0 };
        let created = create_qp(id, &mut extended, false);
        if created.is_ok() {
            (*qp_init_attr).cap = extended.cap;
        }
        result(created)
    }
}

/// Like [`rdma_create_qp`], with extended attributes: `rdma_create_qp_ex(3)`.
pub unsafe extern "C" fn rdma_create_qp_ex(id: *mut rdma_cm_id, qp_init_attr: *mut ibv_qp_init_attr_ex) -> c_int {
    // SAFETY: the caller passes valid arguments. A structure of an older header may end after the last field of its mask.
    unsafe {
        let mask = (*qp_init_attr).comp_mask;
        let mut extended = ibv_qp_init_attr_ex::zeroed();
        (&raw mut extended).cast::<ibv_qp_init_attr>().write(qp_init_attr.cast::<ibv_qp_init_attr>().read());
        extended.comp_mask = mask;
        let has = |flag: ibv_qp_init_attr_mask| mask & flag.0 != 0;
        if has(IBV_QP_INIT_ATTR_PD) {
            extended.pd = (*qp_init_attr).pd;
        }
        if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) {
            extended.create_flags = (*qp_init_attr).create_flags;
        }
        if has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) {
            extended.send_ops_flags = (*qp_init_attr).send_ops_flags;
        }
        let created = create_qp(id, &mut extended, true);
        if created.is_ok() {
            (*qp_init_attr).cap = extended.cap;
        }
        result(created)
    }
}

/// # Safety
/// The id is valid, and so are the objects in the attributes.
unsafe fn create_qp(id: *mut rdma_cm_id, attr: &mut ibv_qp_init_attr_ex, is_extended: bool) -> Result<(), c_int> {
    // SAFETY: the caller passes a valid id and attributes.
    unsafe {
        if !(*id).qp.is_null() || (*id).verbs.is_null() {
            return Err(libc::EINVAL);
        }
        if attr.comp_mask & IBV_QP_INIT_ATTR_PD.0 == 0 || attr.pd.is_null() {
            attr.comp_mask |= IBV_QP_INIT_ATTR_PD.0;
            attr.pd = (*id).pd;
        } else if (*attr.pd).context != (*id).verbs {
            return Err(libc::EINVAL);
        }
        let differs = |own: *mut ibv_cq, other: *mut ibv_cq| !own.is_null() && !other.is_null() && own != other;
        if differs((*id).recv_cq, attr.recv_cq) || differs((*id).send_cq, attr.send_cq) {
            return Err(libc::EINVAL);
        }
        let missing = |own: *mut ibv_cq, other: *mut ibv_cq, size: u32| {
            if own.is_null() && other.is_null() { size.max(1) } else { 0 }
        };
        let send = missing((*id).send_cq, attr.send_cq, attr.cap.max_send_wr);
        let receive = missing((*id).recv_cq, attr.recv_cq, attr.cap.max_recv_wr);
        let made = create_cqs(id, send, receive).and_then(|()| {
            if attr.send_cq.is_null() {
                attr.send_cq = (*id).send_cq;
            }
            if attr.recv_cq.is_null() {
                attr.recv_cq = (*id).recv_cq;
            }
            if attr.srq.is_null() {
                attr.srq = (*id).srq;
            }
            let qp = match is_extended {
                true => abi_qp::create_qp_ex((*id).verbs, attr),
                false => ibv_create_qp(attr.pd, (&raw mut *attr).cast()),
            };
            if qp.is_null() { Err(errno()) } else { Ok(qp) }
        });
        let qp = match made {
            Ok(qp) => qp,
            Err(errno) => {
                destroy_cqs(id);
                return Err(errno);
            }
        };
        (*id).qp = qp;
        let prepared = modify(id, IBV_QPS_INIT, |_| {}).and_then(|()| match (*qp).qp_type {
            IBV_QPT_UD => to_rts_of_datagrams(qp),
            _ => Ok(()),
        });
        if let Err(errno) = prepared {
            (*id).qp = null_mut();
            ibv_destroy_qp(qp);
            destroy_cqs(id);
            return Err(errno);
        }
        (*id).pd = (*qp).pd;
        Ok(())
    }
}

/// # Safety
/// The queue pair is valid.
unsafe fn to_rts_of_datagrams(qp: *mut ibv_qp) -> Result<(), c_int> {
    for (state, mask) in [(IBV_QPS_RTR, IBV_QP_STATE), (IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN)] {
        let mut attr = ibv_qp_attr { qp_state: state, ..ibv_qp_attr::zeroed() };
        // SAFETY: the caller passes a valid queue pair.
        match unsafe { ibv_modify_qp(qp, &raw mut attr, mask.0 as c_int) } {
            0 => {}
            errno => return Err(errno),
        }
    }
    Ok(())
}

/// Destroys the queue pair of an id, and the completion queues that were created for it: `rdma_destroy_qp(3)`.
pub unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    // SAFETY: the caller passes a valid id with a queue pair.
    unsafe {
        if (*id).qp.is_null() {
            return;
        }
        super::multicast::detach_all(id);
        ibv_destroy_qp(core::mem::replace(&mut (*id).qp, null_mut()));
        destroy_cqs(id);
    }
}

/// Creates a shared receive queue for an id: `rdma_create_srq(3)`.
pub unsafe extern "C" fn rdma_create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> c_int {
    // SAFETY: the caller passes valid arguments.
    let created = unsafe {
        let pd = if pd.is_null() { (*id).pd } else { pd };
        if !(*id).srq.is_null() || pd.is_null() {
            Err(libc::EINVAL)
        } else {
            let srq = ibv_create_srq(pd, attr);
            keep_srq(id, srq)
        }
    };
    result(created)
}

/// Like [`rdma_create_srq`], with extended attributes: `rdma_create_srq_ex(3)`. Queues of XRC and tag matching are refused.
pub unsafe extern "C" fn rdma_create_srq_ex(id: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> c_int {
    // SAFETY: the caller passes valid arguments.
    let created = unsafe {
        if !(*id).srq.is_null() || (*id).verbs.is_null() {
            Err(libc::EINVAL)
        } else {
            if (*attr).comp_mask & IBV_SRQ_INIT_ATTR_PD.0 == 0 {
                (*attr).comp_mask |= IBV_SRQ_INIT_ATTR_PD.0;
                (*attr).pd = (*id).pd;
            }
            let srq = abi_srq::create_srq_ex((*id).verbs, attr);
            keep_srq(id, srq)
        }
    };
    result(created)
}

/// # Safety
/// The id is valid, and the queue is valid or null with its errno.
unsafe fn keep_srq(id: *mut rdma_cm_id, srq: *mut ibv_srq) -> Result<(), c_int> {
    if srq.is_null() {
        return Err(errno());
    }
    // SAFETY: the caller passes a valid id and queue.
    unsafe { ((*id).srq, (*id).pd) = (srq, (*srq).pd) };
    Ok(())
}

/// Destroys the shared receive queue of an id: `rdma_destroy_srq(3)`.
pub unsafe extern "C" fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    // SAFETY: the caller passes a valid id. No queue pair uses the queue any more.
    unsafe {
        let srq = core::mem::replace(&mut (*id).srq, null_mut());
        if !srq.is_null() {
            ibv_destroy_srq(srq);
        }
    }
}
