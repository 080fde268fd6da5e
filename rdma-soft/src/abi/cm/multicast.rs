//! Multicast groups of ids.

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;

use libc::sockaddr;
use rdma_sys::*;

use super::object::{IdObject, Membership, number};
use super::{address, id::complete, result};
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
        let of = mc_join_attr.read();
        if of.comp_mask != needed.0 || of.join_flags >= RDMA_MC_JOIN_FLAG_RESERVED.0 {
            return result(Err(libc::EINVAL));
        }
        join(id, of.addr, context, of.join_flags != RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER.0)
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
            let membership = core.cm_join(number(id), group, receives)?;
            // The event is read after this, as the device is locked.
            (*object).memberships.push(Membership { number: membership, group, context, receives, is_attached: false });
            Ok(())
        })
    };
    match result(joined) {
        // SAFETY: as above.
        0 => unsafe { complete(id) },
        failed => failed,
    }
}

/// Attaches the queue pair of an id to a group that it has joined.
///
/// # Safety
/// The id is valid, and no other thread uses it.
pub(super) unsafe fn finish_join(id: *mut rdma_cm_id, membership: u32) -> Result<(), c_int> {
    let object = id.cast::<IdObject>();
    // SAFETY: the caller passes a valid id, whose queue pair is valid if it has one.
    unsafe {
        let memberships = &mut (*object).memberships;
        let Some(of) = memberships.iter_mut().find(|of| of.number == membership) else { return Ok(()) };
        if (*id).qp.is_null() || !of.receives {
            return Ok(());
        }
        let gid = ibv_gid { raw: gid_of(of.group.ip()) };
        match ibv_attach_mcast((*id).qp, &raw const gid, 0) {
            0 => of.is_attached = true,
            errno => return Err(errno),
        }
    }
    Ok(())
}

/// The program's context of a membership.
///
/// # Safety
/// The id is valid, and no other thread uses it.
pub(super) unsafe fn context_of(id: *mut rdma_cm_id, membership: u32) -> *const c_void {
    // SAFETY: the caller passes a valid id.
    let memberships = unsafe { &(*id.cast::<IdObject>()).memberships };
    memberships.iter().find(|of| of.number == membership).map_or(null_mut(), |of| of.context)
}

/// # Safety
/// The id is valid, with a valid queue pair if the membership is attached.
unsafe fn detach(id: *mut rdma_cm_id, of: &Membership) {
    if of.is_attached {
        let gid = ibv_gid { raw: gid_of(of.group.ip()) };
        // SAFETY: the caller passes a valid id with a queue pair.
        unsafe { ibv_detach_mcast((*id).qp, &raw const gid, 0) };
    }
}

/// Detaches the queue pair of an id from all groups, before it is destroyed.
///
/// # Safety
/// The id and its queue pair are valid.
pub(super) unsafe fn detach_all(id: *mut rdma_cm_id) {
    // SAFETY: the caller passes a valid id with a queue pair.
    unsafe {
        let memberships = &mut (*id.cast::<IdObject>()).memberships;
        for of in memberships.iter_mut() {
            detach(id, of);
            of.is_attached = false;
        }
    }
}

/// Leaves a multicast group: `rdma_leave_multicast(3)`.
pub unsafe extern "C" fn rdma_leave_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    let object = id.cast::<IdObject>();
    // SAFETY: the caller passes valid arguments.
    let left = unsafe {
        address::read(addr).and_then(|group| {
            let device = device().ok_or(libc::ENODEV)?;
            let memberships = &mut (*object).memberships;
            let at = memberships.iter().position(|of| of.group.ip() == group.ip()).ok_or(libc::EADDRNOTAVAIL)?;
            let of = memberships.remove(at);
            detach(id, &of);
            device.lock().cm_leave(number(id), of.number)
        })
    };
    result(left)
}
