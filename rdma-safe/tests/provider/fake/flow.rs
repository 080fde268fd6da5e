//! Flows with their actions and counters, and delivery of matching packets.

use std::collections::BTreeMap;
use std::ffi::c_int;

use rdma_sys::*;

use super::engine::Cqe;
use super::state::{Alloc, State, enter, null, own};
use super::wq::{Rss, Table, Wq};

/// All objects that steer packets.
#[derive(Default)]
pub(super) struct Steering {
    pub(super) wqs: BTreeMap<usize, Wq>,
    pub(super) tables: BTreeMap<usize, Table>,
    /// RSS queue pairs, which have an indirection table.
    pub(super) rss: BTreeMap<usize, Rss>,
    pub(super) flows: BTreeMap<usize, Flow>,
    pub(super) actions: BTreeMap<usize, (Alloc, usize)>,
    pub(super) counters: BTreeMap<usize, Counters>,
    pub(super) seen: Vec<SeenFlow>,
    pub(super) esp: Vec<SeenEsp>,
}

pub(super) struct Flow {
    alloc: Alloc,
    context: usize,
    qp: usize,
    rule: SeenFlow,
    /// Counters attached to the flow itself: address, counted quantity, index.
    points: Vec<(usize, u32, u32)>,
}

pub(super) struct Counters {
    alloc: Alloc,
    context: usize,
    points: Vec<(u32, u32)>,
    values: BTreeMap<u32, u64>,
}

/// The attributes of a flow as the provider received them.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct SeenFlow {
    pub(crate) flow_type: u32,
    pub(crate) size: u16,
    pub(crate) priority: u16,
    pub(crate) port: u8,
    pub(crate) flags: u32,
    pub(crate) specs: Vec<SeenSpec>,
}

/// A flow specification: offset after the attributes, type, size, value, mask, and argument.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct SeenSpec {
    pub(crate) at: usize,
    pub(crate) kind: u32,
    pub(crate) size: u16,
    pub(crate) val: Vec<u8>,
    pub(crate) mask: Vec<u8>,
    pub(crate) argument: usize,
}

/// The attributes of an ESP action as the provider received them.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct SeenEsp {
    pub(crate) flags: Option<u32>,
    pub(crate) spi: u32,
    pub(crate) hard_limit_pkts: u64,
    pub(crate) key: Vec<u8>,
    pub(crate) replay: Option<u32>,
    pub(crate) esn: Option<u32>,
    /// Type and bytes of the outer header.
    pub(crate) outer: Option<(u16, Vec<u8>)>,
}

/// For a header type, the C layout of its specification: size, offset of the value, offset of the mask, and number of
/// meaningful bytes in each.
fn layout(kind: u32) -> Option<(u16, usize, usize, usize)> {
    Some(match kind & !0x100 {
        0x20 => (40, 6, 22, 16),
        0x30 => (24, 8, 16, 8),
        0x31 => (88, 8, 48, 39),
        0x32 => (32, 8, 20, 12),
        0x34 => (24, 8, 16, 8),
        0x40 | 0x41 => (16, 6, 10, 4),
        0x50 | 0x60 => (16, 8, 12, 4),
        0x51 => (24, 8, 16, 8),
        _ => return None,
    })
}

pub(super) fn set_operations(context: &mut verbs_context) {
    context.ibv_create_flow = Some(create_flow);
    context.ibv_destroy_flow = Some(destroy_flow);
    context.create_flow_action_esp = Some(create_flow_action_esp);
    context.modify_flow_action_esp = Some(modify_flow_action_esp);
    context.destroy_flow_action = Some(destroy_flow_action);
    context.create_counters = Some(create_counters);
    context.destroy_counters = Some(destroy_counters);
    context.attach_counters_point_flow = Some(attach_counters_point_flow);
    context.read_counters = Some(read_counters);
}

unsafe extern "C" fn create_flow(qp: *mut ibv_qp, attr: *mut ibv_flow_attr) -> *mut ibv_flow {
    enter(qp, "create_flow", |state, device| {
        if let Some(errno) = state.fault("create_flow") {
            return null(errno);
        }
        let found = state.qps.get(&qp.addr()).map(|qp| qp.context);
        let found = found.or(state.steering.rss.contains_key(&qp.addr()).then(|| unsafe { (*qp).context.addr() }));
        let Some(context) = found else {
            state.violation("create_flow to a queue pair that does not exist");
            return null(libc::EINVAL);
        };
        let Some(rule) = (unsafe { state.read_rule(attr) }) else { return null(libc::EINVAL) };
        state.steering.seen.push(rule.clone());
        let raw = ibv_flow { comp_mask: 0, context: unsafe { (*qp).context }, handle: state.handle() };
        let (alloc, raw) = Alloc::new(raw);
        own(raw, device);
        state.steering.flows.insert(raw.addr(), Flow { alloc, context, qp: qp.addr(), rule, points: Vec::new() });
        raw
    })
}

