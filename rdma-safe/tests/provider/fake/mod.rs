//! A provider inside the test process: the C ABI of verbs in Rust, without a device, a library or a kernel.
//!
//! It fills the table of exported functions, the operations of contexts, and the function pointers inside completion
//! queues and queue pairs. Queue pairs of one device that name each other exchange data on registered memory. It keeps
//! the rules of the manual pages on its own account: whatever a program must not do is noted as a violation, and the
//! test fails when its [`Fake`] is dropped. Each test has devices of its own, so tests run side by side.
// What a C library would do: every function gets raw pointers and trusts its caller, so a reason at each block would say
// the same everywhere. Pointers are looked up by address before they are followed, so that a stale one is reported.
#![allow(clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc)]
// Several test programs share it, and none uses all of it.
#![allow(dead_code)]

mod advise;
mod ah;
mod buf;
mod comp_cntr;
mod config;
mod cq;
mod dm;
mod dmah;
mod domains;
mod engine;
mod events;
mod flow;
mod import;
mod memory;
mod multicast;
mod mw;
mod operations;
mod post;
mod qp;
mod queries;
mod srq;
mod state;
mod table;
mod tags;
mod verbs;
mod wq;
mod xrc;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_safe::{Context, Device as SafeDevice, ProtectionDomain};
use rdma_sys::ibv_cq;

pub(crate) use advise::Advised;
pub(crate) use config::{Bad, Config, FakeGid, Mode, Port, PostFault};
pub(crate) use engine::Cqe;
pub(crate) use events::Element;
pub(crate) use flow::{SeenEsp, SeenFlow};
pub(crate) use import::{Importing, with_importing};
pub(crate) use operations::Flush;
pub(crate) use post::Posted;
pub(crate) use queries::fork_inits;
pub(crate) use state::Live;
pub(crate) use verbs::{DeviceList, with_device_list};

use state::{Device, State};

/// One device of the provider, for one test. Dropping it checks that nothing was violated and nothing is left.
pub(crate) struct Fake {
    device: Arc<Device>,
    may_leak: Cell<bool>,
}

