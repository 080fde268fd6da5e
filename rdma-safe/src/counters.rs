//! Counters of flows.

use std::ffi::c_int;
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::{check, check_ptr};
use crate::named::named;
use crate::object::{Object, Parents};
use crate::{Context, Result};

named! {
    /// What is counted: `enum ibv_counter_description`.
    pub struct CounterDescription(u32) as "counter" {
        /// Packets.
        PACKETS = IBV_COUNTER_PACKETS.0 => "packets",
        /// Bytes.
        BYTES = IBV_COUNTER_BYTES.0 => "bytes",
    }
}

const FEATURE: &str = "counters of flows";

/// A set of counters: `struct ibv_counters`. Made by [`Context::create_counters`]. Clones share it, and so can flows, whose packets
/// are then counted together.
#[derive(Clone)]
pub struct Counters {
    // Providers lock a set of counters for each call.
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom(Context);

impl Parents for MadeFrom {
    type Raw = ibv_counters;

    const VERB: &'static str = "ibv_destroy_counters";

    fn context(&self) -> &Context {
        &self.0
    }

    unsafe fn destroy(&self, raw: *mut ibv_counters) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { ibv_destroy_counters(raw) }
    }
}

impl Context {
    /// Creates a set of counters, which counts nothing yet: `ibv_create_counters(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_create_counters")]
    pub fn create_counters(&self) -> Result<Counters> {
        let mut attr = ibv_counters_init_attr::zeroed();
        // SAFETY: the context is valid, and `attr` is for the duration of the call.
        let raw = check_ptr(|| unsafe { ibv_create_counters(self.as_raw(), &mut attr) })
            .map_err(|errno| self.feature_error("ibv_create_counters", FEATURE, errno))?;
        // SAFETY: just made, and given to nobody else.
        Ok(unsafe { Counters::from_raw(self, raw) })
    }
}

impl Counters {
    /// Adopts counters that other code has created. They are destroyed when the last flow with them is gone.
    ///
    /// # Safety
    /// `raw` must be counters of `context` that exist, and no flow may have them. Nobody else may destroy them from here on.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_counters>) -> Self {
        // SAFETY: the caller's contract; a flow with them holds an `Arc` of them.
        Counters { inner: Arc::new(unsafe { Object::new(raw, MadeFrom(context.clone())) }) }
    }

    /// Lets the value at `index` count `what` of the flows that these counters are given to:
    /// `ibv_attach_counters_point_flow(3)`. Before the first [`FlowRule::count`](crate::FlowRule::count) of them is made a flow; an
    /// index that was attached before adds up.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported), also for `what` the device does not count;
    /// [`Error::Verb`](crate::Error::Verb), with `EBUSY` when a flow has them already.
    #[doc(alias = "ibv_attach_counters_point_flow")]
    pub fn attach(&self, what: CounterDescription, index: u32) -> Result<()> {
        // SAFETY: NULL stands for the flows to come.
        unsafe { self.attach_to(null_mut(), what, index) }
    }

    /// # Safety
    /// `flow` must be NULL, or be a flow of the same context that exists and then keeps these counters.
    pub(crate) unsafe fn attach_to(&self, flow: *mut ibv_flow, what: CounterDescription, index: u32) -> Result<()> {
        let mut attr = ibv_counter_attach_attr { counter_desc: ibv_counter_description(what.0), index, comp_mask: 0 };
        // SAFETY: the counters are valid, the flow is by the caller's contract, and `attr` is for the duration of the call.
        check(unsafe { ibv_attach_counters_point_flow(self.as_raw(), &mut attr, flow) })
            .map_err(|errno| self.context().feature_error("ibv_attach_counters_point_flow", FEATURE, errno))
    }

    /// Reads the first values, as many as `values` has room for: `ibv_read_counters(3)`. With `cached` those do that the driver has
    /// at hand.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb), among others with `EINVAL` for fewer
    /// values than were attached, and before any flow has the counters.
    #[doc(alias = "ibv_read_counters")]
    pub fn read(&self, values: &mut [u64], cached: bool) -> Result<()> {
        let flags = if cached { IBV_READ_COUNTERS_ATTR_PREFER_CACHED.0 } else { 0 };
        let room = u32::try_from(values.len()).unwrap_or(u32::MAX);
        // SAFETY: the counters are valid, and there is room for so many values.
        check(unsafe { ibv_read_counters(self.as_raw(), values.as_mut_ptr(), room, flags) })
            .map_err(|errno| self.context().feature_error("ibv_read_counters", FEATURE, errno))
    }

    /// Destroys them: `ibv_destroy_counters(3)`. Dropping does the same, when no flow has them any more, and tells nobody.
    ///
    /// # Errors
    /// [`Error::InUse`](crate::Error::InUse) while there are clones of them or flows with them: they are destroyed when the last of
    /// those is gone. [`Error::Verb`](crate::Error::Verb) with the provider's answer; they, and their device, then stay until the
    /// process ends.
    #[doc(alias = "ibv_destroy_counters")]
    pub fn destroy(self) -> Result<()> {
        Object::destroy_last(self.inner, "set of counters", "clones or flows").map(drop)
    }

    /// The device that they belong to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.inner.context()
    }

    /// The C object, valid while these counters or a flow with them is.
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
