//! What one thread works with: queue pairs, their completion queues, and the memory of their messages.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use anyhow::{Context as _, Result, bail};
use rdma_safe::cm::Id;
use rdma_safe::{
    Access, Backing, CompletionChannel, CompletionQueue, ConnectOptions, Context, HugePages, InitOptions, Pages,
    ProtectionDomain, QueuePair, QueuePairAddress, RawMemoryRegion, Remote, RemoteMemory, Sge, SharedReceiveQueue,
    UdTarget, WcFields,
};

use crate::control::{LaneAddress, WorkerAddress};
use crate::credit::CreditLine;
use crate::datagram::{Destination, QKEY};
use crate::plan::{Interface, Plan, Role, Verb};
use crate::rdmacm::Unconnected;
use crate::transport::Transport;

/// Messages begin at multiples of this, the size of a cache line.
const LINE: u64 = 64;
/// Small messages take turns in this much memory, so that not one of them stays in the first-level cache and yet none
/// leaves the second-level one. perftest's `cycle_buffer`.
const CYCLE: u64 = 4096;

/// How the memory of a queue pair is divided.
///
/// ```text
///   sends: slot 0, 1, …   receives, and target of the peer: slot 0, 1, …
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    /// Bytes of the sends.
    pub(crate) send_area: u64,
    /// Bytes of the receives and of the target.
    pub(crate) target_area: u64,
    /// Bytes of one receive.
    pub(crate) receive_len: u64,
    /// Receives that have memory of their own.
    pub(crate) receive_slots: u64,
}

impl Layout {
    /// What an end has that does all that the plan's ends do.
    pub(crate) fn of(plan: &Plan) -> Self {
        let largest = plan.sizes.iter().copied().max().unwrap_or(1);
        let area = plan.sizes.iter().map(|size| slots(*size) * stride(*size)).max().unwrap_or(LINE);
        let received = largest + plan.transport.header();
        let receive_len = stride(received);
        let receive_slots = match plan.takes_receives() {
            false => 0,
            // What arrives is to be looked at before the next message takes its place.
            true if plan.validate => plan.rx_depth.into(),
            true => slots(received),
        };
        Layout { send_area: area, target_area: area.max(receive_slots * receive_len), receive_len, receive_slots }
    }

    /// Without what this end has no use for.
    fn of_end(plan: &Plan, role: Role) -> Self {
        let mut layout = Layout::of(plan);
        if !plan.sends(role) {
            layout.send_area = LINE;
        }
        if !plan.is_sent_to(role) {
            layout.target_area = LINE;
        }
        layout
    }

    /// Bytes that a test takes at one end, about.
    pub(crate) fn total(plan: &Plan, role: Role) -> u64 {
        /// What a work request takes here and, about, in the provider's rings.
        const WORK_REQUEST: u64 = 512;
        /// A mapping's granularity with huge pages, otherwise.
        const HUGE: u64 = 2 << 20;
        const PAGE: u64 = 4096;

        let layout = Layout::of_end(plan, role);
        let page = if plan.huge_pages { HUGE } else { PAGE };
        let area = |part: u64| part.saturating_mul(plan.qps.into()).next_multiple_of(page);
        let buffers = area(layout.send_area).saturating_add(area(layout.target_area));
        let work_requests = u64::from(plan.tx_depth) + u64::from(plan.rx_depth) + u64::from(plan.post_list);
        let queues = work_requests * WORK_REQUEST * u64::from(plan.qps);
        buffers.saturating_add(queues).saturating_mul(plan.threads.into())
    }
}

/// From one message of `size` bytes to the next.
pub(crate) fn stride(size: u64) -> u64 {
    size.max(1).next_multiple_of(LINE)
}

/// Messages of `size` bytes that take turns.
pub(crate) fn slots(size: u64) -> u64 {
    // As in perftest: larger ones stay where they are.
    if stride(size) <= CYCLE / 2 { CYCLE / stride(size) } else { 1 }
}

/// Registered memory, in parts of one length: one for each queue pair.
///
/// Of as few regions as access allows: a device finds a region by its key, the faster the fewer there are.
struct Area {
    /// Taken when it is dropped.
    region: Option<RawMemoryRegion>,
    memory: ManuallyDrop<Box<dyn Backing>>,
    part: u64,
    lkey: u32,
    rkey: u32,
    address: u64,
}

