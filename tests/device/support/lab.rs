//! Two connected raw queue pairs, with memory that the device and the tests access.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;

use rdma_safe::cq::CompletionQueueBuilder;
use rdma_safe::post::InlineList;
use rdma_safe::{
    Access, CompletionQueue, Context, Inline, PostError, ProtectionDomain, QueuePair, QueuePairBuilder,
    RawMemoryRegion, Remote, SendBatch, SendFlags, SendOps, Sge, WcFields, WcFlags, WcOpcode, WcStatus, WorkCompletion,
    WorkRequest,
};

use rdma_safe::sys::dma;

use super::link::Link;
use super::miri::one_under_miri;
use super::{Rdma, within_deadline};

/// The interfaces of libibverbs that a test uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mode {
    pub(crate) classic_qp: bool,
    pub(crate) classic_cq: bool,
}

impl Mode {
    pub(crate) const EXTENDED: Mode = Mode { classic_qp: false, classic_cq: false };
    pub(crate) const CLASSIC: Mode = Mode { classic_qp: true, classic_cq: true };

    /// Miri runs no mixed interfaces.
    #[cfg(miri)]
    pub(crate) const ALL: [Mode; 2] = [Mode::EXTENDED, Mode::CLASSIC];
    #[cfg(not(miri))]
    pub(crate) const ALL: [Mode; 4] = [
        Mode::EXTENDED,
        Mode { classic_qp: false, classic_cq: true },
        Mode { classic_qp: true, classic_cq: false },
        Mode::CLASSIC,
    ];

    /// The modes that a test runs in.
    pub(crate) fn each() -> impl Iterator<Item = Mode> {
        one_under_miri(&Mode::ALL).iter().copied()
    }

    /// The function that a poll calls first.
    pub(crate) fn poll_verb(self) -> &'static str {
        if self.classic_cq { "ibv_poll_cq" } else { "start_poll" }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |classic| if classic { "classic" } else { "extended" };
        write!(f, "{} queue pair, {} completion queue", name(self.classic_qp), name(self.classic_cq))
    }
}

/// Registered memory that peers may access and that the tests copy atomically.
pub(crate) struct Memory {
    region: Option<RawMemoryRegion>,
    address: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is owned, is not tied to a thread, and is only accessed by atomic copies.
unsafe impl Send for Memory {}

impl Memory {
    pub(crate) fn new(pd: &ProtectionDomain, len: usize) -> Self {
        Memory::with_access(pd, len, Access::LOCAL_WRITE | Access::REMOTE)
    }

    pub(crate) fn with_access(pd: &ProtectionDomain, len: usize, access: Access) -> Self {
        let layout = Layout::from_size_align(len, 4096).expect("a layout");
        assert!(len > 0);
        // SAFETY: the layout has a size other than zero.
        let address = NonNull::new(unsafe { alloc_zeroed(layout) }).expect("memory");
        // SAFETY: `drop` frees the memory after deregistering the region. No reference to the memory is ever created; it is
        // only accessed by atomic copies.
        let region = unsafe { pd.register_raw(address.as_ptr(), len, access) }.expect("a memory region");
        Memory { region: Some(region), address, layout }
    }

    fn region(&self) -> &RawMemoryRegion {
        self.region.as_ref().expect("the region was not taken")
    }

    pub(crate) fn sge(&self, range: Range<usize>) -> Sge {
        self.check(&range);
        let address = self.region().address() + range.start as u64;
        Sge { address, len: range.len() as u32, lkey: self.region().lkey() }
    }

    pub(crate) fn remote(&self, offset: usize) -> Remote {
        Remote { address: self.region().address() + offset as u64, rkey: self.region().rkey() }
    }

    pub(crate) fn raw(&self) -> &RawMemoryRegion {
        self.region()
    }

