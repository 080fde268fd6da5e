//! Thread safety over a fake librdmacm, which records two kinds of violations: concurrent calls on the same channel, and use
//! after free.
//!
//! This is a separate test program, because the fake functions replace those of the library in the whole process.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_int, c_void};
use std::net::Ipv4Addr;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use rdma_safe::cm::{
    Cause, CmError, Connector, DatagramListener, EventChannel, EventKind, Id, Listener, PortSpace, Step,
};
use rdma_safe::sys::*;
use rdma_safe::{Error, Result};

/// Whether the device was removed, so that ids cannot migrate or leave groups.
static IS_REMOVED: AtomicBool = AtomicBool::new(false);

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// State of the fake library. Objects are identified by their addresses.
#[derive(Default)]
struct State {
    channels: HashMap<usize, Channel>,
    ids: HashMap<usize, IdState>,
    violations: Vec<&'static str>,
    /// Number of connection requests that were read.
    requests: usize,
}

#[derive(Default)]
struct Channel {
    /// Whether a call on the channel is running.
    busy: bool,
    events: VecDeque<(usize, rdma_cm_event_type)>,
}

struct IdState {
    channel: usize,
    /// Number of events that were read and not acknowledged.
    unacknowledged: usize,
    /// Whether its state of a multicast group was freed although the kernel still has events of the group.
    has_freed_group: bool,
}

fn lock() -> MutexGuard<'static, Option<State>> {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    state.get_or_insert_default();
    state
}

fn with<R>(change: impl FnOnce(&mut State) -> R) -> R {
    change(lock().as_mut().unwrap())
}

/// A running call that changes a channel or its objects. Concurrent calls on a channel are a violation.
struct Call(usize);

impl Call {
    fn on_channel(channel: usize) -> Call {
        with(|state| match state.channels.get_mut(&channel) {
            Some(found) => {
                if std::mem::replace(&mut found.busy, true) {
                    state.violations.push("concurrent calls on a channel");
                }
            }
            None => state.violations.push("use of a destroyed channel"),
        });
        std::thread::yield_now();
        Call(channel)
    }

    fn on_id(id: *mut rdma_cm_id) -> Call {
        let channel = with(|state| match state.ids.get(&id.addr()) {
            Some(id) => id.channel,
            None => {
                state.violations.push("use of a destroyed id");
                0
            }
        });
        Call::on_channel(channel)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        with(|state| {
            if let Some(channel) = state.channels.get_mut(&self.0) {
                channel.busy = false;
            }
        });
    }
}

unsafe extern "C" fn create_event_channel() -> *mut rdma_event_channel {
    // Nothing reads from this descriptor.
    let fd = UnixStream::pair().unwrap().0.into_raw_fd();
    let channel = Box::into_raw(Box::new(rdma_event_channel { fd }));
    with(|state| state.channels.insert(channel.addr(), Channel::default()));
    channel
}

unsafe extern "C" fn destroy_event_channel(channel: *mut rdma_event_channel) {
    with(|state| {
        if state.ids.values().any(|id| id.channel == channel.addr()) {
            state.violations.push("a channel is destroyed before its ids");
        }
        if state.channels.remove(&channel.addr()).is_none() {
            return state.violations.push("a channel is destroyed twice");
        }
        // SAFETY: `create_event_channel` made the channel, and it was registered until now.
        let channel = unsafe { Box::from_raw(channel) };
        // SAFETY: the descriptor belongs to the channel.
        unsafe { libc::close(channel.fd) };
    });
}

fn make_id(channel: *mut rdma_event_channel, context: *mut c_void, ps: rdma_port_space) -> *mut rdma_cm_id {
    let id = Box::into_raw(Box::new(rdma_cm_id { channel, context, ps, ..rdma_cm_id::zeroed() }));
    with(|state| {
        state.ids.insert(id.addr(), IdState { channel: channel.addr(), unacknowledged: 0, has_freed_group: false })
    });
    id
}

unsafe extern "C" fn create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    let _call = Call::on_channel(channel.addr());
    // SAFETY: the caller's out pointer.
    unsafe { *id = make_id(channel, context, ps) };
    0
}

