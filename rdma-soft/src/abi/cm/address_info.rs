//! Names of hosts and services.

use core::ffi::{c_char, c_int, c_void};
use core::ptr::null_mut;

use libc::{addrinfo, sockaddr};
use rdma_sys::*;

use super::result;

/// Resolves a host and a service: `rdma_getaddrinfo(3)`. Returns one result, as librdmacm does.
///
/// Returns an error code of `getaddrinfo(3)`, or -1 with `errno`.
pub unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    res: *mut *mut rdma_addrinfo,
) -> c_int {
    if node.is_null() && service.is_null() && hints.is_null() {
        return result(Err(libc::EINVAL));
    }
    // SAFETY: the caller passes valid hints or none.
    let hints = if hints.is_null() { rdma_addrinfo::zeroed() } else { unsafe { hints.read() } };
    let mut made = rdma_addrinfo { ai_flags: hints.ai_flags, ai_family: hints.ai_family, ..rdma_addrinfo::zeroed() };
    set_type(&mut made, &hints);
    if !node.is_null() || !service.is_null() {
        // SAFETY: the caller passes strings or null.
        match unsafe { resolve(node, service, &hints, &mut made) } {
            0 => {}
            code => return code,
        }
    }
    if hints.ai_family == AF_IB {
        // SAFETY: the addresses of the result have the family and length that it names.
        unsafe { convert_to_ib(&mut made, !service.is_null()) };
    }
    let is_passive = hints.ai_flags & RAI_PASSIVE != 0;
    // SAFETY: the addresses in the hints have the lengths that the hints name.
    unsafe {
        if hints.ai_src_len > 0 && made.ai_src_addr.is_null() {
            (made.ai_src_addr, made.ai_src_len) =
                (copy(hints.ai_src_addr, hints.ai_src_len as usize), hints.ai_src_len);
        }
        if hints.ai_dst_len > 0 && made.ai_dst_addr.is_null() && (is_passive || node.is_null()) {
            (made.ai_dst_addr, made.ai_dst_len) =
                (copy(hints.ai_dst_addr, hints.ai_dst_len as usize), hints.ai_dst_len);
        }
        res.write(Box::into_raw(Box::new(made)));
    }
    0
}

/// Chooses queue pair type and port space: each follows from the other, and reliable connections are the default.
fn set_type(made: &mut rdma_addrinfo, hints: &rdma_addrinfo) {
    let is_datagram = hints.ai_qp_type == IBV_QPT_UD.0 as c_int || hints.ai_port_space == RDMA_PS_UDP.0 as c_int;
    let (qp_type, space) = if is_datagram { (IBV_QPT_UD, RDMA_PS_UDP) } else { (IBV_QPT_RC, RDMA_PS_TCP) };
    let or = |value: c_int, default: u32| if value == 0 { default as c_int } else { value };
    made.ai_qp_type = or(hints.ai_qp_type, qp_type.0);
    made.ai_port_space = or(hints.ai_port_space, space.0);
}

