//! Devices and their objects.

use std::alloc::{Layout, dealloc};
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use rdma_sys::*;

use super::Inside;
use super::advise::Advised;
use super::ah::Ah;
use super::buf::Buf;
use super::comp_cntr::CompCntr;
use super::config::{Config, Mode, PostFault};
use super::cq::{Channel, Cq};
use super::dm::Dm;
use super::dmah::Dmah;
use super::domains::{Extends, Td};
use super::engine::{RecvWr, SendWr};
use super::events::{AsyncEvents, AsyncQueue};
use super::flow::Steering;
use super::import::{Command, ImportedMr};
use super::memory::Mr;
use super::multicast::Group;
use super::operations::Flush;
use super::post::{Building, Posted};
use super::srq::Srq;
use super::xrc::{OpenedQp, Xrcd};

/// A raw pointer that may move between threads, because a lock protects the state behind it.
pub(super) struct Ptr<T>(pub(super) *mut T);

unsafe impl<T> Send for Ptr<T> {}
unsafe impl<T> Sync for Ptr<T> {}

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Ptr<T> {}

/// Memory of a C object.
pub(super) struct Alloc {
    ptr: Ptr<u8>,
    layout: Layout,
}

impl Alloc {
    pub(super) fn new<T: Copy>(value: T) -> (Self, *mut T) {
        let ptr = Box::into_raw(Box::new(value));
        (Alloc { ptr: Ptr(ptr.cast()), layout: Layout::new::<T>() }, ptr)
    }
}

impl Drop for Alloc {
    fn drop(&mut self) {
        unsafe { dealloc(self.ptr.0, self.layout) }
    }
}

/// Number of existing objects, by type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Live {
    pub(crate) contexts: usize,
    pub(crate) pds: usize,
    pub(crate) mrs: usize,
    pub(crate) channels: usize,
    pub(crate) cqs: usize,
    pub(crate) qps: usize,
    pub(crate) srqs: usize,
    pub(crate) tds: usize,
    pub(crate) ahs: usize,
    pub(crate) xrcds: usize,
    pub(crate) wqs: usize,
    pub(crate) tables: usize,
    pub(crate) flows: usize,
    pub(crate) flow_actions: usize,
    pub(crate) counters: usize,
    pub(crate) comp_cntrs: usize,
    pub(crate) dms: usize,
    pub(crate) dmahs: usize,
    pub(crate) bufs: usize,
}

pub(super) struct Device {
    pub(super) name: String,
    pub(super) index: i32,
    pub(super) config: Config,
    pub(super) raw: Ptr<ibv_device>,
    _alloc: Alloc,
    state: Mutex<State>,
}

