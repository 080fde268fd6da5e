//! Multicast groups of ids.

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use std::net::SocketAddr;

use libc::sockaddr;
use rdma_sys::*;

use super::object::{IdObject, Membership, number};
use super::{address, id::finish, result};
use crate::abi::{ibv_attach_mcast, ibv_detach_mcast};
use crate::device::{device, gid as gid_of};

/// Joins a multicast group: `rdma_join_multicast(3)`. The queue pair of the id, if it has one, is attached to the group.
pub unsafe extern "C" fn rdma_join_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr, context: *mut c_void) -> c_int {
    // SAFETY: the caller keeps the contract of the function.
    unsafe { join(id, addr, context, true) }
}

/// Like [`rdma_join_multicast`], as a full member or only for sending: `rdma_join_multicast_ex(3)`.
///
/// The queue pair of a member that only sends is not attached, and sending needs no membership of the host.
pub unsafe extern "C" fn rdma_join_multicast_ex(
    id: *mut rdma_cm_id,
    mc_join_attr: *mut rdma_cm_join_mc_attr_ex,
    context: *mut c_void,
) -> c_int {
    let needed = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
    // SAFETY: the caller passes valid arguments.
    unsafe {
        let attr = mc_join_attr.read();
        if attr.comp_mask != needed.0 || attr.join_flags >= RDMA_MC_JOIN_FLAG_RESERVED.0 {
            return result(Err(libc::EINVAL));
        }
        join(id, attr.addr, context, attr.join_flags != RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER.0)
    }
}

/// # Safety
/// The id and the address are valid.
unsafe fn join(id: *mut rdma_cm_id, addr: *mut sockaddr, context: *mut c_void, receives: bool) -> c_int {
    let object = id.cast::<IdObject>();
    // SAFETY: the caller passes valid arguments.
    let joined = unsafe {
        address::read(addr).and_then(|group| {
            let device = device().ok_or(libc::ENODEV)?;
            let mut core = device.lock();
            core.state.cma.check_device(number(id))?;
            let membership = core.cm_join(number(id), group, receives)?;
            // The event is read after this, as the device is locked.
            let membership = Membership { number: membership, group, context, receives, is_attached: false };
            (*object).memberships().push(membership);
            Ok(())
        })
    };
    // SAFETY: as above.
    unsafe { finish(id, joined) }
}

/// Attaches the queue pair of an id to a group that it has joined.
///
/// # Safety
/// The id is valid, with a valid queue pair if it has one.
pub(super) unsafe fn finish_join(id: *mut rdma_cm_id, membership: u32) -> Result<(), c_int> {
    // SAFETY: the caller passes a valid id.
    let (qp, object) = unsafe { ((*id).qp, &*id.cast::<IdObject>()) };
    let group = object
        .memberships()
        .iter()
        .find(|joined| joined.number == membership && joined.receives)
        .map(|joined| joined.group);
    let Some(group) = group.filter(|_| !qp.is_null()) else { return Ok(()) };
    // SAFETY: the caller passes a valid queue pair.
    unsafe { attach(qp, group)? };
    if let Some(joined) = object.memberships().iter_mut().find(|joined| joined.number == membership) {
        joined.is_attached = true;
        return Ok(());
    }
    // Another thread has left the group meanwhile.
    // SAFETY: as above.
    unsafe { detach(qp, group) };
    Ok(())
}

/// The program's context of a membership.
///
/// # Safety
/// The id is valid.
pub(super) unsafe fn context_of(id: *mut rdma_cm_id, membership: u32) -> *const c_void {
    // SAFETY: the caller passes a valid id.
    let object = unsafe { &*id.cast::<IdObject>() };
    let memberships = object.memberships();
    memberships.iter().find(|joined| joined.number == membership).map_or(null_mut(), |joined| joined.context)
}

/// # Safety
/// The queue pair is valid.
unsafe fn attach(qp: *mut ibv_qp, group: SocketAddr) -> Result<(), c_int> {
    let gid = ibv_gid { raw: gid_of(group.ip()) };
    // SAFETY: the caller passes a valid queue pair.
    match unsafe { ibv_attach_mcast(qp, &raw const gid, 0) } {
        0 => Ok(()),
        errno => Err(errno),
    }
}

/// # Safety
/// The queue pair is valid.
unsafe fn detach(qp: *mut ibv_qp, group: SocketAddr) {
    let gid = ibv_gid { raw: gid_of(group.ip()) };
    // SAFETY: the caller passes a valid queue pair.
    unsafe { ibv_detach_mcast(qp, &raw const gid, 0) };
}

/// Detaches the queue pair of an id from all groups, before it is destroyed.
///
/// # Safety
/// The id and its queue pair are valid.
pub(super) unsafe fn detach_all(id: *mut rdma_cm_id) {
    // SAFETY: the caller passes a valid id.
    let (qp, object) = unsafe { ((*id).qp, &*id.cast::<IdObject>()) };
    let attached: Vec<SocketAddr> = {
        let mut memberships = object.memberships();
        let attached = memberships.iter_mut().filter(|membership| membership.is_attached);
        attached
            .map(|membership| {
                membership.is_attached = false;
                membership.group
            })
            .collect()
    };
    // SAFETY: the caller passes a valid queue pair.
    attached.into_iter().for_each(|group| unsafe { detach(qp, group) });
}

/// Leaves a multicast group: `rdma_leave_multicast(3)`.
pub unsafe extern "C" fn rdma_leave_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    // SAFETY: the caller passes valid arguments.
    let left = unsafe {
        address::read(addr).and_then(|group| {
            let device = device().ok_or(libc::ENODEV)?;
            let membership = {
                let mut memberships = (*id.cast::<IdObject>()).memberships();
                let at = memberships
                    .iter()
                    .position(|membership| membership.group.ip() == group.ip())
                    .ok_or(libc::EADDRNOTAVAIL)?;
                memberships.remove(at)
            };
            if membership.is_attached {
                detach((*id).qp, membership.group);
            }
            device.lock().cm_leave(number(id), membership.number)
        })
    };
    result(left)
}
