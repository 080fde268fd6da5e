//! Completion counters: how much work has completed, without a completion for each.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::{check, check_ptr};
use crate::object::{Object, Parents};
use crate::{Context, Error, QueuePair, QueuePairState, Result};

const FEATURE: &str = "completion counters (ibv_create_comp_cntr, of rdma-core 65)";

bitflags::bitflags! {
    /// What a completion counter counts of a queue pair: `enum ibv_qp_attach_comp_cntr_op`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct CountedOperations: u32 {
        /// Sends.
        const SEND = IBV_QP_ATTACH_COMP_CNTR_OP_SEND.0;
        /// Receives.
        const RECV = IBV_QP_ATTACH_COMP_CNTR_OP_RECV.0;
        /// Reads.
        const RDMA_READ = IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_READ.0;
        /// Reads by the peer.
        const REMOTE_RDMA_READ = IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_READ.0;
        /// Writes.
        const RDMA_WRITE = IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_WRITE.0;
        /// Writes by the peer.
        const REMOTE_RDMA_WRITE = IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_WRITE.0;

        const _ = !0;
    }
}

/// What a completion counter adds up: `enum ibv_comp_cntr_type`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum CompletionCount {
    /// Work requests.
    WorkRequests,
    /// Bytes.
    Bytes,
}

/// What a device has of completion counters: `struct ibv_comp_cntr_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CompletionCounterCaps {
    /// Largest value; beyond it a counter starts again from 0.
    pub max_value: u64,
    /// Largest number of counters.
    pub max_counters: u32,
    /// What they can count.
    pub operations: CountedOperations,
}

/// A completion counter: `struct ibv_comp_cntr`. Made by [`Context::completion_counter`]. Clones share it.
///
/// It has two values: of work that succeeded, and of work that failed. It counts for the queue pairs that it is attached to, by
/// [`QueuePair::attach_counter`], for as long as they exist, and they keep it.
#[derive(Clone)]
pub struct CompletionCounter {
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom {
    context: Context,
    calls: Calls,
}

/// The functions, all of which a library has that has one.
#[derive(Clone, Copy)]
struct Calls {
    create: ibv_create_comp_cntr_fn,
    destroy: ibv_destroy_comp_cntr_fn,
    /// Of success, and of failure.
    read: [ibv_read_comp_cntr_fn; 2],
    set: [ibv_set_comp_cntr_fn; 2],
    add: [ibv_inc_comp_cntr_fn; 2],
    attach: ibv_qp_attach_comp_cntr_fn,
}

impl Calls {
    fn of(verbs: &Verbs) -> Option<Self> {
        Some(Calls {
            create: verbs.ibv_create_comp_cntr?,
            destroy: verbs.ibv_destroy_comp_cntr?,
            read: [verbs.ibv_read_comp_cntr?, verbs.ibv_read_err_comp_cntr?],
            set: [verbs.ibv_set_comp_cntr?, verbs.ibv_set_err_comp_cntr?],
            add: [verbs.ibv_inc_comp_cntr?, verbs.ibv_inc_err_comp_cntr?],
            attach: verbs.ibv_qp_attach_comp_cntr?,
        })
    }
}

impl Parents for MadeFrom {
    type Raw = ibv_comp_cntr;

    const VERB: &'static str = "ibv_destroy_comp_cntr";

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&self, raw: *mut ibv_comp_cntr) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.calls.destroy)(raw) }
    }
}

impl Context {
    /// What completion counters can do: `ibv_query_comp_cntr_caps(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 65, or a device without; [`Error::Verb`].
    #[doc(alias = "ibv_query_comp_cntr_caps")]
    pub fn completion_counter_caps(&self) -> Result<CompletionCounterCaps> {
        let query = self.verbs()._ibv_query_comp_cntr_caps.ok_or_else(|| self.unsupported(FEATURE))?;
        let mut caps = ibv_comp_cntr_caps::zeroed();
        // SAFETY: the context is valid, and `caps` has room for the structure whose size is passed along.
        check(unsafe { query(self.as_raw(), &mut caps, size_of::<ibv_comp_cntr_caps>()) })
            .map_err(|errno| self.feature_error("ibv_query_comp_cntr_caps", FEATURE, errno))?;
        let operations = CountedOperations::from_bits_retain(caps.supported_qp_attach_ops);
        Ok(CompletionCounterCaps { max_value: caps.max_value, max_counters: caps.max_counters, operations })
    }

