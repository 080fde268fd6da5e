//! Address lookup over a fake librdmacm, which stands in for a name service and for ibacm and has the functions of rdma-core 60.
//!
//! This is a separate test program, because the fake functions replace those of the library in the whole process.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use rdma_safe::cm::{Address, AddressFamily, AddressQuery, CmError, EventChannel, EventKind, Id, PortSpace};
use rdma_safe::error::Verb;
use rdma_safe::sys::*;
use rdma_safe::{Errno, Error, Gid, QueuePairType};

/// State of the fake library.
#[derive(Default)]
struct State {
    /// Hints of the last lookup: flags, family, port space, queue pair type, lengths of the source and destination address.
    hints: [i64; 6],
    /// Number of lookups.
    lookups: usize,
    /// Number of result lists that were freed.
    freed: usize,
    events: VecDeque<QueuedEvent>,
    /// Whether an id has addresses that were not queried yet.
    has_result: bool,
    /// Path records that were set as an option.
    paths: Vec<u8>,
}

struct QueuedEvent {
    id: usize,
    event: rdma_cm_event_type,
    status: c_int,
    argument: u64,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

fn with<R>(change: impl FnOnce(&mut State) -> R) -> R {
    change(STATE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Sets `errno` and returns -1.
fn fail(errno: c_int) -> c_int {
    // SAFETY: `errno` belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Path of the first entry of [`list`]: two path records.
const PATHS: [u8; 144] = [7; 144];
const CONNECT: [u8; 36] = [9; 36];
const NAME: &CStr = c"storage.example";

fn leaked<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Result of a lookup with ibacm: an InfiniBand address with all information, and an IP address.
fn list() -> *mut rdma_addrinfo {
    let ip = leaked(libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 7471_u16.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([10, 0, 0, 2]) },
        sin_zero: [0; 8],
    });
    let ib = || {
        let mut address = sockaddr_ib::zeroed();
        address.sib_family = AF_IB as u16;
        address.sib_sid = 0x0106_1d2f_u64.to_be();
        address.sib_addr = ib_addr { ib_u: ib_addr__bindgen_ty_1 { uib_addr8: [4; 16] } };
        leaked(address).cast()
    };
    let second = rdma_addrinfo {
        ai_family: libc::AF_INET,
        ai_qp_type: 2,
        ai_port_space: RDMA_PS_TCP.0 as c_int,
        ai_dst_len: 16,
        ai_dst_addr: ip.cast(),
        ..rdma_addrinfo::zeroed()
    };
    leaked(rdma_addrinfo {
        ai_family: AF_IB,
        ai_src_len: size_of::<sockaddr_ib>() as libc::socklen_t,
        ai_dst_len: size_of::<sockaddr_ib>() as libc::socklen_t,
        ai_src_addr: ib(),
        ai_dst_addr: ib(),
        ai_dst_canonname: NAME.to_owned().into_raw(),
        ai_route_len: PATHS.len(),
        ai_route: leaked(PATHS).cast(),
        ai_connect_len: CONNECT.len(),
        ai_connect: leaked(CONNECT).cast(),
        ai_next: leaked(second),
        ..second
    })
}

unsafe extern "C" fn getaddrinfo(
    node: *const c_char,
    _service: *const c_char,
    hints: *const rdma_addrinfo,
    res: *mut *mut rdma_addrinfo,
) -> c_int {
    // SAFETY: the caller's arguments: strings or NULL, and hints.
    let (node, hints) = unsafe { ((!node.is_null()).then(|| CStr::from_ptr(node)), &*hints) };
    let noted = [hints.ai_flags, hints.ai_family, hints.ai_port_space, hints.ai_qp_type].map(i64::from);
    with(|state| {
        state.hints[..4].copy_from_slice(&noted);
        state.hints[4..].copy_from_slice(&[hints.ai_src_len.into(), hints.ai_dst_len.into()]);
        state.lookups += 1;
    });
    match node {
        Some(node) if node == c"nobody" => return libc::EAI_NONAME,
        Some(node) if node == c"system" => {
            fail(libc::ECONNREFUSED);
            return libc::EAI_SYSTEM;
        }
        Some(node) if node == c"memory" => return fail(libc::ENOMEM),
        _ => {}
    }
    // SAFETY: the caller's out pointer.
    unsafe { *res = list() };
    0
}

unsafe extern "C" fn freeaddrinfo(mut list: *mut rdma_addrinfo) {
    while !list.is_null() {
        // SAFETY: `list` made the entry and all that it points to, and each entry is freed once.
        unsafe {
            let entry = Box::from_raw(list);
            for address in [entry.ai_src_addr, entry.ai_dst_addr] {
                match entry.ai_family {
                    _ if address.is_null() => {}
                    AF_IB => drop(Box::from_raw(address.cast::<sockaddr_ib>())),
                    _ => drop(Box::from_raw(address.cast::<libc::sockaddr_in>())),
                }
            }
            if !entry.ai_dst_canonname.is_null() {
                drop(CString::from_raw(entry.ai_dst_canonname));
                drop(Box::from_raw(entry.ai_route.cast::<[u8; 144]>()));
                drop(Box::from_raw(entry.ai_connect.cast::<[u8; 36]>()));
            }
            list = entry.ai_next;
        }
    }
    with(|state| state.freed += 1);
}

unsafe extern "C" fn create_event_channel() -> *mut rdma_event_channel {
    // Nothing reads from this descriptor.
    leaked(rdma_event_channel { fd: UnixStream::pair().unwrap().0.into_raw_fd() })
}

unsafe extern "C" fn destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: `create_event_channel` made the channel, and it is destroyed once.
    unsafe { libc::close(Box::from_raw(channel).fd) };
}

unsafe extern "C" fn create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    // A context that nothing here accesses.
    let verbs = std::ptr::dangling_mut();
    // SAFETY: the caller's out pointer.
    unsafe { *id = leaked(rdma_cm_id { channel, context, ps, verbs, ..rdma_cm_id::zeroed() }) };
    0
}