    /// Splits off the region. Dropping the `Memory` frees the bytes, so deregister the region first.
    pub(crate) fn into_parts(mut self) -> (RawMemoryRegion, Memory) {
        (self.region.take().expect("the region was not taken"), self)
    }

    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        self.check(&(offset..offset + bytes.len()));
        // SAFETY: `check` has ensured that the bytes are within the memory. The device accesses them atomically, too.
        unsafe { dma::write(self.address.as_ptr().add(offset), bytes.as_ptr(), bytes.len()) }
    }

    pub(crate) fn get(&self, range: Range<usize>) -> Vec<u8> {
        self.check(&range);
        let mut bytes = vec![0; range.len()];
        // SAFETY: `check` has ensured that the bytes are within the memory. The device accesses them atomically, too.
        unsafe { dma::read(self.address.as_ptr().add(range.start), bytes.as_mut_ptr(), range.len()) };
        bytes
    }

    pub(crate) fn put_u64(&self, offset: usize, value: u64) {
        self.put(offset, &value.to_ne_bytes());
    }

    pub(crate) fn get_u64(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.get(offset..offset + 8).try_into().expect("eight bytes"))
    }

    fn check(&self, range: &Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.layout.size());
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        drop(self.region.take());
        // SAFETY: `with_access` has allocated the memory with this layout. It is deregistered, and freed only here.
        unsafe { dealloc(self.address.as_ptr(), self.layout) }
    }
}

/// An operation and its address in the peer's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Send,
    SendImm(u32),
    SendInvalidate(u32),
    Write(Remote),
    WriteImm(Remote, u32),
    Read(Remote),
    CompareSwap(Remote, u64, u64),
    FetchAdd(Remote, u64),
}

/// The payload of an operation, or the destination of its result.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Data<'a> {
    One(Sge),
    List(&'a [Sge]),
    Inline(&'a [u8]),
    InlineList(&'a [&'a [u8]]),
}

/// One work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wr<'a> {
    id: u64,
    flags: SendFlags,
    op: Op,
    data: Data<'a>,
}

impl<'a> Wr<'a> {
    /// A signaled work request.
    pub(crate) fn new(id: u64, op: Op, data: Data<'a>) -> Self {
        Wr { id, flags: SendFlags::SIGNALED, op, data }
    }

    pub(crate) fn flags(self, flags: SendFlags) -> Self {
        Wr { flags, ..self }
    }
}

/// A completion with all its fields copied out.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) opcode: WcOpcode,
    pub(crate) flags: WcFlags,
    pub(crate) byte_len: Option<u32>,
    pub(crate) imm: Option<u32>,
    pub(crate) invalidated_rkey: Option<u32>,
    pub(crate) qp_num: Option<u32>,
}

impl From<WorkCompletion<'_>> for Wc {
    fn from(completion: WorkCompletion<'_>) -> Self {
        Wc {
            wr_id: completion.wr_id(),
            status: completion.status(),
            opcode: completion.opcode(),
            flags: completion.flags(),
            byte_len: completion.byte_len(),
            imm: completion.imm(),
            invalidated_rkey: completion.invalidated_rkey(),
            qp_num: completion.qp_num(),
        }
    }
}

/// The status of a send whose local memory cannot be read.
///
/// Older SoftRoCE deviates from the status of IBTA. Newer SoftRoCE moves the queue pair to ERR before it completes the send, so the
/// send is flushed.
pub(crate) fn local_failure(rdma: &Rdma) -> WcStatus {
    match (rdma.is_rxe(), rdma.is_newer_rxe()) {
        (false, _) => WcStatus::LOC_PROT_ERR,
        (true, false) => WcStatus::LOC_QP_OP_ERR,
        (true, true) => WcStatus::WR_FLUSH_ERR,
    }
}

/// The next completion, if any.
pub(crate) fn try_next(cq: &mut CompletionQueue) -> Option<Wc> {
    cq.poll().next().expect("the queue can be polled").map(Wc::from)
}

/// Waits for the next completion.
#[track_caller]
pub(crate) fn next(cq: &mut CompletionQueue) -> Wc {
    within_deadline("a completion", || try_next(cq))
}

