//! Queue pairs.

mod attributes;
mod builder;
mod connect;
mod data_order;
mod drain;
mod ece;
mod modify;
mod multicast;
mod operations;
mod options;
mod rate_limit;
mod raw;
mod raw_packet;
mod state;
mod target;

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_sys::*;

use crate::errno::check;
use crate::id::QpId;
use crate::object::{self, Object, Parents as _};
use crate::post::{RecvBatch, RecvQueue, RecvState, SendBatch, SendOps, SendQueue, SendState};
use crate::{Context, Error, PostError, ProtectionDomain, Result, Sge, SrqId, XrcDomain};
use crate::{cq, srq};
use multicast::Groups;

pub use attributes::{AttributeMask, QueuePairAttributes, QueuePairCapacity, Transition};
pub use builder::QueuePairBuilder;
pub(crate) use connect::Local;
pub use connect::{ConnectOptions, InitOptions, QueuePairAddress};
pub use data_order::{DataInOrder, WrOpcode};
pub use ece::Ece;
pub use modify::ModifyError;
pub use options::QueuePairFlags;
pub use rate_limit::RateLimit;
pub use state::{QueuePairState, QueuePairType};
pub use target::XrcTarget;

/// A queue pair: `struct ibv_qp`, with `struct ibv_qp_ex` for posting where the provider has it.
///
/// This is the raw door: [`SendBatch`] and [`RecvBatch`] post memory by address and key, which is `unsafe`. The owned
/// door is [`Endpoint`](crate::Endpoint).
pub struct QueuePair {
    // Before `shared`, so that an open batch is aborted before the queue pair is destroyed.
    send: SendState,
    recv: RecvState,
    shared: Arc<Shared>,
    /// Since [`QueuePair::init`].
    local: Option<Local>,
}

/// What both queues hold of their queue pair.
pub(crate) struct Shared {
    object: Object<Parents>,
    number: u32,
    id: QpId,
    qp_type: QueuePairType,
    capacity: QueuePairCapacity,
    /// As last set or queried here; the device may have gone on to the error state.
    state: AtomicU32,
    port: AtomicU8,
    /// Held for `ibv_query_qp`, which writes to the C object although it only asks.
    query: Mutex<()>,
}

struct Parents {
    home: Home,
    // Completion queues must outlive the queue pairs that complete to them.
    cqs: Option<[Arc<cq::Shared>; 2]>,
    // And so must the queue that they take receives from.
    srq: Option<Arc<srq::Shared>>,
    groups: Groups,
    // They can only go when the queue pair has.
    kept: Mutex<Vec<Box<dyn Send>>>,
}

/// What a queue pair is made in.
enum Home {
    Domain(ProtectionDomain),
    /// Of the target of an XRC connection, which has no queues of its own.
    Xrc(XrcDomain),
}

impl Home {
    fn context(&self) -> &Context {
        match self {
            Home::Domain(pd) => pd.context(),
            Home::Xrc(xrcd) => xrcd.context(),
        }
    }
}