unsafe extern "C" fn destroy_flow(raw: *mut ibv_flow) -> c_int {
    enter(raw, "destroy_flow", |state, _| {
        if let Some(errno) = state.fault("destroy_flow") {
            return errno;
        }
        match state.steering.flows.remove(&raw.addr()) {
            Some(flow) => state.retire(flow.alloc),
            None => state.violation("destroy_flow of a flow that does not exist"),
        }
        0
    })
}

unsafe fn seen_esp(attr: *mut ibv_flow_action_esp_attr) -> SeenEsp {
    let attr = unsafe { *attr };
    let mut seen = SeenEsp::default();
    if !attr.esp_attr.is_null() {
        let esp = unsafe { *attr.esp_attr };
        (seen.flags, seen.spi, seen.hard_limit_pkts) = (Some(esp.flags), esp.spi, esp.hard_limit_pkts);
    }
    if !attr.keymat_ptr.is_null() && attr.keymat_proto == IB_UVERBS_FLOW_ACTION_ESP_KEYMAT_AES_GCM {
        assert_eq!(usize::from(attr.keymat_len), size_of::<ib_uverbs_flow_action_esp_keymat_aes_gcm>());
        let key = unsafe { *attr.keymat_ptr.cast::<ib_uverbs_flow_action_esp_keymat_aes_gcm>() };
        seen.key = key.aes_key.iter().flat_map(|word| word.to_ne_bytes()).take(key.key_len as usize).collect();
    }
    if !attr.replay_ptr.is_null() && attr.replay_proto == IB_UVERBS_FLOW_ACTION_ESP_REPLAY_BMP {
        assert_eq!(attr.replay_len, 4);
        seen.replay = Some(unsafe { *attr.replay_ptr.cast::<u32>() });
    }
    if !attr.esp_encap.is_null() {
        let encap = unsafe { *attr.esp_encap };
        assert!(unsafe { encap.__bindgen_anon_2.next_ptr.is_null() }, "the kernel supports only one");
        let bytes = unsafe { std::slice::from_raw_parts(encap.__bindgen_anon_1.val_ptr.cast(), encap.len.into()) };
        seen.outer = Some((encap.type_, bytes.to_vec()));
    }
    seen.esn = (attr.comp_mask == IBV_FLOW_ACTION_ESP_MASK_ESN.0).then_some(attr.esn);
    seen
}

unsafe extern "C" fn create_flow_action_esp(
    context: *mut ibv_context,
    attr: *mut ibv_flow_action_esp_attr,
) -> *mut ibv_flow_action {
    enter(context, "create_flow_action_esp", |state, device| {
        if let Some(errno) = state.fault("create_flow_action_esp") {
            return null(errno);
        }
        state.steering.esp.push(unsafe { seen_esp(attr) });
        let (alloc, raw) = Alloc::new(ibv_flow_action { context });
        own(raw, device);
        state.steering.actions.insert(raw.addr(), (alloc, context.addr()));
        raw
    })
}

unsafe extern "C" fn modify_flow_action_esp(raw: *mut ibv_flow_action, attr: *mut ibv_flow_action_esp_attr) -> c_int {
    enter(raw, "modify_flow_action_esp", |state, _| {
        if let Some(errno) = state.fault("modify_flow_action_esp") {
            return errno;
        }
        if !state.steering.actions.contains_key(&raw.addr()) {
            state.violation("modify_flow_action_esp of an action that does not exist");
        }
        state.steering.esp.push(unsafe { seen_esp(attr) });
        0
    })
}

unsafe extern "C" fn destroy_flow_action(raw: *mut ibv_flow_action) -> c_int {
    enter(raw, "destroy_flow_action", |state, _| {
        if let Some(errno) = state.fault("destroy_flow_action") {
            return errno;
        }
        if state.names(0x1002, raw.addr()) {
            state.violation("destroy_flow_action of an action that flows have");
            return libc::EBUSY;
        }
        match state.steering.actions.remove(&raw.addr()) {
            Some((alloc, _)) => state.retire(alloc),
            None => state.violation("destroy_flow_action of an action that does not exist"),
        }
        0
    })
}

unsafe extern "C" fn create_counters(
    context: *mut ibv_context,
    attr: *mut ibv_counters_init_attr,
) -> *mut ibv_counters {
    enter(context, "create_counters", |state, device| {
        if let Some(errno) = state.fault("create_counters") {
            return null(errno);
        }
        if unsafe { (*attr).comp_mask } != 0 {
            return null(libc::EOPNOTSUPP);
        }
        let (alloc, raw) = Alloc::new(ibv_counters { context });
        own(raw, device);
        let counters = Counters { alloc, context: context.addr(), points: Vec::new(), values: BTreeMap::new() };
        state.steering.counters.insert(raw.addr(), counters);
        raw
    })
}