unsafe extern "C" fn destroy_id(id: *mut rdma_cm_id) -> c_int {
    let _call = Call::on_id(id);
    with(|state| {
        let Some(removed) = state.ids.remove(&id.addr()) else { return };
        if removed.unacknowledged != 0 {
            state.violations.push("an id with unacknowledged events is destroyed, which blocks forever");
        }
        if let Some(channel) = state.channels.get_mut(&removed.channel) {
            channel.events.retain(|(owner, _)| *owner != id.addr());
        }
        // SAFETY: `make_id` made the id, and it was registered until now.
        drop(unsafe { Box::from_raw(id) });
    });
    0
}

/// Queues an event of the id.
fn queue_event(id: *mut rdma_cm_id, event: rdma_cm_event_type) -> c_int {
    let call = Call::on_id(id);
    with(|state| {
        if let Some(channel) = state.channels.get_mut(&call.0) {
            channel.events.push_back((id.expose_provenance(), event));
        }
    });
    0
}

unsafe extern "C" fn resolve_addr(
    id: *mut rdma_cm_id,
    _: *mut libc::sockaddr,
    _: *mut libc::sockaddr,
    _: c_int,
) -> c_int {
    queue_event(id, RDMA_CM_EVENT_ADDR_RESOLVED)
}

unsafe extern "C" fn bind_addr(_: *mut rdma_cm_id, _: *mut libc::sockaddr) -> c_int {
    0
}

/// Queues a connection request immediately.
unsafe extern "C" fn listen(id: *mut rdma_cm_id, _: c_int) -> c_int {
    queue_event(id, RDMA_CM_EVENT_CONNECT_REQUEST)
}

/// Queues the event that the id has joined.
unsafe extern "C" fn join_multicast(id: *mut rdma_cm_id, _: *mut libc::sockaddr, _: *mut c_void) -> c_int {
    queue_event(id, RDMA_CM_EVENT_MULTICAST_JOIN)
}

/// The kernel discards events of the group, unless the device was removed. The library frees its state of the group in any case.
unsafe extern "C" fn leave_multicast(id: *mut rdma_cm_id, _: *mut libc::sockaddr) -> c_int {
    let call = Call::on_id(id);
    let is_removed = IS_REMOVED.load(Ordering::Relaxed);
    with(|state| {
        if is_removed {
            state.ids.get_mut(&id.addr()).unwrap().has_freed_group = true;
        } else {
            let events = &mut state.channels.get_mut(&call.0).unwrap().events;
            events.retain(|event| *event != (id.addr(), RDMA_CM_EVENT_MULTICAST_JOIN));
        }
    });
    if is_removed { refuse(libc::ENXIO) } else { 0 }
}

/// Fails a call.
fn refuse(errno: c_int) -> c_int {
    // SAFETY: `errno` belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

unsafe extern "C" fn get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int {
    let _call = Call::on_channel(channel.addr());
    let next = with(|state| {
        let (owner, kind) = state.channels.get_mut(&channel.addr())?.events.pop_front()?;
        let id = state.ids.get_mut(&owner)?;
        id.unacknowledged += 1;
        if kind == RDMA_CM_EVENT_MULTICAST_JOIN && id.has_freed_group {
            state.violations.push("an event of a freed group is read");
        }
        Some((std::ptr::with_exposed_provenance_mut::<rdma_cm_id>(owner), kind))
    });
    let Some((id, kind)) = next else { return refuse(libc::EAGAIN) };
    let mut read = rdma_cm_event { id, event: kind, ..rdma_cm_event::zeroed() };
    // SAFETY: the id exists, because no other thread may destroy it now. The writes detect concurrent reads as data races.
    unsafe {
        (*id).port_num = (*id).port_num.wrapping_add(1);
        (*id).route.addr.addr.ibaddr.pkey = u16::from((*id).port_num).to_be();
        if kind == RDMA_CM_EVENT_CONNECT_REQUEST {
            (read.listen_id, read.id) = (id, make_id(channel, (*id).context, (*id).ps));
            with(|state| state.requests += 1);
        }
        *event = Box::into_raw(Box::new(read));
    }
    0
}

unsafe extern "C" fn ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    // SAFETY: `get_cm_event` made the event, and it is acknowledged once.
    let event = unsafe { Box::from_raw(event) };
    let id = if event.listen_id.is_null() { event.id } else { event.listen_id };
    with(|state| match state.ids.get_mut(&id.addr()) {
        Some(id) => id.unacknowledged -= 1,
        None => state.violations.push("an event of a destroyed id is acknowledged"),
    });
    0
}

