//! Verbs in front of those of soft0, by which a test makes the device fail or report wrong completions.
//!
//! [`install`] replaces functions of soft0's table. The functions here call soft0. For an object of an [`Interposed`] device
//! they first do what the test has asked for. The functions of the data path are function pointers in C objects, and are replaced
//! in the objects of an interposed context only. Each `Interposed` has its own state, so tests run in parallel.
//!
//! Interposed functions also check the rules of the manual pages. They record a violation for each forbidden call, and the test
//! fails when its `Interposed` is dropped.

mod completions;
mod control;
mod posts;
pub(crate) mod rig;
mod rules;
mod state;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};

use rdma_safe::sys::{
    IBV_QP_STATE, IBV_QPS_ERR, Verbs, Zeroed, ibv_context, ibv_cq, ibv_qp, ibv_qp_attr, ibv_send_wr, ibv_srq, ibv_wc,
};
use rdma_safe::{Context, Device, ProtectionDomain};

use super::{Rdma, device, within_deadline};
pub(crate) use posts::{Bad, PostFault, Posted};
use state::State;
pub(crate) use state::{Config, Live};

/// The functions that are counted and can be made to fail, by the name that libibverbs exports, or else by the name of their
/// pointer. `end_poll`, `wr_start` and `wr_abort` cannot fail.
const VERBS: [&str; 36] = [
    "alloc_mw",
    "bind_mw",
    "create_cq_ex",
    "create_qp_ex",
    "dealloc_mw",
    "end_poll",
    "ibv_alloc_pd",
    "ibv_close_device",
    "ibv_create_ah",
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_create_qp",
    "ibv_create_srq",
    "ibv_dealloc_pd",
    "ibv_dereg_mr",
    "ibv_destroy_ah",
    "ibv_destroy_comp_channel",
    "ibv_destroy_cq",
    "ibv_destroy_qp",
    "ibv_destroy_srq",
    "ibv_modify_qp",
    "ibv_modify_srq",
    "ibv_open_device",
    "ibv_poll_cq",
    "ibv_post_recv",
    "ibv_post_send",
    "ibv_post_srq_recv",
    "ibv_reg_mr",
    "ibv_req_notify_cq",
    "ibv_rereg_mr",
    "ibv_resize_cq",
    "ibv_wr_complete",
    "next_poll",
    "start_poll",
    "wr_abort",
    "wr_start",
];

/// Panics on a name that would never be counted.
fn check_name(verb: &str) {
    assert!(VERBS.contains(&verb), "{verb} is not among the functions that the interposer counts");
}

/// The functions of soft0.
static SOFT: OnceLock<Verbs> = OnceLock::new();

/// The state of each interposed context, by the address of the context.
static CONTEXTS: Mutex<BTreeMap<usize, Arc<State>>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The state of the context that this thread is opening.
    static OPENING: RefCell<Option<Arc<State>>> = const { RefCell::new(None) };
}

/// Registers the interposer. Must be called before soft0 is installed.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    // SAFETY: the functions of `control` call those of soft0, fail like verbs, or report what the test asked for.
    ONCE.call_once(|| unsafe { rdma_soft::abi::interpose(replace) });
}

fn replace(table: &mut Verbs) {
    SOFT.get_or_init(|| *table);
    control::replace(table);
}

/// The functions of soft0.
fn soft() -> &'static Verbs {
    SOFT.get().expect("soft0 was installed with its functions replaced")
}

/// The state of an interposed context.
fn state_of(context: *mut ibv_context) -> Option<Arc<State>> {
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).get(&context.addr()).cloned()
}

/// A soft0 whose functions can be made to fail and to lie, or `None` after printing why the test is skipped.
pub(crate) fn interposed() -> Option<Interposed> {
    interposed_with(Config::default())
}

/// Like [`interposed`], with options that apply from the opening of the device.
pub(crate) fn interposed_with(config: Config) -> Option<Interposed> {
    let mut rdma = device()?;
    if !rdma.is_soft() {
        println!("skipped: only soft0 has functions that the test can replace");
        return None;
    }
    let state = Arc::new(State::new(config));
    rdma.context = open(&state);
    Some(Interposed { rdma, state, may_leak: Cell::new(false) })
}

fn open(state: &Arc<State>) -> Context {
    OPENING.set(Some(Arc::clone(state)));
    let context = Device::by_name("soft0").and_then(|device| device.open());
    OPENING.set(None);
    context.expect("soft0 opens")
}

/// An interposed device for one test. Dropping it checks for violations and for objects that were not destroyed.
pub(crate) struct Interposed {
    rdma: Rdma,
    state: Arc<State>,
    may_leak: Cell<bool>,
}

impl Deref for Interposed {
    type Target = Rdma;

    fn deref(&self) -> &Rdma {
        &self.rdma
    }
}

impl Interposed {
    /// Opens another interposed context, which [`live`](Self::live) counts.
    pub(crate) fn open(&self) -> Context {
        open(&self.state)
    }

    /// A protection domain of another context, which nothing else keeps open.
    pub(crate) fn pd_of_own_context(&self) -> ProtectionDomain {
        self.open().alloc_pd().expect("a protection domain")
    }

    /// Number of calls of one of [`VERBS`].
    pub(crate) fn calls(&self, verb: &str) -> usize {
        check_name(verb);
        self.state.lock().calls.get(verb).copied().unwrap_or(0)
    }