unsafe extern "C" fn destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: `create_id` made the id, and it is destroyed once.
    drop(unsafe { Box::from_raw(id) });
    0
}

unsafe extern "C" fn get_cm_event(_: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int {
    let Some(next) = with(|state| state.events.pop_front()) else { return fail(libc::EAGAIN) };
    let mut read = rdma_cm_event { event: next.event, status: next.status, ..rdma_cm_event::zeroed() };
    read.id = std::ptr::with_exposed_provenance_mut(next.id);
    // SAFETY: the union has room for the argument, and the caller passes a valid out pointer.
    unsafe {
        (&raw mut read.param).cast::<u64>().write_unaligned(next.argument);
        *event = leaked(read);
    }
    0
}

unsafe extern "C" fn ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    // SAFETY: `get_cm_event` made the event, and it is acknowledged once.
    drop(unsafe { Box::from_raw(event) });
    0
}

unsafe extern "C" fn resolve_addrinfo(
    id: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> c_int {
    if with(|state| state.has_result) {
        return fail(libc::EBUSY);
    }
    // SAFETY: the caller's arguments.
    let (by_subnet_administrator, service) =
        unsafe { ((*hints).ai_flags & RAI_SA as c_int != 0, CStr::from_ptr(service)) };
    if !node.is_null() {
        assert!(!by_subnet_administrator);
        // SAFETY: the caller's argument.
        if unsafe { CStr::from_ptr(node) } == c"nobody" {
            // The library stores the resolver's code in errno, too.
            return fail(libc::EAI_NONAME);
        }
    }
    let (event, status) = match service == c"unknown" {
        true => (RDMA_CM_EVENT_ADDRINFO_ERROR, libc::ENOENT),
        false => (RDMA_CM_EVENT_ADDRINFO_RESOLVED, 0),
    };
    with(|state| {
        state.has_result = status == 0;
        state.events.push_back(QueuedEvent { id: id.expose_provenance(), event, status, argument: 0 });
    });
    0
}

unsafe extern "C" fn query_addrinfo(_: *mut rdma_cm_id, info: *mut *mut rdma_addrinfo) -> c_int {
    if !with(|state| std::mem::take(&mut state.has_result)) {
        return fail(libc::ENOENT);
    }
    // SAFETY: the caller's out pointer.
    unsafe { *info = list() };
    0
}

unsafe extern "C" fn write_cm_event(
    id: *mut rdma_cm_id,
    event: rdma_cm_event_type,
    status: c_int,
    argument: u64,
) -> c_int {
    with(|state| state.events.push_back(QueuedEvent { id: id.expose_provenance(), event, status, argument }));
    0
}

unsafe extern "C" fn set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: usize,
) -> c_int {
    assert_eq!((level, name), (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH));
    // SAFETY: the caller's value.
    let paths = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len) }.to_vec();
    with(|state| {
        state.paths = paths;
        let event = RDMA_CM_EVENT_ROUTE_RESOLVED;
        state.events.push_back(QueuedEvent { id: id.expose_provenance(), event, status: 0, argument: 0 });
    });
    0
}

