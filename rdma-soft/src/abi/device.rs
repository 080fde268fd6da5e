//! The device, contexts, and what can be asked of them.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::{offset_of, size_of};
use core::ptr::null_mut;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::OnceLock;

use rdma_sys::*;

use super::refuse::{null, set_errno};
use super::{builder, cq, memory, post, qp, srq};
use crate::device::{Context, Device, PKEY, Signal, bytes, device, gid};

/// Of a message: so that its packets can be told apart by their numbers at the smallest MTU.
pub(crate) const MAX_MESSAGE: u32 = 1 << 30;

/// Work requests of a queue, completions of a queue, and parts of a work request.
pub(crate) const MAX_WR: u32 = 1 << 15;
pub(crate) const MAX_CQE: u32 = 1 << 22;
pub(crate) const MAX_SGE: u32 = 32;
pub(crate) const MAX_INLINE: u32 = 1024;
pub(crate) const MAX_READS: u8 = 128;
const MANY: c_int = 1 << 16;

/// What is behind an `ibv_context`, which is the end of `verbs`.
#[repr(C)]
pub(crate) struct ContextObject {
    verbs: verbs_context,
    /// Its number in the device.
    number: u32,
}

/// The device, as programs know it.
struct DeviceObject(*mut ibv_device);

// SAFETY: it is written when it is made, and read afterwards.
unsafe impl Send for DeviceObject {}
// SAFETY: as above.
unsafe impl Sync for DeviceObject {}

fn the_device() -> *mut ibv_device {
    static OBJECT: OnceLock<DeviceObject> = OnceLock::new();
    let make = || {
        let mut object =
            ibv_device { node_type: IBV_NODE_CA, transport_type: IBV_TRANSPORT_IB, ..ibv_device::zeroed() };
        copy(&mut object.name, "soft0");
        copy(&mut object.dev_name, "uverbs-soft0");
        // It stays as long as the process: lists of devices come and go.
        DeviceObject(Box::into_raw(Box::new(object)))
    };
    OBJECT.get_or_init(make).0
}

fn copy(to: &mut [c_char], text: &str) {
    for (to, from) in to.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// The devices of this process: one.
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    if !count.is_null() {
        // SAFETY: the caller's pointer, where it gives one.
        unsafe { *count = 1 };
    }
    Box::into_raw(Box::new([the_device(), null_mut()])).cast()
}

/// Frees a list; the device stays.
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: it was made so by `ibv_get_device_list`, and is freed once.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) });
}

/// `soft0`.
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: the caller's device is that of a list.
    unsafe { (&raw const (*device).name).cast() }
}

/// Of its first address.
pub unsafe extern "C" fn ibv_get_device_guid(_device: *mut ibv_device) -> __be64 {
    device().map_or(0, guid)
}

fn guid(device: &Device) -> __be64 {
    let [.., a, b, c, d] = device.lock().links.first().map_or([0; 16], |link| gid(link.socket.address()));
    // Locally administered.
    u64::from_be_bytes([0x02, 0x50, 0x0f, 0x7f, a, b, c, d]).to_be()
}

/// There is one.
pub unsafe extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    0
}

/// Opens the device: a context, of which there may be many.
pub unsafe extern "C" fn ibv_open_device(raw: *mut ibv_device) -> *mut ibv_context {
    let Some(device) = device() else { return null(libc::EADDRNOTAVAIL) };
    let signal = match Signal::new() {
        Ok(signal) => signal,
        Err(error) => return null(error.raw_os_error().unwrap_or(libc::EMFILE)),
    };
    let async_fd = signal.fd();
    let number =
        device.lock().state.shared.events.contexts.insert(Context { signal, queue: VecDeque::with_capacity(16) });
    let mut context = ibv_context {
        device: raw,
        cmd_fd: -1,
        async_fd,
        num_comp_vectors: 1,
        abi_compat: __VERBS_ABI_IS_EXTENDED,
        ..ibv_context::zeroed()
    };
    context.ops.poll_cq = Some(cq::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_send = Some(post::post_send);
    context.ops.post_recv = Some(post::post_recv);
    context.ops.post_srq_recv = Some(srq::post_srq_recv);
    context.ops.alloc_mw = Some(memory::alloc_mw);
    context.ops.bind_mw = Some(builder::bind_mw);
    context.ops.dealloc_mw = Some(memory::dealloc_mw);
    let verbs = verbs_context {
        query_port: Some(query_port),
        query_device_ex: Some(query_device_ex),
        create_cq_ex: Some(cq::create_cq_ex),
        create_qp_ex: Some(qp::create_qp_ex),
        create_srq_ex: Some(srq::create_srq_ex),
        sz: size_of::<verbs_context>(),
        context,
        ..verbs_context::zeroed()
    };
    let object = Box::into_raw(Box::new(ContextObject { verbs, number }));
    // SAFETY: it was made just now.
    unsafe { &raw mut (*object).verbs.context }
}

fn object(context: *mut ibv_context) -> *mut ContextObject {
    context.cast::<u8>().wrapping_sub(offset_of!(ContextObject, verbs) + offset_of!(verbs_context, context)).cast()
}

/// The number of a context in the device.
///
/// # Safety
/// It is one that [`ibv_open_device`] has made, and is open.
pub(crate) unsafe fn number(context: *mut ibv_context) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { (*object(context)).number }
}