unsafe extern "C" fn migrate_id(id: *mut rdma_cm_id, to: *mut rdma_event_channel) -> c_int {
    if IS_REMOVED.load(Ordering::Relaxed) {
        return refuse(libc::ENXIO);
    }
    let from = Call::on_id(id);
    let _to = Call::on_channel(to.addr());
    with(|state| {
        let Some(channel) = state.channels.get_mut(&from.0) else { return };
        let (moved, remaining) = channel.events.drain(..).partition(|(owner, _)| *owner == id.addr());
        channel.events = remaining;
        let mut moved: VecDeque<_> = moved;
        if let Some(channel) = state.channels.get_mut(&to.addr()) {
            channel.events.append(&mut moved);
        }
        if let Some(moved) = state.ids.get_mut(&id.addr()) {
            moved.channel = to.addr();
        }
        // SAFETY: the id exists.
        unsafe { (*id).channel = to };
    });
    0
}

unsafe extern "C" fn device_guid(device: *mut ibv_device) -> __be64 {
    (device.addr() as u64).to_be()
}

extern "C" fn unsupported() -> c_int {
    -1
}

/// Installs the fake library. The returned guard lets one test at a time use it.
fn install() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    static INSTALLED: Once = Once::new();
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    INSTALLED.call_once(|| {
        // SAFETY: the tests call only functions that are replaced.
        let mut table = unsafe { RdmaCm::from_lookup("the test", |_: &CStr| unsupported as *mut c_void) }.unwrap();
        (table.rdma_create_event_channel, table.rdma_destroy_event_channel) =
            (create_event_channel, destroy_event_channel);
        (table.rdma_create_id, table.rdma_destroy_id, table.rdma_migrate_id) = (create_id, destroy_id, migrate_id);
        (table.rdma_get_cm_event, table.rdma_ack_cm_event) = (get_cm_event, ack_cm_event);
        (table.rdma_join_multicast, table.rdma_leave_multicast) = (join_multicast, leave_multicast);
        (table.rdma_resolve_addr, table.rdma_listen, table.rdma_bind_addr) = (resolve_addr, listen, bind_addr);
        // SAFETY: the functions that the tests call have the signatures of their fields.
        unsafe { install_rdmacm(table) }.unwrap();
        // SAFETY: as above.
        let mut table = unsafe { Verbs::from_lookup("the test", |_: &CStr| unsupported as *mut c_void) }.unwrap();
        table.ibv_get_device_guid = device_guid;
        // SAFETY: as above.
        unsafe { install_verbs(table) }.unwrap();
    });
    guard
}

/// Whether to forget an id in this round. Never under Miri, which reports leaks.
fn is_forgotten(round: usize) -> bool {
    !cfg!(miri) && round % 7 == 0
}

/// Threads create, migrate and drop ids, while other threads read the events of all channels.
#[test]
fn ids_migrate_and_are_dropped_while_their_events_are_read() {
    let _guard = install();
    let rounds = if cfg!(miri) { 5 } else { 500 };
    let channels = [(); 3].map(|()| EventChannel::new().unwrap());
    std::thread::scope(|scope| {
        for start in 0..3 {
            let channels = &channels;
            scope.spawn(move || {
                for round in start..start + rounds {
                    let mut id = Id::new(&channels[round % 3], PortSpace::TCP).unwrap();
                    id.resolve_address(None, (Ipv4Addr::LOCALHOST, 1), Duration::from_secs(1)).unwrap();
                    id.listen(1).unwrap();
                    id.migrate(&channels[(round + 1 + start) % 3]).unwrap();
                    // The port key counts the events that were read, at most two.
                    let (pkey, shown) = (id.pkey(), format!("{id:?}"));
                    assert!(pkey <= 2 && shown.starts_with("Id {"), "{pkey}, {shown}");
                    id.migrate(&channels[(round + 2) % 3]).unwrap();
                    if is_forgotten(round) {
                        // A forgotten id leaks, together with its channel.
                        std::mem::forget(Id::new(&EventChannel::new().unwrap(), PortSpace::UDP).unwrap());
                    }
                }
            });
            scope.spawn(move || {
                for round in 0..rounds * 4 {
                    let Some(event) = channels[round % 3].try_event().unwrap() else { continue };
                    if let EventKind::ConnectRequest(mut new, _) = event.kind {
                        assert_ne!(new.id(), event.id);
                        new.migrate(&channels[round / 3 % 3]).unwrap();
                    }
                }
            });
        }
    });
    drop(channels);
    with(|state| {
        assert_eq!(state.violations, [""; 0]);
        assert!(state.requests > 0, "no request was read");
        // Only forgotten ids and their channels are left.
        let forgotten = (0..3).flat_map(|start| start..start + rounds).filter(|round| is_forgotten(*round)).count();
        assert_eq!((state.ids.len(), state.channels.len()), (forgotten, forgotten));
    });
}

