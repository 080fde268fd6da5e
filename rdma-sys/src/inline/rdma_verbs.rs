//! The helpers of `rdma/rdma_verbs.h`: verbs on the queue pair of a connection identifier.
//!
//! They return 0, or -1 and set errno. Those that register memory return null and set errno. Work requests are zeroed
//! before they are filled in. The C functions leave fields that an operation does not need uninitialized.

#![expect(clippy::too_many_arguments, reason = "the signatures are those of C")]

use core::ffi::{c_int, c_void};
use core::ptr;

use super::{Unsupported as _, ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_post_srq_recv};
use super::{ibv_req_notify_cq, set_errno};
use crate::Zeroed as _;
use crate::bindings::*;
use crate::load::verbs;

/// Converts an errno to -1 and sets errno. 0 stays 0.
#[inline]
pub fn rdma_seterrno(ret: c_int) -> c_int {
    if ret == 0 {
        return 0;
    }
    set_errno(ret);
    -1
}

/// Registers memory with the flags of [`rdma_reg_msgs`] and similar functions, none of which is optional.
///
/// # Safety
/// Those of [`rdma_reg_msgs`].
#[inline]
unsafe fn register(id: *mut rdma_cm_id, addr: *mut c_void, length: usize, access: ibv_access_flags) -> *mut ibv_mr {
    // SAFETY: the caller vouches for the identifier, its domain and the memory.
    unsafe { super::__ibv_reg_mr((*id).pd, addr, length, access.0, 1) }
}

/// Registers memory for sends and receives: `rdma_reg_msgs(3)`.
///
/// # Safety
/// `id` must exist and have a protection domain; the memory must stay mapped until the region is deregistered.
#[inline]
pub unsafe fn rdma_reg_msgs(id: *mut rdma_cm_id, addr: *mut c_void, length: usize) -> *mut ibv_mr {
    // SAFETY: the caller's contract is the same.
    unsafe { register(id, addr, length, IBV_ACCESS_LOCAL_WRITE) }
}

/// Registers memory that the peer may read: `rdma_reg_read(3)`.
///
/// # Safety
/// Those of [`rdma_reg_msgs`]. The peer may read the memory at any time.
#[inline]
pub unsafe fn rdma_reg_read(id: *mut rdma_cm_id, addr: *mut c_void, length: usize) -> *mut ibv_mr {
    // SAFETY: the caller's contract is the same.
    unsafe { register(id, addr, length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ) }
}

/// Registers memory that the peer may write: `rdma_reg_write(3)`.
///
/// # Safety
/// Those of [`rdma_reg_msgs`]. The peer may write the memory at any time.
#[inline]
pub unsafe fn rdma_reg_write(id: *mut rdma_cm_id, addr: *mut c_void, length: usize) -> *mut ibv_mr {
    // SAFETY: the caller's contract is the same.
    unsafe { register(id, addr, length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) }
}

/// Deregisters memory: `rdma_dereg_mr(3)`.
///
/// # Safety
/// `mr` must exist.
#[inline]
pub unsafe fn rdma_dereg_mr(mr: *mut ibv_mr) -> c_int {
    rdma_seterrno(match verbs() {
        // SAFETY: the caller vouches for the region.
        Ok(verbs) => unsafe { (verbs.ibv_dereg_mr)(mr) },
        Err(_) => c_int::unsupported(),
    })
}

/// Posts a receive with a scatter/gather list, to the shared receive queue if there is one: `rdma_post_recvv(3)`.
///
/// # Safety
/// `id` must exist and have a queue pair or a shared receive queue. The memory must stay registered until the receive
/// completes.
#[inline]
pub unsafe fn rdma_post_recvv(id: *mut rdma_cm_id, context: *mut c_void, sgl: *mut ibv_sge, nsge: c_int) -> c_int {
    let mut wr =
        ibv_recv_wr { wr_id: context.expose_provenance() as u64, next: ptr::null_mut(), sg_list: sgl, num_sge: nsge };
    let mut bad = ptr::null_mut();
    // SAFETY: the caller vouches for the queues and the memory. Providers read the request only during the call.
    rdma_seterrno(unsafe {
        if (*id).srq.is_null() {
            ibv_post_recv((*id).qp, &mut wr, &mut bad)
        } else {
            ibv_post_srq_recv((*id).srq, &mut wr, &mut bad)
        }
    })
}

/// Creates a send request with the fields that all operations have.
#[inline]
fn request(context: *mut c_void, sgl: *mut ibv_sge, nsge: c_int, opcode: ibv_wr_opcode, flags: c_int) -> ibv_send_wr {
    ibv_send_wr {
        wr_id: context.expose_provenance() as u64,
        sg_list: sgl,
        num_sge: nsge,
        opcode,
        send_flags: flags as u32,
        ..ibv_send_wr::zeroed()
    }
}