impl Fake {
    /// Adds a device to those that `ibv_get_device_list` finds.
    pub(crate) fn new(config: Config) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        table::install();
        let name = format!("fake{}", NEXT.fetch_add(1, Ordering::Relaxed));
        Fake { device: state::plug(name, config), may_leak: Cell::new(false) }
    }

    pub(crate) fn name(&self) -> &str {
        &self.device.name
    }

    pub(crate) fn open(&self) -> Context {
        SafeDevice::by_name(self.name()).unwrap().open().unwrap()
    }

    pub(crate) fn pd(&self) -> ProtectionDomain {
        self.open().alloc_pd().unwrap()
    }

    /// How often a function was called: by the name of the exported function, or of the operation or pointer.
    pub(crate) fn calls(&self, verb: &str) -> usize {
        self.with(|state| state.calls.get(verb).copied().unwrap_or(0))
    }

    /// Objects that exist.
    pub(crate) fn live(&self) -> Live {
        self.with(|state| state.live())
    }

    /// What was done against the rules, and forgets it.
    pub(crate) fn take_violations(&self) -> Vec<String> {
        self.with(|state| std::mem::take(&mut state.violations))
    }

    /// From now on `verb` fails with `errno`, without doing anything; with 0 it fails without a reason.
    pub(crate) fn fail(&self, verb: &'static str, errno: i32) {
        self.with(|state| state.faults.insert(verb, errno));
    }

    /// `verb` works again.
    pub(crate) fn heal(&self, verb: &'static str) {
        self.with(|state| state.faults.remove(verb));
    }

    /// The next `ibv_post_send` fails this way.
    pub(crate) fn fail_post_send(&self, fault: PostFault) {
        self.with(|state| state.post_send_fault = Some(fault));
    }

    /// The next `ibv_post_recv` or `ibv_post_srq_recv` fails this way.
    pub(crate) fn fail_post_recv(&self, fault: PostFault) {
        self.with(|state| state.post_recv_fault = Some(fault));
    }

    /// The next `ibv_wr_complete` fails this way; of the fault, `taken` says whether the batch is in the queue anyway.
    pub(crate) fn fail_wr_complete(&self, errno: i32, taken: bool) {
        self.with(|state| state.wr_complete_fault = Some((errno, taken)));
    }

    /// When posted work is executed.
    pub(crate) fn set_mode(&self, mode: Mode) {
        self.with(|state| state.mode = mode);
    }

    /// Executes what can be executed, in any mode.
    pub(crate) fn progress(&self) {
        self.with(State::run);
    }

    /// Puts a completion into a queue that no work caused.
    pub(crate) fn inject(&self, cq: *mut ibv_cq, cqe: Cqe) {
        self.with(|state| state.push_cqe(cq.addr(), cqe, false));
    }

    /// Queues an asynchronous event of any kind.
    pub(crate) fn raise(&self, context: &Context, kind: u32, element: Element) {
        self.with(|state| state.raise(context.as_raw(), kind, element));
    }

    /// Asynchronous events that nobody has read yet.
    pub(crate) fn queued(&self, context: &Context) -> usize {
        self.with(|state| state.queued(context.as_raw()))
    }

    /// From now on the descriptor of asynchronous events says that there will be no more.
    pub(crate) fn hang_up(&self, context: &Context) {
        self.with(|state| state.hang_up(context.as_raw()));
    }

    /// Asynchronous events that were read and not acknowledged.
    pub(crate) fn unacknowledged(&self) -> u32 {
        self.with(|state| state.unacknowledged())
    }

    /// The next call of `verb` fails with `errno`.
    pub(crate) fn fail_once(&self, verb: &'static str, errno: i32) {
        self.with(|state| state.faults_once.insert(verb, errno));
    }

    /// Identifiers of the receives that are in a shared receive queue, oldest first.
    pub(crate) fn shared_receives(&self, srq: *mut rdma_sys::ibv_srq) -> Vec<u64> {
        self.with(|state| state.shared_receives(srq))
    }

    /// Moves a work queue to the error state, as a device does by itself.
    pub(crate) fn break_wq(&self, wq: *mut rdma_sys::ibv_wq) {
        self.with(|state| state.break_wq(wq));
    }

    /// The next queue pair gets this number, which no queue pair may have any more.
    pub(crate) fn reuse_number(&self, number: u32) {
        self.with(|state| state.next_number = Some(number));
    }

    /// Moves a queue pair to the error state, as a device does by itself.
    pub(crate) fn break_qp(&self, number: u32) {
        self.with(|state| state.break_qp(number));
    }

    /// The newest work requests that were posted, oldest first; forgets them.
    pub(crate) fn take_posted(&self) -> Vec<Posted> {
        self.with(|state| std::mem::take(&mut state.posted))
    }

    /// The attributes and the mask of every `ibv_modify_qp` that was obeyed.
    pub(crate) fn take_modified(&self) -> Vec<(rdma_sys::ibv_qp_attr, u32)> {
        self.with(|state| std::mem::take(&mut state.modified))
    }

    /// What every `ibv_modify_cq` that was obeyed has asked for: completions and microseconds.
    pub(crate) fn take_moderations(&self) -> Vec<(u16, u16)> {
        self.with(|state| std::mem::take(&mut state.moderations))
    }

    /// Offset, length and address of every DMA-BUF that was registered.
    pub(crate) fn take_dmabufs(&self) -> Vec<(u64, usize, u64)> {
        self.with(|state| std::mem::take(&mut state.dmabufs))
    }

    /// What every DMA handle was allocated for, and forgets it.
    pub(crate) fn take_dmah_attrs(&self) -> Vec<rdma_sys::ibv_dmah_init_attr> {
        self.with(|state| std::mem::take(&mut state.dmah_attrs))
    }

    /// Every advice on memory, and forgets it.
    pub(crate) fn take_advised(&self) -> Vec<Advised> {
        self.with(|state| std::mem::take(&mut state.advised))
    }

    /// The limits of every `ibv_modify_qp_rate_limit`, and forgets them.
    pub(crate) fn take_rate_limits(&self) -> Vec<rdma_sys::ibv_qp_rate_limit_attr> {
        self.with(|state| std::mem::take(&mut state.rate_limits))
    }

    /// Flags and source numbers of the queue pairs that were created with some.
    pub(crate) fn take_create_flags(&self) -> Vec<(u32, u32)> {
        self.with(|state| std::mem::take(&mut state.create_flags))
    }

    /// What was flushed, and forgets it.
    pub(crate) fn take_flushes(&self) -> Vec<Flush> {
        self.with(|state| std::mem::take(&mut state.flushes))
    }

    /// A frame of Ethernet comes to the port.
    pub(crate) fn packet(&self, frame: &[u8]) {
        self.with(|state| state.packet(frame));
    }

    /// Every flow that was made.
    pub(crate) fn take_flows(&self) -> Vec<SeenFlow> {
        self.with(|state| std::mem::take(&mut state.steering.seen))
    }

    /// Every ESP action that was made or changed.
    pub(crate) fn take_esp(&self) -> Vec<SeenEsp> {
        self.with(|state| std::mem::take(&mut state.steering.esp))
    }

    /// Objects that are left when the device is dropped are wanted.
    pub(crate) fn may_leak(&self) {
        self.may_leak.set(true);
    }

    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let _inside = Inside::enter();
        f(&mut self.device.lock())
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        state::unplug(&self.device);
        if std::thread::panicking() {
            return;
        }
        let violations = self.take_violations();
        assert!(violations.is_empty(), "the provider was misused: {violations:#?}");
        if !self.may_leak.get() {
            assert_eq!(self.live(), Live::default(), "objects that were not destroyed");
        }
    }
}

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Whether this thread is in the provider: what it allocates there is not the doing of the library under test.
pub(crate) fn is_inside() -> bool {
    DEPTH.with(|depth| depth.get() > 0)
}

struct Inside;

impl Inside {
    fn enter() -> Self {
        DEPTH.with(|depth| depth.set(depth.get() + 1));
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.set(depth.get() - 1));
    }
}