#[test]
#[cfg_attr(miri, ignore = "poll(2)")]
fn both_kinds_of_listeners_report_a_request_whose_device_was_removed() {
    fn cause<T>(request: Result<Option<T>>) -> Cause {
        match request.err().expect("the request cannot be accepted") {
            Error::Cm(CmError::Connect(error)) => error.cause,
            other => panic!("{other:?}"),
        }
    }
    let _guard = install();
    let count = || with(|state| (state.ids.len(), state.channels.len()));
    let before = count();
    IS_REMOVED.store(true, Ordering::Relaxed);
    let at = (Ipv4Addr::LOCALHOST, 1);
    let connections = cause(Listener::bind(at).unwrap().next(Duration::ZERO));
    let datagrams = cause(DatagramListener::bind(at).unwrap().next(Duration::ZERO));
    IS_REMOVED.store(false, Ordering::Relaxed);
    assert_eq!((connections, datagrams), (Cause::DeviceRemoved, Cause::DeviceRemoved));
    assert_eq!(count(), before, "the requests and their channels are destroyed");
    with(|state| assert_eq!(state.violations, [""; 0]));
}

fn ids() -> usize {
    with(|state| state.ids.len())
}

fn expect_no_violation(ids: usize) {
    with(|state| {
        assert_eq!(state.violations, [""; 0]);
        assert_eq!(state.ids.len(), ids);
    });
}

fn errno_of(refused: Result<()>) -> i32 {
    match refused.unwrap_err() {
        Error::Cm(CmError::Call { errno, .. }) => errno.0,
        other => panic!("{other:?}"),
    }
}

#[test]
fn calls_after_the_removal_of_a_device_was_read_do_not_reach_the_library() {
    let _guard = install();
    let before = ids();
    let [channel, elsewhere] = [(); 2].map(|()| EventChannel::new().unwrap());
    let [mut removed, mut other] = [(); 2].map(|()| Id::new(&channel, PortSpace::TCP).unwrap());
    queue_event(removed.as_raw(), RDMA_CM_EVENT_DEVICE_REMOVAL);
    let event = channel.try_event().unwrap().unwrap();
    assert!(matches!(event.kind, EventKind::DeviceRemoval) && event.id == removed.id(), "{event:?}");

    let resolve = |id: &mut Id| id.resolve_address(None, (Ipv4Addr::LOCALHOST, 1), Duration::from_secs(1));
    for refused in [resolve(&mut removed), removed.listen(1), removed.migrate(&elsewhere), removed.establish()] {
        assert_eq!(errno_of(refused), libc::ENXIO);
    }
    // The library would have queued an event for two of them, and would have moved the id.
    assert!(channel.try_event().unwrap().is_none() && removed.channel().is_same(&channel));

    resolve(&mut other).unwrap();
    assert_eq!(channel.try_event().unwrap().unwrap().id, other.id());
    removed.destroy().unwrap();
    other.destroy().unwrap();
    expect_no_violation(before);
}

/// An id that has joined a group, on a device that must outlive it.
fn joined(channel: &EventChannel, device: &mut ibv_context, group: (Ipv4Addr, u16)) -> Id {
    let mut id = Id::new(channel, PortSpace::UDP).unwrap();
    // SAFETY: the id is valid, and no other thread uses it yet.
    unsafe { (*id.as_raw()).verbs = device };
    id.join_multicast(group).unwrap();
    id
}

