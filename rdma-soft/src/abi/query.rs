//! Attributes of the device and its port.

use core::ffi::{c_int, c_uint};
use core::mem::offset_of;

use rdma_sys::*;

use super::errors::set_errno;
use super::fill::{write_front, write_text};
use super::gids::{self, entry};
use super::limits::{MAX_CQE, MAX_MESSAGE, MAX_OBJECTS, MAX_RD_ATOMIC, MAX_SGE, MAX_WR};
use crate::device::{Device, PKEY, device, gid};

/// First three bytes of the device's GUID. They are locally administered, so no vendor has them.
const VENDOR: u32 = 0x02_50_0f;

/// Returns the GUID of the device. It ends with the last four bytes of the device's first address.
pub(super) fn guid(device: &Device) -> __be64 {
    let [.., a, b, c, d] = device.lock().links.first().map_or([0; 16], |link| gid(link.socket.address()));
    let [_, vendor @ ..] = VENDOR.to_be_bytes();
    let [x, y, z] = vendor;
    u64::from_be_bytes([x, y, z, 0x7f, a, b, c, d]).to_be()
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
        // The device accepts pages of any size.
        page_size_cap: 4096,
        vendor_id: VENDOR,
        max_qp: MAX_OBJECTS,
        max_qp_wr: MAX_WR as c_int,
        device_cap_flags: flags.0,
        max_sge: MAX_SGE as c_int,
        max_sge_rd: MAX_SGE as c_int,
        max_cq: MAX_OBJECTS,
        max_cqe: MAX_CQE as c_int,
        max_mr: MAX_OBJECTS,
        max_pd: MAX_OBJECTS,
        max_qp_rd_atom: MAX_RD_ATOMIC.into(),
        max_res_rd_atom: c_int::from(MAX_RD_ATOMIC) * MAX_OBJECTS,
        max_qp_init_rd_atom: MAX_RD_ATOMIC.into(),
        // `IBV_ATOMIC_GLOB` would be correct, too: see `pci_atomic_caps`. But UCX and others accept only this value.
        atomic_cap: IBV_ATOMIC_HCA,
        max_mw: MAX_OBJECTS,
        max_mcast_grp: MAX_OBJECTS,
        max_mcast_qp_attach: MAX_OBJECTS,
        max_total_mcast_qp_attach: MAX_OBJECTS,
        max_ah: MAX_OBJECTS,
        max_srq: MAX_OBJECTS,
        max_srq_wr: MAX_WR as c_int,
        max_srq_sge: MAX_SGE as c_int,
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
        ..ibv_device_attr::zeroed()
    };
    write_text(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
    // The processor executes the atomic operations of peers, so they are atomic with its own.
    let word = IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP.0 as u16;
    ibv_device_attr_ex {
        orig_attr: attr,
        device_cap_flags_ex: flags.0.into(),
        pci_atomic_caps: ibv_pci_atomic_caps { fetch_add: word, swap: 0, compare_swap: word },
        phys_port_cnt_ex: 1,
        ..ibv_device_attr_ex::zeroed()
    }
}

/// Returns the attributes of the device: `ibv_query_device(3)`.
pub unsafe extern "C" fn ibv_query_device(_context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid structure.
    unsafe { attr.write(device_attributes(device).orig_attr) };
    0
}

pub(super) unsafe extern "C" fn query_device_ex(
    _context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: `input` is valid, unless it is null.
    if !input.is_null() && unsafe { (*input).comp_mask } != 0 {
        return libc::EINVAL;
    }
    let full = device_attributes(device);
    // SAFETY: the caller's structure has `size` bytes. Other releases of it have fewer or more fields at the end.
    unsafe { write_front(attr.cast(), &full, size) };
    0
}

/// `active_width` and `active_speed` of one lane of 25 Gbit/s, about what one thread transfers by UDP.
const WIDTH_1X: u8 = 1;
const SPEED_EDR: u8 = 32;

fn port_attributes(device: &Device) -> ibv_port_attr {
    ibv_port_attr {
        state: IBV_PORT_ACTIVE,
        max_mtu: IBV_MTU_4096,
        active_mtu: device.active_mtu(),
        gid_tbl_len: gids::len(device.lock().links.len()) as c_int,
        // `IBV_PORT_IP_BASED_GIDS`: GIDs of RoCEv2 are IP addresses.
        port_cap_flags: 1 << 26,
        max_msg_sz: MAX_MESSAGE,
        pkey_tbl_len: 1,
        max_vl_num: 1,
        active_width: WIDTH_1X,
        active_speed: SPEED_EDR,
        phys_state: 5,
        link_layer: IBV_LINK_LAYER_ETHERNET as u8,
        ..ibv_port_attr::zeroed()
    }
}

pub(super) unsafe extern "C" fn query_port(
    _context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: the caller passes a valid structure has that size.
    unsafe { write_front(attr.cast(), &port_attributes(device), size) };
    0
}

/// Returns the attributes of the port, without the newest fields.
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: the caller keeps the contract of the verb. Programs that call this function have a structure that ends there.
    unsafe { query_port(context, port, attr.cast(), offset_of!(ibv_port_attr, port_cap_flags2)) }
}

/// Returns an entry of the GID table: `ibv_query_gid_ex(3)`.
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
    // SAFETY: the caller passes a valid structure has that size.
    unsafe { write_front(to.cast(), &entry, size) };
    0
}

/// Returns the GID table: `ibv_query_gid_table(3)`.
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
        // SAFETY: the caller's array has room for `room` structures of `size` bytes.
        unsafe { write_front(entries.cast::<u8>().add(index * size).cast(), entry, size) };
    }
    all.len() as isize
}

/// Returns a GID: `ibv_query_gid(3)`.
pub unsafe extern "C" fn ibv_query_gid(_: *mut ibv_context, port: u8, index: c_int, to: *mut ibv_gid) -> c_int {
    let found = device().filter(|_| port == 1).and_then(|device| entry(device, u32::try_from(index).ok()?));
    let Some(entry) = found else {
        set_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: the caller passes a valid structure.
    unsafe { to.write(entry.gid) };
    0
}

/// Returns the type of a GID, in the numbers of sysfs: RoCE v2 is 1.
pub unsafe extern "C" fn ibv_query_gid_type(_: *mut ibv_context, port: u8, index: c_uint, to: *mut c_uint) -> c_int {
    if port != 1 || device().and_then(|device| entry(device, index)).is_none() {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller passes a valid pointer.
    unsafe { to.write(1) };
    0
}

/// Returns the only partition key: `ibv_query_pkey(3)`.
pub unsafe extern "C" fn ibv_query_pkey(_: *mut ibv_context, port: u8, index: c_int, to: *mut __be16) -> c_int {
    if port != 1 || index != 0 {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller passes a valid pointer.
    unsafe { to.write(PKEY.to_be()) };
    0
}

/// Returns the index of a partition key: `ibv_get_pkey_index(3)`.
pub unsafe extern "C" fn ibv_get_pkey_index(_: *mut ibv_context, port: u8, pkey: __be16) -> c_int {
    if port == 1 && pkey == PKEY.to_be() {
        return 0;
    }
    set_errno(libc::ENOENT);
    -1
}