unsafe extern "C" fn destroy_counters(raw: *mut ibv_counters) -> c_int {
    enter(raw, "destroy_counters", |state, _| {
        if let Some(errno) = state.fault("destroy_counters") {
            return errno;
        }
        let address = raw.addr();
        let attached = state.steering.flows.values().any(|flow| flow.points.iter().any(|point| point.0 == address));
        if attached || state.names(0x1003, address) {
            state.violation("destroy_counters of counters that flows have");
            return libc::EBUSY;
        }
        match state.steering.counters.remove(&address) {
            Some(counters) => state.retire(counters.alloc),
            None => state.violation("destroy_counters of counters that do not exist"),
        }
        0
    })
}

unsafe extern "C" fn attach_counters_point_flow(
    raw: *mut ibv_counters,
    attr: *mut ibv_counter_attach_attr,
    flow: *mut ibv_flow,
) -> c_int {
    let attr = unsafe { *attr };
    enter(raw, "attach_counters_point_flow", |state, _| {
        let bound = state.names(0x1003, raw.addr());
        if let Some(errno) = state.fault("attach_counters_point_flow") {
            return errno;
        }
        if attr.counter_desc.0 > IBV_COUNTER_BYTES.0 {
            return libc::ENOTSUP;
        }
        if !flow.is_null() {
            let point = (raw.addr(), attr.counter_desc.0, attr.index);
            return match state.steering.flows.get_mut(&flow.addr()) {
                Some(flow) => {
                    flow.points.push(point);
                    0
                }
                None => {
                    state.violation("attach_counters_point_flow to a flow that does not exist");
                    libc::EINVAL
                }
            };
        }
        if bound {
            return libc::EBUSY;
        }
        let Some(counters) = state.steering.counters.get_mut(&raw.addr()) else { return libc::EINVAL };
        counters.points.push((attr.counter_desc.0, attr.index));
        0
    })
}

unsafe extern "C" fn read_counters(raw: *mut ibv_counters, values: *mut u64, count: u32, flags: u32) -> c_int {
    enter(raw, "read_counters", |state, _| {
        if let Some(errno) = state.fault("read_counters") {
            return errno;
        }
        let Some(counters) = state.steering.counters.get(&raw.addr()) else {
            state.violation("read_counters of counters that do not exist");
            return libc::EINVAL;
        };
        if flags & !IBV_READ_COUNTERS_ATTR_PREFER_CACHED.0 != 0
            || counters.points.iter().any(|(_, index)| *index >= count)
        {
            return libc::EINVAL;
        }
        for index in 0..count {
            unsafe { values.add(index as usize).write(counters.values.get(&index).copied().unwrap_or(0)) };
        }
        0
    })
}

impl State {
    pub(super) fn has_flows(&self, qp: usize) -> bool {
        self.steering.flows.values().any(|flow| flow.qp == qp)
    }

    pub(super) fn objects_of_steering(&self, context: usize) -> usize {
        self.work_queue_objects(context)
            + self.steering.flows.values().filter(|flow| flow.context == context).count()
            + self.steering.actions.values().filter(|(_, of)| *of == context).count()
            + self.steering.counters.values().filter(|counters| counters.context == context).count()
            + self.comp_cntrs_of(context)
    }

    /// Whether any flow has a specification of this type with this argument.
    fn names(&self, kind: u32, argument: usize) -> bool {
        let names = |spec: &SeenSpec| (spec.kind, spec.argument) == (kind, argument);
        self.steering.flows.values().any(|flow| flow.rule.specs.iter().any(names))
    }

