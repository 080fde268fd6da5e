//! Flow steering: rules that direct packets to queue pairs.
//!
//! Start with [`FlowRule`], which describes the packets. [`FlowRule::steer`] directs them to a queue pair as long as
//! the returned [`Flow`] exists.

mod action;
mod buffer;
mod spec;

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::counters::{CounterDescription, Counters};
use crate::device::DeviceCapabilities;
use crate::errno::check_ptr;
use crate::error::Verb;
use crate::named::named;
use crate::object::{Object, Parents};
use crate::wq::RssQueuePair;
use crate::{Context, Error, QueuePair, QueuePairType, Result};

pub use action::{AesKey, EspAction, EspEncapsulation, EspFlags, FlowAction};
use buffer::Buffer;
use spec::spec_of;
pub use spec::{
    EspHeader, EthernetHeader, FlowHeader, GreHeader, Ipv4ExtHeader, Ipv4Header, Ipv6Header, MplsHeader, TcpHeader,
    UdpHeader, VxlanHeader,
};

named! {
    /// Packets that a flow receives: `enum ibv_flow_attr_type`.
    pub struct FlowType(u32) as "flow type" {
        /// Packets that it matches.
        NORMAL = IBV_FLOW_ATTR_NORMAL.0 => "NORMAL",
        /// Packets that no other flow receives.
        ALL_DEFAULT = IBV_FLOW_ATTR_ALL_DEFAULT.0 => "ALL_DEFAULT",
        /// Multicast packets that no other flow receives.
        MC_DEFAULT = IBV_FLOW_ATTR_MC_DEFAULT.0 => "MC_DEFAULT",
        /// Copies of all packets that arrive at the port.
        SNIFFER = IBV_FLOW_ATTR_SNIFFER.0 => "SNIFFER",
    }
}

bitflags::bitflags! {
    /// Options of flows: `enum ibv_flow_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct FlowFlags: u32 {
        /// Flows of lower priority also receive the packets. Only for [`FlowType::NORMAL`].
        const DONT_TRAP = IBV_FLOW_ATTR_FLAGS_DONT_TRAP.0;
        /// Applies to outgoing packets. The queue pair then only identifies the device.
        const EGRESS = IBV_FLOW_ATTR_FLAGS_EGRESS.0;

        const _ = !0;
    }
}

/// A rule: matching packets of a port, and the actions on them.
///
/// ```no_run
/// # use rdma_safe::QueuePair;
/// # use rdma_safe::counters::Counters;
/// use rdma_safe::flow::{FlowRule, UdpHeader};
///
/// # fn example(qp: &QueuePair, counters: &Counters) -> rdma_safe::Result<()> {
/// let to_port = UdpHeader { dst_port: 4791, src_port: 0 };
/// let all_of_it = UdpHeader { dst_port: 0xffff, src_port: 0 };
/// let flow = FlowRule::new(1).matching(to_port, all_of_it).tag(7).count(counters).steer(qp)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a rule does nothing until `steer`"]
pub struct FlowRule {
    attr: ibv_flow_attr,
    headers: Vec<ibv_flow_spec>,
    tag: Option<u32>,
    drop: bool,
    actions: Vec<FlowAction>,
    counters: Vec<Counters>,
}

impl FlowRule {
    /// A rule for all packets that arrive at `port`, which counts from 1.
    pub fn new(port: u8) -> Self {
        let attr = ibv_flow_attr { port, ..ibv_flow_attr::zeroed() };
        FlowRule { attr, headers: Vec::new(), tag: None, drop: false, actions: Vec::new(), counters: Vec::new() }
    }

    /// Type of the flow; [`FlowType::NORMAL`] by default. Other types match no headers.
    pub fn flow_type(mut self, flow_type: FlowType) -> Self {
        self.attr.type_ = ibv_flow_attr_type(flow_type.0);
        self
    }

    /// Priority; 0, the highest, by default. Flows with a higher number receive the packets that lower numbers leave.
    pub fn priority(mut self, priority: u16) -> Self {
        self.attr.priority = priority;
        self
    }

    /// Options; none by default.
    pub fn flags(mut self, flags: FlowFlags) -> Self {
        self.attr.flags = flags.bits();
        self
    }

    /// Matches packets whose header equals `value` in the bits of `mask`.
    ///
    /// Many devices require the mask of each field to be all ones or all zeros.
    pub fn matching<H: FlowHeader>(mut self, value: H, mask: H) -> Self {
        self.headers.push(value.spec(mask));
        self
    }