/// Waits for the next completion, which must be a success of work `id`.
#[track_caller]
pub(crate) fn next_ok(cq: &mut CompletionQueue, id: u64) -> Wc {
    let wc = next(cq);
    assert_eq!((wc.wr_id, wc.status), (id, WcStatus::SUCCESS), "{wc:?}");
    wc
}

/// One end of a connection: a queue pair, its completion queue, and memory.
///
/// The queue pair is the first field, so it is destroyed before the memory is freed.
pub(crate) struct Side {
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) memory: Memory,
}

impl Side {
    /// Posts all of `wrs` as one batch.
    pub(crate) fn post(&mut self, wrs: &[Wr<'_>]) -> Result<(), PostError> {
        post(self.qp.send_batch(), wrs)
    }

    /// Posts one receive.
    pub(crate) fn receive(&mut self, id: u64, range: Range<usize>) -> Result<(), PostError> {
        let sge = self.memory.sge(range);
        // SAFETY: a `Memory` tolerates any access, and this side frees it after its queue pair.
        unsafe { self.qp.receive(id, sge) }
    }

    /// Posts all of `receives`, each a list of elements, as one batch.
    pub(crate) fn receive_batch(&mut self, receives: &[(u64, &[Sge])]) -> Result<(), PostError> {
        let mut batch = self.qp.recv_batch()?;
        for (id, sges) in receives {
            // SAFETY: the same as in `receive`.
            unsafe { batch.receive(*id, sges)? }
        }
        assert_eq!(batch.len(), receives.len());
        batch.post()
    }

    #[track_caller]
    pub(crate) fn next(&mut self) -> Wc {
        next(&mut self.cq)
    }

    #[track_caller]
    pub(crate) fn next_ok(&mut self, id: u64) -> Wc {
        next_ok(&mut self.cq, id)
    }
}

/// Adds all of `wrs` to `batch` and posts it.
pub(crate) fn post(batch: Result<SendBatch<'_>, PostError>, wrs: &[Wr<'_>]) -> Result<(), PostError> {
    let mut batch = batch?;
    for wr in wrs {
        add(&mut batch, *wr)?;
    }
    assert_eq!(batch.len(), wrs.len());
    batch.post()
}

/// Adds one work request to a batch.
pub(crate) fn add(batch: &mut SendBatch<'_>, wr: Wr<'_>) -> Result<(), PostError> {
    let request = WorkRequest::new(wr.id).with_flags(wr.flags);
    macro_rules! with_payload {
        ($payload:ident => $call:expr) => {
            match wr.data {
                Data::One($payload) => $call,
                Data::List($payload) => $call,
                Data::Inline(bytes) => {
                    let $payload = Inline(bytes);
                    $call
                }
                Data::InlineList(pieces) => {
                    let $payload = InlineList(pieces);
                    $call
                }
            }
        };
    }
    // SAFETY: elements and remote addresses belong to `Memory` values, which tolerate any access by the device and are freed
    // after the queue pairs of the test. All other memory of this process that peers may write is in exposed regions.
    unsafe {
        match (wr.op, wr.data) {
            (Op::Send, _) => with_payload!(payload => batch.send(request, payload)),
            (Op::SendImm(imm), _) => with_payload!(payload => batch.send_imm(request, imm, payload)),
            (Op::SendInvalidate(rkey), _) => with_payload!(payload => batch.send_invalidate(request, rkey, payload)),
            (Op::Write(remote), _) => with_payload!(payload => batch.write(request, remote, payload)),
            (Op::WriteImm(remote, imm), _) => with_payload!(payload => batch.write_imm(request, remote, imm, payload)),
            (Op::Read(remote), Data::One(sge)) => batch.read(request, remote, sge),
            (Op::Read(remote), Data::List(sges)) => batch.read(request, remote, sges),
            (Op::CompareSwap(remote, compare, swap), Data::One(sge)) => {
                batch.compare_swap(request, remote, compare, swap, sge)
            }
            (Op::FetchAdd(remote, add), Data::One(sge)) => batch.fetch_add(request, remote, add, sge),
            (op, data) => panic!("{op:?} cannot take {data:?}"),
        }
    }
}

