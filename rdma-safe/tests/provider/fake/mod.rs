//! A fake verbs provider inside the test process: the C ABI in Rust, without a device, a library or a kernel.
//!
//! The provider fills the table of exported functions, the operations of contexts, and the function pointers in completion
//! queues and queue pairs. Queue pairs of one device that are connected to each other exchange data in registered memory. The
//! provider also checks the rules of the manual pages. It records a violation for each forbidden call, and the test fails when
//! its [`Fake`] is dropped. Each test uses separate devices, so tests can run in parallel.
// Like a C library, every function receives raw pointers and trusts its caller, so each block would need the same reason.
// Pointers are looked up by address before they are dereferenced, so stale pointers are reported.
#![allow(clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc)]
// Several test programs include this module, and each uses only a part of it.
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

/// A fake device for one test. Dropping it checks for violations and for objects that were not destroyed.
pub(crate) struct Fake {
    device: Arc<Device>,
    may_leak: Cell<bool>,
}

impl Fake {
    /// Adds a device to the list that `ibv_get_device_list` returns.
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

    /// Number of calls of a function, by the name of the exported function, operation or function pointer.
    pub(crate) fn calls(&self, verb: &str) -> usize {
        self.with(|state| state.calls.count(verb))
    }

    /// Numbers of objects that exist.
    pub(crate) fn live(&self) -> Live {
        self.with(|state| state.live())
    }

    /// Returns and clears the recorded violations.
    pub(crate) fn take_violations(&self) -> Vec<String> {
        self.with(|state| std::mem::take(&mut state.violations))
    }

    /// Makes every call of `verb` fail with `errno` and without effect. With 0 it fails without an errno.
    pub(crate) fn fail(&self, verb: &'static str, errno: i32) {
        self.with(|state| state.faults.insert(verb, errno));
    }

    /// Ends the effect of [`fail`](Self::fail) for `verb`.
    pub(crate) fn heal(&self, verb: &'static str) {
        self.with(|state| state.faults.remove(verb));
    }

    /// Makes the next `ibv_post_send` fail.
    pub(crate) fn fail_post_send(&self, fault: PostFault) {
        self.with(|state| state.post_send_fault = Some(fault));
    }

    /// Makes the next `ibv_post_recv` or `ibv_post_srq_recv` fail.
    pub(crate) fn fail_post_recv(&self, fault: PostFault) {
        self.with(|state| state.post_recv_fault = Some(fault));
    }

    /// Makes the next `ibv_wr_complete` fail. If `taken` is set, the batch is posted nevertheless.
    pub(crate) fn fail_wr_complete(&self, errno: i32, taken: bool) {
        self.with(|state| state.wr_complete_fault = Some((errno, taken)));
    }

    /// Sets when posted work is executed.
    pub(crate) fn set_mode(&self, mode: Mode) {
        self.with(|state| state.mode = mode);
    }

    /// Executes all work that is ready, in any mode.
    pub(crate) fn progress(&self) {
        self.with(State::run);
    }

    /// Adds a completion that no posted work caused.
    pub(crate) fn inject(&self, cq: *mut ibv_cq, cqe: Cqe) {
        self.with(|state| state.push_cqe(cq.addr(), cqe, false));
    }

    /// Queues an asynchronous event of any kind.
    pub(crate) fn raise(&self, context: &Context, kind: u32, element: Element) {
        self.with(|state| state.raise(context.as_raw(), kind, element));
    }

    /// Makes the descriptor of asynchronous events report end of file.
    pub(crate) fn hang_up(&self, context: &Context) {
        self.with(|state| state.hang_up(context.as_raw()));
    }

    /// Number of asynchronous events that were read but not acknowledged.
    pub(crate) fn unacknowledged(&self) -> u32 {
        self.with(|state| state.unacknowledged())
    }

    /// Makes the next call of `verb` fail with `errno`.
    pub(crate) fn fail_once(&self, verb: &'static str, errno: i32) {
        self.with(|state| state.faults_once.insert(verb, errno));
    }

    /// The `wr_id`s of the receives in a shared receive queue, oldest first.
    pub(crate) fn shared_receives(&self, srq: *mut rdma_sys::ibv_srq) -> Vec<u64> {
        self.with(|state| state.shared_receives(srq))
    }

    /// Moves a work queue to the error state, like a device that detects an error.
    pub(crate) fn break_wq(&self, wq: *mut rdma_sys::ibv_wq) {
        self.with(|state| state.break_wq(wq));
    }

    /// Gives the next queue pair this number, which must be unused.
    pub(crate) fn reuse_number(&self, number: u32) {
        self.with(|state| state.next_number = Some(number));
    }

    /// Moves a queue pair to the error state, like a device that detects an error.
    pub(crate) fn break_qp(&self, number: u32) {
        self.with(|state| state.break_qp(number));
    }

    /// Returns and clears the recorded work requests, oldest first.
    pub(crate) fn take_posted(&self) -> Vec<Posted> {
        self.with(|state| std::mem::take(&mut state.posted))
    }

    /// Attributes and mask of every successful `ibv_modify_qp`.
    pub(crate) fn take_modified(&self) -> Vec<(rdma_sys::ibv_qp_attr, u32)> {
        self.with(|state| std::mem::take(&mut state.modified))
    }

    /// Completions and microseconds of every successful `ibv_modify_cq`.
    pub(crate) fn take_moderations(&self) -> Vec<(u16, u16)> {
        self.with(|state| std::mem::take(&mut state.moderations))
    }

    /// Offset, length and address of every registered DMA-BUF.
    pub(crate) fn take_dmabufs(&self) -> Vec<(u64, usize, u64)> {
        self.with(|state| std::mem::take(&mut state.dmabufs))
    }

    /// Returns and clears the attributes of all allocated DMA handles.
    pub(crate) fn take_dmah_attrs(&self) -> Vec<rdma_sys::ibv_dmah_init_attr> {
        self.with(|state| std::mem::take(&mut state.dmah_attrs))
    }

    /// Returns and clears the recorded calls of `ibv_advise_mr`.
    pub(crate) fn take_advised(&self) -> Vec<Advised> {
        self.with(|state| std::mem::take(&mut state.advised))
    }

    /// Returns and clears the limits of all calls of `ibv_modify_qp_rate_limit`.
    pub(crate) fn take_rate_limits(&self) -> Vec<rdma_sys::ibv_qp_rate_limit_attr> {
        self.with(|state| std::mem::take(&mut state.rate_limits))
    }

    /// Creation flags and source numbers of all queue pairs that were created with flags.
    pub(crate) fn take_create_flags(&self) -> Vec<(u32, u32)> {
        self.with(|state| std::mem::take(&mut state.create_flags))
    }

    /// Returns and clears the recorded flush operations.
    pub(crate) fn take_flushes(&self) -> Vec<Flush> {
        self.with(|state| std::mem::take(&mut state.flushes))
    }

    /// Delivers an Ethernet frame to the port.
    pub(crate) fn packet(&self, frame: &[u8]) {
        self.with(|state| state.packet(frame));
    }

    /// All created flows.
    pub(crate) fn take_flows(&self) -> Vec<SeenFlow> {
        self.with(|state| std::mem::take(&mut state.steering.seen))
    }

    /// All ESP actions that were created or modified.
    pub(crate) fn take_esp(&self) -> Vec<SeenEsp> {
        self.with(|state| std::mem::take(&mut state.steering.esp))
    }

    /// Permits objects that still exist when the device is dropped.
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

/// Whether this thread is inside the provider. Allocations there are not allocations of the library.
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