    /// Like [`FlowRule::matching`], for the inner packet of a tunnel.
    pub fn matching_inner<H: FlowHeader>(mut self, value: H, mask: H) -> Self {
        let mut spec = value.spec(mask);
        // SAFETY: all members of the union start with the type.
        unsafe { spec.__bindgen_anon_1.hdr.type_.0 |= IBV_FLOW_SPEC_INNER.0 };
        self.headers.push(spec);
        self
    }

    /// Marks packets with a tag: [`WorkCompletion::flow_tag`](crate::WorkCompletion::flow_tag).
    ///
    /// Many devices support 24 bits.
    pub fn tag(mut self, tag: u32) -> Self {
        self.tag = Some(tag);
        self
    }

    /// Drops packets instead of delivering them.
    pub fn drop_packets(mut self) -> Self {
        self.drop = true;
        self
    }

    /// Applies `action` to packets.
    pub fn action(mut self, action: &FlowAction) -> Self {
        self.actions.push(action.clone());
        self
    }

    /// Counts packets, at the counting points of [`Counters::attach`].
    pub fn count(mut self, counters: &Counters) -> Self {
        self.counters.push(counters.clone());
        self
    }

    /// Creates a flow that directs matching packets to `target`: `ibv_create_flow(3)`. Dropping the flow removes it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device lacks [`DeviceCapabilities::MANAGED_FLOW_STEERING`]; [`Error::WrongType`]
    /// unless the target has the type UD or RAW_PACKET; [`Error::NoSuchPort`]; [`Error::ForeignContext`] when an action
    /// or counters belong to another context; [`Error::CreateFlow`].
    #[doc(alias = "ibv_create_flow")]
    pub fn steer(self, target: &impl FlowTarget) -> Result<Flow> {
        let TargetHandle { raw: qp, context, qp_type, kept } = target.target();
        let unsupported = || context.unsupported("flow steering");
        if !context.attributes().capabilities().contains(DeviceCapabilities::MANAGED_FLOW_STEERING) {
            return Err(unsupported());
        }
        if ![QueuePairType::UD, QueuePairType::RAW_PACKET].contains(&qp_type) {
            let advice = "flows support only the types UD and RAW_PACKET";
            return Err(Error::WrongType { operation: "flow steering", qp_type, advice });
        }
        context.query_port(self.attr.port)?;
        for action in &self.actions {
            context.require_same(action.context(), "flow action")?;
        }
        for counters in &self.counters {
            context.require_same(counters.context(), "set of counters")?;
        }
        let specs = self.specs();
        let count = specs.len();
        let error = |errno| Error::CreateFlow { specs: count, errno };
        let mut buffer = Buffer::new(self.attr, &specs).ok_or(error(crate::Errno(libc::E2BIG)))?;
        // SAFETY: the queue pair is valid. The buffer contains the attributes followed by the number of specifications
        // they state. The actions and counters in them exist, and are kept below. All of this is valid during the call.
        let raw = check_ptr(|| unsafe { ibv_create_flow(qp, buffer.as_mut_ptr()) }).map_err(|errno| {
            match errno.is_unsupported() {
                true => unsupported(),
                false => error(errno),
            }
        })?;
        let made_from =
            MadeFrom { context: context.clone(), _target: kept, _actions: self.actions, counters: self.counters };
        // SAFETY: just created from these, and not shared with anything. Nothing is created from it.
        Ok(Flow { object: unsafe { Object::new(raw, made_from) } })
    }

    /// The specifications in the order of the calls, headers before actions.
    fn specs(&self) -> Vec<ibv_flow_spec> {
        let mut specs = self.headers.clone();
        for action in &self.actions {
            let size = size_of::<ibv_flow_spec_action_handle>() as u16;
            let type_ = IBV_FLOW_SPEC_ACTION_HANDLE;
            let handle = ibv_flow_spec_action_handle { type_, size, action: action.as_raw() };
            specs.push(spec_of(ibv_flow_spec__bindgen_ty_1 { handle }));
        }
        for counters in &self.counters {
            let size = size_of::<ibv_flow_spec_counter_action>() as u16;
            let type_ = IBV_FLOW_SPEC_ACTION_COUNT;
            let flow_count = ibv_flow_spec_counter_action { type_, size, counters: counters.as_raw() };
            specs.push(spec_of(ibv_flow_spec__bindgen_ty_1 { flow_count }));
        }
        if self.drop {
            let size = size_of::<ibv_flow_spec_action_drop>() as u16;
            let drop = ibv_flow_spec_action_drop { type_: IBV_FLOW_SPEC_ACTION_DROP, size };
            specs.push(spec_of(ibv_flow_spec__bindgen_ty_1 { drop }));
        }
        // Last, because its size is not a multiple of 8: see `Buffer`.
        if let Some(tag_id) = self.tag {
            let size = size_of::<ibv_flow_spec_action_tag>() as u16;
            let flow_tag = ibv_flow_spec_action_tag { type_: IBV_FLOW_SPEC_ACTION_TAG, size, tag_id };
            specs.push(spec_of(ibv_flow_spec__bindgen_ty_1 { flow_tag }));
        }
        specs
    }
}

