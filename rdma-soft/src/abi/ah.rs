//! Address handles and multicast groups.

use core::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr};

use rdma_sys::*;

use super::errors::{null, set_errno};
use super::gids;
use crate::device::{Destination, address, device};
use crate::transport::Time;

/// The memory of an `ibv_ah`.
#[repr(C)]
pub(crate) struct AhObject {
    base: ibv_ah,
    pub(crate) to: Destination,
}

/// Resolves an address vector to a destination.
///
/// # Errors
/// `EINVAL` without a global route, for an unspecified address, or for a port other than 1. `ENETUNREACH` if the source and the
/// destination are of different address families.
pub(crate) fn destination(attr: &ibv_ah_attr) -> Result<Destination, c_int> {
    let device = device().ok_or(libc::ENODEV)?;
    if attr.is_global == 0 || attr.port_num != 1 {
        return Err(libc::EINVAL);
    }
    let (link, from) = {
        let links = &device.lock().links;
        let link = gids::link_at(attr.grh.sgid_index.into(), links.len()).ok_or(libc::EINVAL)?;
        (link, links[link].socket.address())
    };
    // SAFETY: any bytes of the union are a valid GID.
    let to = address(unsafe { attr.grh.dgid.raw });
    if to.is_unspecified() {
        return Err(libc::EINVAL);
    }
    if from.is_ipv4() == to.is_ipv4() {
        Ok(Destination { link, address: to, class: attr.grh.traffic_class })
    } else {
        Err(libc::ENETUNREACH)
    }
}

/// Creates an address handle: `ibv_create_ah(3)`.
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the caller passes valid structures.
    let (attr, context) = unsafe { (*attr, (*pd).context) };
    match destination(&attr) {
        Ok(to) => Box::into_raw(Box::new(AhObject { base: ibv_ah { context, pd, handle: 0 }, to })).cast(),
        Err(errno) => null(errno),
    }
}

/// Destroys an address handle. Posted work keeps a copy of the destination.
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: `ibv_create_ah` created it, and work holds a copy of its destination.
    drop(unsafe { Box::from_raw(ah.cast::<AhObject>()) });
    0
}

/// Returns the source, the destination and the traffic class of a datagram.
fn parse_grh(grh: &ibv_grh) -> (IpAddr, IpAddr, u8) {
    // SAFETY: the structure is an IPv6 header of 40 bytes without padding, and any bytes are valid.
    let bytes: [u8; 40] = unsafe { core::mem::transmute_copy(grh) };
    let v4 = |at: usize| IpAddr::V4(Ipv4Addr::new(bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]));
    let gid = |at: usize| {
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[at..at + 16]);
        address(gid)
    };
    // An IPv4 header is in the second half. The content of the first half is undefined.
    if bytes[0] >> 4 != 6 && bytes[20] == 0x45 {
        (v4(32), v4(36), bytes[21])
    } else {
        (gid(8), gid(24), bytes[0] << 4 | bytes[1] >> 4)
    }
}

/// Fills in the address vector for a reply to a datagram: `ibv_init_ah_from_wc(3)`.
pub unsafe extern "C" fn ibv_init_ah_from_wc(
    _context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    // SAFETY: the caller passes valid structures.
    let (wc, grh) = unsafe { (*wc, *grh) };
    let found = device().filter(|_| wc.wc_flags & IBV_WC_GRH.0 != 0).and_then(|device| {
        let (from, to, class) = parse_grh(&grh);
        // A reply to a multicast datagram has the first address as its source.
        let index = if to.is_multicast() { Some(0) } else { device.index_of(to) };
        Some((from, index?, class))
    });
    let Some((from, index, class)) = found else {
        set_errno(libc::EINVAL);
        return -1;
    };
    let grh = ibv_global_route {
        dgid: ibv_gid { raw: crate::device::gid(from) },
        sgid_index: index as u8,
        hop_limit: crate::net::Origin::HOPS,
        traffic_class: class,
        ..ibv_global_route::zeroed()
    };
    // The service level stays 0: `wc.sl` holds the packet type.
    let back = ibv_ah_attr { grh, is_global: 1, port_num: port, ..ibv_ah_attr::zeroed() };
    // SAFETY: the caller passes a valid structure.
    unsafe { attr.write(back) };
    0
}

/// Creates an address handle for a reply to a datagram: `ibv_create_ah_from_wc(3)`.
pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    let mut attr = ibv_ah_attr::zeroed();
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        if ibv_init_ah_from_wc((*pd).context, port, wc, grh, &raw mut attr) != 0 {
            return null(libc::EINVAL);
        }
        ibv_create_ah(pd, &raw mut attr)
    }
}

/// Resolves a GID to an Ethernet address.
///
/// A multicast address maps to its Ethernet address. Others have none here, since datagrams go through the kernel's IP.
pub unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(
    _context: *mut ibv_context,
    attr: *mut ibv_ah_attr,
    mac: *mut u8,
    vid: *mut u16,
) -> c_int {
    // SAFETY: the caller passes valid structures.
    let to = match destination(unsafe { &*attr }) {
        Ok(to) => to.address,
        Err(errno) => {
            set_errno(errno);
            return -1;
        }
    };
    let found = match to {
        IpAddr::V4(v4) if v4.is_multicast() => {
            let [_, b, c, d] = v4.octets();
            [0x01, 0x00, 0x5e, b & 0x7f, c, d]
        }
        IpAddr::V6(v6) if v6.is_multicast() => {
            let [.., a, b, c, d] = v6.octets();
            [0x33, 0x33, a, b, c, d]
        }
        _ => [0; 6],
    };
    // SAFETY: `mac` points to six bytes, and `vid` is valid unless it is null.
    unsafe {
        mac.copy_from(found.as_ptr(), 6);
        if !vid.is_null() {
            vid.write(0xffff);
        }
    }
    0
}

/// Joins a multicast group: `ibv_attach_mcast(3)`.
pub unsafe extern "C" fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: the caller passes valid structures.
    let (number, gid) = unsafe { ((*qp).qp_num, crate::device::group_gid((*gid).raw)) };
    let Some(device) = device() else { return libc::ENODEV };
    let mut core = device.lock();
    let joined = core.state.join_group(gid, number);
    core.update_groups();
    // Wakes the server, so that it also waits for the socket of the group.
    device.server.wake_before(Time(0));
    joined.err().unwrap_or(0)
}

/// Leaves a multicast group.
pub unsafe extern "C" fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: the caller passes valid structures.
    let (number, gid) = unsafe { ((*qp).qp_num, crate::device::group_gid((*gid).raw)) };
    let Some(device) = device() else { return libc::ENODEV };
    let mut core = device.lock();
    let left = core.state.leave_group(gid, number);
    core.update_groups();
    left.err().unwrap_or(0)
}