impl Drop for Area {
    fn drop(&mut self) {
        // Otherwise the device may still use the memory, which then stays until the process ends.
        if self.region.take().is_some_and(|region| region.deregister().is_ok()) {
            // SAFETY: dropped here only, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

impl Area {
    fn new(pd: &ProtectionDomain, plan: &Plan, part: u64, access: Access) -> Result<Self> {
        let len = usize::try_from(part * u64::from(plan.qps))?;
        let memory: Box<dyn Backing> =
            if plan.huge_pages { Box::new(HugePages::new(len)?) } else { Box::new(Pages::new(len)?) };
        // SAFETY: the memory stays until the region was deregistered with success: see `drop`. `Part` gives raw pointers to it;
        // references are made only to sources of plans that send inline, which no device writes to.
        let region = unsafe { pd.register_raw(memory.address().as_ptr(), len, access)? };
        let (lkey, rkey, address) = (region.lkey(), region.rkey(), region.address());
        Ok(Area { region: Some(region), memory: ManuallyDrop::new(memory), part, lkey, rkey, address })
    }

    /// `len` bytes at `offset` of the part numbered `index`.
    fn part(&self, index: usize, offset: u64, len: u64) -> Part {
        let offset = index as u64 * self.part + offset;
        // SAFETY: the memory has a part of this length for each queue pair.
        let base = unsafe { self.memory.address().add(offset as usize) };
        Part { base, address: self.address + offset, len, lkey: self.lkey, rkey: self.rkey }
    }
}

/// The memory of all queue pairs of a worker.
enum Areas {
    /// For messages that take receives and nothing else: no key of it lets a peer in, so that one region is enough.
    One(Area),
    /// The source and, apart from it, what the peer has access to. An end that has no use for one of them has none.
    Two(Option<Area>, Option<Area>),
}

impl Areas {
    fn new(pd: &ProtectionDomain, plan: &Plan, role: Role, layout: &Layout) -> Result<Self> {
        if plan.verb == Verb::Send {
            let part = layout.send_area + layout.target_area;
            return Ok(Areas::One(Area::new(pd, plan, part, Access::LOCAL_WRITE)?));
        }
        let area = |part, access| Area::new(pd, plan, part, access);
        let source = plan.sends(role).then(|| area(layout.send_area, Access::LOCAL_WRITE));
        let target = plan.is_sent_to(role).then(|| area(layout.target_area, Access::LOCAL_WRITE | Access::REMOTE));
        Ok(Areas::Two(source.transpose()?, target.transpose()?))
    }

    /// Source and target of the queue pair numbered `index`.
    fn parts(&self, index: usize, layout: &Layout) -> (Part, Part) {
        let (sends, targets) = (layout.send_area, layout.target_area);
        match self {
            Areas::One(area) => (area.part(index, 0, sends), area.part(index, sends, targets)),
            Areas::Two(source, target) => {
                let part = |area: &Option<Area>, len| area.as_ref().map_or(Part::NONE, |area| area.part(index, 0, len));
                (part(source, sends), part(target, targets))
            }
        }
    }
}

/// The memory of one queue pair for one purpose.
pub(crate) struct Part {
    base: NonNull<u8>,
    address: u64,
    len: u64,
    lkey: u32,
    rkey: u32,
}

// SAFETY: plain memory, which belongs to the worker that moves to a thread as a whole.
unsafe impl Send for Part {}

impl Part {
    /// No memory.
    const NONE: Part = Part { base: NonNull::dangling(), address: 0, len: 0, lkey: 0, rkey: 0 };

    /// `size` bytes at `offset`.
    #[inline]
    pub(crate) fn sge(&self, offset: u64, size: u64) -> Sge {
        Sge { address: self.address + offset, len: size as u32, lkey: self.lkey }
    }

    /// The byte at `offset`; the pointer is good for as long as the worker is.
    ///
    /// # Panics
    /// When it does not lie within.
    #[inline]
    pub(crate) fn byte(&self, offset: u64) -> *mut u8 {
        assert!(offset < self.len);
        // SAFETY: within the memory of this part.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }
}

/// One queue pair. It is dropped before what its work names: fields are, in order.
pub(crate) struct Lane {
    pub(crate) qp: QueuePair,
    pub(crate) memory: LaneMemory,
    address: QueuePairAddress,
    /// Of one that is connected by address: its end is that of the connection.
    id: Option<Id>,
}

impl Lane {
    pub(crate) fn is_connected(&self) -> bool {
        self.id.is_some()
    }

    /// For connecting it by address to that of the peer.
    pub(crate) fn unconnected(&mut self, peer: &LaneAddress) -> Unconnected<'_> {
        Unconnected { qp: &mut self.qp, own: self.address, peer: peer.queue_pair }
    }

    pub(crate) fn keep(&mut self, id: Id) {
        self.id = Some(id);
    }
}

/// The memory that a queue pair works with, here and at the peer.
pub(crate) struct LaneMemory {
    /// What it sends, or reads into. Nobody else writes to it.
    pub(crate) source: Part,
    /// Where receives go, and what the peer writes to and reads.
    pub(crate) target: Part,
    layout: Layout,
    /// The peer's target; nothing before it is connected.
    remote: RemoteMemory,
    /// Where datagrams go, once that is known; of other queue pairs, nothing.
    destination: Option<Destination>,
}

/// Fails when a set-up, which takes a while where there are many queue pairs, is to end.
pub(crate) type Check<'c> = &'c dyn Fn() -> Result<()>;

/// Everything of one thread. Fields are dropped in order: queue pairs before the memory that they may still write to.
pub(crate) struct Worker {
    pub(crate) lanes: Vec<Lane>,
    pub(crate) send_cq: CompletionQueue,
    pub(crate) recv_cq: CompletionQueue,
    /// Receives of all queue pairs, where they share them.
    pub(crate) srq: Option<SharedReceiveQueue>,
    /// Where the peer says what has arrived, if it has to.
    pub(crate) credits: Option<CreditLine>,
    _areas: Areas,
}

impl Worker {
    /// Creates the objects of one thread and registers their memory.
    pub(crate) fn new(
        pd: &ProtectionDomain,
        plan: &Plan,
        role: Role,
        init: &InitOptions,
        check: Check<'_>,
    ) -> Result<Self> {
        check()?;
        let layout = Layout::of_end(plan, role);
        let areas = Areas::new(pd, plan, role, &layout)?;
        let rx_depth = if plan.takes_receives() { plan.rx_depth } else { 1 };
        let channel = || plan.events.then(|| pd.context().create_channel()).transpose();
        let send_channel = channel()?;
        // Who waits for both at a time can do so in one place only.
        let recv_channel = if plan.bidirectional { send_channel.clone() } else { channel()? };
        let send_cq = completion_queue(pd.context(), plan, plan.tx_depth, send_channel.as_ref())?;
        let recv_cq = completion_queue(pd.context(), plan, rx_depth, recv_channel.as_ref())?;
        let srq = if plan.shared_receives && plan.is_sent_to(role) {
            Some(pd.shared_receive_queue(rx_depth).max_batch(RECEIVE_BATCH).build()?)
        } else {
            None
        };
        let mut lanes = Vec::with_capacity(plan.qps as usize);
        for index in 0..plan.qps as usize {
            check()?;
            let builder = pd
                .queue_pair(&send_cq, &recv_cq)
                .qp_type(plan.transport.queue_pair())
                .send_depth(plan.tx_depth)
                .recv_depth(rx_depth)
                .inline_data(plan.inline)
                .max_batch(plan.post_list.max(RECEIVE_BATCH))
                .classic(plan.post == Interface::Classic);
            let mut qp = match &srq {
                Some(srq) => builder.shared_receive_queue(srq).build()?,
                None => builder.build()?,
            };
            if plan.post == Interface::Extended && !qp.is_extended() {
                bail!("{} does not post by ibv_wr_*: leave out --post extended", pd.context().device_name());
            }
            let address = match plan.transport {
                Transport::Ud => qp.init_datagrams(QKEY, init)?,
                Transport::Rc | Transport::Uc => qp.init(&init.peer_access(Access::REMOTE))?,
            };
            let (source, target) = areas.parts(index, &layout);
            let remote = RemoteMemory { address: 0, len: 0, rkey: 0 };
            let memory = LaneMemory { source, target, layout, remote, destination: None };
            lanes.push(Lane { qp, memory, address, id: None });
        }
        let credits = if plan.has_credits() {
            let waits_for = if plan.sends(role) { &send_channel } else { &recv_channel };
            Some(CreditLine::new(pd, plan, init, waits_for.as_ref())?)
        } else {
            None
        };
        Ok(Worker { lanes, send_cq, recv_cq, srq, credits, _areas: areas })
    }

    /// What the peer has to know.
    pub(crate) fn address(&self) -> WorkerAddress {
        let lane = |lane: &Lane| LaneAddress { queue_pair: lane.address, target: lane.memory.exposed() };
        let credits = self.credits.as_ref().map(|line| line.address);
        WorkerAddress { queue_pairs: self.lanes.iter().map(lane).collect(), credits }
    }

    /// Connects to the peer, or, where that is done by address, takes what else there is to know of it.
    pub(crate) fn connect(&mut self, peer: &WorkerAddress, plan: &Plan, role: Role, check: Check<'_>) -> Result<()> {
        if peer.queue_pairs.len() != self.lanes.len() {
            bail!("the peer has {} queue pairs for {} here", peer.queue_pairs.len(), self.lanes.len());
        }
        let connection = &plan.connection;
        let mut options = ConnectOptions::default()
            .service_level(connection.service_level)
            .traffic_class(connection.traffic_class)
            .timeout(connection.timeout)
            .retry_count(connection.retries)
            .rnr_retry(connection.rnr_retries);
        if let Some(mtu) = plan.mtu {
            options = options.mtu(mtu);
        }
        if let Some(outstanding) = plan.outstanding {
            options = options.rd_atomic(outstanding);
        }
        let needed = if plan.sends(role) { Layout::of(plan).target_area } else { 0 };
        for (lane, peer) in self.lanes.iter_mut().zip(&peer.queue_pairs) {
            check()?;
            if peer.target.len < needed {
                bail!("the peer's memory of {} bytes is too short", peer.target.len);
            }
            let peers = &peer.queue_pair;
            match plan.transport {
                Transport::Ud => lane.memory.destination = Some(Destination::new(&lane.qp, peers, &options)?),
                Transport::Rc | Transport::Uc if plan.rdma_cm => {}
                Transport::Rc | Transport::Uc => {
                    lane.qp.connect(peers, &options).context("cannot connect to the peer's queue pair")?
                }
            }
            lane.memory.remote = peer.target;
        }
        match (&mut self.credits, &peer.credits) {
            (None, None) => Ok(()),
            (Some(line), Some(peer)) => line.connect(peer, &options),
            _ => bail!("only one end has a connection for credits"),
        }
    }
}

/// Receives that are posted again with one doorbell.
pub(crate) const RECEIVE_BATCH: u32 = 32;

pub(crate) fn completion_queue(
    context: &Context,
    plan: &Plan,
    depth: u32,
    channel: Option<&CompletionChannel>,
) -> Result<CompletionQueue> {
    let entries = depth.saturating_mul(plan.qps).max(1);
    let mut cq = context
        .completion_queue(entries)
        .fields(WcFields::BYTE_LEN | WcFields::IMM | WcFields::QP_NUM)
        .classic(plan.poll == Interface::Classic);
    if let Some(channel) = channel {
        cq = cq.channel(channel);
    }
    let cq = cq.build().with_context(|| {
        format!("--qps, --tx-depth and --rx-depth ask for {} times {depth} completions in one queue", plan.qps)
    })?;
    if plan.poll == Interface::Extended && !cq.is_extended() {
        bail!("{} does not poll by ibv_start_poll: leave out --poll extended", context.device_name());
    }
    Ok(cq)
}

impl LaneMemory {
    fn exposed(&self) -> RemoteMemory {
        RemoteMemory { address: self.target.address, len: self.target.len, rkey: self.target.rkey }
    }

    /// The peer's side of a message at `offset`.
    #[inline]
    pub(crate) fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.remote.address.wrapping_add(offset), rkey: self.remote.rkey }
    }

    /// Where a datagram goes.
    #[inline(always)]
    pub(crate) fn to(&self) -> Option<UdTarget<'_>> {
        self.destination.as_ref().map(Destination::target)
    }

