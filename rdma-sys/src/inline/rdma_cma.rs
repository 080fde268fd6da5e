//! Inline functions for the addresses of a connection identifier.

use crate::bindings::*;

/// The local address: `rdma_get_local_addr(3)`.
///
/// # Safety
/// `id` must exist; the result points into it.
#[inline]
pub unsafe fn rdma_get_local_addr(id: *mut rdma_cm_id) -> *mut libc::sockaddr {
    // SAFETY: the caller vouches for the identifier, so the field lies in it.
    unsafe { &raw mut (*id).route.addr.__bindgen_anon_1.src_addr }
}

/// The peer's address: `rdma_get_peer_addr(3)`.
///
/// # Safety
/// `id` must exist; the result points into it.
#[inline]
pub unsafe fn rdma_get_peer_addr(id: *mut rdma_cm_id) -> *mut libc::sockaddr {
    // SAFETY: the caller vouches for the identifier, so the field lies in it.
    unsafe { &raw mut (*id).route.addr.__bindgen_anon_2.dst_addr }
}
