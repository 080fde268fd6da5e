//! Completion counters, which count completed work without reading completions.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::{check, check_ptr};
use crate::error::Verb;
use crate::object::{Object, Parents};
use crate::{Context, Error, QueuePair, QueuePairState, Result};

const FEATURE: &str = "completion counters (ibv_create_comp_cntr, of rdma-core 65)";

bitflags::bitflags! {
    /// Operations of a queue pair that a completion counter counts: `enum ibv_qp_attach_comp_cntr_op`.
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

/// Unit of a completion counter: `enum ibv_comp_cntr_type`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum CompletionCount {
    /// Work requests.
    WorkRequests,
    /// Bytes.
    Bytes,
}

/// Support of a device for completion counters: `struct ibv_comp_cntr_caps`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CompletionCounterCaps {
    /// Largest value, after which a counter wraps to 0.
    pub max_value: u64,
    /// Largest number of counters.
    pub max_counters: u32,
    /// Operations that they can count.
    pub operations: CountedOperations,
}

/// A completion counter: `struct ibv_comp_cntr`. Made by [`Context::completion_counter`]. Clones share it.
///
/// It has two values: successful work and failed work. [`QueuePair::attach_counter`] attaches it to queue pairs. The
/// counter counts their work as long as they exist, and the queue pairs keep the counter alive.
#[derive(Clone)]
pub struct CompletionCounter {
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom {
    context: Context,
    calls: Calls,
}

/// The functions of completion counters. A library has all of them or none.
#[derive(Clone, Copy)]
struct Calls {
    create: ibv_create_comp_cntr_fn,
    destroy: ibv_destroy_comp_cntr_fn,
    /// For successful work, and for failed work.
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

    const VERB: Verb = Verb::DestroyCompCntr;

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_comp_cntr) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.calls.destroy)(raw) }
    }
}

impl Context {
    /// Capabilities of completion counters: `ibv_query_comp_cntr_caps(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 65, or a device without counters; [`Error::Verb`].
    #[doc(alias = "ibv_query_comp_cntr_caps")]
    pub fn completion_counter_caps(&self) -> Result<CompletionCounterCaps> {
        let query = self.verbs()._ibv_query_comp_cntr_caps.ok_or_else(|| self.unsupported(FEATURE))?;
        let mut caps = ibv_comp_cntr_caps::zeroed();
        // SAFETY: the context is valid, and `caps` has the size that is passed along.
        check(unsafe { query(self.as_raw(), &mut caps, size_of::<ibv_comp_cntr_caps>()) })
            .map_err(|errno| self.feature_error(Verb::QueryCompCntrCaps, FEATURE, errno))?;
        let operations = CountedOperations::from_bits_retain(caps.supported_qp_attach_ops);
        Ok(CompletionCounterCaps { max_value: caps.max_value, max_counters: caps.max_counters, operations })
    }

    /// Creates a completion counter with the value 0: `ibv_create_comp_cntr(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 65, or a device without counters; [`Error::Verb`].
    #[doc(alias = "ibv_create_comp_cntr")]
    pub fn completion_counter(&self, count: CompletionCount) -> Result<CompletionCounter> {
        let calls = Calls::of(self.verbs()).ok_or_else(|| self.unsupported(FEATURE))?;
        let type_ = match count {
            CompletionCount::WorkRequests => IBV_COMP_CNTR_TYPE_WRS,
            CompletionCount::Bytes => IBV_COMP_CNTR_TYPE_BYTES,
        };
        let mut attr = ibv_comp_cntr_init_attr { comp_mask: 0, type_, flags: 0 };
        // SAFETY: the context is valid, and `attr` is valid during the call.
        let raw = check_ptr(|| unsafe { (calls.create)(self.as_raw(), &mut attr) })
            .map_err(|errno| self.feature_error(Verb::CreateCompCntr, FEATURE, errno))?;
        // SAFETY: the counter was just created, and nobody else has it.
        Ok(unsafe { CompletionCounter::new(self, raw, calls) })
    }
}

impl CompletionCounter {
    /// # Safety
    /// Those of [`CompletionCounter::from_raw`]. `calls` must be from the library of the context.
    unsafe fn new(context: &Context, raw: NonNull<ibv_comp_cntr>, calls: Calls) -> Self {
        // SAFETY: the caller's contract. Each queue pair that has the counter attached holds an `Arc` of the counter.
        CompletionCounter { inner: Arc::new(unsafe { Object::new(raw, MadeFrom { context: context.clone(), calls }) }) }
    }