/// Closes a context. What is left of it goes with it, as when a program ends; to use it afterwards is a fault of the program.
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: the caller's context.
    let number = unsafe { number(context) };
    let Some(device) = device() else { return libc::ENODEV };
    let mut core = device.lock();
    core.send(device.now());
    core.state.close(number);
    core.follow_groups();
    device.leave(core);
    // SAFETY: made by `ibv_open_device`; nothing of the device refers to it any more.
    drop(unsafe { Box::from_raw(object(context)) });
    0
}

fn device_attributes(device: &Device) -> ibv_device_attr_ex {
    let guid = guid(device);
    let flags = IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B
        | IBV_DEVICE_SRQ_RESIZE
        | IBV_DEVICE_CURR_QP_STATE_MOD
        | IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_SYS_IMAGE_GUID
        | IBV_DEVICE_N_NOTIFY_CQ;
    let mut attr = ibv_device_attr {
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: u64::MAX,
        page_size_cap: 4096,
        max_qp: MANY,
        max_qp_wr: MAX_WR as c_int,
        device_cap_flags: flags.0,
        max_sge: MAX_SGE as c_int,
        max_sge_rd: MAX_SGE as c_int,
        max_cq: MANY,
        max_cqe: MAX_CQE as c_int,
        max_mr: MANY,
        max_pd: MANY,
        max_qp_rd_atom: MAX_READS.into(),
        max_res_rd_atom: c_int::from(MAX_READS) * MANY,
        max_qp_init_rd_atom: MAX_READS.into(),
        atomic_cap: IBV_ATOMIC_GLOB,
        max_mw: MANY,
        max_mcast_grp: MANY,
        max_mcast_qp_attach: MANY,
        max_total_mcast_qp_attach: MANY,
        max_ah: MANY,
        max_srq: MANY,
        max_srq_wr: MAX_WR as c_int,
        max_srq_sge: MAX_SGE as c_int,
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
        ..ibv_device_attr::zeroed()
    };
    copy(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
    ibv_device_attr_ex { orig_attr: attr, device_cap_flags_ex: flags.0.into(), ..ibv_device_attr_ex::zeroed() }
}

/// What the device can do.
pub unsafe extern "C" fn ibv_query_device(_context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's structure.
    unsafe { attr.write(device_attributes(device).orig_attr) };
    0
}

unsafe extern "C" fn query_device_ex(
    _context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's structure, where it gives one.
    if !input.is_null() && unsafe { (*input).comp_mask } != 0 {
        return libc::EINVAL;
    }
    let full = device_attributes(device);
    // SAFETY: the caller's structure has that size; those of other releases have fewer or more fields at the end.
    unsafe { write_front(attr.cast(), &full, size) };
    0
}

/// Writes as much as there is room for, and zeros where there is room for more: what later releases have there is not here.
///
/// # Safety
/// `to` has room for `size` bytes.
pub(crate) unsafe fn write_front<T>(to: *mut c_void, from: &T, size: usize) {
    let len = size.min(size_of::<T>());
    let to = to.cast::<u8>();
    // SAFETY: the caller's promise, and no more than there is.
    unsafe {
        to.copy_from(core::ptr::from_ref(from).cast(), len);
        to.add(len).write_bytes(0, size - len);
    }
}

/// The greatest MTU of all addresses of the device.
pub(crate) fn active_mtu(device: &Device) -> ibv_mtu {
    let most = device.lock().links.iter().map(|link| link.socket.mtu()).max().unwrap_or(1024);
    (1..=5).rev().map(ibv_mtu).find(|mtu| bytes(*mtu) <= most).unwrap_or(IBV_MTU_256)
}

fn port_attributes(device: &Device) -> ibv_port_attr {
    ibv_port_attr {
        state: IBV_PORT_ACTIVE,
        max_mtu: IBV_MTU_4096,
        active_mtu: active_mtu(device),
        gid_tbl_len: device.lock().links.len() as c_int,
        // The GIDs are IP addresses, as of all RoCEv2.
        port_cap_flags: 1 << 26,
        max_msg_sz: MAX_MESSAGE,
        pkey_tbl_len: 1,
        max_vl_num: 1,
        active_width: 1,
        active_speed: 1,
        phys_state: 5,
        link_layer: IBV_LINK_LAYER_ETHERNET as u8,
        ..ibv_port_attr::zeroed()
    }
}

unsafe extern "C" fn query_port(_context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr, size: usize) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: the caller's structure has that size.
    unsafe { write_front(attr.cast(), &port_attributes(device), size) };
    0
}