/// Resolves names with the C library.
///
/// # Safety
/// The names are strings or null.
unsafe fn resolve(
    node: *const c_char,
    service: *const c_char,
    hints: &rdma_addrinfo,
    made: &mut rdma_addrinfo,
) -> c_int {
    let is_passive = hints.ai_flags & RAI_PASSIVE != 0;
    // SAFETY: all bytes of the structure may be zero.
    let mut wanted = unsafe { core::mem::zeroed::<addrinfo>() };
    if is_passive {
        wanted.ai_flags |= libc::AI_PASSIVE;
    }
    if hints.ai_flags & RAI_NUMERICHOST != 0 {
        wanted.ai_flags |= libc::AI_NUMERICHOST;
    }
    // Without `RAI_FAMILY` the family is only a preference. It is used here in any case.
    wanted.ai_family = match hints.ai_family {
        libc::AF_INET | libc::AF_INET6 => hints.ai_family,
        // A GID is written like an IPv6 address.
        AF_IB => libc::AF_INET6,
        _ => libc::AF_UNSPEC,
    };
    wanted.ai_socktype =
        if made.ai_port_space == RDMA_PS_UDP.0 as c_int { libc::SOCK_DGRAM } else { libc::SOCK_STREAM };
    let mut found = null_mut();
    // SAFETY: the caller passes strings or null, and the structures are valid.
    let code = unsafe { libc::getaddrinfo(node, service, &raw const wanted, &raw mut found) };
    if code != 0 {
        return code;
    }
    // SAFETY: the list has at least one entry, whose address has the length that it names.
    unsafe {
        let first = &*found;
        let (address, len) = (copy(first.ai_addr, first.ai_addrlen as usize), first.ai_addrlen);
        let name = if first.ai_canonname.is_null() { null_mut() } else { libc::strdup(first.ai_canonname) };
        made.ai_family = first.ai_family;
        match is_passive {
            true => (made.ai_src_addr, made.ai_src_len, made.ai_src_canonname) = (address, len, name),
            false => (made.ai_dst_addr, made.ai_dst_len, made.ai_dst_canonname) = (address, len, name),
        }
        libc::freeaddrinfo(found);
    }
    0
}

/// Converts the IPv6 addresses of a result to native InfiniBand addresses.
///
/// # Safety
/// The addresses have the length that the result names, and room for any address.
unsafe fn convert_to_ib(made: &mut rdma_addrinfo, has_service: bool) {
    let space = made.ai_port_space as u64;
    for (address, len) in [(made.ai_src_addr, &mut made.ai_src_len), (made.ai_dst_addr, &mut made.ai_dst_len)] {
        // SAFETY: the caller passes valid addresses or null.
        let Ok(resolved) = (if address.is_null() { Err(0) } else { unsafe { super::address::read(address) } }) else {
            continue;
        };
        let std::net::IpAddr::V6(gid) = resolved.ip() else { continue };
        let raw = sockaddr_ib {
            sib_family: AF_IB as libc::sa_family_t,
            sib_pkey: u16::MAX,
            sib_addr: ib_addr { ib_u: ib_addr__bindgen_ty_1 { uib_addr8: gid.octets() } },
            sib_sid: (space << 16 | u64::from(resolved.port())).to_be(),
            sib_sid_mask: (if has_service { u64::MAX } else { u64::MAX << 16 }).to_be(),
            ..sockaddr_ib::zeroed()
        };
        // SAFETY: as above.
        unsafe { address.cast::<sockaddr_ib>().write_unaligned(raw) };
        *len = size_of::<sockaddr_ib>() as libc::socklen_t;
    }
    made.ai_family = AF_IB;
}

/// Copies a socket address to memory of `malloc(3)`, as large as any address.
///
/// # Safety
/// `from` points to `len` bytes.
unsafe fn copy(from: *const sockaddr, len: usize) -> *mut sockaddr {
    let size = size_of::<libc::sockaddr_storage>();
    // SAFETY: the arguments are numbers.
    let to = unsafe { libc::calloc(1, size.max(len)) }.cast::<u8>();
    if !to.is_null() && !from.is_null() {
        // SAFETY: both have that many bytes.
        unsafe { to.copy_from_nonoverlapping(from.cast(), len) };
    }
    to.cast()
}

/// Frees the result of [`rdma_getaddrinfo`]: `rdma_freeaddrinfo(3)`.
pub unsafe extern "C" fn rdma_freeaddrinfo(res: *mut rdma_addrinfo) {
    let mut next = res;
    while !next.is_null() {
        // SAFETY: `rdma_getaddrinfo` created the result, and the caller frees it once. Its parts are of `malloc(3)` or null.
        unsafe {
            let info = Box::from_raw(next);
            libc::free(info.ai_src_addr.cast::<c_void>());
            libc::free(info.ai_dst_addr.cast::<c_void>());
            libc::free(info.ai_src_canonname.cast::<c_void>());
            libc::free(info.ai_dst_canonname.cast::<c_void>());
            next = info.ai_next;
        }
    }
}