    /// Where in the target the receive numbered `index` goes.
    #[inline]
    pub(crate) fn receive_offset(&self, index: u64) -> u64 {
        index % self.layout.receive_slots * self.layout.receive_len
    }

    /// The receive numbered `index`.
    #[inline]
    pub(crate) fn receive_sge(&self, index: u64) -> Sge {
        self.target.sge(self.receive_offset(index), self.layout.receive_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    fn layout(arguments: &str) -> Layout {
        Layout::of(&sample::plan(arguments))
    }

    #[test]
    fn small_messages_take_turns_and_large_ones_stay() {
        assert_eq!((slots(1), slots(64), slots(65), slots(2048), slots(2049)), (64, 64, 32, 2, 1));
        assert_eq!((stride(1), stride(65), stride(1 << 20)), (64, 128, 1 << 20));
    }

    #[test]
    fn memory_does_not_grow_with_what_is_sent() {
        let write = layout("write bw h -s 1M -n 1000 -q 64");
        assert_eq!((write.send_area, write.target_area, write.receive_slots), (1 << 20, 1 << 20, 0));
        let plan = sample::plan("write bw h -s 1M -n 1000 -q 64");
        // The buffers of one direction, and the queues.
        let total = [Role::Client, Role::Server].map(|role| Layout::total(&plan, role));
        assert_eq!(total[0], total[1]);
        assert!(((64 << 20)..(100 << 20)).contains(&total[0]), "{total:?}");
        let sweep = layout("write bw h -s 2..8K");
        assert_eq!((sweep.send_area, sweep.target_area), (8192, 8192));
        let send = layout("send bw h -s 64");
        assert_eq!((send.receive_len, send.receive_slots, send.target_area), (64, 64, 4096));
        let validated = layout("send bw h -s 100 --validate -r 10");
        assert_eq!((validated.receive_len, validated.receive_slots, validated.target_area), (128, 10, 4096));
        // Headers come before them.
        let datagrams = layout("send bw h -c UD -s 64");
        assert_eq!((datagrams.receive_len, datagrams.receive_slots, datagrams.target_area), (128, 32, 4096));
        assert_eq!((datagrams.send_area, layout("send bw h -c UD -s 4K").target_area), (4096, 4160));
    }
}
