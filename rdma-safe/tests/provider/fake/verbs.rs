//! Devices, contexts and device queries.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::mem::offset_of;
use std::sync::{Arc, Mutex};

use rdma_sys::*;

use super::Inside;
use super::config::{Config, Port};
use super::events::AsyncQueue;
use super::import::Command;
use super::state::{Alloc, Context, Device, State, enter, null, own, owner, plugged, set_errno};
use super::{advise, cq, dm, domains, flow, memory, post, qp, queries, srq, tags, wq, xrc};

/// The behavior of `ibv_get_device_list` on this thread.
#[derive(Clone, Copy)]
pub(crate) enum DeviceList {
    Full,
    Empty,
    Fails(i32),
}

thread_local! {
    static LIST: Cell<DeviceList> = const { Cell::new(DeviceList::Full) };
}

/// Runs `f` while `ibv_get_device_list` behaves as given, on this thread.
pub(crate) fn with_device_list<R>(list: DeviceList, f: impl FnOnce() -> R) -> R {
    super::table::install();
    LIST.set(list);
    let result = f();
    LIST.set(DeviceList::Full);
    result
}

/// A returned list: its array, and the devices that it keeps alive.
type List = (Alloc, Vec<Arc<Device>>);

static LISTS: Mutex<BTreeMap<usize, List>> = Mutex::new(BTreeMap::new());

const MAX_DEVICES: usize = 255;

/// Like `null`, outside of `enter`.
pub(super) fn null_at_once<T>(errno: i32) -> *mut T {
    if errno != 0 {
        unsafe { *libc::__errno_location() = errno };
    }
    std::ptr::null_mut()
}

pub(super) unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let _inside = Inside::enter();
    let devices = match LIST.get() {
        DeviceList::Full => plugged(),
        DeviceList::Empty => Vec::new(),
        DeviceList::Fails(errno) => return null_at_once(errno),
    };
    let mut array = [std::ptr::null_mut(); MAX_DEVICES + 1];
    assert!(devices.len() <= MAX_DEVICES);
    for (to, from) in array.iter_mut().zip(&devices) {
        *to = from.raw.0;
    }
    let (alloc, raw) = Alloc::new(array);
    unsafe { *count = devices.len() as c_int };
    LISTS.lock().unwrap().insert(raw.addr(), (alloc, devices));
    raw.cast()
}

pub(super) unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    let _inside = Inside::enter();
    assert!(LISTS.lock().unwrap().remove(&list.addr()).is_some(), "a device list was freed twice");
}

fn device(raw: *mut ibv_device) -> Arc<Device> {
    owner(raw)
        .or_else(|| {
            // An unplugged device remains in lists that were created before.
            let lists = LISTS.lock().unwrap();
            lists.values().flat_map(|(_, devices)| devices).find(|device| device.raw.0 == raw).cloned()
        })
        .expect("a device that is in no list")
}

pub(super) unsafe extern "C" fn get_device_name(raw: *mut ibv_device) -> *const c_char {
    unsafe { (&raw const (*raw).name).cast() }
}

pub(super) unsafe extern "C" fn get_device_guid(raw: *mut ibv_device) -> __be64 {
    let _inside = Inside::enter();
    device(raw).config.guid.to_be()
}

pub(super) unsafe extern "C" fn get_device_index(raw: *mut ibv_device) -> c_int {
    let _inside = Inside::enter();
    device(raw).index
}

pub(super) unsafe extern "C" fn open_device(raw: *mut ibv_device) -> *mut ibv_context {
    if owner(raw).is_none() {
        return null_at_once(libc::ENODEV);
    }
    enter(raw, "ibv_open_device", |state, device| {
        if let Some(errno) = state.fault("ibv_open_device") {
            return null(errno);
        }
        let command = Command::open(device.index);
        add_context(state, device, command)
    })
}