extern "C" fn unsupported() -> c_int {
    -1
}

/// Installs the fake library and resets its state. The returned guard lets one test at a time use it.
fn install() -> MutexGuard<'static, ()> {
    static INSTALLED: Once = Once::new();
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    INSTALLED.call_once(|| {
        // SAFETY: the tests call only functions that are replaced below.
        let mut table = unsafe { RdmaCm::from_lookup("the test", |_: &CStr| unsupported as *mut c_void) }.unwrap();
        table.rdma_create_event_channel = create_event_channel;
        table.rdma_destroy_event_channel = destroy_event_channel;
        (table.rdma_create_id, table.rdma_destroy_id) = (create_id, destroy_id);
        (table.rdma_get_cm_event, table.rdma_ack_cm_event) = (get_cm_event, ack_cm_event);
        (table.rdma_getaddrinfo, table.rdma_freeaddrinfo) = (getaddrinfo, freeaddrinfo);
        table.rdma_set_option = set_option;
        table.rdma_resolve_addrinfo = Some(resolve_addrinfo);
        table.rdma_query_addrinfo = Some(query_addrinfo);
        table.rdma_write_cm_event = Some(write_cm_event);
        // SAFETY: the functions that the tests call have the signatures of their fields.
        unsafe { install_rdmacm(table) }.unwrap();
    });
    with(|state| *state = State::default());
    guard
}

#[test]
fn found_addresses_are_copied_and_freed_once() {
    let _guard = install();
    let found = AddressQuery::new().node("storage").service("7471").lookup().unwrap();
    assert_eq!(with(|state| (state.lookups, state.freed)), (1, 1));
    let [ib, ip] = &found[..] else { panic!("{found:?}") };
    let Some(Address::Ib(peer)) = ib.peer else { panic!("{ib:?}") };
    assert_eq!((peer.gid, peer.service_id), (Gid::from(Ipv6Addr::from([4; 16])), 0x0106_1d2f));
    assert_eq!((ib.local, ib.peer_name.as_deref(), ib.local_name.as_deref()), (ib.peer, NAME.to_str().ok(), None));
    let paths = ib.paths.as_ref().expect("ibacm has returned paths");
    assert_eq!((paths.len(), paths.as_bytes(), &ib.connect_data[..]), (2, &PATHS[..], &CONNECT[..]));
    assert_eq!(ip.peer.and_then(|peer| peer.ip()), Some((Ipv4Addr::new(10, 0, 0, 2), 7471).into()));
    assert_eq!((ip.space, ip.qp_type, ip.local, &ip.paths), (PortSpace::TCP, QueuePairType::RC, None, &None));
    assert!(!ip.passive && ip.connect_data.is_empty());

    // The paths replace the resolution of a route.
    let channel = EventChannel::new().unwrap();
    let mut id = Id::new(&channel, ib.space).unwrap();
    id.set_paths(paths).unwrap();
    assert_eq!(with(|state| std::mem::take(&mut state.paths)), PATHS);
    let event = channel.try_event().unwrap().expect("an event");
    assert!(event.id == id.id() && matches!(event.kind, EventKind::RouteResolved), "{event:?}");
}

#[test]
fn every_hint_reaches_the_library() {
    let _guard = install();
    let hints = || with(|state| state.hints);
    AddressQuery::new().node("storage").lookup().unwrap();
    assert_eq!(hints(), [0; 6]);
    let query = AddressQuery::new().node("10.0.0.2").passive().numeric_host().no_route();
    query.space(PortSpace::UDP).qp_type(QueuePairType::UD).source((Ipv4Addr::LOCALHOST, 0)).lookup().unwrap();
    let all = RAI_PASSIVE | RAI_NUMERICHOST | RAI_NOROUTE | RAI_FAMILY;
    let expected = [all.into(), libc::AF_INET.into(), RDMA_PS_UDP.0.into(), 4, 16, 0];
    assert_eq!(hints(), expected, "the family is that of the source");
    AddressQuery::new().destination((Ipv6Addr::LOCALHOST, 1)).lookup().unwrap();
    assert_eq!(hints(), [RAI_FAMILY.into(), libc::AF_INET6.into(), 0, 0, 0, 28]);
    AddressQuery::new().node("fe80::1").family(AddressFamily::Ib).lookup().unwrap();
    assert_eq!(hints(), [(RAI_FAMILY | RAI_NUMERICHOST).into(), AF_IB.into(), 0, 0, 0, 0]);
}