impl Device {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Context {
    pub(super) alloc: Alloc,
    /// `None` if the device reports no events.
    pub(super) events: Option<AsyncQueue>,
    /// `None` for a context without a command descriptor.
    pub(super) command: Option<Command>,
}

pub(super) struct Pd {
    pub(super) alloc: Alloc,
    pub(super) raw: Ptr<ibv_pd>,
    pub(super) context: usize,
    /// The parts of a parent domain.
    pub(super) extends: Option<Extends>,
    /// The original of an imported domain.
    pub(super) imports: Option<usize>,
}

pub(super) struct Qp {
    pub(super) alloc: Alloc,
    pub(super) raw: Ptr<ibv_qp>,
    /// NULL for a queue pair created by `ibv_create_qp`.
    pub(super) raw_ex: Ptr<ibv_qp_ex>,
    pub(super) context: usize,
    pub(super) pd: usize,
    pub(super) send_cq: usize,
    pub(super) recv_cq: usize,
    /// `None` for a queue pair with its own receive queue.
    pub(super) srq: Option<usize>,
    pub(super) number: u32,
    pub(super) qp_type: ibv_qp_type,
    pub(super) cap: ibv_qp_cap,
    pub(super) state: ibv_qp_state,
    /// Attributes after the last change.
    pub(super) attr: ibv_qp_attr,
    pub(super) sq: VecDeque<SendWr>,
    pub(super) sq_posted: u64,
    pub(super) sq_reclaimed: u64,
    pub(super) rq: VecDeque<RecvWr>,
    pub(super) rq_posted: u64,
    pub(super) rq_reclaimed: u64,
    /// The open batch, between `ibv_wr_start` and `ibv_wr_complete`.
    pub(super) batch: Option<Vec<Building>>,
    /// The ECE options that were set last.
    pub(super) ece: Option<ibv_ece>,
    pub(super) max_tso_header: u16,
    /// The XRC domain of an XRC target.
    pub(super) xrcd: Option<u64>,
    /// Whether the creator has destroyed the queue pair while other handles are open.
    pub(super) orphan: bool,
    /// The thread that called `ibv_wr_start` last.
    pub(super) builder: Option<ThreadId>,
}

pub(super) struct State {
    pub(super) config: Config,
    pub(super) mode: Mode,
    pub(super) violations: Vec<String>,
    pub(super) calls: Calls,
    pub(super) faults: BTreeMap<&'static str, i32>,
    pub(super) faults_once: BTreeMap<&'static str, i32>,
    pub(super) async_events: AsyncEvents,
    pub(super) post_send_fault: Option<PostFault>,
    pub(super) post_recv_fault: Option<PostFault>,
    pub(super) wr_complete_fault: Option<(i32, bool)>,
    pub(super) posted: Vec<Posted>,
    pub(super) modified: Vec<(ibv_qp_attr, u32)>,
    /// Requested event moderation: completions and microseconds.
    pub(super) moderations: Vec<(u16, u16)>,
    /// Offset, length and address of registered DMA-BUFs.
    pub(super) dmabufs: Vec<(u64, usize, u64)>,
    pub(super) dmah_attrs: Vec<ibv_dmah_init_attr>,
    pub(super) advised: Vec<Advised>,
    pub(super) rate_limits: Vec<ibv_qp_rate_limit_attr>,
    pub(super) flushes: Vec<Flush>,
    /// Creation flags and source numbers of queue pairs.
    pub(super) create_flags: Vec<(u32, u32)>,
    pub(super) contexts: BTreeMap<usize, Context>,
    pub(super) pds: BTreeMap<usize, Pd>,
    pub(super) mrs: BTreeMap<usize, Mr>,
    pub(super) imported_mrs: BTreeMap<usize, ImportedMr>,
    pub(super) channels: BTreeMap<usize, Channel>,
    pub(super) cqs: BTreeMap<usize, Cq>,
    pub(super) qps: BTreeMap<usize, Qp>,
    pub(super) srqs: BTreeMap<usize, Srq>,
    pub(super) tds: BTreeMap<usize, Td>,
    pub(super) ahs: BTreeMap<usize, Ah>,
    /// Each with an attached queue pair.
    pub(super) groups: Vec<(Group, usize)>,
    pub(super) xrcds: BTreeMap<usize, Xrcd>,
    pub(super) opened: BTreeMap<usize, OpenedQp>,
    pub(super) steering: Steering,
    pub(super) comp_cntrs: BTreeMap<usize, CompCntr>,
    pub(super) dms: BTreeMap<usize, Dm>,
    pub(super) dmahs: BTreeMap<usize, Dmah>,
    pub(super) bufs: BTreeMap<usize, Buf>,
    pub(super) next_handle: u32,
    /// Number of the next queue pair, if a test sets it.
    pub(super) next_number: Option<u32>,
    /// Memory of destroyed objects. Without Miri it is not freed, so its address is not reused and a stale pointer is reported.
    /// Miri detects stale pointers in freed memory.
    retired: Vec<Alloc>,
}

/// Looks up an existing object, or reports a call with one that does not exist.
macro_rules! find {
    ($($name:ident: $map:ident -> $ty:ty = $c_name:literal;)+) => {
        impl State {
            $(pub(super) fn $name(&mut self, address: usize, verb: &str) -> Option<&mut $ty> {
                if !self.$map.contains_key(&address) {
                    self.violation(format!(concat!("{} on an ", $c_name, " that does not exist"), verb));
                }
                self.$map.get_mut(&address)
            })+
        }
    };
}

find! {
    context: contexts -> Context = "ibv_context";
    pd: pds -> Pd = "ibv_pd";
    mr: mrs -> Mr = "ibv_mr";
    channel: channels -> Channel = "ibv_comp_channel";
    cq: cqs -> Cq = "ibv_cq";
    qp: qps -> Qp = "ibv_qp";
    srq: srqs -> Srq = "ibv_srq";
    td: tds -> Td = "ibv_td";
    ah: ahs -> Ah = "ibv_ah";
    xrcd: xrcds -> Xrcd = "ibv_xrcd";
    dm: dms -> Dm = "ibv_dm";
    dmah: dmahs -> Dmah = "ibv_dmah";
    buf: bufs -> Buf = "ibv_buf";
}

impl State {
    fn new(config: Config) -> Self {
        State {
            config,
            mode: Mode::AtPost,
            violations: Vec::new(),
            calls: Calls::default(),
            faults: BTreeMap::new(),
            faults_once: BTreeMap::new(),
            async_events: AsyncEvents::default(),
            post_send_fault: None,
            post_recv_fault: None,
            wr_complete_fault: None,
            posted: Vec::new(),
            modified: Vec::new(),
            moderations: Vec::new(),
            dmabufs: Vec::new(),
            dmah_attrs: Vec::new(),
            advised: Vec::new(),
            rate_limits: Vec::new(),
            flushes: Vec::new(),
            create_flags: Vec::new(),
            contexts: BTreeMap::new(),
            pds: BTreeMap::new(),
            mrs: BTreeMap::new(),
            imported_mrs: BTreeMap::new(),
            channels: BTreeMap::new(),
            cqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            srqs: BTreeMap::new(),
            tds: BTreeMap::new(),
            ahs: BTreeMap::new(),
            groups: Vec::new(),
            xrcds: BTreeMap::new(),
            opened: BTreeMap::new(),
            steering: Steering::default(),
            comp_cntrs: BTreeMap::new(),
            dms: BTreeMap::new(),
            dmahs: BTreeMap::new(),
            bufs: BTreeMap::new(),
            next_handle: 0x11,
            next_number: None,
            retired: Vec::new(),
        }
    }

