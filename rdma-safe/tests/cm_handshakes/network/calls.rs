//! The functions of librdmacm.

use std::collections::VecDeque;
use std::ffi::{CStr, c_int, c_void};
use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_safe::sys::*;
use rdma_safe::{Context, Device, Gid, soft};

use super::{Channel, GROUP, IdState, Network, PORT, Phase, Port, Queued, with};

/// An event that was read and not acknowledged, with the private data that it points to.
#[repr(C)]
struct Delivered {
    raw: rdma_cm_event,
    data: Vec<u8>,
}

fn fail(errno: c_int) -> c_int {
    // SAFETY: `errno` belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

fn pointer(id: usize) -> *mut rdma_cm_id {
    std::ptr::with_exposed_provenance_mut(id)
}

unsafe extern "C" fn create_event_channel() -> *mut rdma_event_channel {
    // SAFETY: the call has no pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK) };
    let channel = Box::into_raw(Box::new(rdma_event_channel { fd }));
    with(|network| network.channels.insert(channel.addr(), Channel { fd, events: VecDeque::new() }));
    channel
}

unsafe extern "C" fn destroy_event_channel(channel: *mut rdma_event_channel) {
    let removed = with(|network| network.channels.remove(&channel.addr())).expect("the channel exists");
    assert!(removed.events.is_empty(), "a channel is destroyed before its ids");
    // SAFETY: `create_event_channel` made the channel, and it was registered until now.
    unsafe {
        libc::close(removed.fd);
        drop(Box::from_raw(channel));
    }
}

fn make_id(network: &mut Network, channel: usize, context: *mut c_void, ps: rdma_port_space) -> usize {
    let raw = std::ptr::with_exposed_provenance_mut(channel);
    let id = Box::into_raw(Box::new(rdma_cm_id { channel: raw, context, ps, ..rdma_cm_id::zeroed() }));
    let is_datagrams = ps == RDMA_PS_UDP;
    let state = IdState { channel, phase: Phase::Idle, peer: None, port: 0, is_datagrams, remote: None };
    network.ids.insert(id.expose_provenance(), state);
    id.addr()
}

unsafe extern "C" fn create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    let made = with(|network| make_id(network, channel.expose_provenance(), context, ps));
    // SAFETY: the caller's out pointer.
    unsafe { *id = pointer(made) };
    0
}

fn destroy(network: &mut Network, id: usize) {
    network.sever(id);
    let channel = network.id(id).channel;
    let channel = network.channels.get_mut(&channel).expect("the channel exists");
    let (unread, kept) = channel.events.drain(..).partition(|event: &Queued| event.owner == id);
    channel.events = kept;
    channel.signal();
    let unread: VecDeque<Queued> = unread;
    for request in unread.into_iter().filter_map(|event| event.request) {
        destroy(network, request);
    }
    network.ids.remove(&id);
    // SAFETY: `make_id` made the id, and it was registered until now.
    drop(unsafe { Box::from_raw(pointer(id)) });
}

unsafe extern "C" fn destroy_id(id: *mut rdma_cm_id) -> c_int {
    with(|network| destroy(network, id.addr()));
    0
}

/// An address of this host.
fn address(port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(Ipv4Addr::LOCALHOST).to_be() },
        sin_zero: [0; 8],
    }
}

/// Sets the device and the addresses of an id.
///
/// # Safety
/// No other thread may use the id: the lock of its channel is held, or the id is new.
unsafe fn place(network: &mut Network, id: usize, local: u16, peer: Option<u16>) {
    assert!(network.ids.contains_key(&id), "the id exists");
    let port = PORT.get().expect("the device is open");
    let id = pointer(id);
    // SAFETY: the id exists, since it is registered, and no other thread uses it by the contract of this function.
    unsafe {
        ((*id).verbs, (*id).port_num) = (port.context.as_raw(), 1);
        (*id).route.addr.__bindgen_anon_1.src_sin = address(local);
        if let Some(peer) = peer {
            (*id).route.addr.__bindgen_anon_2.dst_sin = address(peer);
        }
    }
}

/// # Safety
/// `address` must be an IPv4 address.
unsafe fn port_of(address: *mut libc::sockaddr) -> u16 {
    // SAFETY: the caller's contract.
    u16::from_be(unsafe { (*address.cast::<libc::sockaddr_in>()).sin_port })
}

unsafe extern "C" fn bind_addr(id: *mut rdma_cm_id, address: *mut libc::sockaddr) -> c_int {
    // SAFETY: the tests bind to IPv4 addresses.
    let wanted = unsafe { port_of(address) };
    with(|network| {
        network.ports += 1;
        let port = if wanted == 0 { network.ports } else { wanted };
        network.id(id.addr()).port = port;
        // SAFETY: the caller holds the lock of the channel.
        unsafe { place(network, id.addr(), port, None) };
    });
    0
}