/// # Safety
/// `id` must exist and have a queue pair. The memory of the request must stay registered until it completes.
#[inline]
unsafe fn post(id: *mut rdma_cm_id, mut wr: ibv_send_wr) -> c_int {
    let mut bad = ptr::null_mut();
    // SAFETY: the caller vouches for the queue pair and the memory. Providers read the request only during the call.
    rdma_seterrno(unsafe { ibv_post_send((*id).qp, &mut wr, &mut bad) })
}

/// The scatter/gather element at `addr`. Its key is 0 if `mr` is null, as for inline data.
///
/// # Safety
/// `mr` must be null or exist.
#[inline]
unsafe fn piece(addr: *mut c_void, length: usize, mr: *mut ibv_mr) -> ibv_sge {
    // SAFETY: the caller vouches for the region.
    let lkey = unsafe { if mr.is_null() { 0 } else { (*mr).lkey } };
    ibv_sge { addr: addr.expose_provenance() as u64, length: length as u32, lkey }
}

/// Posts a send with a scatter/gather list: `rdma_post_sendv(3)`.
///
/// # Safety
/// `id` must exist and have a queue pair. The memory must stay registered until the send completes.
#[inline]
pub unsafe fn rdma_post_sendv(
    id: *mut rdma_cm_id,
    context: *mut c_void,
    sgl: *mut ibv_sge,
    nsge: c_int,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's contract is the same.
    unsafe { post(id, request(context, sgl, nsge, IBV_WR_SEND, flags)) }
}

/// Posts an RDMA read with a scatter/gather list: `rdma_post_readv(3)`.
///
/// # Safety
/// Those of [`rdma_post_sendv`].
#[inline]
pub unsafe fn rdma_post_readv(
    id: *mut rdma_cm_id,
    context: *mut c_void,
    sgl: *mut ibv_sge,
    nsge: c_int,
    flags: c_int,
    remote_addr: u64,
    rkey: u32,
) -> c_int {
    let mut wr = request(context, sgl, nsge, IBV_WR_RDMA_READ, flags);
    wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
    // SAFETY: the caller's contract is the same.
    unsafe { post(id, wr) }
}

/// Posts an RDMA write with a scatter/gather list: `rdma_post_writev(3)`.
///
/// # Safety
/// Those of [`rdma_post_sendv`].
#[inline]
pub unsafe fn rdma_post_writev(
    id: *mut rdma_cm_id,
    context: *mut c_void,
    sgl: *mut ibv_sge,
    nsge: c_int,
    flags: c_int,
    remote_addr: u64,
    rkey: u32,
) -> c_int {
    let mut wr = request(context, sgl, nsge, IBV_WR_RDMA_WRITE, flags);
    wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
    // SAFETY: the caller's contract is the same.
    unsafe { post(id, wr) }
}

/// Posts a receive: `rdma_post_recv(3)`. Debug builds assert that the memory lies in `mr`.
///
/// # Safety
/// Those of [`rdma_post_recvv`], and `mr` must exist.
#[inline]
pub unsafe fn rdma_post_recv(
    id: *mut rdma_cm_id,
    context: *mut c_void,
    addr: *mut c_void,
    length: usize,
    mr: *mut ibv_mr,
) -> c_int {
    // SAFETY: the caller vouches for the region.
    let (start, bytes) = unsafe { ((*mr).addr.addr(), (*mr).length) };
    debug_assert!(
        addr.addr() >= start && addr.addr().wrapping_add(length) <= start.wrapping_add(bytes),
        "the receive does not lie in its memory region"
    );
    // SAFETY: the caller's contract is the same; the list is valid during the call.
    unsafe { rdma_post_recvv(id, context, &mut piece(addr, length, mr), 1) }
}

/// Posts a send: `rdma_post_send(3)`. `mr` may be null for inline data.
///
/// # Safety
/// Those of [`rdma_post_sendv`], and `mr` must be null or exist.
#[inline]
pub unsafe fn rdma_post_send(
    id: *mut rdma_cm_id,
    context: *mut c_void,
    addr: *mut c_void,
    length: usize,
    mr: *mut ibv_mr,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's contract is the same; the list is valid during the call.
    unsafe { rdma_post_sendv(id, context, &mut piece(addr, length, mr), 1, flags) }
}