/// Bytes of memory of each end.
pub(crate) const MEMORY: usize = 1 << 16;

/// Two ends in one protection domain, connected to each other.
pub(crate) struct Lab {
    pub(crate) a: Side,
    pub(crate) b: Side,
    pub(crate) pd: ProtectionDomain,
}

/// Options of a [`Lab`].
#[derive(Clone, Copy)]
pub(crate) struct LabBuilder<'r> {
    rdma: &'r Rdma,
    mode: Mode,
    link: Link,
    sges: u32,
    inline: u32,
    depth: u32,
    entries: u32,
    max_batch: Option<u32>,
    ops: Option<SendOps>,
    connected: bool,
}

impl Lab {
    pub(crate) fn builder(rdma: &Rdma, mode: Mode) -> LabBuilder<'_> {
        LabBuilder {
            rdma,
            mode,
            link: Link::default(),
            sges: 1,
            inline: 0,
            depth: 32,
            entries: 128,
            max_batch: None,
            ops: None,
            connected: true,
        }
    }

    pub(crate) fn new(rdma: &Rdma, mode: Mode) -> Lab {
        Lab::builder(rdma, mode).build()
    }
}

macro_rules! setters {
    ($($name:ident: $type:ty => $value:expr;)+) => {
        $(pub(crate) fn $name(mut self, $name: $type) -> Self {
            self.$name = $value;
            self
        })+
    };
}

impl LabBuilder<'_> {
    setters! {
        link: Link => link;
        sges: u32 => sges;
        inline: u32 => inline;
        depth: u32 => depth;
        entries: u32 => entries;
        connected: bool => connected;
        ops: SendOps => Some(ops);
        max_batch: u32 => Some(max_batch);
    }

    pub(crate) fn build(self) -> Lab {
        let pd = self.rdma.pd();
        self.build_in(pd)
    }

    /// Builds both ends in `pd`, which may be of another context.
    pub(crate) fn build_in(self, pd: ProtectionDomain) -> Lab {
        let (mut a, mut b) = (self.side(&pd), self.side(&pd));
        if self.connected {
            let (first, second) = (a.qp.number(), b.qp.number());
            self.link.connect(self.rdma, &mut a.qp, second).expect("the first queue pair connects");
            self.link.connect(self.rdma, &mut b.qp, first).expect("the second queue pair connects");
        }
        Lab { a, b, pd }
    }

    fn side(&self, pd: &ProtectionDomain) -> Side {
        let cq = cq_builder(pd.context(), self.entries, self.mode).build().expect("a completion queue");
        let qp = self.qp_builder(pd.queue_pair(&cq, &cq)).build().expect("a queue pair");
        Side { qp, cq, memory: Memory::new(pd, MEMORY) }
    }

    pub(crate) fn qp_builder<'b>(&self, builder: QueuePairBuilder<'b>) -> QueuePairBuilder<'b> {
        let mut builder = builder
            .send_depth(self.depth)
            .recv_depth(self.depth)
            .send_sges(self.sges)
            .recv_sges(self.sges)
            .inline_data(self.inline);
        if let Some(max_batch) = self.max_batch {
            builder = builder.max_batch(max_batch);
        }
        if let Some(ops) = self.ops {
            builder = builder.operations(ops);
        }
        builder.classic(self.mode.classic_qp)
    }
}

/// A builder for a completion queue with the interface of `mode`.
pub(crate) fn cq_builder(context: &Context, entries: u32, mode: Mode) -> CompletionQueueBuilder {
    let builder = context.completion_queue(entries).fields(WcFields::STANDARD);
    builder.classic(mode.classic_cq)
}