    /// Numbers of objects that exist, without the context that `self` keeps open.
    pub(crate) fn live(&self) -> Live {
        let live = self.state.lock().live;
        Live { contexts: live.contexts - 1, ..live }
    }

    /// Returns and clears the recorded violations.
    pub(crate) fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().violations)
    }

    /// Makes every call of one of [`VERBS`] fail with `errno` and without effect.
    ///
    /// With 0, a verb that creates fails without an errno. `ibv_poll_cq` returns -2 for any errno.
    pub(crate) fn fail(&self, verb: &'static str, errno: i32) {
        check_name(verb);
        self.state.lock().faults.insert(verb, (errno, usize::MAX));
    }

    /// Like [`fail`](Self::fail), for the next call only.
    pub(crate) fn fail_once(&self, verb: &'static str, errno: i32) {
        check_name(verb);
        self.state.lock().faults.insert(verb, (errno, 1));
    }

    /// Ends the effect of [`fail`](Self::fail) for `verb`.
    pub(crate) fn heal(&self, verb: &'static str) {
        self.state.lock().faults.remove(verb);
    }

    /// Makes the next `ibv_post_send` fail.
    pub(crate) fn fail_post_send(&self, fault: PostFault) {
        self.state.lock().post_send = Some(fault);
    }

    /// Makes the next `ibv_post_recv` or `ibv_post_srq_recv` fail.
    pub(crate) fn fail_post_recv(&self, fault: PostFault) {
        self.state.lock().post_recv = Some(fault);
    }

    /// Makes the next `ibv_wr_complete` fail. If `taken` is set, the batch is posted nevertheless.
    pub(crate) fn fail_wr_complete(&self, errno: i32, taken: bool) {
        self.state.lock().wr_complete = Some((errno, taken));
    }

    /// Posts work to soft0 itself, which neither fails nor is recorded.
    ///
    /// # Safety
    /// The queue pair is one of this device, and the chain keeps the contract of `ibv_post_send`.
    pub(crate) unsafe fn post_send(&self, qp: *mut ibv_qp, first: &mut ibv_send_wr) {
        let post = self.state.lock().soft.and_then(|soft| soft.ops.post_send).expect("post_send");
        // SAFETY: the caller's promise.
        assert_eq!(unsafe { post(qp, first, &mut null_mut()) }, 0, "soft0 accepts the work");
    }

    /// Returns and clears the recorded work requests, oldest first.
    pub(crate) fn take_posted(&self) -> Vec<Posted> {
        std::mem::take(&mut self.state.lock().posted)
    }

    /// Adds a completion that no posted work caused, after those that the queue has now.
    pub(crate) fn inject(&self, cq: *mut ibv_cq, wc: ibv_wc) {
        self.state.lock().inject(cq, wc);
    }

    /// Takes all completions that soft0 has now, so that a later [`hold`](Self::hold) does not affect them.
    pub(crate) fn fetch(&self, cq: *mut ibv_cq) {
        _ = self.state.lock().count(cq);
    }

    /// Waits until the queue has `count` completions, without polling it for the program.
    pub(crate) fn await_completions(&self, cq: *mut ibv_cq, count: usize) {
        let has_all = || (self.state.lock().count(cq) >= count).then_some(());
        within_deadline("completions", has_all);
    }

    /// Holds true completions back from now on, until [`release`](Self::release).
    pub(crate) fn hold(&self) {
        self.state.lock().holds = true;
    }

    /// Releases the completions that were held back, and holds no more.
    pub(crate) fn release(&self) {
        self.state.lock().release();
    }

    /// Replaces each true completion by those that `change` returns: none, another one, or several.
    ///
    /// It runs while the state of the device is locked, so it must not use the device, and must not panic.
    pub(crate) fn change_completions(&self, change: impl FnMut(ibv_wc) -> Vec<ibv_wc> + Send + 'static) {
        self.state.lock().change = Some(Box::new(change));
    }

    /// Number of receives that are posted to a queue pair and whose completions were not polled.
    pub(crate) fn receives_in_flight(&self, number: u32) -> usize {
        self.state.lock().receives(number)
    }

    /// The `wr_id`s of the receives that are posted to a shared receive queue, oldest first.
    pub(crate) fn shared_receives(&self, srq: *mut ibv_srq) -> Vec<u64> {
        self.state.lock().shared_receives(srq.addr())
    }

    /// Moves a queue pair to the error state, like a device that detects an error.
    ///
    /// # Safety
    /// No other thread uses the queue pair during the call.
    pub(crate) unsafe fn break_qp(&self, number: u32) {
        let inner = self.state.lock();
        let qp = inner.queue_pair(number).expect("a queue pair of this device");
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_ERR, ..ibv_qp_attr::zeroed() };
        // SAFETY: the state is locked, so the queue pair is not destroyed meanwhile. The caller excludes other accesses to the
        // field, which is restored, because a device does not write to the object.
        unsafe {
            let before = (*qp).state;
            assert_eq!((soft().ibv_modify_qp)(qp, &raw mut attr, IBV_QP_STATE.0 as i32), 0);
            (*qp).state = before;
        }
    }

    /// Permits objects that still exist when the value is dropped.
    pub(crate) fn may_leak(&self) {
        self.may_leak.set(true);
    }
}

impl Drop for Interposed {
    fn drop(&mut self) {
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
