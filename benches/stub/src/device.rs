//! The device, with one port, and its queries.

use std::ffi::{c_char, c_int};
use std::net::Ipv4Addr;
use std::sync::OnceLock;

use rdma_sys::*;

use crate::{cq, free, new, qp, srq};

const NAME: &str = "stub0";
const GUID: u64 = 0x0200_00ff_fe00_0001;
const MAX_MESSAGE: u32 = 1 << 30;

struct Device(*mut ibv_device);

// SAFETY: the device never changes.
unsafe impl Send for Device {}
unsafe impl Sync for Device {}

fn device() -> *mut ibv_device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let make = || {
        let mut device =
            ibv_device { node_type: IBV_NODE_CA, transport_type: IBV_TRANSPORT_IB, ..ibv_device::zeroed() };
        for (to, from) in device.name.iter_mut().zip(NAME.bytes()) {
            *to = from as c_char;
        }
        device.dev_name = device.name;
        Device(new(device))
    };
    DEVICE.get_or_init(make).0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    if !count.is_null() {
        unsafe { *count = 1 };
    }
    new([device(), std::ptr::null_mut()]).cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    unsafe { free(list.cast::<[*mut ibv_device; 2]>()) };
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    unsafe { (&raw const (*device).name).cast() }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_get_device_guid(_: *mut ibv_device) -> __be64 {
    GUID.to_be()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_get_device_index(_: *mut ibv_device) -> c_int {
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let mut context = ibv_context {
        device,
        cmd_fd: -1,
        async_fd: -1,
        num_comp_vectors: 1,
        abi_compat: __VERBS_ABI_IS_EXTENDED,
        ..ibv_context::zeroed()
    };
    context.ops.poll_cq = Some(cq::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_send = Some(qp::post_send);
    context.ops.post_recv = Some(qp::post_recv);
    context.ops.post_srq_recv = Some(srq::post_srq_recv);
    let extended = new(verbs_context {
        sz: size_of::<verbs_context>(),
        query_port: Some(query_port),
        query_device_ex: Some(query_device_ex),
        create_cq_ex: Some(cq::create_cq_ex),
        create_qp_ex: Some(qp::create_qp_ex),
        context,
        ..verbs_context::zeroed()
    });
    unsafe { &raw mut (*extended).context }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    unsafe { free(verbs_get_ctx(context)) }
}

fn attributes() -> ibv_device_attr {
    ibv_device_attr {
        node_guid: GUID.to_be(),
        max_mr_size: u64::MAX,
        max_qp: 1 << 16,
        max_qp_wr: 1 << 14,
        max_sge: qp::MAX_SGE as c_int,
        max_srq: 1 << 16,
        max_srq_wr: 1 << 14,
        max_srq_sge: qp::MAX_SGE as c_int,
        max_cq: 1 << 16,
        max_cqe: 1 << 20,
        max_mr: 1 << 20,
        max_pd: 1 << 16,
        max_qp_rd_atom: 16,
        max_qp_init_rd_atom: 16,
        phys_port_cnt: 1,
        ..ibv_device_attr::zeroed()
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_device(_: *mut ibv_context, to: *mut ibv_device_attr) -> c_int {
    unsafe { to.write(attributes()) };
    0
}

unsafe extern "C" fn query_device_ex(
    _: *mut ibv_context,
    _: *const ibv_query_device_ex_input,
    to: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    let full = ibv_device_attr_ex { orig_attr: attributes(), ..ibv_device_attr_ex::zeroed() };
    unsafe { copy_prefix(&full, to, size) };
    0
}

fn port() -> ibv_port_attr {
    ibv_port_attr {
        state: IBV_PORT_ACTIVE,
        max_mtu: IBV_MTU_4096,
        active_mtu: IBV_MTU_4096,
        gid_tbl_len: 1,
        max_msg_sz: MAX_MESSAGE,
        pkey_tbl_len: 1,
        link_layer: IBV_LINK_LAYER_ETHERNET as u8,
        ..ibv_port_attr::zeroed()
    }
}

unsafe extern "C" fn query_port(_: *mut ibv_context, number: u8, to: *mut ibv_port_attr, size: usize) -> c_int {
    if number != 1 {
        return libc::EINVAL;
    }
    unsafe { copy_prefix(&port(), to, size) };
    0
}

/// Leaves the newer fields alone, as libibverbs does for old binaries.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    number: u8,
    to: *mut _compat_ibv_port_attr,
) -> c_int {
    unsafe { query_port(context, number, to.cast(), std::mem::offset_of!(ibv_port_attr, port_cap_flags2)) }
}

/// Writes at most `size` bytes of `from`, for callers that were compiled with other headers.
unsafe fn copy_prefix<T>(from: &T, to: *mut T, size: usize) {
    let from = std::ptr::from_ref(from).cast::<u8>();
    unsafe { to.cast::<u8>().copy_from(from, size.min(size_of::<T>())) };
}

fn gid() -> ibv_gid {
    ibv_gid { raw: Ipv4Addr::new(10, 9, 9, 1).to_ipv6_mapped().octets() }
}

fn gid_entry() -> ibv_gid_entry {
    ibv_gid_entry { gid: gid(), gid_index: 0, port_num: 1, gid_type: IBV_GID_TYPE_ROCE_V2.0, ndev_ifindex: 0 }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _ibv_query_gid_ex(
    _: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _flags: u32,
    _size: usize,
) -> c_int {
    match (port, index) {
        (1, 0) => {
            unsafe { entry.write(gid_entry()) };
            0
        }
        _ => libc::ENODATA,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn _ibv_query_gid_table(
    _: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    _flags: u32,
    _size: usize,
) -> isize {
    if max_entries == 0 {
        return -(libc::EINVAL as isize);
    }
    unsafe { entries.write(gid_entry()) };
    1
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_gid(
    _: *mut ibv_context,
    _port: u8,
    _index: c_int,
    to: *mut ibv_gid,
) -> c_int {
    unsafe { to.write(gid()) };
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_pkey(
    _: *mut ibv_context,
    _port: u8,
    _index: c_int,
    pkey: *mut __be16,
) -> c_int {
    unsafe { *pkey = 0xffff };
    0
}
