//! The state of an interposed device.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{ThreadId, current};

use rdma_safe::device::DeviceCapabilities;
use rdma_safe::sys::*;

use super::completions::{Change, Cq, Entry};
use super::posts::{PostFault, Posted, Qp};

/// Options that apply when objects are created.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    /// Completion fields that soft0 lacks and that creation accepts nevertheless.
    pub(crate) further_fields: u64,
    /// Completion fields whose accessors are NULL.
    pub(crate) hollow_fields: u64,
    /// Whether extended completion queues lack `end_poll`.
    pub(crate) no_end_poll: bool,
    /// Capabilities of soft0 that the device does not report.
    pub(crate) without_capabilities: DeviceCapabilities,
    /// Vendor of the device, in place of soft0's.
    pub(crate) vendor_id: Option<u32>,
    /// Longest message of the port, in place of soft0's.
    pub(crate) max_msg_sz: Option<u32>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            further_fields: 0,
            hollow_fields: 0,
            no_end_poll: false,
            without_capabilities: DeviceCapabilities::empty(),
            vendor_id: None,
            max_msg_sz: None,
        }
    }
}

/// Number of existing objects, by type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Live {
    pub(crate) contexts: usize,
    pub(crate) pds: usize,
    pub(crate) mrs: usize,
    pub(crate) mws: usize,
    pub(crate) channels: usize,
    pub(crate) cqs: usize,
    pub(crate) qps: usize,
    pub(crate) srqs: usize,
    pub(crate) ahs: usize,
}

impl Live {
    /// The count that a successful call of `verb` changes, and whether it grows.
    fn count_of(&mut self, verb: &str) -> Option<(&mut usize, bool)> {
        Some(match verb {
            "ibv_open_device" => (&mut self.contexts, true),
            "ibv_close_device" => (&mut self.contexts, false),
            "ibv_alloc_pd" => (&mut self.pds, true),
            "ibv_dealloc_pd" => (&mut self.pds, false),
            "ibv_reg_mr" => (&mut self.mrs, true),
            "ibv_dereg_mr" => (&mut self.mrs, false),
            "alloc_mw" => (&mut self.mws, true),
            "dealloc_mw" => (&mut self.mws, false),
            "ibv_create_comp_channel" => (&mut self.channels, true),
            "ibv_destroy_comp_channel" => (&mut self.channels, false),
            "ibv_create_cq" | "create_cq_ex" => (&mut self.cqs, true),
            "ibv_destroy_cq" => (&mut self.cqs, false),
            "ibv_create_qp" | "create_qp_ex" => (&mut self.qps, true),
            "ibv_destroy_qp" => (&mut self.qps, false),
            "ibv_create_srq" => (&mut self.srqs, true),
            "ibv_destroy_srq" => (&mut self.srqs, false),
            "ibv_create_ah" => (&mut self.ahs, true),
            "ibv_destroy_ah" => (&mut self.ahs, false),
            _ => return None,
        })
    }
}

/// The functions of soft0 in a context.
#[derive(Clone, Copy)]
pub(super) struct Operations {
    pub(super) ops: ibv_context_ops,
    pub(super) create_cq_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex,
    pub(super) create_qp_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp,
    pub(super) query_device_ex: unsafe extern "C" fn(
        *mut ibv_context,
        *const ibv_query_device_ex_input,
        *mut ibv_device_attr_ex,
        usize,
    ) -> c_int,
    pub(super) query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int,
}

pub(super) struct State {
    pub(super) config: Config,
    inner: Mutex<Inner>,
}