unsafe extern "C" fn listen(id: *mut rdma_cm_id, _: c_int) -> c_int {
    with(|network| network.id(id.addr()).phase = Phase::Listening);
    0
}

unsafe extern "C" fn resolve_addr(
    id: *mut rdma_cm_id,
    _: *mut libc::sockaddr,
    peer: *mut libc::sockaddr,
    _: c_int,
) -> c_int {
    // SAFETY: the tests resolve IPv4 addresses.
    let peer = unsafe { port_of(peer) };
    with(|network| {
        network.count("resolve_addr");
        if network.script.loses_addresses {
            return;
        }
        if network.script.address_errors > 0 {
            network.script.address_errors -= 1;
            return network.push(id.addr(), RDMA_CM_EVENT_ADDR_ERROR, -libc::ETIMEDOUT);
        }
        network.ports += 1;
        let own = network.ports;
        // SAFETY: the caller holds the lock of the channel.
        unsafe { place(network, id.addr(), own, Some(peer)) };
        network.push(id.addr(), RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    });
    0
}

unsafe extern "C" fn resolve_route(id: *mut rdma_cm_id, _: c_int) -> c_int {
    with(|network| {
        network.count("resolve_route");
        if network.script.route_errors > 0 {
            network.script.route_errors -= 1;
            return network.push(id.addr(), RDMA_CM_EVENT_ROUTE_ERROR, -libc::ETIMEDOUT);
        }
        network.push(id.addr(), RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    });
    0
}

/// # Safety
/// The private data must be valid.
unsafe fn private_data(data: *const c_void, len: u8) -> Vec<u8> {
    match data.is_null() {
        true => Vec::new(),
        // SAFETY: the caller's contract.
        false => unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len.into()) }.to_vec(),
    }
}