    /// Reads attributes and specifications like a provider: each field at its offset. Padding is ignored.
    unsafe fn read_rule(&mut self, attr: *mut ibv_flow_attr) -> Option<SeenFlow> {
        let start = attr.cast::<u8>();
        let bytes = |at: usize, len: usize| -> Vec<u8> { (0..len).map(|i| unsafe { *start.add(at + i) }).collect() };
        let word = |at: usize| u32::from_ne_bytes(bytes(at, 4).try_into().unwrap());
        let half = |at: usize| u16::from_ne_bytes(bytes(at, 2).try_into().unwrap());
        if start.addr() % 4 != 0 || word(0) != 0 {
            self.violation("create_flow with attributes out of alignment, or an unknown comp_mask");
            return None;
        }
        let (size, count) = (half(8), bytes(12, 1)[0]);
        let (mut specs, mut at) = (Vec::new(), 20);
        for _ in 0..count {
            let (kind, size) = (word(at), half(at + 4));
            let argument = |len: usize| match len {
                4 => word(at + 8) as usize,
                _ => {
                    assert_eq!((start.addr() + at + 8) % 8, 0, "a pointer out of alignment");
                    unsafe { (*start.add(at + 8).cast::<*mut u8>()).addr() }
                }
            };
            let (expected, val, mask, argument) = match (layout(kind), kind) {
                (Some((size, val, mask, len)), _) => (size, bytes(at + val, len), bytes(at + mask, len), 0),
                (None, 0x1000) => (12, Vec::new(), Vec::new(), argument(4)),
                (None, 0x1001) => (8, Vec::new(), Vec::new(), 0),
                (None, 0x1002 | 0x1003) => (16, Vec::new(), Vec::new(), argument(8)),
                _ => return None,
            };
            if size != expected || (start.addr() + at) % 4 != 0 {
                self.violation(format!("create_flow with a specification {kind:#x} of {size} bytes at {at}"));
                return None;
            }
            let missing = match kind {
                0x1002 => !self.steering.actions.contains_key(&argument),
                0x1003 => !self.steering.counters.contains_key(&argument),
                _ => false,
            };
            if missing {
                self.violation("create_flow with an action or counters that do not exist");
            }
            specs.push(SeenSpec { at: at - 20, kind, size, val, mask, argument });
            at += usize::from(size);
        }
        if at != usize::from(size) {
            self.violation(format!("create_flow of {size} bytes, of which {at} are used"));
        }
        let (flow_type, priority, port, flags) = (word(4), half(10), bytes(13, 1)[0], word(16));
        Some(SeenFlow { flow_type, size, priority, port, flags, specs })
    }

    /// Delivers a frame by the first matching flow in the order of priority.
    pub(super) fn packet(&mut self, frame: &[u8]) {
        let mut flows: Vec<_> =
            self.steering.flows.iter().map(|(address, flow)| (flow.rule.priority, *address)).collect();
        flows.sort_unstable();
        for (_, address) in flows {
            let flow = &self.steering.flows[&address];
            let (rule, qp, points) = (flow.rule.clone(), flow.qp, flow.points.clone());
            if !rule.specs.iter().all(|spec| matches(spec, frame)) {
                continue;
            }
            for (counters, what, index) in points {
                self.add_to_counter(counters, what, index, frame);
            }
            for spec in rule.specs.iter().filter(|spec| spec.kind == 0x1003) {
                for (what, index) in self.steering.counters[&spec.argument].points.clone() {
                    self.add_to_counter(spec.argument, what, index, frame);
                }
            }
            if !rule.specs.iter().any(|spec| spec.kind == 0x1001) {
                self.deliver_frame(qp, frame);
            }
            if rule.flags & IBV_FLOW_ATTR_FLAGS_DONT_TRAP.0 == 0 {
                return;
            }
        }
    }

    fn add_to_counter(&mut self, counters: usize, what: u32, index: u32, frame: &[u8]) {
        let amount = if what == IBV_COUNTER_BYTES.0 { frame.len() as u64 } else { 1 };
        *self.steering.counters.get_mut(&counters).unwrap().values.entry(index).or_insert(0) += amount;
    }

    fn deliver_frame(&mut self, qp: usize, frame: &[u8]) {
        if self.steering.rss.contains_key(&qp) {
            return self.spread(qp, frame);
        }
        let Some(receive) = self.take_receive(qp) else { return };
        let ok = self.scatter(self.receive_domain(qp), &receive.sges, frame).is_some();
        let status = if ok { IBV_WC_SUCCESS } else { IBV_WC_LOC_PROT_ERR }.0;
        let cqe = Cqe { status, opcode: IBV_WC_RECV.0, byte_len: frame.len() as u32, ..Cqe::default() };
        self.finish_recv(qp, &receive, cqe, false);
    }
}

/// Whether an Ethernet frame with IPv4 and UDP matches a specification.
fn matches(spec: &SeenSpec, frame: &[u8]) -> bool {
    let field = |ranges: &[std::ops::Range<usize>]| -> Vec<u8> {
        ranges.iter().flat_map(|range| frame[range.clone()].to_vec()).collect()
    };
    let is_ipv4 = frame[12..14] == [8, 0];
    let found = match spec.kind {
        0x20 => [field(&[0..6, 6..12, 12..14]), vec![0; 2]].concat(),
        0x30 if is_ipv4 => field(&[26..30, 30..34]),
        0x41 if is_ipv4 && frame[23] == 17 => field(&[36..38, 34..36]),
        kind if kind >= 0x1000 => return true,
        _ => return false,
    };
    found.iter().zip(&spec.val).zip(&spec.mask).all(|((found, val), mask)| found & mask == val & mask)
}
