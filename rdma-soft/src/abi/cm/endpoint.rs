//! Synchronous endpoints.

use core::ffi::c_int;
use core::ptr::null_mut;

use rdma_sys::*;

use super::object::IdObject;
use super::result;
use super::{
    rdma_ack_cm_event, rdma_bind_addr, rdma_create_id, rdma_create_qp, rdma_destroy_id, rdma_destroy_qp,
    rdma_destroy_srq, rdma_get_cm_event, rdma_resolve_addr, rdma_resolve_route,
};
use crate::abi::errors::errno;

/// Timeout for resolving the address and the route, as in librdmacm.
const TIMEOUT_MS: c_int = 2000;

/// Creates a synchronous id for a resolved address: `rdma_create_ep(3)`.
pub unsafe extern "C" fn rdma_create_ep(
    id: *mut *mut rdma_cm_id,
    res: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    qp_init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    let mut made = null_mut();
    // SAFETY: the caller passes valid arguments.
    let ps = unsafe { rdma_port_space((*res).ai_port_space as u32) };
    // SAFETY: the pointer is valid.
    if unsafe { rdma_create_id(null_mut(), &raw mut made, null_mut(), ps) } != 0 {
        return -1;
    }
    // SAFETY: the caller passes valid arguments, and the id was just created.
    if unsafe { prepare(made, res, pd, qp_init_attr) } == 0 {
        // SAFETY: as above.
        unsafe { id.write(made) };
        return 0;
    }
    let errno = errno();
    // SAFETY: as above.
    unsafe { rdma_destroy_ep(made) };
    result(Err(errno))
}

/// # Safety
/// All arguments are valid. The protection domain and the attributes may be null.
unsafe fn prepare(
    id: *mut rdma_cm_id,
    res: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    qp_init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    let object = id.cast::<IdObject>();
    // SAFETY: the caller passes valid arguments.
    unsafe {
        if !qp_init_attr.is_null() {
            (*qp_init_attr).qp_type = ibv_qp_type((*res).ai_qp_type as u32);
        }
        if (*res).ai_flags & RAI_PASSIVE != 0 {
            if rdma_bind_addr(id, (*res).ai_src_addr) != 0 {
                return -1;
            }
            if !pd.is_null() {
                (*id).pd = pd;
            }
            if !qp_init_attr.is_null() {
                (*object).request_attributes = Some(Box::new(qp_init_attr.read()));
            }
            return 0;
        }
        if rdma_resolve_addr(id, (*res).ai_src_addr, (*res).ai_dst_addr, TIMEOUT_MS) != 0
            || rdma_resolve_route(id, TIMEOUT_MS) != 0
            || (!qp_init_attr.is_null() && rdma_create_qp(id, pd, qp_init_attr) != 0)
        {
            return -1;
        }
        if (*res).ai_connect_len > 0 {
            let data = core::slice::from_raw_parts((*res).ai_connect.cast::<u8>(), (*res).ai_connect_len);
            (*object).connect_data = data.to_vec();
        }
        0
    }
}

/// Destroys an id, its queue pair and its shared receive queue: `rdma_destroy_ep(3)`.
pub unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    // SAFETY: the caller passes a valid id.
    unsafe {
        rdma_destroy_qp(id);
        rdma_destroy_srq(id);
        rdma_destroy_id(id);
    }
}

/// Waits, without a deadline, for the next request of a synchronous listening id: `rdma_get_request(3)`.
pub unsafe extern "C" fn rdma_get_request(listen: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int {
    let object = listen.cast::<IdObject>();
    // SAFETY: the caller passes a valid id and a valid pointer. The events are read and acknowledged once.
    unsafe {
        if !(*object).is_synchronous {
            return result(Err(libc::EINVAL));
        }
        let previous = core::mem::replace(&mut (*listen).event, null_mut());
        if !previous.is_null() {
            rdma_ack_cm_event(previous);
        }
        let mut event = null_mut();
        if rdma_get_cm_event((*listen).channel, &raw mut event) != 0 {
            return -1;
        }
        let is_request = (*event).event == RDMA_CM_EVENT_CONNECT_REQUEST;
        let requested = match (*event).status {
            0 if is_request => Ok((*event).id),
            0 => Err(libc::EINVAL),
            status => Err(status.abs()),
        };
        let prepared = requested.and_then(|new| {
            let attributes = (*object).request_attributes.as_deref().copied();
            let Some(mut attributes) = attributes else { return Ok(new) };
            match rdma_create_qp(new, (*listen).pd, &raw mut attributes) {
                0 => Ok(new),
                _ => Err(errno()),
            }
        });
        match prepared {
            Ok(new) => {
                (*new).event = event;
                id.write(new);
                0
            }
            Err(errno) => {
                let new = (*event).id;
                rdma_ack_cm_event(event);
                if is_request {
                    rdma_destroy_id(new);
                }
                result(Err(errno))
            }
        }
    }
}
