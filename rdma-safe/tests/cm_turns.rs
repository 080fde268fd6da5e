//! A librdmacm in this process that notes what it would not survive: calls at the same time on what belongs together, and the use
//! of what is gone. A program of its own: its functions take the place of the library's.

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

/// Ids are taken from under the library.
static IS_REMOVED: AtomicBool = AtomicBool::new(false);

static WORLD: Mutex<Option<World>> = Mutex::new(None);

#[derive(Default)]
struct World {
    channels: HashMap<usize, Channel>,
    ids: HashMap<usize, State>,
    breaches: Vec<&'static str>,
    requests: usize,
}

#[derive(Default)]
struct Channel {
    busy: bool,
    events: VecDeque<(usize, rdma_cm_event_type)>,
}

struct State {
    channel: usize,
    /// Events that were read and not acknowledged.
    read: usize,
}

fn world() -> MutexGuard<'static, Option<World>> {
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    world.get_or_insert_default();
    world
}

fn with<R>(change: impl FnOnce(&mut World) -> R) -> R {
    change(world().as_mut().unwrap())
}

/// As long as a call lasts that changes what belongs to a channel.
struct Call(usize);

impl Call {
    fn on(channel: usize) -> Call {
        with(|world| match world.channels.get_mut(&channel) {
            Some(found) => {
                if std::mem::replace(&mut found.busy, true) {
                    world.breaches.push("two calls at the same time");
                }
            }
            None => world.breaches.push("a channel that is gone"),
        });
        std::thread::yield_now();
        Call(channel)
    }

    fn of(id: *mut rdma_cm_id) -> Call {
        let channel = with(|world| match world.ids.get(&id.addr()) {
            Some(state) => state.channel,
            None => {
                world.breaches.push("an id that is gone");
                0
            }
        });
        Call::on(channel)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        with(|world| {
            if let Some(channel) = world.channels.get_mut(&self.0) {
                channel.busy = false;
            }
        });
    }
}

unsafe extern "C" fn create_event_channel() -> *mut rdma_event_channel {
    // It is never read here.
    let fd = UnixStream::pair().unwrap().0.into_raw_fd();
    let channel = Box::into_raw(Box::new(rdma_event_channel { fd }));
    with(|world| world.channels.insert(channel.addr(), Channel::default()));
    channel
}

unsafe extern "C" fn destroy_event_channel(channel: *mut rdma_event_channel) {
    with(|world| {
        if world.ids.values().any(|id| id.channel == channel.addr()) {
            world.breaches.push("a channel goes before its ids");
        }
        if world.channels.remove(&channel.addr()).is_none() {
            return world.breaches.push("a channel goes twice");
        }
        // SAFETY: made above, and there until now.
        let channel = unsafe { Box::from_raw(channel) };
        // SAFETY: opened above.
        unsafe { libc::close(channel.fd) };
    });
}

fn make_id(channel: *mut rdma_event_channel, context: *mut c_void, ps: rdma_port_space) -> *mut rdma_cm_id {
    let id = Box::into_raw(Box::new(rdma_cm_id { channel, context, ps, ..rdma_cm_id::zeroed() }));
    with(|world| world.ids.insert(id.addr(), State { channel: channel.addr(), read: 0 }));
    id
}

unsafe extern "C" fn create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    let _call = Call::on(channel.addr());
    // SAFETY: the caller's out pointer.
    unsafe { *id = make_id(channel, context, ps) };
    0
}

unsafe extern "C" fn destroy_id(id: *mut rdma_cm_id) -> c_int {
    let _call = Call::of(id);
    with(|world| {
        let Some(state) = world.ids.remove(&id.addr()) else { return };
        if state.read != 0 {
            world.breaches.push("an id waits for its events for ever");
        }
        if let Some(channel) = world.channels.get_mut(&state.channel) {
            channel.events.retain(|(whose, _)| *whose != id.addr());
        }
        // SAFETY: made above, and there until now.
        drop(unsafe { Box::from_raw(id) });
    });
    0
}

