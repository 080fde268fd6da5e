//! The memory of ids and event channels, and calls that change it.

use core::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_sys::*;

use super::address;
use super::devices::shared;
use crate::device::{Core, device, gid};
use crate::transport::Time;

/// The memory of an `rdma_cm_id`, which is its first field.
#[repr(C)]
pub(super) struct IdObject {
    pub(super) id: rdma_cm_id,
    /// Number of the id in the device.
    pub(super) number: u32,
    /// Whether its calls wait for their events, which arrive on a channel that only this id uses.
    pub(super) is_synchronous: bool,
    /// Whether `CONNECT_ERROR` was reported because the queue pair could not be connected.
    pub(super) has_failed: bool,
    /// Reads and atomics of the request or reply that the program accepts.
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    /// The path of the route, which `id.route` points to.
    pub(super) path: ibv_sa_path_rec,
    /// Memberships in multicast groups. A thread may join and leave while another one reads events. The device is never locked
    /// while this lock is held.
    memberships: Mutex<Vec<Membership>>,
    /// Attributes of the queue pairs of requests: `rdma_create_ep(3)`.
    pub(super) request_attributes: Option<Box<ibv_qp_init_attr>>,
    /// Private data to send before the private data of the program: `ai_connect` of `rdma_getaddrinfo(3)`.
    pub(super) connect_data: Vec<u8>,
}

/// Membership of an id in a multicast group.
pub(super) struct Membership {
    pub(super) number: u32,
    pub(super) group: SocketAddr,
    pub(super) context: *mut c_void,
    /// Whether the membership is for receiving, too.
    pub(super) receives: bool,
    /// Whether the queue pair of the id is attached to the group.
    pub(super) is_attached: bool,
}

/// The memory of an `rdma_event_channel`, which is its first field.
#[repr(C)]
pub(super) struct ChannelObject {
    pub(super) channel: rdma_event_channel,
    /// Number of the channel in the device.
    pub(super) number: u32,
}

impl IdObject {
    /// Allocates the object of an id that reports to `channel`.
    pub(super) fn allocate(number: u32, channel: *mut rdma_event_channel, context: *mut c_void, ps: u32) -> *mut Self {
        let qp_type = if ps == RDMA_PS_UDP.0 || ps == RDMA_PS_IPOIB.0 { IBV_QPT_UD } else { IBV_QPT_RC };
        Box::into_raw(Box::new(IdObject {
            id: rdma_cm_id { channel, context, ps: rdma_port_space(ps), qp_type, ..rdma_cm_id::zeroed() },
            number,
            is_synchronous: false,
            has_failed: false,
            responder_resources: 0,
            initiator_depth: 0,
            path: ibv_sa_path_rec::zeroed(),
            memberships: Mutex::new(Vec::new()),
            request_attributes: None,
            connect_data: Vec::new(),
        }))
    }

    pub(super) fn memberships(&self) -> MutexGuard<'_, Vec<Membership>> {
        // Each change is complete before anything can panic.
        self.memberships.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Number of an id in the device.
///
/// # Safety
/// The id is valid.
pub(super) unsafe fn number(id: *mut rdma_cm_id) -> u32 {
    // SAFETY: the caller passes an id, which is the first field of an object.
    unsafe { (*id.cast::<IdObject>()).number }
}

/// Number of a channel in the device.
///
/// # Safety
/// The channel is valid.
pub(super) unsafe fn channel_number(channel: *mut rdma_event_channel) -> u32 {
    // SAFETY: the caller passes a channel, which is the first field of an object.
    unsafe { (*channel.cast::<ChannelObject>()).number }
}

/// Copies what the device knows of an id to the structure that programs read: addresses, device, and path.
///
/// # Safety
/// The id is valid, and no other thread accesses its structure.
pub(super) unsafe fn refresh(core: &Core, id: *mut rdma_cm_id) {
    // SAFETY: the caller passes a valid id.
    let (number, object) = (unsafe { number(id) }, id.cast::<IdObject>());
    let Some(known) = core.state.cma.ids.get(number) else { return };
    // SAFETY: the caller passes a valid id. The fields are written in place.
    unsafe {
        address::write(&raw mut (*id).route.addr.__bindgen_anon_1.src_storage, known.source);
        if let Some(destination) = known.destination {
            address::write(&raw mut (*id).route.addr.__bindgen_anon_2.dst_storage, destination);
        }
    }
    // The context was opened before the id was created.
    let (Some(link), Some(shared)) = (known.link, shared()) else { return };
    let own = core.links.get(link).map_or([0; 16], |link| gid(link.socket.address()));
    let peer = known.remote_gid.or(known.destination.map(|to| gid(to.ip()))).unwrap_or_default();
    // SAFETY: as above.
    unsafe {
        if (*id).verbs.is_null() {
            ((*id).verbs, (*id).pd) = (shared.context, shared.pd);
        }
        (*id).port_num = 1;
        (*id).route.addr.addr.ibaddr.sgid.raw = own;
        (*id).route.addr.addr.ibaddr.dgid.raw = peer;
        (*id).route.addr.addr.ibaddr.pkey = crate::device::PKEY.to_be();
        if known.has_route() {
            let mtu = core.links.get(link).map_or(IBV_MTU_1024, |link| crate::device::qp::mtu_code(link.socket.mtu()));
            (*object).path = ibv_sa_path_rec {
                dgid: ibv_gid { raw: peer },
                sgid: ibv_gid { raw: own },
                hop_limit: crate::net::Origin::HOPS,
                traffic_class: known.options.tos,
                reversible: 1,
                numb_path: 1,
                pkey: crate::device::PKEY.to_be(),
                mtu_selector: 2,
                mtu: mtu.0 as u8,
                rate_selector: 2,
                rate: IBV_RATE_25_GBPS.0 as u8,
                packet_life_time_selector: 2,
                packet_life_time: 15,
                ..ibv_sa_path_rec::zeroed()
            };
            ((*id).route.path_rec, (*id).route.num_paths) = (&raw mut (*object).path, 1);
        }
    }
}

/// Runs a call on an id with the device locked, at the current time, and copies the changed fields to its C structure.
///
/// `ENXIO` if the device of the id was removed.
///
/// # Safety
/// The id is valid, and no other thread accesses its structure.
pub(super) unsafe fn update(
    id: *mut rdma_cm_id,
    call: impl FnOnce(&mut Core, u32, Time) -> Result<(), c_int>,
) -> Result<(), c_int> {
    let device = device().ok_or(libc::ENODEV)?;
    // SAFETY: the caller passes a valid id.
    let number = unsafe { number(id) };
    let mut core = device.lock();
    let called = core.state.cma.check_device(number).and_then(|()| call(&mut core, number, device.now()));
    // A peer in this process answers at once.
    core.receive_own(device.now());
    // SAFETY: as above.
    unsafe { refresh(&core, id) };
    device.unlock(core);
    called
}