impl QueuePair {
    /// Number of the queue pair, 24 bits: what a peer needs to reach it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.shared.number
    }

    /// Its name in asynchronous events, which no other queue pair of the process will have.
    #[must_use]
    pub fn id(&self) -> QpId {
        self.shared.id
    }

    /// Capacities as the device granted them; at least what was asked for.
    #[must_use]
    pub fn capacity(&self) -> QueuePairCapacity {
        self.shared.capacity
    }

    /// Type.
    #[must_use]
    pub fn qp_type(&self) -> QueuePairType {
        self.shared.qp_type
    }

    /// State as last set or queried here. A device moves a queue pair to the error state by itself: see
    /// [`QueuePair::query`].
    #[must_use]
    pub fn state(&self) -> QueuePairState {
        self.shared.state()
    }

    /// The shared receive queue that it takes receives from, by [`SharedReceiveQueue::id`](crate::SharedReceiveQueue::id);
    /// `None` when it has a receive queue of its own.
    #[must_use]
    pub fn shared_receive_queue(&self) -> Option<SrqId> {
        self.shared.object.srq.as_ref().map(|srq| srq.id())
    }

    /// Whether work is posted by `ibv_wr_*`; otherwise by `ibv_post_send`.
    #[must_use]
    #[inline(always)]
    pub fn is_extended(&self) -> bool {
        self.send.is_extended()
    }

    /// Sets attributes: `ibv_modify_qp(3)`.
    ///
    /// # Errors
    /// [`Error::Modify`] says which attribute is missing, not allowed or out of range, or what is wrong with the
    /// address, instead of the kernel's `EINVAL`.
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        // A batch that was forgotten would be aborted later, and then put the provider's counters back to before a reset.
        self.send.abort();
        let result = self.shared.modify(attributes);
        if let (Some(port), true) = (attributes.port(), result.is_ok()) {
            self.tell_port(port);
        }
        self.tell_state();
        result
    }

    /// Lets the send queue know how long a datagram can be.
    fn tell_port(&mut self, port: u8) {
        if self.qp_type() == QueuePairType::UD {
            let mtu = self.context().query_port(port).ok().and_then(|port| port.active_mtu().bytes());
            // The largest there is, where it is not known: then the device has to refuse.
            self.send.set_max_datagram(mtu.and_then(|mtu| u16::try_from(mtu).ok()).unwrap_or(4096));
        }
    }

    /// Reads attributes from the device: `ibv_query_qp(3)`.
    ///
    /// All attributes are asked for; some devices report only part of them and leave the rest zero.
    ///
    /// # Errors
    /// [`Error::Verb`].
    #[doc(alias = "ibv_query_qp")]
    pub fn query(&self) -> Result<QueuePairAttributes> {
        self.shared.query(|| self.tell_state())
    }

    /// Lets both queues know what the state allows.
    fn tell_state(&self) {
        self.send.set_state(self.state());
        self.recv.set_state(self.state());
    }

    /// Bytes that a datagram can have: the MTU of the port, as it was when the queue pair was given it. `None` for queue pairs of
    /// other types than UD and before INIT.
    #[must_use]
    pub fn max_datagram(&self) -> Option<u32> {
        self.send.max_datagram()
    }

    /// Send operations that can be posted.
    #[must_use]
    pub fn operations(&self) -> SendOps {
        self.send.operations()
    }

    /// Begins a batch of sends: `ibv_wr_start`. Nothing is posted before [`SendBatch::post`].
    ///
    /// # Errors
    /// [`PostError::NotReady`] unless the queue pair was brought to RTS.
    #[doc(alias = "ibv_wr_start")]
    #[inline(always)]
    pub fn send_batch(&mut self) -> Result<SendBatch<'_>, PostError> {
        self.send.batch()
    }

    /// Begins a batch of receives. Nothing is posted before [`RecvBatch::post`].
    ///
    /// # Errors
    /// [`PostError::NotReady`] in RESET; [`PostError::SharedReceives`] where it takes receives from a shared receive queue.
    #[inline(always)]
    pub fn recv_batch(&mut self) -> Result<RecvBatch<'_>, PostError> {
        self.recv.batch()
    }

    /// Posts one receive: `ibv_post_recv(3)`.
    ///
    /// # Errors
    /// [`PostError::NotReady`] in RESET; [`PostError::SharedReceives`] where it takes receives from a shared receive queue;
    /// [`PostError::QueueFull`]; [`PostError::Refused`] and [`PostError::InDoubt`] when
    /// the provider failed otherwise.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.recv.receive(wr_id, sge) }
    }

    /// As [`QueuePair::receive`], into several pieces of memory.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    pub(crate) unsafe fn receive_list(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        let mut batch = self.recv_batch()?;
        // SAFETY: the caller's contract is the same.
        unsafe { batch.receive(wr_id, sges)? };
        batch.post()
    }

    /// Both queues apart: two threads may use one each.
    #[inline(always)]
    pub fn split(&mut self) -> (SendQueue<'_>, RecvQueue<'_>) {
        (SendQueue::new(&mut self.send), RecvQueue::new(&mut self.recv))
    }

    #[inline(always)]
    pub(crate) fn send_state(&mut self) -> &mut SendState {
        &mut self.send
    }

    #[inline(always)]
    pub(crate) fn recv_state(&mut self) -> &mut RecvState {
        &mut self.recv
    }

    /// The send queue, and the queue pair behind it.
    pub(crate) fn send_and_shared(&mut self) -> (&mut SendState, &Shared) {
        (&mut self.send, &self.shared)
    }

    /// Aborts a batch that was forgotten.
    pub(crate) fn abort_sends(&mut self) {
        self.send.abort();
    }

    /// Makes all work in flight flush.
    #[cold]
    pub(crate) fn fail(&mut self) {
        // A batch that was forgotten holds a lock that some providers take for this.
        self.send.abort();
        self.shared.fail();
        self.tell_state();
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.shared.context()
    }

    /// The domain that it is in.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.shared.pd()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The C object, valid while this queue pair or a flow to it is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_qp {
        self.shared.as_raw()
    }

    /// Destroys it: `ibv_destroy_qp(3)`. Dropping does the same and tells nobody.
    ///
    /// # Errors
    /// [`Error::Verb`] with the provider's answer; the object, and all it depends on, then stays until the process
    /// ends. [`Error::PolledHere`] when this thread holds a cursor on one of its completion queues: it is destroyed when the
    /// cursor moves on or goes. [`Error::InUse`] while there are [`Flow`](crate::Flow)s to it, or memory windows of type 2 bound to
    /// it: it is destroyed when the last of them is gone.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn destroy(self) -> Result<()> {
        self.destroy_or_keep(|| ())
    }

    /// As [`QueuePair::destroy`]. Where it is not, or not yet, it keeps the `work` that the device may go on with.
    pub(crate) fn destroy_or_keep<W: Send + 'static>(self, work: impl FnOnce() -> W) -> Result<()> {
        let QueuePair { send, recv, shared, .. } = self;
        drop((send, recv));
        match Arc::try_unwrap(shared) {
            Ok(shared) => {
                if shared.is_polled_here() {
                    shared.keep(work());
                    return shared.object.destroy().map(drop);
                }
                shared.object.destroy().map(drop).inspect_err(|_| std::mem::forget(work()))
            }
            Err(shared) => {
                shared.keep(work());
                Err(Error::InUse { object: "queue pair", by: "flows or memory windows" })
            }
        }
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("number", &format_args!("{:#08x}", self.number()))
            .field("type", &self.qp_type())
            .field("state", &self.state())
            .field("extended", &self.is_extended())
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn context(&self) -> &Context {
        self.object.context()
    }

    /// Of one that is no target of XRC, which is of another type.
    pub(crate) fn pd(&self) -> &ProtectionDomain {
        match &self.object.home {
            Home::Domain(pd) => pd,
            Home::Xrc(_) => unreachable!("targets of XRC are of another type"),
        }
    }

    /// Lets go of `what` when it was destroyed, and not before.
    pub(crate) fn keep(&self, what: impl Send + 'static) {
        self.object.kept.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(what));
    }

    fn groups(&self) -> &Groups {
        &self.object.groups
    }

    pub(crate) fn as_raw(&self) -> *mut ibv_qp {
        self.object.as_raw()
    }

    pub(crate) fn raw(&self) -> NonNull<ibv_qp> {
        self.object.raw()
    }

    /// Whether this thread holds a lock that a reset may take.
    fn is_polled_here(&self) -> bool {
        self.object.polled_here().is_some()
    }

    pub(crate) fn qp_type(&self) -> QueuePairType {
        self.qp_type
    }

    pub(crate) fn capacity(&self) -> QueuePairCapacity {
        self.capacity
    }

    /// Whether it takes receives from a shared receive queue.
    pub(crate) fn has_srq(&self) -> bool {
        self.object.srq.is_some()
    }

    /// Whether it has no receive queue at all: what an XRC queue pair receives goes to shared receive queues by their number.
    pub(crate) fn has_no_receives(&self) -> bool {
        self.qp_type == QueuePairType::XRC_SEND
    }

    /// Of a receive that cannot be posted.
    #[cold]
    pub(crate) fn why_no_receives(&self) -> PostError {
        match self.has_srq() {
            true => PostError::SharedReceives,
            false if self.has_no_receives() => PostError::NoReceiveQueue,
            false => PostError::NotReady { state: self.state() },
        }
    }

    /// Makes all work in flight flush. A failure leaves the work to be ended by destroying the queue pair, which is what
    /// it comes to anyway.
    #[cold]
    pub(crate) fn fail(&self) {
        let _ = self.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR));
    }

    #[inline(always)]
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    #[inline]
    pub(crate) fn state(&self) -> QueuePairState {
        QueuePairState(self.state.load(Ordering::Relaxed))
    }

    fn set_state(&self, state: QueuePairState) {
        self.state.store(state.0, Ordering::Relaxed);
    }

    /// Port given at INIT; 0 before.
    fn port(&self) -> u8 {
        self.port.load(Ordering::Relaxed)
    }

    fn set_port(&self, port: u8) {
        self.port.store(port, Ordering::Relaxed);
    }

    /// Calls `done` before another thread can.
    fn query(&self, done: impl FnOnce()) -> Result<QueuePairAttributes> {
        let mut attributes = QueuePairAttributes::new();
        let mask = AttributeMask::all() - AttributeMask::RATE_LIMIT;
        let mut init = ibv_qp_init_attr::zeroed();
        let _alone = self.query.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the queue pair and both out pointers are valid.
        let result = unsafe {
            (self.context().verbs().ibv_query_qp)(
                self.as_raw(),
                &mut attributes.raw,
                mask.bits() as std::ffi::c_int,
                &mut init,
            )
        };
        check(result).map_err(|errno| self.error("ibv_query_qp", errno))?;
        attributes.mask = mask;
        self.set_state(QueuePairState(attributes.raw.qp_state.0));
        done();
        Ok(attributes)
    }

    fn error(&self, verb: &'static str, errno: crate::Errno) -> Error {
        self.context().verb_error(verb, errno)
    }
}

impl object::Parents for Parents {
    type Raw = ibv_qp;

    const VERB: &'static str = "ibv_destroy_qp";

    fn context(&self) -> &Context {
        self.home.context()
    }

    fn polled_here(&self) -> Option<&Arc<cq::Shared>> {
        self.cqs.iter().flatten().find(|cq| cq.is_polled_here())
    }

    unsafe fn destroy(&self, raw: *mut ibv_qp) -> std::ffi::c_int {
        // SAFETY: the caller's contract: the queue pair is valid until the next call.
        unsafe { self.groups.leave(self.context(), raw) };
        // SAFETY: as above.
        unsafe { (self.context().verbs().ibv_destroy_qp)(raw) }
    }
}