fn happen(id: *mut rdma_cm_id, event: rdma_cm_event_type) -> c_int {
    let call = Call::of(id);
    with(|world| {
        if let Some(channel) = world.channels.get_mut(&call.0) {
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
    happen(id, RDMA_CM_EVENT_ADDR_RESOLVED)
}

unsafe extern "C" fn bind_addr(_: *mut rdma_cm_id, _: *mut libc::sockaddr) -> c_int {
    0
}

/// One wants to connect already.
unsafe extern "C" fn listen(id: *mut rdma_cm_id, _: c_int) -> c_int {
    happen(id, RDMA_CM_EVENT_CONNECT_REQUEST)
}

unsafe extern "C" fn get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int {
    let _call = Call::on(channel.addr());
    let next = with(|world| {
        let (whose, kind) = world.channels.get_mut(&channel.addr())?.events.pop_front()?;
        world.ids.get_mut(&whose)?.read += 1;
        Some((std::ptr::with_exposed_provenance_mut::<rdma_cm_id>(whose), kind))
    });
    let Some((id, kind)) = next else {
        // SAFETY: that of this thread.
        unsafe { *libc::__errno_location() = libc::EAGAIN };
        return -1;
    };
    let mut read = rdma_cm_event { id, event: kind, ..rdma_cm_event::zeroed() };
    // SAFETY: the id is there, as nobody destroys it meanwhile. Anybody who reads it now is in a race with this.
    unsafe {
        (*id).port_num = (*id).port_num.wrapping_add(1);
        (*id).route.addr.addr.ibaddr.pkey = u16::from((*id).port_num).to_be();
        if kind == RDMA_CM_EVENT_CONNECT_REQUEST {
            (read.listen_id, read.id) = (id, make_id(channel, (*id).context, (*id).ps));
            with(|world| world.requests += 1);
        }
        *event = Box::into_raw(Box::new(read));
    }
    0
}

unsafe extern "C" fn ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    // SAFETY: made above, and acknowledged once.
    let event = unsafe { Box::from_raw(event) };
    let id = if event.listen_id.is_null() { event.id } else { event.listen_id };
    with(|world| match world.ids.get_mut(&id.addr()) {
        Some(state) => state.read -= 1,
        None => world.breaches.push("an event of an id that is gone is acknowledged"),
    });
    0
}

unsafe extern "C" fn migrate_id(id: *mut rdma_cm_id, to: *mut rdma_event_channel) -> c_int {
    if IS_REMOVED.load(Ordering::Relaxed) {
        // SAFETY: that of this thread.
        unsafe { *libc::__errno_location() = libc::ENXIO };
        return -1;
    }
    let from = Call::of(id);
    let _to = Call::on(to.addr());
    with(|world| {
        let Some(channel) = world.channels.get_mut(&from.0) else { return };
        let (moved, left) = channel.events.drain(..).partition(|(whose, _)| *whose == id.addr());
        channel.events = left;
        let mut moved: VecDeque<_> = moved;
        if let Some(channel) = world.channels.get_mut(&to.addr()) {
            channel.events.append(&mut moved);
        }
        if let Some(state) = world.ids.get_mut(&id.addr()) {
            state.channel = to.addr();
        }
        // SAFETY: the id is there.
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

/// What each test begins with: they share the library, and are alone with it.
fn installed() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    static INSTALLED: Once = Once::new();
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    INSTALLED.call_once(|| {
        // SAFETY: nobody here calls what is not replaced below.
        let mut table = unsafe { RdmaCm::from_lookup("the test", |_: &CStr| unsupported as *mut c_void) }.unwrap();
        (table.rdma_create_event_channel, table.rdma_destroy_event_channel) =
            (create_event_channel, destroy_event_channel);
        (table.rdma_create_id, table.rdma_destroy_id, table.rdma_migrate_id) = (create_id, destroy_id, migrate_id);
        (table.rdma_get_cm_event, table.rdma_ack_cm_event) = (get_cm_event, ack_cm_event);
        (table.rdma_resolve_addr, table.rdma_listen, table.rdma_bind_addr) = (resolve_addr, listen, bind_addr);
        // SAFETY: the functions that are called have the signatures of their fields.
        unsafe { install_rdmacm(table) }.unwrap();
        // SAFETY: as above.
        let mut table = unsafe { Verbs::from_lookup("the test", |_: &CStr| unsupported as *mut c_void) }.unwrap();
        table.ibv_get_device_guid = device_guid;
        // SAFETY: as above.
        unsafe { install_verbs(table) }.unwrap();
    });
    alone
}

/// Miri counts what is leaked.
fn is_forgotten(round: usize) -> bool {
    !cfg!(miri) && round % 7 == 0
}

/// Threads whose ids come, wander from channel to channel and go, while others read the events of all.
#[test]
fn ids_wander_and_go_while_their_events_are_read() {
    let _alone = installed();
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
                    // Its two events at most, each read as a whole.
                    let (pkey, shown) = (id.pkey(), format!("{id:?}"));
                    assert!(pkey <= 2 && shown.starts_with("Id {"), "{pkey}, {shown}");
                    id.migrate(&channels[(round + 2) % 3]).unwrap();
                    if is_forgotten(round) {
                        // It stays, and its channel does.
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
    with(|world| {
        assert_eq!(world.breaches, [""; 0]);
        assert!(world.requests > 0, "no request was read");
        // Those that were forgotten, and nothing else.
        let forgotten = (0..3).flat_map(|start| start..start + rounds).filter(|round| is_forgotten(*round)).count();
        assert_eq!((world.ids.len(), world.channels.len()), (forgotten, forgotten));
    });
}

#[test]
#[cfg_attr(miri, ignore = "poll(2)")]
fn a_request_whose_device_has_gone_says_so_to_either_kind_of_listener() {
    fn cause<T>(asked: Result<Option<T>>) -> Cause {
        match asked.err().expect("a request that cannot be taken") {
            Error::Cm(CmError::Connect(error)) => error.cause,
            other => panic!("{other:?}"),
        }
    }
    let _alone = installed();
    let left = || with(|world| (world.ids.len(), world.channels.len()));
    let before = left();
    IS_REMOVED.store(true, Ordering::Relaxed);
    let at = (Ipv4Addr::LOCALHOST, 1);
    let connections = cause(Listener::bind(at).unwrap().next(Duration::ZERO));
    let datagrams = cause(DatagramListener::bind(at).unwrap().next(Duration::ZERO));
    IS_REMOVED.store(false, Ordering::Relaxed);
    assert_eq!((connections, datagrams), (Cause::DeviceRemoved, Cause::DeviceRemoved));
    assert_eq!(left(), before, "neither the requests nor their channels are left");
    with(|world| assert_eq!(world.breaches, [""; 0]));
}

#[test]
#[cfg_attr(miri, ignore = "poll(2)")]
fn a_way_may_be_looked_for_as_long_as_there_is_time() {
    let _alone = installed();
    let connector = Connector::new().resolve_timeout(Duration::MAX, 0);
    match connector.resolve((Ipv4Addr::LOCALHOST, 1)) {
        // The address is found at once, and this library finds no way.
        Err(Error::Cm(CmError::Connect(error))) => assert_eq!(error.step, Step::ResolveRoute),
        other => panic!("{other:?}"),
    }
}

/// Under Miri a reference to the whole context races with the thread that locks its mutex.
#[test]
fn the_device_of_an_id_is_read_while_the_mutex_of_its_context_changes_hands() {
    let _alone = installed();
    let channel = EventChannel::new().unwrap();
    let id = Id::new(&channel, PortSpace::TCP).unwrap();
    let device = std::ptr::without_provenance_mut(0x17);
    let context = Box::into_raw(Box::new(ibv_context { device, ..ibv_context::zeroed() }));
    // SAFETY: nobody else uses the id yet.
    unsafe { (*id.as_raw()).verbs = context };
    std::thread::scope(|scope| {
        // SAFETY: the context is valid.
        let mutex = Shared(unsafe { &raw mut (*context).mutex });
        scope.spawn(move || {
            let Shared(mutex) = { mutex };
            // SAFETY: a mutex of zeros is an open one, which this thread is the only one to lock.
            unsafe {
                assert_eq!((libc::pthread_mutex_lock(mutex.cast()), libc::pthread_mutex_unlock(mutex.cast())), (0, 0))
            }
        });
        assert_eq!(id.device_guid().map(|guid| guid.to_string()), Some("0000:0000:0000:0017".to_owned()));
    });
    drop(id);
    // SAFETY: made above, and the id that had it is gone.
    drop(unsafe { Box::from_raw(context) });
    with(|world| assert_eq!(world.breaches, [""; 0]));
}

/// A pointer that can be sent to another thread.
struct Shared<T>(*mut T);

// SAFETY: the test orders the accesses of both threads.
unsafe impl<T> Send for Shared<T> {}