impl fmt::Debug for FlowRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowRule")
            .field("type", &FlowType(self.attr.type_.0))
            .field("port", &self.attr.port)
            .field("priority", &self.attr.priority)
            .field("headers", &self.headers.len())
            .finish_non_exhaustive()
    }
}

/// A destination of flows: a [`QueuePair`] or an [`RssQueuePair`].
pub trait FlowTarget: target::Target {}

impl FlowTarget for QueuePair {}
impl FlowTarget for RssQueuePair {}

mod target {
    /// Sealed, because the provider trusts the pointer that it returns.
    pub trait Target {
        #[doc(hidden)]
        fn target(&self) -> super::TargetHandle<'_>;
    }
}

impl target::Target for QueuePair {
    fn target(&self) -> TargetHandle<'_> {
        let kept = self.core().keeper();
        TargetHandle { raw: self.as_raw(), context: self.context(), qp_type: self.qp_type(), kept }
    }
}

impl target::Target for RssQueuePair {
    fn target(&self) -> TargetHandle<'_> {
        let kept = Arc::clone(self.shared());
        TargetHandle { raw: self.as_raw(), context: self.context(), qp_type: self.qp_type(), kept }
    }
}

/// A queue pair as a destination of flows.
#[doc(hidden)]
pub struct TargetHandle<'a> {
    raw: *mut ibv_qp,
    context: &'a Context,
    qp_type: QueuePairType,
    /// Keeps the C object of the queue pair.
    kept: Arc<dyn Send + Sync>,
}

impl fmt::Debug for TargetHandle<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TargetHandle").field(&self.qp_type).finish()
    }
}

/// A flow: `struct ibv_flow`. Made by [`FlowRule::steer`]; dropping it removes it.
///
/// It keeps its queue pair alive: [`QueuePair::destroy`] fails while the flow exists.
pub struct Flow {
    object: Object<MadeFrom>,
}

struct MadeFrom {
    context: Context,
    /// Keeps the C object of the queue pair.
    _target: Arc<dyn Send + Sync>,
    _actions: Vec<FlowAction>,
    counters: Vec<Counters>,
}

impl Parents for MadeFrom {
    type Raw = ibv_flow;

    const VERB: Verb = Verb::DestroyFlow;

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_flow) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { ibv_destroy_flow(raw) }
    }
}

impl Flow {
    /// Adopts a flow that other code has created. It is destroyed on drop.
    ///
    /// # Safety
    /// `raw` must be an existing flow to `target` without other actions and counters than these. Other code must not
    /// destroy it from now on.
    #[must_use]
    pub unsafe fn from_raw(
        raw: NonNull<ibv_flow>,
        target: &impl FlowTarget,
        actions: &[FlowAction],
        counters: &[Counters],
    ) -> Self {
        let TargetHandle { context, kept, .. } = target.target();
        let (context, _actions, counters) = (context.clone(), actions.to_vec(), counters.to_vec());
        // SAFETY: the caller's contract. Nothing is created from it.
        Flow { object: unsafe { Object::new(raw, MadeFrom { context, _target: kept, _actions, counters }) } }
    }

    /// Attaches `counters` to this flow: `ibv_attach_counters_point_flow(3)`.
    ///
    /// Most devices support only [`Counters::attach`] instead.
    ///
    /// # Errors
    /// [`Error::ForeignContext`]; the errors of [`Counters::attach`].
    #[doc(alias = "ibv_attach_counters_point_flow")]
    pub fn attach(&mut self, counters: &Counters, what: CounterDescription, index: u32) -> Result<()> {
        self.context().require_same(counters.context(), "set of counters")?;
        // SAFETY: the flow is valid, and keeps the counters below.
        unsafe { counters.attach_to(self.as_raw(), what, index) }?;
        self.object.counters.push(counters.clone());
        Ok(())
    }

    /// The device of the flow.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.object.context()
    }

    /// The C object, valid while this flow exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_flow {
        self.object.as_raw()
    }

    /// Destroys the flow: `ibv_destroy_flow(3)`. Dropping does the same, but ignores errors.
    ///
    /// # Errors
    /// [`Error::Verb`] with the provider's error. The flow and everything it depends on are then kept until the process
    /// ends.
    #[doc(alias = "ibv_destroy_flow")]
    pub fn destroy(self) -> Result<()> {
        self.object.destroy().map(drop)
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flow").field("device", &self.context().device_name()).finish_non_exhaustive()
    }
}