const GROUP: (Ipv4Addr, u16) = (Ipv4Addr::new(239, 1, 1, 1), 0);

#[test]
fn no_event_is_read_after_a_group_could_not_be_left_until_its_id_is_destroyed() {
    let _guard = install();
    let before = ids();
    let [channel, elsewhere] = [(); 2].map(|()| EventChannel::new().unwrap());
    let mut device = ibv_context::zeroed();
    let mut id = joined(&channel, &mut device, GROUP);
    let mut other = Id::new(&channel, PortSpace::TCP).unwrap();
    other.listen(1).unwrap();
    IS_REMOVED.store(true, Ordering::Relaxed);
    assert_eq!(errno_of(id.leave_multicast(GROUP)), libc::ENXIO);
    for refused in [channel.try_event().map(drop), id.migrate(&elsewhere), id.leave_multicast(GROUP)] {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Cm(CmError::FailedLeave { id: named }) if named == id.id()), "{error:?}");
    }
    drop(id);
    IS_REMOVED.store(false, Ordering::Relaxed);
    assert_eq!(channel.try_event().unwrap().unwrap().id, other.id());
    assert!(channel.try_event().unwrap().is_none());
    drop(other);
    expect_no_violation(before);
}

#[test]
fn an_id_that_cannot_leave_its_group_is_dropped_while_another_thread_reads_events() {
    let _guard = install();
    let before = ids();
    let channel = EventChannel::new().unwrap();
    let mut device = ibv_context::zeroed();
    let rounds = if cfg!(miri) { 10 } else { 1000 };
    let done = AtomicBool::new(false);
    IS_REMOVED.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                channel.try_event().unwrap();
            }
        });
        for _ in 0..rounds {
            drop(joined(&channel, &mut device, GROUP));
        }
        done.store(true, Ordering::Relaxed);
    });
    IS_REMOVED.store(false, Ordering::Relaxed);
    expect_no_violation(before);
}

#[test]
#[cfg_attr(miri, ignore = "poll(2)")]
fn the_resolve_timeout_may_be_unlimited() {
    let _guard = install();
    let connector = Connector::new().resolve_timeout(Duration::MAX, 0);
    match connector.resolve((Ipv4Addr::LOCALHOST, 1)) {
        // The fake library resolves the address immediately, and resolves no route.
        Err(Error::Cm(CmError::Connect(error))) => assert_eq!(error.step, Step::ResolveRoute),
        other => panic!("{other:?}"),
    }
}

/// Miri would report a race between a reference to the whole context and the thread that locks its mutex.
#[test]
fn the_device_of_an_id_is_read_while_another_thread_locks_its_context() {
    let _guard = install();
    let channel = EventChannel::new().unwrap();
    let id = Id::new(&channel, PortSpace::TCP).unwrap();
    let device = std::ptr::without_provenance_mut(0x17);
    let context = Box::into_raw(Box::new(ibv_context { device, ..ibv_context::zeroed() }));
    // SAFETY: no other thread uses the id yet.
    unsafe { (*id.as_raw()).verbs = context };
    std::thread::scope(|scope| {
        // SAFETY: the context is valid.
        let mutex = Shared(unsafe { &raw mut (*context).mutex });
        scope.spawn(move || {
            let Shared(mutex) = { mutex };
            // SAFETY: a zeroed mutex is initialized and unlocked, and only this thread locks it.
            unsafe {
                assert_eq!((libc::pthread_mutex_lock(mutex.cast()), libc::pthread_mutex_unlock(mutex.cast())), (0, 0))
            }
        });
        assert_eq!(id.device_guid().map(|guid| guid.to_string()), Some("0000:0000:0000:0017".to_owned()));
    });
    drop(id);
    // SAFETY: `Box::into_raw` returned the context above, and the id that used it was dropped.
    drop(unsafe { Box::from_raw(context) });
    with(|state| assert_eq!(state.violations, [""; 0]));
}

/// A pointer that can be sent to another thread.
struct Shared<T>(*mut T);

// SAFETY: the test orders the accesses of both threads.
unsafe impl<T> Send for Shared<T> {}
