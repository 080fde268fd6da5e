//! Binding and resolving addresses, and listening.

use core::ffi::c_int;
use core::time::Duration;

use libc::sockaddr;
use rdma_sys::*;

use super::id::complete;
use super::object::{number, refresh};
use super::{address, result};
use crate::device::{Core, device};
use crate::transport::Time;

/// Runs a call on an id with the device locked, and copies the changed fields to its C structure.
///
/// `ENXIO` if the device of the id was removed.
///
/// # Safety
/// The id is valid, and no other thread accesses its structure.
pub(super) unsafe fn update(
    id: *mut rdma_cm_id,
    call: impl FnOnce(&mut Core, u32) -> Result<(), c_int>,
) -> Result<(), c_int> {
    let device = device().ok_or(libc::ENODEV)?;
    // SAFETY: the caller passes a valid id.
    let number = unsafe { number(id) };
    let mut core = device.lock();
    let called = core.state.cma.check_device(number).and_then(|()| call(&mut core, number));
    // A peer in this process answers at once.
    core.receive_own(device.now());
    // SAFETY: as above.
    unsafe { refresh(&core, id) };
    device.unlock(core);
    called
}

/// Binds an id to a local address: `rdma_bind_addr(3)`.
pub unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    // SAFETY: the caller passes valid arguments.
    let bound = unsafe { address::read(addr).and_then(|addr| update(id, |core, id| core.cm_bind(id, addr))) };
    result(bound)
}

/// Listens for requests: `rdma_listen(3)`.
pub unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: the caller passes a valid id.
    result(unsafe { update(id, |core, id| core.cm_listen(id, backlog)) })
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
        unsafe { update(id, |core, id| core.cm_resolve_address(id, source, destination)) }
    });
    match result(resolved) {
        // SAFETY: as above.
        0 => unsafe { complete(id) },
        failed => failed,
    }
}

/// Resolves the route to a peer: `rdma_resolve_route(3)`.
pub unsafe extern "C" fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int {
    let timeout = Duration::from_millis(timeout_ms.max(0) as u64);
    let now = device().map_or(Time(0), |device| device.now());
    // SAFETY: the caller passes a valid id.
    match result(unsafe { update(id, |core, id| core.cm_resolve_route(id, timeout, now)) }) {
        // SAFETY: as above.
        0 => unsafe { complete(id) },
        failed => failed,
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