/// librdmacm would parse an IPv4 address as IPv6 if the family is InfiniBand, and would take
/// addresses of two families for addresses of one.
#[test]
fn invalid_address_queries_do_not_reach_librdmacm() {
    let _guard = install();
    let ib = AddressQuery::new().family(AddressFamily::Ib);
    for query in [
        AddressQuery::new(),
        ib.clone().node("10.0.0.2"),
        ib.clone().node("storage"),
        ib.service("7471"),
        AddressQuery::new().node("stor\0age"),
    ] {
        let error = query.lookup().unwrap_err();
        assert!(matches!(error, Error::Cm(CmError::NoAddress { .. })), "{query:?}: {error}");
    }
    let (v4, v6): (SocketAddr, SocketAddr) = ("10.0.0.1:0".parse().unwrap(), "[fe80::1]:0".parse().unwrap());
    for query in [
        AddressQuery::new().source(v6).destination(v4),
        AddressQuery::new().node("storage").source(v4).family(AddressFamily::V6),
    ] {
        let error = query.lookup().unwrap_err();
        assert!(matches!(error, Error::Cm(CmError::Call { errno: Errno(libc::EINVAL), .. })), "{query:?}: {error}");
    }
    assert_eq!(with(|state| state.lookups), 0);
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no gai_strerror(3)")]
fn resolver_codes_are_distinguished_from_errnos() {
    let _guard = install();
    let error = |node: &str| AddressQuery::new().node(node).lookup().unwrap_err();
    let no_name = error("nobody");
    assert!(matches!(&no_name, Error::Cm(CmError::NoAddress { reason }) if !reason.is_empty()), "{no_name}");
    for (node, errno) in [("system", libc::ECONNREFUSED), ("memory", libc::ENOMEM)] {
        let error = error(node);
        assert_eq!((error.verb(), error.errno()), (Some(Verb::RdmaGetaddrinfo), Some(Errno(errno))), "{error}");
    }
    assert_eq!(with(|state| state.freed), 0);

    let mut id = Id::new(&EventChannel::new().unwrap(), PortSpace::TCP).unwrap();
    let error = id.resolve_address_info(&AddressQuery::new().node("nobody").service("1")).unwrap_err();
    assert!(matches!(error, Error::Cm(CmError::NoAddress { .. })), "{error}");
}

#[test]
fn an_event_reports_the_result_of_an_address_lookup() {
    let _guard = install();
    let channel = EventChannel::new().unwrap();
    let mut id = Id::new(&channel, PortSpace::TCP).unwrap();
    let query = AddressQuery::new().node("storage").service("7471");
    let errno = |error: Error| error.errno().map(|errno| errno.0);
    assert_eq!(errno(id.address_info().unwrap_err()), Some(libc::ENOENT));
    id.resolve_address_info(&query).unwrap();
    assert_eq!(errno(id.resolve_address_info(&query).unwrap_err()), Some(libc::EBUSY));
    let event = channel.try_event().unwrap().expect("an event");
    assert!(event.id == id.id() && matches!(event.kind, EventKind::AddressInfoResolved), "{event:?}");
    assert_eq!(id.address_info().unwrap().len(), 2);
    assert_eq!(with(|state| state.freed), 1);

    id.resolve_service("unknown").unwrap();
    let event = channel.try_event().unwrap().expect("an event");
    assert!(matches!(event.kind, EventKind::AddressInfoError(Errno(libc::ENOENT))), "{event:?}");
}

#[test]
fn a_program_can_write_user_events() {
    let _guard = install();
    let channel = EventChannel::new().unwrap();
    let id = Id::new(&channel, PortSpace::TCP).unwrap();
    id.write_event(-5, u64::MAX - 1).unwrap();
    let event = channel.try_event().unwrap().expect("an event");
    assert_eq!(event.id, id.id());
    let EventKind::User { status: -5, argument } = event.kind else { panic!("{event:?}") };
    assert_eq!(argument, u64::MAX - 1);
}