unsafe extern "C" fn connect(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int {
    // SAFETY: the caller's parameters and id.
    let (parameters, to, from, ps) = unsafe {
        let addr = &(*id).route.addr;
        let ports = [addr.__bindgen_anon_2.dst_sin.sin_port, addr.__bindgen_anon_1.src_sin.sin_port].map(u16::from_be);
        (*parameters, ports[0], ports[1], (*id).ps)
    };
    // SAFETY: the caller's parameters.
    let data = unsafe { private_data(parameters.private_data, parameters.private_data_len) };
    let id = id.addr();
    with(|network| {
        network.id(id).phase = Phase::Requesting;
        if network.script.loses_requests {
            return;
        }
        let is_datagrams = network.id(id).is_datagrams;
        let is_listener =
            |state: &IdState| (state.phase, state.port, state.is_datagrams) == (Phase::Listening, to, is_datagrams);
        let listener = network.ids.iter().find(|(_, state)| is_listener(state)).map(|(id, state)| (*id, state.channel));
        let Some((listener, channel)) = listener else {
            let (event, status) =
                if is_datagrams { (RDMA_CM_EVENT_UNREACHABLE, 1) } else { (RDMA_CM_EVENT_REJECTED, 8) };
            return network.push(id, event, status);
        };
        let request = make_id(network, channel, std::ptr::null_mut(), ps);
        // SAFETY: the id is new.
        unsafe { place(network, request, to, Some(from)) };
        let passive = network.id(request);
        (passive.phase, passive.peer, passive.remote) = (Phase::Requested, Some(id), Some(parameters.qp_num));
        network.id(id).peer = Some(request);
        network.push_event(Queued {
            owner: listener,
            event: RDMA_CM_EVENT_CONNECT_REQUEST,
            status: 0,
            data,
            qp_num: parameters.qp_num,
            request: Some(request),
        });
    });
    0
}

unsafe extern "C" fn accept(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int {
    // SAFETY: the caller's parameters.
    let parameters = unsafe { *parameters };
    // SAFETY: the caller's parameters.
    let data = unsafe { private_data(parameters.private_data, parameters.private_data_len) };
    with(|network| {
        let own = network.id(id.addr());
        let (Phase::Requested, Some(owner)) = (own.phase, own.peer) else { return fail(libc::EINVAL) };
        own.phase = Phase::Replied;
        let peer = network.id(owner);
        (peer.phase, peer.remote) = (Phase::Answered, Some(parameters.qp_num));
        let event = if peer.is_datagrams { RDMA_CM_EVENT_ESTABLISHED } else { RDMA_CM_EVENT_CONNECT_RESPONSE };
        network.push_event(Queued { owner, event, status: 0, data, qp_num: parameters.qp_num, request: None });
        0
    })
}

unsafe extern "C" fn reject(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> c_int {
    // SAFETY: the caller's data.
    let data = unsafe { private_data(data, len) };
    with(|network| {
        let own = network.id(id.addr());
        let (Phase::Requested, Some(peer)) = (own.phase, own.peer.take()) else { return fail(libc::EINVAL) };
        own.phase = Phase::Ended;
        network.id(peer).peer = None;
        network.refuse(peer, data);
        0
    })
}

unsafe extern "C" fn establish(id: *mut rdma_cm_id) -> c_int {
    with(|network| {
        let own = network.id(id.addr());
        let (Phase::Answered, Some(peer)) = (own.phase, own.peer) else { return fail(libc::EINVAL) };
        own.phase = Phase::Established;
        if !network.script.loses_confirmations {
            network.id(peer).phase = Phase::Established;
            network.push(peer, RDMA_CM_EVENT_ESTABLISHED, 0);
        }
        0
    })
}

unsafe extern "C" fn disconnect(id: *mut rdma_cm_id) -> c_int {
    with(|network| {
        let own = network.id(id.addr());
        let peer = own.peer;
        match own.phase {
            Phase::Established => own.phase = Phase::Disconnecting,
            Phase::Disconnected => own.phase = Phase::Ended,
            // Without a peer the kernel treats the disconnect as done.
            _ => return 0,
        }
        let Some(peer) = peer.filter(|_| !network.script.loses_confirmations) else { return 0 };
        if network.script.crosses_disconnects {
            if network.id(peer).phase == Phase::Disconnecting {
                network.push(peer, RDMA_CM_EVENT_DISCONNECTED, 0);
                network.push(id.addr(), RDMA_CM_EVENT_DISCONNECTED, 0);
            }
            return 0;
        }
        let phase = &mut network.id(peer).phase;
        *phase = if *phase == Phase::Established { Phase::Disconnected } else { Phase::Ended };
        network.push(peer, RDMA_CM_EVENT_DISCONNECTED, 0);
        0
    })
}

/// The address vector of both ends.
fn route_to_self() -> ibv_ah_attr {
    let port = PORT.get().expect("the device is open");
    let mut ah = ibv_ah_attr { is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() };
    ah.grh.dgid = ibv_gid { raw: port.gid.gid.0 };
    (ah.grh.sgid_index, ah.grh.hop_limit) = (port.gid.index as u8, 64);
    ah
}

unsafe extern "C" fn init_qp_attr(id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, mask: *mut c_int) -> c_int {
    let (phase, remote, is_datagrams) = with(|network| {
        let own = network.id(id.addr());
        (own.phase, own.remote.filter(|_| own.peer.is_some()), own.is_datagrams)
    });
    // SAFETY: the caller's out pointers.
    let (attr, mask) = unsafe { (&mut *attr, &mut *mask) };
    *mask = IBV_QP_STATE.0 as c_int;
    match (attr.qp_state, remote) {
        (IBV_QPS_INIT, _) if phase != Phase::Requested || remote.is_some() => {
            (attr.port_num, attr.pkey_index, attr.qkey) = (1, 0, RDMA_UDP_QKEY);
            let kind = if is_datagrams { IBV_QP_QKEY } else { IBV_QP_ACCESS_FLAGS };
            *mask |= (IBV_QP_PORT | IBV_QP_PKEY_INDEX | kind).0 as c_int;
        }
        (IBV_QPS_RTR, Some(remote)) => {
            (attr.ah_attr, attr.path_mtu, attr.dest_qp_num) = (route_to_self(), IBV_MTU_1024, remote);
            (attr.rq_psn, attr.max_dest_rd_atomic, attr.min_rnr_timer) = (0, 4, 12);
            let path = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
            *mask |= (path | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER).0 as c_int;
        }
        (IBV_QPS_RTS, Some(_)) => {
            (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.sq_psn, attr.max_rd_atomic) = (14, 7, 7, 0, 4);
            let retries = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY;
            *mask |= (retries | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC).0 as c_int;
        }
        _ => return fail(libc::EINVAL),
    }
    0
}

unsafe extern "C" fn join_multicast(id: *mut rdma_cm_id, _: *mut libc::sockaddr, _: *mut c_void) -> c_int {
    with(|network| network.push(id.addr(), RDMA_CM_EVENT_MULTICAST_JOIN, 0));
    0
}

unsafe extern "C" fn leave_multicast(_: *mut rdma_cm_id, _: *mut libc::sockaddr) -> c_int {
    with(|network| network.count("leave_multicast"));
    0
}

unsafe extern "C" fn migrate_id(id: *mut rdma_cm_id, to: *mut rdma_event_channel) -> c_int {
    with(|network| {
        if network.script.migration_errors > 0 {
            network.script.migration_errors -= 1;
            return fail(libc::ENXIO);
        }
        let to = to.expose_provenance();
        let from = std::mem::replace(&mut network.id(id.addr()).channel, to);
        let from = network.channels.get_mut(&from).expect("the channel exists");
        let (moved, kept) = from.events.drain(..).partition(|event| event.owner == id.addr());
        from.events = kept;
        from.signal();
        let moved: VecDeque<Queued> = moved;
        moved.into_iter().for_each(|event| network.push_event(event));
        // SAFETY: the id exists, and the caller holds the locks of both channels.
        unsafe { (*id).channel = std::ptr::with_exposed_provenance_mut(to) };
        0
    })
}

unsafe extern "C" fn get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int {
    let next = with(|network| {
        network.count("get_cm_event");
        let channel = network.channels.get_mut(&channel.addr()).expect("the channel exists");
        let next = channel.events.pop_front();
        channel.signal();
        next.map(|next| (network.id(next.owner).is_datagrams, next))
    });
    let Some((is_datagrams, Queued { owner, event: kind, status, data, qp_num, request })) = next else {
        return fail(libc::EAGAIN);
    };
    let id = pointer(request.unwrap_or(owner));
    let raw = rdma_cm_event { id, event: kind, status, ..rdma_cm_event::zeroed() };
    let mut read = Box::new(Delivered { raw, data });
    if request.is_some() {
        read.raw.listen_id = pointer(owner);
    }
    let (private_data, private_data_len) = (read.data.as_ptr().cast(), read.data.len() as u8);
    if is_datagrams {
        let (mut ah_attr, mut qp_num, qkey) = (route_to_self(), qp_num, RDMA_UDP_QKEY);
        if kind == RDMA_CM_EVENT_MULTICAST_JOIN {
            ah_attr.grh.dgid = ibv_gid { raw: Gid::from(GROUP).0 };
            qp_num = 0xff_ffff;
        }
        read.raw.param.ud = rdma_ud_param { private_data, private_data_len, ah_attr, qp_num, qkey };
    } else {
        let resources = rdma_conn_param { responder_resources: 4, initiator_depth: 4, ..rdma_conn_param::zeroed() };
        read.raw.param.conn = rdma_conn_param { private_data, private_data_len, qp_num, ..resources };
    }
    // SAFETY: the caller's out pointer. The event is the first field of the allocation.
    unsafe { *event = Box::into_raw(read).cast() };
    0
}

unsafe extern "C" fn ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    // SAFETY: `get_cm_event` made the event, and it is acknowledged once.
    drop(unsafe { Box::from_raw(event.cast::<Delivered>()) });
    0
}

extern "C" fn unsupported() -> c_int {
    fail(libc::EOPNOTSUPP)
}

/// Installs soft0 and the fake library. The returned guard lets one test at a time use them.
pub(crate) fn install() -> (MutexGuard<'static, ()>, Context) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let port = PORT.get_or_init(|| {
        // SAFETY: the tests call only functions that are replaced.
        let mut table = unsafe { RdmaCm::from_lookup("the test", |_: &CStr| unsupported as *mut c_void) }.unwrap();
        table.rdma_create_event_channel = create_event_channel;
        table.rdma_destroy_event_channel = destroy_event_channel;
        (table.rdma_create_id, table.rdma_destroy_id, table.rdma_migrate_id) = (create_id, destroy_id, migrate_id);
        (table.rdma_bind_addr, table.rdma_listen) = (bind_addr, listen);
        (table.rdma_resolve_addr, table.rdma_resolve_route) = (resolve_addr, resolve_route);
        (table.rdma_connect, table.rdma_accept, table.rdma_reject) = (connect, accept, reject);
        (table.rdma_establish, table.rdma_disconnect) = (establish, disconnect);
        table.rdma_init_qp_attr = init_qp_attr;
        (table.rdma_join_multicast, table.rdma_leave_multicast) = (join_multicast, leave_multicast);
        (table.rdma_get_cm_event, table.rdma_ack_cm_event) = (get_cm_event, ack_cm_event);
        // SAFETY: the functions that the tests call have the signatures of their fields.
        unsafe { install_rdmacm(table) }.unwrap();
        // soft0 reports that there is a librdmacm already.
        let _ = soft::install();
        let context = Device::first().unwrap().open().unwrap();
        let gid = context.recommended_gid(1).unwrap();
        Port { context, gid }
    });
    with(|network| (network.script, network.calls) = Default::default());
    (guard, port.context.clone())
}