pub(super) fn add_context(state: &mut State, device: &Arc<Device>, command: Option<Command>) -> *mut ibv_context {
    let events = state.config.async_events.then(AsyncQueue::new).flatten();
    let async_fd = events.as_ref().map_or(-1, AsyncQueue::fd);
    let cmd_fd = command.as_ref().map_or(-1, Command::fd);
    let mut context =
        ibv_context { device: device.raw.0, num_comp_vectors: 2, cmd_fd, async_fd, ..ibv_context::zeroed() };
    context.ops.poll_cq = Some(cq::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_send = Some(post::post_send);
    context.ops.post_recv = Some(post::post_recv);
    context.ops.post_srq_recv = Some(srq::post_srq_recv);
    let (alloc, raw) = if state.config.extended_context {
        context.abi_compat = __VERBS_ABI_IS_EXTENDED;
        let (alloc, raw) = Alloc::new(extended(&state.config, context));
        (alloc, unsafe { &raw mut (*raw).context })
    } else {
        Alloc::new(context)
    };
    own(raw, device);
    state.contexts.insert(raw.addr(), Context { alloc, events, command });
    raw
}

fn extended(config: &Config, context: ibv_context) -> verbs_context {
    let mut extended = verbs_context { sz: size_of::<verbs_context>(), context, ..verbs_context::zeroed() };
    extended.query_port = Some(query_port);
    if config.query_device_ex {
        extended.query_device_ex = Some(query_device_ex);
    }
    if config.domains {
        extended.alloc_td = Some(domains::alloc_td);
        extended.dealloc_td = Some(domains::dealloc_td);
        extended.alloc_parent_domain = Some(domains::alloc_parent_domain);
    }
    extended.open_xrcd = Some(xrc::open_xrcd);
    extended.close_xrcd = Some(xrc::close_xrcd);
    extended.create_srq_ex = Some(xrc::create_srq_ex);
    extended.get_srq_num = Some(xrc::get_srq_num);
    extended.open_qp = Some(xrc::open_qp);
    extended.post_srq_ops = Some(tags::post_srq_ops);
    if config.odp != 0 {
        extended.advise_mr = Some(advise::advise_mr);
    }
    extended.alloc_dm = Some(dm::alloc_dm);
    extended.free_dm = Some(dm::free_dm);
    extended.reg_dm_mr = Some(dm::reg_dm_mr);
    if config.null_mr {
        extended.alloc_null_mr = Some(memory::alloc_null_mr);
    }
    if config.moderation.is_some() {
        extended.modify_cq = Some(cq::modify_cq);
    }
    if config.rate_limits {
        extended.modify_qp_rate_limit = Some(qp::modify_qp_rate_limit);
    }
    if config.steering {
        wq::set_operations(&mut extended);
        flow::set_operations(&mut extended);
    }
    if config.raw_clock.is_some() {
        extended.query_rt_values = Some(queries::query_rt_values);
    }
    if config.extended_cq {
        extended.create_cq_ex = Some(cq::create_cq_ex);
    }
    if config.extended_qp {
        extended.create_qp_ex = Some(qp::create_qp_ex);
    }
    extended
}

pub(super) unsafe extern "C" fn close_device(raw: *mut ibv_context) -> c_int {
    enter(raw, "ibv_close_device", |state, _| {
        let address = raw.addr();
        if state.context(address, "ibv_close_device").is_none() {
            return libc::EINVAL;
        }
        let children = state.pds.values().filter(|pd| pd.context == address).count()
            + state.channels.values().filter(|channel| channel.context == address).count()
            + state.cqs.values().filter(|cq| cq.context == address).count()
            + state.srqs.values().filter(|srq| srq.context == address).count()
            + state.tds.values().filter(|td| td.context == address).count()
            + state.dms.values().filter(|dm| dm.context == address).count()
            + state.dmahs.values().filter(|dmah| dmah.context == address).count()
            + state.xrcds.values().filter(|xrcd| xrcd.context == address).count()
            + state.opened.values().filter(|opened| opened.context == address).count()
            + state.qps.values().filter(|qp| qp.context == address && !qp.orphan).count()
            + state.objects_of_steering(address);
        if children > 0 {
            state.violation(format!("ibv_close_device of a context with {children} objects"));
            return libc::EBUSY;
        }
        let context = state.contexts.remove(&address).unwrap();
        state.retire(context.alloc);
        0
    })
}

fn device_attributes(config: &Config) -> ibv_device_attr_ex {
    let mut attr = ibv_device_attr {
        node_guid: config.guid.to_be(),
        sys_image_guid: (config.guid + 1).to_be(),
        vendor_id: config.vendor_id,
        vendor_part_id: config.vendor_part_id,
        max_mr_size: u64::MAX,
        max_qp: 1000,
        max_qp_wr: config.max_qp_wr as c_int,
        max_sge: config.max_sge as c_int,
        max_srq: 1000,
        max_srq_wr: config.max_srq_wr as c_int,
        max_srq_sge: config.max_sge as c_int,
        device_cap_flags: if config.srq_resize { IBV_DEVICE_SRQ_RESIZE.0 } else { 0 }
            | (IBV_DEVICE_XRC | IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B).0,
        max_cq: 1000,
        max_cqe: config.max_cqe as c_int,
        max_mr: 1000,
        max_pd: 1000,
        max_mcast_grp: config.groups,
        max_qp_rd_atom: config.max_qp_rd_atom,
        max_qp_init_rd_atom: config.max_qp_init_rd_atom,
        phys_port_cnt: config.ports.len() as u8,
        ..ibv_device_attr::zeroed()
    };
    for (to, from) in attr.fw_ver.iter_mut().zip("1.2.3".bytes()) {
        *to = from as c_char;
    }
    let mut full = ibv_device_attr_ex {
        orig_attr: attr,
        hca_core_clock: 1_000_000,
        max_dm_size: dm::SIZE,
        ..ibv_device_attr_ex::zeroed()
    };
    if let Some((max_cq_count, max_cq_period)) = config.moderation {
        full.cq_mod_caps = ibv_cq_moderation_caps { max_cq_count, max_cq_period };
    }
    if config.steering {
        full.orig_attr.device_cap_flags |= IBV_DEVICE_MANAGED_FLOW_STEERING.0;
        full.max_wq_type_rq = 8;
        full.rss_caps = ibv_rss_caps {
            supported_qpts: 1 << IBV_QPT_RAW_PACKET.0,
            max_rwq_indirection_tables: 4,
            max_rwq_indirection_table_size: 8,
            rx_hash_fields_mask: (IBV_RX_HASH_SRC_PORT_UDP | IBV_RX_HASH_DST_PORT_UDP).0.into(),
            rx_hash_function: IBV_RX_HASH_FUNC_TOEPLITZ.0 as u8,
        };
    }
    full.odp_caps.general_caps = config.odp;
    (config.change_device)(&mut full);
    full
}

pub(super) unsafe extern "C" fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    enter(context, "ibv_query_device", |state, _| match state.fault("ibv_query_device") {
        Some(errno) => errno,
        None => {
            unsafe { attr.write(device_attributes(&state.config).orig_attr) };
            0
        }
    })
}

unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    enter(context, "query_device_ex", |state, _| {
        if let Some(errno) = state.fault("query_device_ex") {
            return errno;
        }
        if size != size_of::<ibv_device_attr_ex>() {
            state.violation("query_device_ex with another size than the structure's");
        }
        unsafe { attr.write(device_attributes(&state.config)) };
        0
    })
}

pub(super) fn port_of(config: &Config, port: u32) -> Option<&Port> {
    config.ports.get((port as usize).checked_sub(1)?)
}

fn port_attributes(port: &Port) -> ibv_port_attr {
    let mut attributes = ibv_port_attr {
        state: IBV_PORT_ACTIVE,
        max_mtu: port.max_mtu,
        active_mtu: port.active_mtu,
        gid_tbl_len: port.gid_table_len,
        max_msg_sz: port.max_msg_sz,
        pkey_tbl_len: port.pkeys.len() as u16,
        lid: port.lid,
        link_layer: port.link_layer as u8,
        ..ibv_port_attr::zeroed()
    };
    (port.change)(&mut attributes);
    attributes
}

unsafe extern "C" fn query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr, size: usize) -> c_int {
    enter(context, "query_port", |state, _| {
        if size != size_of::<ibv_port_attr>() {
            state.violation("query_port with another size than the structure's");
        }
        if let Some(errno) = state.fault("query_port") {
            return errno;
        }
        match port_of(&state.config, port.into()) {
            Some(port) => {
                unsafe { attr.write(port_attributes(port)) };
                0
            }
            None => libc::EINVAL,
        }
    })
}