    /// Adopts a counter that other code has created. It is destroyed with the last queue pair that uses it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 65.
    ///
    /// # Safety
    /// `raw` must be a valid counter of `context` that is attached to no queue pair. Nobody else may destroy it
    /// afterwards.
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_comp_cntr>) -> Result<Self> {
        let calls = Calls::of(context.verbs()).ok_or_else(|| context.unsupported(FEATURE))?;
        // SAFETY: the caller's contract.
        Ok(unsafe { CompletionCounter::new(context, raw, calls) })
    }

    /// Successful work requests, or their bytes: `ibv_read_comp_cntr(3)`. The result may not include the latest `set`
    /// or `add`.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`].
    #[doc(alias = "ibv_read_comp_cntr")]
    pub fn read(&self) -> Result<u64> {
        self.get(0, Verb::ReadCompCntr)
    }

    /// Failed work requests, or their bytes: `ibv_read_err_comp_cntr(3)`.
    ///
    /// # Errors
    /// Those of [`CompletionCounter::read`].
    #[doc(alias = "ibv_read_err_comp_cntr")]
    pub fn read_errors(&self) -> Result<u64> {
        self.get(1, Verb::ReadErrCompCntr)
    }

    /// Sets the value of successful work: `ibv_set_comp_cntr(3)`. Work that completes at the same time may not be
    /// counted.
    ///
    /// # Errors
    /// Those of [`CompletionCounter::read`].
    #[doc(alias = "ibv_set_comp_cntr")]
    pub fn set(&self, value: u64) -> Result<()> {
        // SAFETY: the counter is valid.
        self.result(Verb::SetCompCntr, unsafe { (self.inner.calls.set[0])(self.as_raw(), value) })
    }

    /// Sets the value of failed work: `ibv_set_err_comp_cntr(3)`.
    ///
    /// # Errors
    /// Those of [`CompletionCounter::read`].
    #[doc(alias = "ibv_set_err_comp_cntr")]
    pub fn set_errors(&self, value: u64) -> Result<()> {
        // SAFETY: the counter is valid.
        self.result(Verb::SetErrCompCntr, unsafe { (self.inner.calls.set[1])(self.as_raw(), value) })
    }

    /// Adds to the value of successful work: `ibv_inc_comp_cntr(3)`.
    ///
    /// # Errors
    /// Those of [`CompletionCounter::read`].
    #[doc(alias = "ibv_inc_comp_cntr")]
    pub fn add(&self, amount: u64) -> Result<()> {
        // SAFETY: the counter is valid.
        self.result(Verb::IncCompCntr, unsafe { (self.inner.calls.add[0])(self.as_raw(), amount) })
    }

    /// Adds to the value of failed work: `ibv_inc_err_comp_cntr(3)`.
    ///
    /// # Errors
    /// Those of [`CompletionCounter::read`].
    #[doc(alias = "ibv_inc_err_comp_cntr")]
    pub fn add_errors(&self, amount: u64) -> Result<()> {
        // SAFETY: the counter is valid.
        self.result(Verb::IncErrCompCntr, unsafe { (self.inner.calls.add[1])(self.as_raw(), amount) })
    }

    /// Destroys the counter: `ibv_destroy_comp_cntr(3)`. Dropping does the same once no queue pair uses it, but ignores
    /// errors.
    ///
    /// # Errors
    /// [`Error::InUse`] if it has clones or queue pairs use it: it is destroyed with the last of them. [`Error::Verb`]
    /// if the provider fails; the counter and its context are then leaked.
    #[doc(alias = "ibv_destroy_comp_cntr")]
    pub fn destroy(self) -> Result<()> {
        Object::destroy_last(self.inner, "completion counter", "clones or queue pairs").map(drop)
    }

    fn get(&self, which: usize, verb: Verb) -> Result<u64> {
        let mut value = 0;
        // SAFETY: the counter and the out pointer are valid.
        self.result(verb, unsafe { (self.inner.calls.read[which])(self.as_raw(), &mut value) })?;
        Ok(value)
    }

    fn result(&self, verb: Verb, result: i32) -> Result<()> {
        check(result)
            .map_err(|errno| self.context().feature_error(verb, "this operation of completion counters", errno))
    }

    /// The context that the counter belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, valid while this counter or a queue pair that it is attached to exists.
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
    /// Attaches `counter` to `operations` of this queue pair: `ibv_qp_attach_comp_cntr(3)`.
    ///
    /// The counter then counts these operations. Each operation can have one counter; a counter can have any number of
    /// queue pairs.
    ///
    /// # Errors
    /// [`Error::ForeignContext`]; [`Error::WrongState`] in other states than RESET and INIT; [`Error::Unsupported`] for
    /// operations that [`CompletionCounterCaps::operations`] does not have; [`Error::Verb`] with `EBUSY` for operations
    /// that already have a counter.
    #[doc(alias = "ibv_qp_attach_comp_cntr")]
    pub fn attach_counter(&mut self, counter: &CompletionCounter, operations: CountedOperations) -> Result<()> {
        let context = self.context();
        context.require_same(counter.context(), "completion counter")?;
        if ![QueuePairState::RESET, QueuePairState::INIT].contains(&self.state()) {
            return Err(Error::WrongState { change: "a completion counter is attached", state: self.state() });
        }
        let mut attr = ibv_qp_attach_comp_cntr_attr { comp_mask: 0, op_mask: operations.bits() };
        // SAFETY: the queue pair is valid, and so is the counter, which the queue pair keeps below. `attr` is valid
        // during the call.
        check(unsafe { (counter.inner.calls.attach)(self.as_raw(), counter.as_raw(), &mut attr) }).map_err(
            |errno| {
                context.feature_error(Verb::QpAttachCompCntr, "counting these operations (CountedOperations)", errno)
            },
        )?;
        // Only destroying the queue pair detaches the counter.
        self.core().keep(counter.clone());
        Ok(())
    }
}