#[derive(Default)]
pub(super) struct Inner {
    pub(super) soft: Option<Operations>,
    pub(super) calls: BTreeMap<&'static str, usize>,
    /// The errno of each verb that fails, and how often it will fail.
    pub(super) faults: BTreeMap<&'static str, (c_int, usize)>,
    pub(super) violations: Vec<String>,
    pub(super) live: Live,
    pub(super) cqs: BTreeMap<usize, Cq>,
    pub(super) qps: BTreeMap<usize, Qp>,
    /// Receives that are posted to shared receive queues and have not completed.
    pub(super) srqs: BTreeMap<usize, VecDeque<Posted>>,
    pub(super) post_send: Option<PostFault>,
    pub(super) post_recv: Option<PostFault>,
    pub(super) wr_complete: Option<(c_int, bool)>,
    pub(super) posted: Vec<Posted>,
    pub(super) holds: bool,
    pub(super) change: Option<Change>,
}

/// The result of a verb: an error number, or a pointer that is null on failure.
pub(super) trait Outcome: Copy {
    fn failure(errno: c_int) -> Self;
    fn address(self) -> Option<usize>;
}

impl Outcome for c_int {
    fn failure(errno: c_int) -> Self {
        errno
    }

    fn address(self) -> Option<usize> {
        (self == 0).then_some(0)
    }
}

impl<T> Outcome for *mut T {
    fn failure(errno: c_int) -> Self {
        // SAFETY: the pointer to the errno of this thread is valid.
        unsafe { *libc::__errno_location() = errno };
        std::ptr::null_mut()
    }

    fn address(self) -> Option<usize> {
        (!self.is_null()).then(|| self.addr())
    }
}

/// What the state knows of an object that is being destroyed.
#[derive(Default)]
struct Removed {
    cq: Option<Cq>,
    qp: Option<Qp>,
    srq: Option<VecDeque<Posted>>,
}