/// What the port is like, without the newest fields.
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: as the caller says; programs of that time have a structure that ends there.
    unsafe { query_port(context, port, attr.cast(), offset_of!(ibv_port_attr, port_cap_flags2)) }
}

fn entry(device: &Device, index: u32) -> Option<ibv_gid_entry> {
    let core = device.lock();
    let socket = &core.links.get(index as usize)?.socket;
    Some(ibv_gid_entry {
        gid: ibv_gid { raw: gid(socket.address()) },
        gid_index: index,
        port_num: 1,
        gid_type: IBV_GID_TYPE_ROCE_V2.0,
        ndev_ifindex: socket.interface(),
    })
}

/// An address of the device, with its type.
pub unsafe extern "C" fn _ibv_query_gid_ex(
    _context: *mut ibv_context,
    port: u32,
    index: u32,
    to: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    if port != 1 || flags != 0 {
        return libc::EINVAL;
    }
    let Some(entry) = entry(device, index) else { return libc::EINVAL };
    // SAFETY: the caller's structure has that size.
    unsafe { write_front(to.cast(), &entry, size) };
    0
}

/// All addresses of the device.
pub unsafe extern "C" fn _ibv_query_gid_table(
    _context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    room: usize,
    flags: u32,
    size: usize,
) -> isize {
    let Some(device) = device() else { return -(libc::ENODEV as isize) };
    let all: Vec<_> = (0..).map_while(|index| entry(device, index)).collect();
    if flags != 0 || all.len() > room {
        return -(libc::EINVAL as isize);
    }
    for (index, entry) in all.iter().enumerate() {
        // SAFETY: the caller's array has room for `room` structures of that size.
        unsafe { write_front(entries.cast::<u8>().add(index * size).cast(), entry, size) };
    }
    all.len() as isize
}

/// An address of the device.
pub unsafe extern "C" fn ibv_query_gid(_: *mut ibv_context, port: u8, index: c_int, to: *mut ibv_gid) -> c_int {
    let found = device().filter(|_| port == 1).and_then(|device| entry(device, u32::try_from(index).ok()?));
    let Some(entry) = found else {
        set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: the caller's structure.
    unsafe { to.write(entry.gid) };
    0
}

/// As the files of Linux number the types: RoCE v2 is 1.
pub unsafe extern "C" fn ibv_query_gid_type(_: *mut ibv_context, port: u8, index: c_uint, to: *mut c_uint) -> c_int {
    if port != 1 || device().and_then(|device| entry(device, index)).is_none() {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller's number.
    unsafe { to.write(1) };
    0
}

/// The one partition.
pub unsafe extern "C" fn ibv_query_pkey(_: *mut ibv_context, port: u8, index: c_int, to: *mut __be16) -> c_int {
    if port != 1 || index != 0 {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller's number.
    unsafe { to.write(PKEY.to_be()) };
    0
}

/// Where a partition is in the table.
pub unsafe extern "C" fn ibv_get_pkey_index(_: *mut ibv_context, port: u8, pkey: __be16) -> c_int {
    if port == 1 && pkey == PKEY.to_be() {
        return 0;
    }
    set_errno(libc::ENOENT);
    -1
}

/// The index of an address of the device among its GIDs.
pub(crate) fn index_of(device: &Device, address: IpAddr) -> Option<usize> {
    device.lock().links.iter().position(|link| link.socket.address() == address)
}
