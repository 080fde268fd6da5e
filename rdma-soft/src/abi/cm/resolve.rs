//! Binding and resolving addresses, and listening.

use core::ffi::c_int;
use core::time::Duration;

use libc::sockaddr;
use rdma_sys::*;

use super::id::finish;
use super::object::update;
use super::{address, result};

/// Binds an id to a local address: `rdma_bind_addr(3)`.
pub unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    // SAFETY: the caller passes valid arguments.
    let bound = unsafe { address::read(addr).and_then(|addr| update(id, |core, id, _| core.cm_bind(id, addr))) };
    result(bound)
}

/// Listens for requests: `rdma_listen(3)`.
pub unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: the caller passes a valid id.
    result(unsafe { update(id, |core, id, _| core.cm_listen(id, backlog)) })
}

/// Resolves the address of a peer: `rdma_resolve_addr(3)`.
pub unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    src_addr: *mut sockaddr,
    dst_addr: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller passes valid addresses. The source may be null.
    let addresses = unsafe {
        let source = if src_addr.is_null() { Ok(None) } else { address::read(src_addr).map(Some) };
        source.and_then(|source| Ok((source, address::read(dst_addr)?)))
    };
    let resolved = addresses.and_then(|(source, destination)| {
        // SAFETY: the caller passes a valid id.
        unsafe { update(id, |core, id, _| core.cm_resolve_address(id, source, destination)) }
    });
    // SAFETY: as above.
    unsafe { finish(id, resolved) }
}

/// Resolves the route to a peer: `rdma_resolve_route(3)`.
pub unsafe extern "C" fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int {
    let timeout = Duration::from_millis(timeout_ms.max(0) as u64);
    // SAFETY: the caller passes a valid id.
    unsafe {
        let resolved = update(id, |core, id, now| core.cm_resolve_route(id, timeout, now));
        finish(id, resolved)
    }
}

/// Returns the local port, 0 if there is none: `rdma_get_src_port(3)`.
pub unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> __be16 {
    // SAFETY: the caller passes a valid id.
    let source = unsafe { address::read(&raw const (*id).route.addr.__bindgen_anon_1.src_addr) };
    source.map_or(0, |source| source.port().to_be())
}

/// Returns the port of the peer, 0 if there is none: `rdma_get_dst_port(3)`.
pub unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> __be16 {
    // SAFETY: the caller passes a valid id.
    let peer = unsafe { address::read(&raw const (*id).route.addr.__bindgen_anon_2.dst_addr) };
    peer.map_or(0, |peer| peer.port().to_be())
}