    pub(super) fn violation(&mut self, what: impl Into<String>) {
        self.violations.push(what.into());
    }

    pub(super) fn fault(&self, verb: &str) -> Option<i32> {
        self.faults.get(verb).copied()
    }

    /// Like `fault`, including faults that occur once.
    pub(super) fn fault_once(&mut self, verb: &str) -> Option<i32> {
        self.faults_once.remove(verb).or_else(|| self.fault(verb))
    }

    pub(super) fn handle(&mut self) -> u32 {
        self.next_handle += 1;
        self.next_handle
    }

    pub(super) fn retire(&mut self, alloc: Alloc) {
        if !cfg!(miri) {
            self.retired.push(alloc);
        }
    }

    pub(super) fn live(&self) -> Live {
        Live {
            contexts: self.contexts.len(),
            pds: self.pds.len(),
            mrs: self.mrs.len() + self.imported_mrs.len(),
            channels: self.channels.len(),
            cqs: self.cqs.len(),
            qps: self.qps.values().filter(|qp| !qp.orphan).count() + self.opened.len() + self.steering.rss.len(),
            srqs: self.srqs.len(),
            tds: self.tds.len(),
            ahs: self.ahs.len(),
            xrcds: self.xrcds.len(),
            wqs: self.steering.wqs.len(),
            tables: self.steering.tables.len(),
            flows: self.steering.flows.len(),
            flow_actions: self.steering.actions.len(),
            counters: self.steering.counters.len(),
            comp_cntrs: self.comp_cntrs.len(),
            dms: self.dms.len(),
            dmahs: self.dmahs.len(),
            bufs: self.bufs.len(),
        }
    }
}

/// Number of calls of each verb.
///
/// Every verb counts itself, so this decides how long the tests take under Miri: a verb is found by the address of its name,
/// and the verbs called last are in front.
#[derive(Default)]
pub(super) struct Calls(Vec<(&'static str, usize)>);

impl Calls {
    fn add(&mut self, verb: &'static str) {
        let mut index = 0;
        while index < self.0.len() {
            if std::ptr::eq(self.0[index].0, verb) {
                self.0[index].1 += 1;
                self.0.swap(index, index / 2);
                return;
            }
            index += 1;
        }
        self.0.push((verb, 1));
    }

    /// The name may have more than one address.
    pub(super) fn count(&self, verb: &str) -> usize {
        self.0.iter().filter(|(name, _)| *name == verb).map(|(_, count)| count).sum()
    }
}

/// All devices, and the device that each object belongs to.
struct Registry {
    devices: Vec<Arc<Device>>,
    owners: BTreeMap<usize, Arc<Device>>,
    /// Some of `owners`, by [`slot`]: a search in a map takes long under Miri.
    recent: [Option<(usize, Arc<Device>)>; 32],
    next_index: i32,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    devices: Vec::new(),
    owners: BTreeMap::new(),
    recent: [const { None }; 32],
    next_index: 100,
});

impl Registry {
    fn own(&mut self, address: usize, device: &Arc<Device>) {
        self.owners.insert(address, Arc::clone(device));
        self.recent[slot(address)] = Some((address, Arc::clone(device)));
    }
}

/// The place in [`Registry::recent`] of the object at `address`.
fn slot(address: usize) -> usize {
    address / 16 % 32
}

fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn plug(name: String, config: Config) -> Arc<Device> {
    let mut raw = ibv_device { node_type: IBV_NODE_CA, transport_type: config.transport, ..ibv_device::zeroed() };
    for (to, from) in raw.name.iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    for (to, from) in raw.dev_name.iter_mut().zip("uverbs0".bytes()) {
        *to = from as _;
    }
    let (alloc, raw) = Alloc::new(raw);
    let mut registry = registry();
    registry.next_index += 1;
    let device = Arc::new(Device {
        name,
        index: registry.next_index,
        state: Mutex::new(State::new(config.clone())),
        config,
        raw: Ptr(raw),
        _alloc: alloc,
    });
    registry.devices.push(Arc::clone(&device));
    registry.own(raw.addr(), &device);
    device
}

pub(super) fn unplug(device: &Arc<Device>) {
    let mut registry = registry();
    registry.devices.retain(|other| !Arc::ptr_eq(other, device));
    registry.owners.retain(|_, other| !Arc::ptr_eq(other, device));
    registry.recent = [const { None }; 32];
}

pub(super) fn plugged() -> Vec<Arc<Device>> {
    registry().devices.clone()
}

/// Returns the device that an object belongs to, even after its destruction.
pub(super) fn owner<T>(object: *const T) -> Option<Arc<Device>> {
    let address = object.addr();
    let mut registry = registry();
    if let Some((recent, device)) = &registry.recent[slot(address)] {
        if *recent == address {
            return Some(Arc::clone(device));
        }
    }
    let device = Arc::clone(registry.owners.get(&address)?);
    registry.recent[slot(address)] = Some((address, Arc::clone(&device)));
    Some(device)
}

/// Records the device of an object. The caller holds the lock of the device, so nobody may lock a device while holding the
/// registry.
pub(super) fn own<T>(object: *const T, device: &Arc<Device>) {
    registry().own(object.addr(), device);
}

/// Runs a provider function on the device of `object`.
pub(super) fn enter<T, R>(object: *const T, verb: &'static str, f: impl FnOnce(&mut State, &Arc<Device>) -> R) -> R {
    let _inside = Inside::enter();
    let Some(device) = owner(object) else {
        eprintln!("{verb}: {object:p} was never an object of the provider");
        std::process::abort();
    };
    ERRNO.set(errno());
    let result = {
        let mut state = device.lock();
        state.calls.add(verb);
        f(&mut state, &device)
    };
    // Hides changes of errno by the lock and by allocations.
    unsafe { *libc::__errno_location() = ERRNO.get() };
    result
}

thread_local! {
    /// Value of errno after the call.
    static ERRNO: Cell<i32> = const { Cell::new(0) };
}

fn errno() -> i32 {
    unsafe { *libc::__errno_location() }
}

pub(super) fn set_errno(errno: i32) {
    ERRNO.set(errno);
}

/// Returns NULL and sets errno, unless `errno` is 0.
pub(super) fn null<T>(errno: i32) -> *mut T {
    if errno != 0 {
        set_errno(errno);
    }
    std::ptr::null_mut()
}
