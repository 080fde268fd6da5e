//! Counters of flows, and of completed work.
//!
//! [`Counters`] count the packets of a [`Flow`](crate::flow::Flow). A [`CompletionCounter`] counts the completed work
//! of a [`QueuePair`](crate::QueuePair).

mod comp_cntr;

use std::ffi::c_int;
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::{check, check_ptr};
use crate::error::Verb;
use crate::named::named;
use crate::object::{Object, Parents};
use crate::{Context, Result};

pub use comp_cntr::{CompletionCount, CompletionCounter, CompletionCounterCaps, CountedOperations};

named! {
    /// Unit of a counter: `enum ibv_counter_description`.
    pub struct CounterDescription(u32) as "counter" {
        /// Packets.
        PACKETS = IBV_COUNTER_PACKETS.0 => "packets",
        /// Bytes.
        BYTES = IBV_COUNTER_BYTES.0 => "bytes",
    }
}

const FEATURE: &str = "counters of flows";

/// A set of counters: `struct ibv_counters`. Made by [`Context::create_counters`]. Clones share it.
///
/// Several flows can share a set, which then counts the packets of all of them.
#[derive(Clone)]
pub struct Counters {
    // Providers lock the set in each call.
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom(Context);

impl Parents for MadeFrom {
    type Raw = ibv_counters;

    const VERB: Verb = Verb::DestroyCounters;

    fn context(&self) -> &Context {
        &self.0
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_counters) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { ibv_destroy_counters(raw) }
    }
}

impl Context {
    /// Creates a set of counters that counts nothing yet: `ibv_create_counters(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_create_counters")]
    pub fn create_counters(&self) -> Result<Counters> {
        let mut attr = ibv_counters_init_attr::zeroed();
        // SAFETY: the context is valid, and `attr` is valid during the call.
        let raw = check_ptr(|| unsafe { ibv_create_counters(self.as_raw(), &mut attr) })
            .map_err(|errno| self.feature_error(Verb::CreateCounters, FEATURE, errno))?;
        // SAFETY: the counters were just created, and nobody else has them.
        Ok(unsafe { Counters::from_raw(self, raw) })
    }
}

impl Counters {
    /// Adopts counters that other code has created. They are destroyed with the last flow that uses them.
    ///
    /// # Safety
    /// `raw` must be valid counters of `context` that no flow uses. Nobody else may destroy them afterwards.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_counters>) -> Self {
        // SAFETY: the caller's contract. Each flow with these counters holds an `Arc` of them.
        Counters { inner: Arc::new(unsafe { Object::new(raw, MadeFrom(context.clone())) }) }
    }

    /// Makes the value at `index` count `what`: `ibv_attach_counters_point_flow(3)`.
    ///
    /// The value counts packets of all flows with these counters. Attach all values before the first flow with these counters
    /// ([`FlowRule::count`](crate::flow::FlowRule::count)) is created. A value that is attached twice counts both.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported), also if the device does not count `what`;
    /// [`Error::Verb`](crate::Error::Verb) with `EBUSY` if a flow already uses them.
    #[doc(alias = "ibv_attach_counters_point_flow")]
    pub fn attach(&self, what: CounterDescription, index: u32) -> Result<()> {
        // SAFETY: NULL stands for future flows.
        unsafe { self.attach_to(null_mut(), what, index) }
    }

    /// # Safety
    /// `flow` must be NULL, or a valid flow of the same context that will keep these counters.
    pub(crate) unsafe fn attach_to(&self, flow: *mut ibv_flow, what: CounterDescription, index: u32) -> Result<()> {
        let mut attr = ibv_counter_attach_attr { counter_desc: ibv_counter_description(what.0), index, comp_mask: 0 };
        // SAFETY: the counters are valid. The caller guarantees this for the flow. `attr` is valid during the call.
        check(unsafe { ibv_attach_counters_point_flow(self.as_raw(), &mut attr, flow) })
            .map_err(|errno| self.context().feature_error(Verb::AttachCountersPointFlow, FEATURE, errno))
    }

    /// Reads as many values as `values` has elements: `ibv_read_counters(3)`.
    ///
    /// With `cached`, the driver may return cached values.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb), for example with
    /// `EINVAL` if `values` is shorter than the attached values, or no flow uses the counters yet.
    #[doc(alias = "ibv_read_counters")]
    pub fn read(&self, values: &mut [u64], cached: bool) -> Result<()> {
        let flags = if cached { IBV_READ_COUNTERS_ATTR_PREFER_CACHED.0 } else { 0 };
        let room = u32::try_from(values.len()).unwrap_or(u32::MAX);
        // SAFETY: the counters are valid, and there is space for `room` values.
        check(unsafe { ibv_read_counters(self.as_raw(), values.as_mut_ptr(), room, flags) })
            .map_err(|errno| self.context().feature_error(Verb::ReadCounters, FEATURE, errno))
    }

    /// Destroys the counters: `ibv_destroy_counters(3)`. Dropping does the same once no flow uses them, but ignores
    /// errors.
    ///
    /// # Errors
    /// [`Error::InUse`](crate::Error::InUse) if there are clones or flows use them: they are destroyed with the last of
    /// them. [`Error::Verb`](crate::Error::Verb) if the provider fails; the counters and their context are then leaked.
    #[doc(alias = "ibv_destroy_counters")]
    pub fn destroy(self) -> Result<()> {
        Object::destroy_last(self.inner, "set of counters", "clones or flows").map(drop)
    }

    /// The context that the counters belong to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.inner.context()
    }

    /// The C object, valid while these counters or a flow with them exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_counters {
        self.inner.as_raw()
    }
}

impl fmt::Debug for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counters").field("device", &self.context().device_name()).finish_non_exhaustive()
    }
}