/// Like the library's function for old binaries, this one does not write the newer fields.
pub(super) unsafe extern "C" fn query_port_compat(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    enter(context, "ibv_query_port", |state, _| match port_of(&state.config, port.into()) {
        Some(port) => {
            let full = port_attributes(port);
            let from = (&raw const full).cast::<u8>();
            unsafe { attr.cast::<u8>().copy_from(from, offset_of!(ibv_port_attr, port_cap_flags2)) };
            0
        }
        None => libc::EINVAL,
    })
}

fn gid_entry(port: u32, gid: &super::FakeGid) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: ibv_gid { raw: gid.gid },
        gid_index: gid.index,
        port_num: port,
        gid_type: gid.gid_type.0,
        ndev_ifindex: gid.interface,
    }
}

pub(super) unsafe extern "C" fn query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _flags: u32,
    size: usize,
) -> c_int {
    enter(context, "ibv_query_gid_ex", |state, _| {
        if size != size_of::<ibv_gid_entry>() {
            state.violation("ibv_query_gid_ex with another size than the structure's");
        }
        if let Some(errno) = state.fault("ibv_query_gid_ex") {
            return errno;
        }
        if !state.config.gid_queries {
            return libc::EOPNOTSUPP;
        }
        let Some(table) = port_of(&state.config, port) else { return libc::EINVAL };
        match table.gids.iter().find(|gid| gid.index == index) {
            Some(gid) => {
                unsafe { entry.write(gid_entry(port, gid)) };
                0
            }
            None => libc::ENODATA,
        }
    })
}

pub(super) unsafe extern "C" fn query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    _flags: u32,
    _size: usize,
) -> isize {
    enter(context, "ibv_query_gid_table", |state, _| {
        if let Some(errno) = state.fault("ibv_query_gid_table") {
            return -(errno as isize);
        }
        if !state.config.gid_queries {
            return -(libc::EOPNOTSUPP as isize);
        }
        let ports = (1..).zip(&state.config.ports);
        let all: Vec<_> =
            ports.flat_map(|(number, port)| port.gids.iter().map(move |gid| gid_entry(number, gid))).collect();
        if all.len() > max_entries {
            return -(libc::EINVAL as isize);
        }
        for (index, entry) in all.iter().enumerate() {
            unsafe { entries.add(index).write(*entry) };
        }
        all.len() as isize
    })
}

/// Returns success and zeros for an empty entry, like libibverbs.
pub(super) unsafe extern "C" fn query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    enter(context, "ibv_query_gid", |state, _| {
        if let Some(errno) = state.fault("ibv_query_gid") {
            set_errno(errno);
            return -1;
        }
        let found = port_of(&state.config, port.into())
            .and_then(|port| port.gids.iter().find(|gid| i64::from(gid.index) == i64::from(index)));
        unsafe { gid.write(ibv_gid { raw: found.map_or([0; 16], |gid| gid.gid) }) };
        0
    })
}

pub(super) unsafe extern "C" fn query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut __be16,
) -> c_int {
    enter(context, "ibv_query_pkey", |state, _| {
        match port_of(&state.config, port.into()).and_then(|port| port.pkeys.get(index as usize)) {
            Some(found) => {
                unsafe { *pkey = found.to_be() };
                0
            }
            None => {
                set_errno(libc::EINVAL);
                -1
            }
        }
    })
}

pub(super) unsafe extern "C" fn get_pkey_index(context: *mut ibv_context, port: u8, pkey: __be16) -> c_int {
    enter(context, "ibv_get_pkey_index", |state, _| {
        let position = port_of(&state.config, port.into())
            .and_then(|port| port.pkeys.iter().position(|found| found.to_be() == pkey));
        position.map_or_else(
            || {
                set_errno(libc::ENOENT);
                -1
            },
            |index| index as c_int,
        )
    })
}