impl State {
    pub(super) fn new(config: Config) -> Self {
        State { config, inner: Mutex::default() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a control verb of soft0, unless it is made to fail. `object` is the address of its first argument.
    pub(super) fn run<R: Outcome>(&self, verb: &'static str, object: usize, call: impl FnOnce() -> R) -> R {
        let mut removed = Removed::default();
        {
            let mut inner = self.lock();
            inner.check(verb, object);
            if let Some(errno) = inner.call(verb) {
                return R::failure(errno);
            }
            match verb {
                // Another object may get the address before the call returns.
                "ibv_destroy_cq" => removed.cq = inner.cqs.remove(&object),
                "ibv_destroy_qp" => removed.qp = inner.qps.remove(&object),
                "ibv_destroy_srq" => removed.srq = inner.srqs.remove(&object),
                _ => {}
            }
        }
        // Without the lock, because some verbs wait for other threads.
        let result = call();
        let mut inner = self.lock();
        let Some(address) = result.address() else {
            inner.cqs.extend(removed.cq.map(|cq| (object, cq)));
            inner.qps.extend(removed.qp.map(|qp| (object, qp)));
            inner.srqs.extend(removed.srq.map(|srq| (object, srq)));
            return result;
        };
        match inner.live.count_of(verb) {
            Some((count, true)) => *count += 1,
            Some((count, false)) => *count -= 1,
            None => {}
        }
        match verb {
            "ibv_create_cq" | "create_cq_ex" => _ = inner.cqs.insert(address, Cq::default()),
            "ibv_create_srq" => _ = inner.srqs.insert(address, VecDeque::new()),
            _ => {}
        }
        result
    }
}

impl Inner {
    /// Counts a call; returns the errno if it is to fail.
    pub(super) fn call(&mut self, verb: &'static str) -> Option<c_int> {
        super::check_name(verb);
        *self.calls.entry(verb).or_default() += 1;
        let (errno, times) = self.faults.get_mut(verb)?;
        let errno = *errno;
        if *times != usize::MAX {
            *times -= 1;
            if *times == 0 {
                self.faults.remove(verb);
            }
        }
        Some(errno)
    }

    pub(super) fn violation(&mut self, what: impl Into<String>) {
        self.violations.push(what.into());
    }

    /// Checks the rules for a call of a verb that is not of the data path.
    fn check(&mut self, verb: &'static str, object: usize) {
        match verb {
            "ibv_destroy_cq" if self.cqs.get(&object).is_some_and(|cq| cq.polling.is_some()) => {
                self.violation("ibv_destroy_cq between start_poll and end_poll");
            }
            "ibv_resize_cq" => self.needs_lock([object, object], verb),
            "ibv_req_notify_cq" => {
                self.needs_lock([object, object], verb);
                self.needs_no_batch(object, verb);
            }
            "ibv_destroy_qp" | "ibv_modify_qp" => {
                let Some((builder, cqs)) = self.qps.get(&object).map(|qp| (qp.builder, qp.cqs)) else { return };
                if builder.is_some() {
                    self.violation(format!("{verb} between wr_start and wr_complete"));
                }
                if verb == "ibv_destroy_qp" {
                    self.needs_lock(cqs, verb);
                }
            }
            _ => {}
        }
    }

    /// Reports a deadlock if this thread polls one of `cqs`. Providers take the lock of the queue in `verb`.
    fn needs_lock(&mut self, cqs: [usize; 2], verb: &str) {
        let here: Option<ThreadId> = Some(current().id());
        if cqs.iter().any(|cq| self.cqs.get(cq).is_some_and(|cq| cq.polling == here)) {
            self.violation(format!("deadlock: {verb} while this thread polls"));
        }
    }

    /// Reports a deadlock if this thread has an open batch whose sends complete to `cq`. Some providers hold the lock of the queue
    /// from `wr_start` to `wr_complete`.
    pub(super) fn needs_no_batch(&mut self, cq: usize, verb: &str) {
        let here = Some(current().id());
        if self.qps.values().any(|qp| qp.builder == here && qp.cqs[0] == cq) {
            self.violation(format!("deadlock: {verb} between wr_start and wr_complete"));
        }
    }

    /// Reports the deregistration of memory that posted work names.
    pub(super) fn needs_unused(&mut self, lkey: u32) {
        let queues = self.qps.values().flat_map(|qp| qp.sends.iter().chain(&qp.receives));
        let names = |posted: &Posted| posted.lkeys.contains(&lkey);
        if queues.chain(self.srqs.values().flatten()).any(names) {
            self.violation("ibv_dereg_mr of memory that posted work names");
        }
    }

    pub(super) fn queue_pair(&self, number: u32) -> Option<*mut ibv_qp> {
        self.qps.values().find(|qp| qp.number == number).map(|qp| qp.raw.0)
    }

    pub(super) fn receives(&self, number: u32) -> usize {
        self.qps.values().find(|qp| qp.number == number).map_or(0, |qp| qp.receives.len())
    }

    pub(super) fn shared_receives(&self, srq: usize) -> Vec<u64> {
        self.srqs[&srq].iter().map(|posted| posted.wr_id).collect()
    }

    /// Forgets the work that a true completion ends. Unsignaled work before it has ended, too.
    pub(super) fn complete(&mut self, Entry { wc, is_true }: &Entry) {
        let Some(qp) = self.qps.values_mut().find(|qp| *is_true && qp.number == wc.qp_num) else { return };
        if let Some(srq) = qp.srq.and_then(|srq| self.srqs.get_mut(&srq)) {
            if let Some(at) = srq.iter().position(|posted| posted.wr_id == wc.wr_id) {
                srq.remove(at);
                return;
            }
        }
        // The opcode of a failed completion is undefined.
        let is_receive = wc.status == IBV_WC_SUCCESS && wc.opcode.0 & IBV_WC_RECV.0 != 0;
        let queues = if is_receive { [&mut qp.receives, &mut qp.sends] } else { [&mut qp.sends, &mut qp.receives] };
        for queue in queues {
            if let Some(at) = queue.iter().position(|posted| posted.wr_id == wc.wr_id) {
                queue.drain(..=at);
                return;
            }
        }
    }
}