    /// Creates a completion counter at 0: `ibv_create_comp_cntr(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 65, or a device without; [`Error::Verb`].
    #[doc(alias = "ibv_create_comp_cntr")]
    pub fn completion_counter(&self, count: CompletionCount) -> Result<CompletionCounter> {
        let calls = Calls::of(self.verbs()).ok_or_else(|| self.unsupported(FEATURE))?;
        let type_ = match count {
            CompletionCount::WorkRequests => IBV_COMP_CNTR_TYPE_WRS,
            CompletionCount::Bytes => IBV_COMP_CNTR_TYPE_BYTES,
        };
        let mut attr = ibv_comp_cntr_init_attr { comp_mask: 0, type_, flags: 0 };
        // SAFETY: the context is valid, and `attr` is for the duration of the call.
        let raw = check_ptr(|| unsafe { (calls.create)(self.as_raw(), &mut attr) })
            .map_err(|errno| self.feature_error("ibv_create_comp_cntr", FEATURE, errno))?;
        // SAFETY: just created, and given to nobody else.
        Ok(unsafe { CompletionCounter::new(self, raw, calls) })
    }
}

impl CompletionCounter {
    /// # Safety
    /// As [`CompletionCounter::from_raw`], with the functions of the same library.
    unsafe fn new(context: &Context, raw: NonNull<ibv_comp_cntr>, calls: Calls) -> Self {
        // SAFETY: the caller's contract; a queue pair that it is attached to holds an `Arc` of it.
        CompletionCounter { inner: Arc::new(unsafe { Object::new(raw, MadeFrom { context: context.clone(), calls }) }) }
    }