/// Posts an RDMA read: `rdma_post_read(3)`.
///
/// # Safety
/// Those of [`rdma_post_readv`], and `mr` must exist.
#[inline]
pub unsafe fn rdma_post_read(
    id: *mut rdma_cm_id,
    context: *mut c_void,
    addr: *mut c_void,
    length: usize,
    mr: *mut ibv_mr,
    flags: c_int,
    remote_addr: u64,
    rkey: u32,
) -> c_int {
    // SAFETY: the caller's contract is the same; the list is valid during the call.
    unsafe { rdma_post_readv(id, context, &mut piece(addr, length, mr), 1, flags, remote_addr, rkey) }
}

/// Posts an RDMA write: `rdma_post_write(3)`. `mr` may be null for inline data.
///
/// # Safety
/// Those of [`rdma_post_writev`], and `mr` must be null or exist.
#[inline]
pub unsafe fn rdma_post_write(
    id: *mut rdma_cm_id,
    context: *mut c_void,
    addr: *mut c_void,
    length: usize,
    mr: *mut ibv_mr,
    flags: c_int,
    remote_addr: u64,
    rkey: u32,
) -> c_int {
    // SAFETY: the caller's contract is the same; the list is valid during the call.
    unsafe { rdma_post_writev(id, context, &mut piece(addr, length, mr), 1, flags, remote_addr, rkey) }
}

/// Posts a datagram with the queue key of librdmacm's UD queue pairs: `rdma_post_ud_send(3)`.
///
/// # Safety
/// Those of [`rdma_post_send`], and `ah` must exist.
#[inline]
pub unsafe fn rdma_post_ud_send(
    id: *mut rdma_cm_id,
    context: *mut c_void,
    addr: *mut c_void,
    length: usize,
    mr: *mut ibv_mr,
    flags: c_int,
    ah: *mut ibv_ah,
    remote_qpn: u32,
) -> c_int {
    // SAFETY: the caller vouches for the region.
    let mut sge = unsafe { piece(addr, length, mr) };
    let mut wr = request(context, &mut sge, 1, IBV_WR_SEND, flags);
    wr.wr.ud = ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah, remote_qpn, remote_qkey: RDMA_UDP_QKEY };
    // SAFETY: the caller vouches for the queue pair, the address handle and the memory; `sge` is valid during the call.
    unsafe { post(id, wr) }
}

/// Polls a completion, and sleeps on the channel while there is none.
///
/// The common part of [`rdma_get_send_comp`] and [`rdma_get_recv_comp`].
///
/// # Safety
/// The queue must exist and report to the channel, with `id` as its context; `wc` must be writable.
#[inline]
unsafe fn completion(id: *mut rdma_cm_id, cq: *mut ibv_cq, channel: *mut ibv_comp_channel, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller vouches for the queue, the channel and the memory.
    unsafe {
        let ret = loop {
            let ret = ibv_poll_cq(cq, 1, wc);
            if ret != 0 {
                break ret;
            }
            let ret = ibv_req_notify_cq(cq, 0);
            if ret != 0 {
                return rdma_seterrno(ret);
            }
            // A completion between the poll and the request raises no event, so poll again.
            let ret = ibv_poll_cq(cq, 1, wc);
            if ret != 0 {
                break ret;
            }
            let Ok(verbs) = verbs() else {
                return rdma_seterrno(c_int::unsupported());
            };
            let (mut event_cq, mut context) = (ptr::null_mut(), ptr::null_mut());
            let ret = (verbs.ibv_get_cq_event)(channel, &mut event_cq, &mut context);
            if ret != 0 {
                return ret;
            }
            debug_assert!(event_cq == cq && context == id.cast(), "an event of another queue");
            (verbs.ibv_ack_cq_events)(cq, 1);
        };
        if ret < 0 { rdma_seterrno(ret) } else { ret }
    }
}

/// Waits for a completion of the send queue: `rdma_get_send_comp(3)`. Returns 1, or -1 and sets errno.
///
/// If polling fails, errno is the provider's negative return value, as in C.
///
/// # Safety
/// `id` must exist and have completion queues that librdmacm created, and `wc` must be writable.
#[inline]
pub unsafe fn rdma_get_send_comp(id: *mut rdma_cm_id, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller vouches for the identifier, and librdmacm for its queue and channel.
    unsafe { completion(id, (*id).send_cq, (*id).send_cq_channel, wc) }
}

/// Waits for a completion of the receive queue: `rdma_get_recv_comp(3)`. See [`rdma_get_send_comp`].
///
/// # Safety
/// Those of [`rdma_get_send_comp`].
#[inline]
pub unsafe fn rdma_get_recv_comp(id: *mut rdma_cm_id, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller vouches for the identifier, and librdmacm for its queue and channel.
    unsafe { completion(id, (*id).recv_cq, (*id).recv_cq_channel, wc) }
}