    /// Adopts a counter that other code has created. It is destroyed when the last queue pair that has it is gone.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 65.
    ///
    /// # Safety
    /// `raw` must be a counter of `context` that exists, attached to no queue pair. Nobody else may destroy it from here on.
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_comp_cntr>) -> Result<Self> {
        let calls = Calls::of(context.verbs()).ok_or_else(|| context.unsupported(FEATURE))?;
        // SAFETY: the caller's contract.
        Ok(unsafe { CompletionCounter::new(context, raw, calls) })
    }

    /// Work that succeeded, or its bytes: `ibv_read_comp_cntr(3)`. What was set or added just now may not be seen yet.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`].
    #[doc(alias = "ibv_read_comp_cntr")]
    pub fn read(&self) -> Result<u64> {
        self.get(0, "ibv_read_comp_cntr")
    }

    /// Work that failed: `ibv_read_err_comp_cntr(3)`.
    ///
    /// # Errors
    /// As [`CompletionCounter::read`].
    #[doc(alias = "ibv_read_err_comp_cntr")]
    pub fn read_errors(&self) -> Result<u64> {
        self.get(1, "ibv_read_err_comp_cntr")
    }

    /// Sets the value of work that succeeded: `ibv_set_comp_cntr(3)`. What completes meanwhile may not be counted.
    ///
    /// # Errors
    /// As [`CompletionCounter::read`].
    #[doc(alias = "ibv_set_comp_cntr")]
    pub fn set(&self, value: u64) -> Result<()> {
        // SAFETY: the counter is valid.
        self.result("ibv_set_comp_cntr", unsafe { (self.inner.calls.set[0])(self.as_raw(), value) })
    }

    /// Sets the value of work that failed: `ibv_set_err_comp_cntr(3)`.
    ///
    /// # Errors
    /// As [`CompletionCounter::read`].
    #[doc(alias = "ibv_set_err_comp_cntr")]
    pub fn set_errors(&self, value: u64) -> Result<()> {
        // SAFETY: the counter is valid.
        self.result("ibv_set_err_comp_cntr", unsafe { (self.inner.calls.set[1])(self.as_raw(), value) })
    }

    /// Adds to the value of work that succeeded: `ibv_inc_comp_cntr(3)`.
    ///
    /// # Errors
    /// As [`CompletionCounter::read`].
    #[doc(alias = "ibv_inc_comp_cntr")]
    pub fn add(&self, amount: u64) -> Result<()> {
        // SAFETY: the counter is valid.
        self.result("ibv_inc_comp_cntr", unsafe { (self.inner.calls.add[0])(self.as_raw(), amount) })
    }

    /// Adds to the value of work that failed: `ibv_inc_err_comp_cntr(3)`.
    ///
    /// # Errors
    /// As [`CompletionCounter::read`].
    #[doc(alias = "ibv_inc_err_comp_cntr")]
    pub fn add_errors(&self, amount: u64) -> Result<()> {
        // SAFETY: the counter is valid.
        self.result("ibv_inc_err_comp_cntr", unsafe { (self.inner.calls.add[1])(self.as_raw(), amount) })
    }

    /// Destroys it: `ibv_destroy_comp_cntr(3)`. Dropping does the same, when no queue pair has it any more, and tells nobody.
    ///
    /// # Errors
    /// [`Error::InUse`] while there are clones of it or queue pairs that have it: it is destroyed when the last of those is gone.
    /// [`Error::Verb`] with the provider's answer; it, and its device, then stay until the process ends.
    #[doc(alias = "ibv_destroy_comp_cntr")]
    pub fn destroy(self) -> Result<()> {
        Object::destroy_last(self.inner, "completion counter", "clones or queue pairs").map(drop)
    }

    fn get(&self, which: usize, verb: &'static str) -> Result<u64> {
        let mut value = 0;
        // SAFETY: the counter is valid, and so is the out pointer.
        self.result(verb, unsafe { (self.inner.calls.read[which])(self.as_raw(), &mut value) })?;
        Ok(value)
    }

    fn result(&self, verb: &'static str, result: i32) -> Result<()> {
        check(result)
            .map_err(|errno| self.context().feature_error(verb, "this operation of completion counters", errno))
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, valid while this counter or a queue pair that it is attached to is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_comp_cntr {
        self.inner.as_raw()
    }
}

impl fmt::Debug for CompletionCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionCounter").field("device", &self.context().device_name()).finish_non_exhaustive()
    }
}

impl QueuePair {
    /// Lets `counter` count `operations` of this queue pair from here on: `ibv_qp_attach_comp_cntr(3)`. Each operation has one
    /// counter at most, and a counter any number of queue pairs.
    ///
    /// # Errors
    /// [`Error::ForeignContext`]; [`Error::TooLate`] in other states than RESET and INIT; [`Error::Unsupported`] for operations
    /// that are not among [`CompletionCounterCaps::operations`]; [`Error::Verb`], with `EBUSY` for those that have a counter
    /// already.
    #[doc(alias = "ibv_qp_attach_comp_cntr")]
    pub fn attach_counter(&mut self, counter: &CompletionCounter, operations: CountedOperations) -> Result<()> {
        let context = self.context();
        context.require_same(counter.context(), "completion counter")?;
        if ![QueuePairState::RESET, QueuePairState::INIT].contains(&self.state()) {
            return Err(Error::TooLate { what: "a completion counter is attached", state: self.state() });
        }
        let mut attr = ibv_qp_attach_comp_cntr_attr { comp_mask: 0, op_mask: operations.bits() };
        // SAFETY: the queue pair and the counter, which it keeps below, are valid; `attr` is for the duration of the call.
        check(unsafe { (counter.inner.calls.attach)(self.as_raw(), counter.as_raw(), &mut attr) }).map_err(
            |errno| {
                context.feature_error("ibv_qp_attach_comp_cntr", "counting these operations (CountedOperations)", errno)
            },
        )?;
        // There is no way to detach it but to destroy the queue pair.
        self.shared().keep(counter.clone());
        Ok(())
    }
}
